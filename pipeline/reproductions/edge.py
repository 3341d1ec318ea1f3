"""From real cells to slides: bundles of the study `edge`, each on the fold that it never saw, and slides drawn from that fold."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.coordinator.run_folder import RunFolder
from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, PALETTE, apply_figure_style, new_figure
from pipeline.reproductions.base import (
    ClaimCheck,
    ReproductionContext,
    ReproductionResult,
    ReproductionRun,
    ResultTable,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "edge"
DESCRIPTION = "Bundles on held-out real cells: what eight bits cost, and slides of 1,000 cells (needs the cells)"
FOLDS = (0, 1, 2, 3)
SLIDES_PER_KIND, CELLS_PER_SLIDE = 1000, 1000  # slides of each kind, cells a slide
SCHISTOCYTE_FRACTIONS = (0.002, 0.01, 0.02)  # of schistocytes
MAX_FLAGGED_HEALTHY, MIN_FLAGGED_SICK = 0.05, 0.9  # flagged at most of slides with 0.2 %, at least of those with 2 %
MAX_BALANCED_ACCURACY_LOSS, MAX_AUROC_LOSS = 0.005, 0.005
MIN_SCHISTOCYTES_PER_SITE = 5  # schistocytes of a site in a fold: from fewer no slides are drawn
MAX_OPPOSITE_VERDICTS = (
    0.025  # of slides of one site may be called above the threshold with 0.2 %, or below it with 2 %
)


@dataclass(frozen=True)
class FoldScores:
    """What a bundle said about one fold's cells."""

    fold: int
    auroc: dict[str, float]
    balanced: dict[str, float]
    refused: float
    sensitivity: tuple[float, float]  # promised, found
    specificity: tuple[float, float]
    flagged: dict[float, float]  # by share of schistocytes: slides whose corrected prevalence reaches the threshold
    verdicts: dict[float, dict[str, float]]
    covered: dict[float, float]  # slides of one site's cells each: how often the interval holds the truth,
    wrong: dict[float, float]  # ... and how often the verdict says the opposite of it


