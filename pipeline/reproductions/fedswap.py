"""FedSwap: does changing places between averages help, and does it help to swap with the least similar?"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

NAME = "fedswap"
ABOUT = "FedAvg against random, greedy-CKA and optimal-CKA swaps at equal traffic, two classes a site, three seeds"
SEEDS = (0, 1, 2)
SWAPS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "random swap": {"name": "fedswap", "swap": "random"},
    "random pairs": {"name": "fedswap", "swap": "pairs"},
    "greedy CKA": {"name": "fedswap", "swap": "cka", "matching": "greedy"},
    "optimal CKA": {"name": "fedswap", "swap": "cka", "matching": "optimal"},
}
AVERAGES = 5  # rounds from average to average: the models in between are no averages, so looks fall on averages


def run(context: Context) -> Reproduction:
    done = {
        label: [
            context.run("fedswap", f"{label.replace(' ', '-')}-seed-{seed}", seed=seed, strategy=s) for seed in SEEDS
        ]
        for label, s in SWAPS.items()
    }
    final = {label: [100 * r.curve("test")[-1] for r in runs] for label, runs in done.items()}
    means = {label: fmean(values) for label, values in final.items()}
    bytes_up = {
        label: fmean(r.results["traffic"]["up"] + r.results["traffic"]["down"] for r in runs)
        for label, runs in done.items()
    }
    rows = [
        [label, f"{means[label]:.2f}", f"{stdev(final[label]):.2f}", *(f"{v:.2f}" for v in final[label]),
         f"{means[label] - means['FedAvg']:+.2f}", f"{bytes_up[label] / 1e6:.0f}"]
        for label in SWAPS
    ]  # fmt: skip
    lines = [
        Series(label, runs[0].judged_rounds(), _mean_curve(runs), colour=colour)
        for colour, (label, runs) in zip(PALETTE, done.items(), strict=False)
    ]
    least = means["optimal CKA"] - means["random swap"]
    traffic = max(bytes_up.values()) / min(bytes_up.values()) - 1
    return Reproduction(
        payload={label: [round(v, 2) for v in values] for label, values in final.items()},
        notes=[
            f"A round is 20 local steps for everybody; FedSwap averages every {AVERAGES} rounds and swaps after the others. A swap through the coordinator moves every model up and down, as an average does, so equal rounds are equal traffic: swapping saves none.",
            "Similarity is linear CKA, mean over the layers, on 600 public images. Whatever the claims below say is what came out.",
        ],
        grids=[Grid("Test accuracy in per cent after 100 rounds", ["", "mean", "sd", *(f"seed {s}" for s in SEEDS), "to FedAvg", "MB"], rows)],
        figures=[("Test accuracy by round, mean of the seeds", curves(lines, "Test accuracy", percent=True, wide=True))],
        checks=[
            Check("traffic is equal within 2 %", traffic <= 0.02, f"{100 * traffic:.2f} %"),
            Check("random swaps help against FedAvg", means["random swap"] > means["FedAvg"], f"{means['random swap'] - means['FedAvg']:+.2f} points"),
            Check("the thesis's hope: swapping with the least similar beats swapping at random", least > 0, f"{least:+.2f} points"),
        ],
    )  # fmt: skip


def _mean_curve(runs: list[Run]) -> list[float]:
    return [fmean(values) for values in zip(*(r.curve("test") for r in runs), strict=True)]
