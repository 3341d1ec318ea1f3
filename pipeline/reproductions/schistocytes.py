"""Schistocytes in real cells: all data in one place against FedAvg over four acquisition batches, three seeds each."""

from __future__ import annotations

from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

NAME = "schistocytes"
ABOUT = "Schistocyte or not on real cells: one place against FedAvg over four batches, three seeds (needs the cells)"
SEEDS = (1, 2, 3)
STRATEGIES = ("central", "fedavg")
FLOOR, GAP = 0.92, 0.02
METRICS = {"positive_auroc": "AUROC", "positive_auprc": "AUPRC", "sensitivity_at_specificity": "sensitivity"}


def run(context: Context) -> Reproduction:
    done = {
        name: [context.run("schistocytes", f"{name}-{seed}", strategy=name, seed=seed) for seed in SEEDS]
        for name in STRATEGIES
    }
    means = {name: fmean(_score(r, "positive_auroc") for r in runs) for name, runs in done.items()}
    rows = [
        [f"{name}, {seed}", *(f"{_score(r, metric):.3f}" for metric in METRICS), _span(r), str(r.results["best_round"])]
        for name, runs in done.items()
        for seed, r in zip(SEEDS, runs, strict=True)
    ]
    by_site = [
        [
            site,
            *(f"{fmean(r.results['test']['sites'][site]['positive_auroc'] for r in done[n]):.3f}" for n in STRATEGIES),
        ]
        for site in done["fedavg"][0].results["test"]["sites"]
    ]
    lines = [
        Series(
            f"{name}, seed {seed}",
            r.judged_rounds(),
            r.curve("val", "positive_auroc", "pooled"),
            colour=colour,
            dashed=seed > 1,
        )
        for colour, (name, runs) in zip(PALETTE, done.items(), strict=False)
        for seed, r in zip(SEEDS, runs, strict=True)
    ]
    about = done["fedavg"][0].results["intervals"]
    gap = means["central"] - means["fedavg"]
    return Reproduction(
        payload={
            name: [{m: _score(r, m) for m in METRICS} | {"interval": _interval(r, "positive_auroc")} for r in runs]
            for name, runs in done.items()
        },
        notes=[
            "Fold 0 is the test split and is read once a run; the best round is chosen on validation groups, which differ from seed to seed.",
            (f"Intervals hold 95 % of {about['draws']} bootstrap draws of whole {about['unit']}s ({about['units']} in the test split): "
            "they say how much the cells at hand matter, the seeds how much chance in training does."),
            "Sensitivity is read at a specificity of 95 %.",
        ],
        grids=[
            Grid("Pooled over the four sites", ["strategy, seed", *METRICS.values(), "AUROC, 95 %", "round"], rows),
            Grid("AUROC by site, mean of the seeds", ["site", *STRATEGIES], by_site),
        ],
        figures=[("AUROC on validation cells, pooled over sites", curves(lines, "Validation AUROC", wide=True))],
        checks=[
            Check(f"all data in one place: AUROC of at least {FLOOR}", means["central"] >= FLOOR, _spread(done["central"])),
            Check(f"FedAvg within {GAP} of it at the same number of passes", gap <= GAP,
                  f"{_spread(done['fedavg'])}: {gap:+.4f} behind"),
        ],
    )  # fmt: skip


def _score(done: Run, metric: str) -> float:
    return float(done.results["test"]["pooled"][metric])


def _interval(done: Run, metric: str) -> list[float]:
    low, high = done.results["intervals"]["pooled"][metric]
    return [low, high]


def _span(done: Run) -> str:
    low, high = _interval(done, "positive_auroc")
    return f"{low:.3f} to {high:.3f}"


def _spread(runs: list[Run]) -> str:
    found = [_score(r, "positive_auroc") for r in runs]
    return f"{fmean(found):.4f} ({min(found):.4f} to {max(found):.4f} over {len(found)} seeds)"
