"""Schistocytes in real cells: centralised training against FedAvg over four acquisition batches, three seeds each."""

from __future__ import annotations

from statistics import fmean

from pipeline.records.run_results import BootstrapIntervals
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

NAME = "schistocytes"
DESCRIPTION = (
    "Schistocyte or not on real cells: centralised against FedAvg over four batches, three seeds (needs the cells)"
)
SEEDS = (1, 2, 3)
STRATEGIES = ("centralized", "fedavg")
MIN_CENTRAL_AUROC, MAX_FEDAVG_GAP = 0.92, 0.02
TABLE_METRICS = {"positive_auroc": "AUROC", "positive_auprc": "AUPRC", "sensitivity_at_specificity": "sensitivity"}


def run(context: ReproductionContext) -> ReproductionResult:
    runs_by_strategy = {
        name: [context.run_study("schistocytes", f"{name}-{seed}", strategy=name, seed=seed) for seed in SEEDS]
        for name in STRATEGIES
    }
    means = {name: fmean(_pooled_score(r, "positive_auroc") for r in runs) for name, runs in runs_by_strategy.items()}
    rows = [
        [
            f"{name}, {seed}",
            *(f"{_pooled_score(r, metric):.3f}" for metric in TABLE_METRICS),
            _interval_text(r),
            str(r.results.best_round),
        ]
        for name, runs in runs_by_strategy.items()
        for seed, r in zip(SEEDS, runs, strict=True)
    ]
    by_site = [
        [
            site,
            *(
                f"{fmean(defined_value(r.results.test.sites[site], 'positive_auroc') for r in runs_by_strategy[n]):.3f}"
                for n in STRATEGIES
            ),
        ]
        for site in runs_by_strategy["fedavg"][0].results.test.sites
    ]
    series = [
        CurveSeries(
            f"{name}, seed {seed}",
            r.evaluated_rounds(),
            r.curve("val", "positive_auroc", "pooled"),
            color=color,
            is_dashed=seed > 1,
        )
        for color, (name, runs) in zip(PALETTE, runs_by_strategy.items(), strict=False)
        for seed, r in zip(SEEDS, runs, strict=True)
    ]
    intervals = _intervals(runs_by_strategy["fedavg"][0])
    gap = means["centralized"] - means["fedavg"]
    return ReproductionResult(
        payload={
            name: [
                {m: _pooled_score(r, m) for m in TABLE_METRICS} | {"interval": _pooled_interval(r, "positive_auroc")}
                for r in runs
            ]
            for name, runs in runs_by_strategy.items()
        },
        notes=[
            "Fold 0 is the test split, evaluated once per run; the best round is selected on validation groups, which differ between seeds.",
            (
                f"Intervals contain 95 % of {intervals.num_resamples} bootstrap draws of whole {intervals.privacy_unit}s ({intervals.num_units} in the test split): "
                "they show the variation from sampling cells, the seeds that from training."
            ),
            "Sensitivity is at a specificity of 95 %.",
        ],
        tables=[
            ResultTable(
                "Pooled over the four sites", ["strategy, seed", *TABLE_METRICS.values(), "AUROC, 95 %", "round"], rows
            ),
            ResultTable("AUROC by site, mean of the seeds", ["site", *STRATEGIES], by_site),
        ],
        figures=[("AUROC on validation cells, pooled over sites", plot_curves(series, "Validation AUROC", wide=True))],
        checks=[
            ClaimCheck(
                f"centralised training: AUROC of at least {MIN_CENTRAL_AUROC}",
                means["centralized"] >= MIN_CENTRAL_AUROC,
                _seed_spread_text(runs_by_strategy["centralized"]),
            ),
            ClaimCheck(
                f"FedAvg within {MAX_FEDAVG_GAP} of it at the same number of passes",
                gap <= MAX_FEDAVG_GAP,
                f"{_seed_spread_text(runs_by_strategy['fedavg'])}: {gap:+.4f} behind",
            ),
        ],
    )


def _pooled_score(study_run: ReproductionRun, metric: str) -> float:
    return defined_value(study_run.results.test.pooled, metric)


def _pooled_interval(study_run: ReproductionRun, metric: str) -> list[float]:
    return list(_intervals(study_run).pooled[metric])


def _intervals(study_run: ReproductionRun) -> BootstrapIntervals:
    intervals = study_run.results.intervals
    assert intervals is not None  # a simulated run has them
    return intervals


def _interval_text(study_run: ReproductionRun) -> str:
    low, high = _pooled_interval(study_run, "positive_auroc")
    return f"{low:.3f} to {high:.3f}"


def _seed_spread_text(runs: list[ReproductionRun]) -> str:
    scores = [_pooled_score(r, "positive_auroc") for r in runs]
    return f"{fmean(scores):.4f} ({min(scores):.4f} to {max(scores):.4f} over {len(scores)} seeds)"