def run(context: ReproductionContext) -> ReproductionResult:
    fold_scores = [
        _evaluate_fold(context.run_study("edge", f"fold-{fold}", data__test_fold=fold), context.data_root, fold)
        for fold in FOLDS
    ]
    flagged_healthy, flagged_sick = (
        fmean(h.flagged[fraction] for h in fold_scores)
        for fraction in (SCHISTOCYTE_FRACTIONS[0], SCHISTOCYTE_FRACTIONS[-1])
    )
    opposite_verdicts = fmean(
        h.wrong[fraction] for h in fold_scores for fraction in (SCHISTOCYTE_FRACTIONS[0], SCHISTOCYTE_FRACTIONS[-1])
    )
    int8_loss = {
        "balanced": fmean(h.balanced["fp32"] - h.balanced["int8"] for h in fold_scores),
        "auroc": fmean(h.auroc["fp32"] - h.auroc["int8"] for h in fold_scores),
    }
    rows = [
        [
            str(h.fold),
            *(f"{kind[p]:.4f}" for kind in (h.auroc, h.balanced) for p in ("fp32", "int8")),
            f"{100 * h.refused:.1f} %",
        ]
        for h in fold_scores
    ]
    rate_rows = [
        [str(h.fold), *(f"{r:.3f}" for r in h.sensitivity), *(f"{r:.4f}" for r in h.specificity)] for h in fold_scores
    ]
    flagged_rows = [[str(h.fold), *(f"{100 * h.flagged[s]:.1f} %" for s in SCHISTOCYTE_FRACTIONS)] for h in fold_scores]
    verdict_rows = [
        [
            str(h.fold),
            *(
                f"{100 * h.verdicts[s].get(v, 0):.0f} %"
                for s in (SCHISTOCYTE_FRACTIONS[0], SCHISTOCYTE_FRACTIONS[-1])
                for v in ("above the threshold", "below the threshold")
            ),
        ]
        for h in fold_scores
    ]
    single_site_rows = [
        [
            str(h.fold),
            *(f"{100 * h.covered[s]:.0f} %" for s in SCHISTOCYTE_FRACTIONS),
            *(f"{100 * h.wrong[s]:.1f} %" for s in (SCHISTOCYTE_FRACTIONS[0], SCHISTOCYTE_FRACTIONS[-1])),
        ]
        for h in fold_scores
    ]
    fraction_labels = [f"{100 * s:g} %" for s in SCHISTOCYTE_FRACTIONS]
    return ReproductionResult(
        payload={
            "folds": [
                vars(h)
                | {
                    name: {str(k): v for k, v in getattr(h, name).items()}
                    for name in ("flagged", "verdicts", "covered", "wrong")
                }
                for h in fold_scores
            ],
            "flagged": {"healthy": flagged_healthy, "sick": flagged_sick},
            "int8_loses": int8_loss,
        },
        notes=[
            "Each fold is held out once. Threshold, temperature and guard come from validation cells of the other three, in sums.",
            (
                f"A slide is {CELLS_PER_SLIDE:,} cells drawn from the held-out fold, {SLIDES_PER_KIND:,} slides of each kind. Flagged: the corrected prevalence is "
                "at least 1 %. Above or below the threshold: the whole interval is. Cells that the guard refuses are not counted."
            ),
            "Slides of one fold share its cells, and its model: what differs between folds tells how sure the figures are.",
            f"A slide of one site: all its cells are of one of the study's sites that has at least {MIN_SCHISTOCYTES_PER_SITE} schistocytes in the fold; means over these.",
        ],
        tables=[
            ResultTable("On cells never seen", ["fold", "AUROC", "int8", "balanced", "int8", "refused"], rows),
            ResultTable(
                "At the safe point: said by the bundle, found on cells never seen",
                ["fold", "sensitivity", "found", "specificity", "found"],
                rate_rows,
            ),
            ResultTable("Slides flagged, by their share of schistocytes", ["fold", *fraction_labels], flagged_rows),
            ResultTable(
                "Verdicts",
                [
                    "fold",
                    *(
                        f"{label} {w}"
                        for label in (fraction_labels[0], fraction_labels[-1])
                        for w in ("above", "below")
                    ),
                ],
                verdict_rows,
            ),
            ResultTable(
                "Slides of one site's cells: truth inside the interval, verdict wrong",
                [
                    "fold",
                    *(f"{label} inside" for label in fraction_labels),
                    f"{fraction_labels[0]} wrong",
                    f"{fraction_labels[-1]} wrong",
                ],
                single_site_rows,
            ),
        ],
        figures=[("Slides flagged, by their share of schistocytes", _plot_flagged(fold_scores))],
        checks=[
            ClaimCheck(
                f"of slides with 0.2 % schistocytes at most {100 * MAX_FLAGGED_HEALTHY:g} % are flagged",
                flagged_healthy <= MAX_FLAGGED_HEALTHY,
                _describe_folds(fold_scores, SCHISTOCYTE_FRACTIONS[0]),
            ),
            ClaimCheck(
                f"of slides with 2 % at least {100 * MIN_FLAGGED_SICK:g} % are",
                flagged_sick >= MIN_FLAGGED_SICK,
                _describe_folds(fold_scores, SCHISTOCYTE_FRACTIONS[-1]),
            ),
            ClaimCheck(
                f"of slides of one site at most {100 * MAX_OPPOSITE_VERDICTS:g} % get a verdict that is the opposite of the truth",
                opposite_verdicts <= MAX_OPPOSITE_VERDICTS,
                f"mean {100 * opposite_verdicts:.2f} %",
            ),
            ClaimCheck(
                f"eight bits lose at most {MAX_BALANCED_ACCURACY_LOSS} of balanced accuracy",
                int8_loss["balanced"] <= MAX_BALANCED_ACCURACY_LOSS,
                f"{int8_loss['balanced']:+.4f}",
            ),
            ClaimCheck(
                f"and at most {MAX_AUROC_LOSS} of AUROC",
                int8_loss["auroc"] <= MAX_AUROC_LOSS,
                f"{int8_loss['auroc']:+.4f}",
            ),
        ],
    )


@apply_figure_style()
def _plot_flagged(fold_scores: list[FoldScores]) -> Figure:
    figure, axes = new_figure(HALF_WIDTH_INCHES)
    for n, h in enumerate(fold_scores):
        axes.plot(
            [100 * s for s in SCHISTOCYTE_FRACTIONS],
            [100 * h.flagged[s] for s in SCHISTOCYTE_FRACTIONS],
            marker="o",
            color=PALETTE[n],
            label=f"fold {h.fold}",
        )
    axes.axvline(1, linestyle="--", linewidth=0.8, color="grey")
    axes.set_xlabel("Schistocytes on the slide, %")
    axes.set_ylabel("Slides flagged, %")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _describe_folds(fold_scores: list[FoldScores], fraction: float) -> str:
    fold_texts = ", ".join(f"{100 * h.flagged[fraction]:.1f} %" for h in fold_scores)
    return f"mean {100 * fmean(h.flagged[fraction] for h in fold_scores):.1f} %; by fold {fold_texts}"


