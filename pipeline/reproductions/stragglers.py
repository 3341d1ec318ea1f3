"""FedAvg against FedProx with 0, 50 and 90 % stragglers among the sampled sites (lecture, with FEMNIST)."""

from __future__ import annotations

from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import CurveSeries, plot_curves
from pipeline.reproductions.base import ClaimCheck, ReproductionContext, ReproductionResult, ResultTable

NAME = "stragglers"
DESCRIPTION = "FedAvg against FedProx at 0, 50 and 90 % stragglers, two classes per site (lecture; other data)"
PUBLISHED_ACCURACY = {
    "fedavg": {0: 95.2, 50: 91.1, 90: 82.3},
    "fedprox": {0: 95.4, 50: 94.8, 90: 93.5},
}  # FEMNIST; other data, so only indicative
STRATEGIES = {"fedavg": {"name": "fedavg"}, "fedprox": {"name": "fedprox", "mu": 0.1}}
NUM_FINAL_EVALUATIONS = 5  # the final accuracy is their mean: with few sites per round, single rounds vary much


def run(context: ReproductionContext) -> ReproductionResult:
    final_accuracy: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    series = []
    for color, percent_stragglers in zip(PALETTE, (0, 50, 90), strict=False):
        for name, strategy in STRATEGIES.items():
            study_run = context.run_study(
                "stragglers",
                f"{name}-{percent_stragglers}",
                strategy=strategy,
                sites__stragglers=percent_stragglers / 100,
            )
            curve = study_run.curve("test")
            final_accuracy[name][percent_stragglers] = 100 * fmean(curve[-NUM_FINAL_EVALUATIONS:])
            series.append(
                CurveSeries(
                    f"{name}, {percent_stragglers} % stragglers",
                    study_run.evaluated_rounds(),
                    curve,
                    is_dashed=name == "fedavg",
                    color=color,
                )
            )
    gap = final_accuracy["fedprox"][90] - final_accuracy["fedavg"][90]
    loss = {name: final_accuracy[name][0] - final_accuracy[name][90] for name in STRATEGIES}
    rows = [
        [
            f"{percent_stragglers} %",
            *(f"{t[n][percent_stragglers]:.2f}" for n in STRATEGIES for t in (final_accuracy, PUBLISHED_ACCURACY)),
        ]
        for percent_stragglers in (0, 50, 90)
    ]
    return ReproductionResult(
        payload={
            name: {str(k): round(v, 2) for k, v in accuracy_by_fraction.items()}
            for name, accuracy_by_fraction in final_accuracy.items()
        },
        notes=[
            "The lecture's numbers are for FEMNIST, these for Fashion-MNIST with 100 sites of two classes each, ten sampled per round: only the ordering can be compared.",
            f"Accuracy is the mean of the last {NUM_FINAL_EVALUATIONS} evaluations. FedAvg drops late sites, FedProx (mu 0.1) accepts partial updates.",
        ],
        tables=[
            ResultTable(
                "Test accuracy in per cent",
                ["stragglers", "FedAvg", "lecture (FEMNIST)", "FedProx", "lecture (FEMNIST)"],
                rows,
            )
        ],
        figures=[
            ("Accuracy on the coordinator's test images", plot_curves(series, "Test accuracy", percent=True, wide=True))
        ],
        checks=[
            ClaimCheck("at 90 % stragglers FedProx is ahead of FedAvg", gap > 0, f"{gap:+.2f} points"),
            ClaimCheck(
                "stragglers cost FedAvg more than FedProx",
                loss["fedavg"] > loss["fedprox"],
                f"from 0 to 90 %: FedAvg loses {loss['fedavg']:.2f}, FedProx {loss['fedprox']:.2f} points",
            ),
        ],
    )
