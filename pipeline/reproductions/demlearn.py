"""DemLearn: specialisation and generalisation of site, cluster and top models, compared with FedAvg and FedProx."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from pipeline.records.scores import EvaluationScores
from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import CurveSeries, plot_curves
from pipeline.reproductions.base import (
    ClaimCheck,
    ReproductionContext,
    ReproductionResult,
    ReproductionRun,
    ResultTable,
    defined_value,
)

NAME = "demlearn"
DESCRIPTION = (
    "DemLearn, 50 sites with two classes each: specialisation and generalisation compared with FedAvg and FedProx"
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},
    "DemLearn": {"name": "demlearn"},
}
LEVEL_VIEWS = {"site": "own", "cluster": "cluster", "top": "global"}  # level -> key of the scores at the sites


def run(context: ReproductionContext) -> ReproductionResult:
    runs = {label: context.run_study("demlearn", label.lower(), strategy=s) for label, s in STRATEGIES.items()}
    scores: dict[str, tuple[float, float]] = {
        label: (defined_value(last_scores.pooled), defined_value(last_scores.coordinator))
        for label in ("FedAvg", "FedProx")
        for last_scores in [_last_test_scores(runs[label])]
    }
    last_scores = _last_test_scores(runs["DemLearn"])
    scores |= {
        f"DemLearn, {level}": (specialization(last_scores, level), generalization(last_scores, level))
        for level in LEVEL_VIEWS
    }
    rows = [[label, f"{100 * own:.2f}", f"{100 * others:.2f}"] for label, (own, others) in scores.items()]
    evaluated_records = runs["DemLearn"].evaluated_records
    rounds = runs["DemLearn"].evaluated_rounds()
    series = [
        CurveSeries(
            f"{level}, {name}",
            rounds,
            [score(round_record.metrics["test"], level) for round_record in evaluated_records],
            is_dashed=dashed,
            color=color,
        )
        for color, level in zip(PALETTE, LEVEL_VIEWS, strict=False)
        for name, score, dashed in (("own data", specialization, False), ("all data", generalization, True))
    ]
    others = [
        CurveSeries(label, runs[label].evaluated_rounds(), runs[label].curve("test"), color=color)
        for color, label in zip(PALETTE, ("FedAvg", "FedProx"), strict=False)
    ]
    others.append(
        CurveSeries(
            "DemLearn, top",
            rounds,
            [generalization(round_record.metrics["test"], "top") for round_record in evaluated_records],
            color=PALETTE[2],
        )
    )
    site, avg, top = scores["DemLearn, site"], scores["FedAvg"], scores["DemLearn, top"]
    return ReproductionResult(
        payload={
            label: {"specialisation": round(100 * a, 2), "generalisation": round(100 * b, 2)}
            for label, (a, b) in scores.items()
        },
        notes=[
            "Specialisation: on the sites' own test images, pooled; generalisation: on all 10,000 test images, mean over the models of a level. FedAvg and FedProx have one model each.",
            "One seed. The settings (three levels, alpha 0.5, mu 0.001, amplification 1.15 for five rounds, centroid linkage) are the defaults, without tuning.",
        ],
        tables=[ResultTable("Test accuracy in per cent", ["model", "specialisation", "generalisation"], rows)],
        figures=[
            (
                "DemLearn by level: on own data (solid) and on all data (dashed)",
                plot_curves(series, "Test accuracy", percent=True, wide=True),
            ),
            ("Global models on all data", plot_curves(others, "Accuracy on all test data", percent=True)),
        ],
        checks=[
            ClaimCheck(
                "site models specialise: better on own data than FedAvg's model",
                site[0] > avg[0],
                f"{100 * (site[0] - avg[0]):+.2f} points",
            ),
            ClaimCheck(
                "the top model generalises better than the site models",
                top[1] > site[1],
                f"{100 * (top[1] - site[1]):+.2f} points",
            ),
            ClaimCheck(
                "the top model generalises no worse than FedAvg's, within 2 points",
                top[1] > avg[1] - 0.02,
                f"{100 * (top[1] - avg[1]):+.2f} points",
            ),
        ],
    )


def _last_test_scores(study_run: ReproductionRun) -> EvaluationScores:
    return study_run.evaluated_records[-1].metrics["test"]


def specialization(test_scores: EvaluationScores, level: str) -> float:
    """On the sites' own examples."""
    level_scores = test_scores if LEVEL_VIEWS[level] == "own" else test_scores.comparisons[LEVEL_VIEWS[level]]
    return defined_value(level_scores.pooled)


def generalization(test_scores: EvaluationScores, level: str) -> float:
    """Accuracy on all test data, mean over the models of a level (of clusters, the lowest ones).

    In the first rounds there is only the top model.
    """
    models = {name: defined_value(m) for name, m in test_scores.models.items() if name.startswith(f"{level}/")}
    lowest_values = [
        value for name, value in models.items() if not any(other.startswith(f"{name}.") for other in models)
    ]
    return fmean(lowest_values) if lowest_values else defined_value(test_scores.coordinator)