def _evaluate_fold(study_run: ReproductionRun, data_root: Path | None, fold: int) -> FoldScores:
    from deploy.bundle.bundle import ModelBundle
    from deploy.bundle.trust_store import TrustStore
    from deploy.export.export import export_bundle
    from deploy.inference.metrics import compute_auroc, compute_balanced_accuracy
    from deploy.inference.runtime import BundleRuntime
    from privacy.ledger import keys

    folder, key = RunFolder.open(study_run.path), keys.generate_key()
    with tempfile.TemporaryDirectory() as temporary_folder:
        trust_store = TrustStore(Path(temporary_folder) / "trust.json")
        trust_store.add("this run", keys.public_hex(key))
        bundle = ModelBundle.open(
            export_bundle(folder, "global", Path(temporary_folder) / "bundle", key, with_int8=True).folder, trust_store
        )
    study = folder.load_study()
    data = study.data.load(data_root, study.seed)
    rows = data.rows_in_split("test")
    images, labels = np.ascontiguousarray(data.x[rows].permute(0, 2, 3, 1).numpy()), data.y[rows].numpy()
    predictions = {p: BundleRuntime(bundle, p).predict(images) for p in bundle.manifest.precisions}
    runtime = BundleRuntime(bundle)
    deployed_predictions = predictions[runtime.precision]
    operating_point = bundle.calibration.find_point()
    assert operating_point is not None
    is_flagged, is_accepted = (
        runtime.flag_positives(deployed_predictions.probabilities, operating_point),
        np.array([decline_reason is None for decline_reason in deployed_predictions.rejection_reasons]),
    )
    slides_by_fraction = {
        fraction: _simulate_slides(is_flagged, is_accepted, labels == 1, fraction, operating_point)
        for fraction in SCHISTOCYTE_FRACTIONS
    }
    site = data.keys["batch"].codes[rows].numpy()
    site_masks = [
        site == one for one in np.unique(site) if (labels[site == one] == 1).sum() >= MIN_SCHISTOCYTES_PER_SITE
    ]
    site_slides_by_fraction = {
        fraction: [
            _simulate_slides(
                is_flagged[site_mask], is_accepted[site_mask], labels[site_mask] == 1, fraction, operating_point
            )
            for site_mask in site_masks
        ]
        for fraction in SCHISTOCYTE_FRACTIONS
    }
    return FoldScores(
        fold=fold,
        auroc={p: compute_auroc(a.probabilities, labels, 1) for p, a in predictions.items()},
        balanced={p: compute_balanced_accuracy(a.probabilities, labels) for p, a in predictions.items()},
        refused=float((~is_accepted).mean()),
        sensitivity=(float(operating_point.sensitivity or 0), float(is_flagged[labels == 1].mean())),
        specificity=(float(operating_point.specificity or 0), float((~is_flagged[labels == 0]).mean())),
        flagged={fraction: slides.flagged for fraction, slides in slides_by_fraction.items()},
        verdicts={fraction: slides.verdicts for fraction, slides in slides_by_fraction.items()},
        covered={
            fraction: fmean(one.covered for one in slides) for fraction, slides in site_slides_by_fraction.items()
        },
        wrong={fraction: fmean(one.wrong for one in slides) for fraction, slides in site_slides_by_fraction.items()},
    )


@dataclass(frozen=True)
class SlideFractions:
    """Shares of slides."""

    flagged: float
    verdicts: dict[str, float]
    covered: float
    wrong: float


def _simulate_slides(
    is_flagged: Any, is_accepted: Any, is_schistocyte: Any, fraction: float, operating_point: Any
) -> SlideFractions:
    from deploy.slide.verdict import SUSPICION_THRESHOLD, VERDICT_ABOVE, VERDICT_BELOW, assess_prevalence

    rng = np.random.default_rng([1, round(fraction * 1e6)])
    num_schistocytes = round(CELLS_PER_SLIDE * fraction)
    opposite_verdict = (
        VERDICT_ABOVE if fraction < SUSPICION_THRESHOLD else VERDICT_BELOW if fraction > SUSPICION_THRESHOLD else ""
    )
    estimates = []
    for _ in range(SLIDES_PER_KIND):
        sampled_cells = np.concatenate(
            [
                rng.choice(np.flatnonzero(is_schistocyte), num_schistocytes),
                rng.choice(np.flatnonzero(~is_schistocyte), CELLS_PER_SLIDE - num_schistocytes),
            ]
        )
        accepted_cells = sampled_cells[is_accepted[sampled_cells]]
        estimates.append(assess_prevalence(len(accepted_cells), int(is_flagged[accepted_cells].sum()), operating_point))
    return SlideFractions(
        fmean(estimate.needs_review for estimate in estimates),
        {verdict: n / SLIDES_PER_KIND for verdict, n in Counter(estimate.verdict for estimate in estimates).items()},
        fmean(
            estimate.prevalence_low is not None
            and estimate.prevalence_high is not None
            and estimate.prevalence_low <= fraction <= estimate.prevalence_high
            for estimate in estimates
        ),
        fmean(estimate.verdict == opposite_verdict for estimate in estimates),
    )
