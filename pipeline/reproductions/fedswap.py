"""FedSwap: do swaps between averaging rounds help, and does swapping with the least similar site help (thesis)?"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import CurveSeries, plot_curves
from pipeline.reproductions.base import (
    ClaimCheck,
    ReproductionContext,
    ReproductionResult,
    ReproductionRun,
    ResultTable,
)

NAME = "fedswap"
DESCRIPTION = (
    "FedAvg against random, greedy-CKA and optimal-CKA swaps at equal traffic, two classes per site, three seeds"
)
SEEDS = (0, 1, 2)
SWAP_STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "random swap": {"name": "fedswap", "swap": "random"},
    "random pairs": {"name": "fedswap", "swap": "pairs"},
    "greedy CKA": {"name": "fedswap", "swap": "cka", "matching": "greedy"},
    "optimal CKA": {"name": "fedswap", "swap": "cka", "matching": "optimal"},
}
ROUNDS_PER_AVERAGE = 5  # the studies evaluate only averaged models


def run(context: ReproductionContext) -> ReproductionResult:
    runs_by_label = {
        label: [
            context.run_study("fedswap", f"{label.replace(' ', '-')}-seed-{seed}", seed=seed, strategy=s)
            for seed in SEEDS
        ]
        for label, s in SWAP_STRATEGIES.items()
    }
    final_accuracies = {label: [100 * r.curve("test")[-1] for r in runs] for label, runs in runs_by_label.items()}
    means = {label: fmean(values) for label, values in final_accuracies.items()}
    traffic_bytes = {
        label: fmean(r.results.traffic.up + r.results.traffic.down for r in runs)
        for label, runs in runs_by_label.items()
    }
    rows = [
        [
            label,
            f"{means[label]:.2f}",
            f"{stdev(final_accuracies[label]):.2f}",
            *(f"{v:.2f}" for v in final_accuracies[label]),
            f"{means[label] - means['FedAvg']:+.2f}",
            f"{traffic_bytes[label] / 1e6:.0f}",
        ]
        for label in SWAP_STRATEGIES
    ]
    series = [
        CurveSeries(label, runs[0].evaluated_rounds(), _mean_curve(runs), color=color)
        for color, (label, runs) in zip(PALETTE, runs_by_label.items(), strict=False)
    ]
    cka_gain = means["optimal CKA"] - means["random swap"]
    traffic_excess = max(traffic_bytes.values()) / min(traffic_bytes.values()) - 1
    return ReproductionResult(
        payload={label: [round(v, 2) for v in values] for label, values in final_accuracies.items()},
        notes=[
            f"A round is 20 local steps at every site; FedSwap averages every {ROUNDS_PER_AVERAGE} rounds and swaps after the others. A swap sends every model to the coordinator and back, like averaging, so equal rounds are equal traffic: swapping saves none.",
            "Similarity is linear CKA, mean over layers, on 600 public images.",
        ],
        tables=[
            ResultTable(
                "Test accuracy in per cent after 100 rounds",
                ["", "mean", "sd", *(f"seed {s}" for s in SEEDS), "vs FedAvg", "MB"],
                rows,
            )
        ],
        figures=[
            ("Test accuracy by round, mean of the seeds", plot_curves(series, "Test accuracy", percent=True, wide=True))
        ],
        checks=[
            ClaimCheck("traffic is equal within 2 %", traffic_excess <= 0.02, f"{100 * traffic_excess:.2f} %"),
            ClaimCheck(
                "random swaps beat FedAvg",
                means["random swap"] > means["FedAvg"],
                f"{means['random swap'] - means['FedAvg']:+.2f} points",
            ),
            ClaimCheck(
                "thesis: swapping with the least similar site beats random swaps",
                cka_gain > 0,
                f"{cka_gain:+.2f} points",
            ),
        ],
    )


def _mean_curve(runs: list[ReproductionRun]) -> list[float]:
    return [fmean(values) for values in zip(*(r.curve("test") for r in runs), strict=True)]
