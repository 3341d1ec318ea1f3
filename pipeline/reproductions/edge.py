"""From real cells to slides: bundles of `bedside`, each on the fold that it never saw, and slides drawn from that fold."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.coordinator.run_folder import RunFolder
from pipeline.reports.document.figure_style import HALF, PALETTE, new_figure, styled
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "bedside"
ABOUT = "Bundles on held-out real cells: what eight bits cost, and slides of 1,000 cells (needs the cells)"
FOLDS = (0, 1, 2, 3)
SLIDES, CELLS = 1000, 1000  # slides of each kind, cells a slide
SHARES = (0.002, 0.01, 0.02)  # of schistocytes
HEALTHY, SICK = 0.05, 0.9  # flagged at most of slides with 0.2 %, at least of those with 2 %
LOSES_BALANCED, LOSES_AUROC = 0.005, 0.005
FEW = 5  # schistocytes of a site in a fold: from fewer no slides are drawn
WRONG = 0.025  # of slides of one site may be called above the line with 0.2 %, or below it with 2 %


@dataclass(frozen=True)
class Held:
    """What a bundle said about one fold's cells."""

    fold: int
    auroc: dict[str, float]
    balanced: dict[str, float]
    refused: float
    sensitivity: tuple[float, float]  # promised, found
    specificity: tuple[float, float]
    flagged: dict[float, float]  # by share of schistocytes: slides whose corrected prevalence reaches the line
    verdicts: dict[float, dict[str, float]]
    covered: dict[float, float]  # slides of one site's cells each: how often the interval holds the truth,
    wrong: dict[float, float]  # ... and how often the verdict says the opposite of it


def run(context: Context) -> Reproduction:
    held = [_judged(context.run("bedside", f"fold-{fold}", data__test_fold=fold), context.data, fold) for fold in FOLDS]
    healthy, sick = (fmean(h.flagged[share] for h in held) for share in (SHARES[0], SHARES[-1]))
    wrong = fmean(h.wrong[share] for h in held for share in (SHARES[0], SHARES[-1]))
    lost = {
        "balanced": fmean(h.balanced["fp32"] - h.balanced["int8"] for h in held),
        "auroc": fmean(h.auroc["fp32"] - h.auroc["int8"] for h in held),
    }
    rows = [[str(h.fold), *(f"{kind[p]:.4f}" for kind in (h.auroc, h.balanced) for p in ("fp32", "int8")), f"{100 * h.refused:.1f} %"]
            for h in held]  # fmt: skip
    rates = [[str(h.fold), *(f"{r:.3f}" for r in h.sensitivity), *(f"{r:.4f}" for r in h.specificity)] for h in held]
    flagged = [[str(h.fold), *(f"{100 * h.flagged[s]:.1f} %" for s in SHARES)] for h in held]
    verdicts = [[str(h.fold), *(f"{100 * h.verdicts[s].get(v, 0):.0f} %" for s in (SHARES[0], SHARES[-1]) for v in ("above the line", "below the line"))]
                for h in held]  # fmt: skip
    alone = [[str(h.fold), *(f"{100 * h.covered[s]:.0f} %" for s in SHARES), *(f"{100 * h.wrong[s]:.1f} %" for s in (SHARES[0], SHARES[-1]))]
             for h in held]  # fmt: skip
    each = [f"{100 * s:g} %" for s in SHARES]
    return Reproduction(
        payload={"folds": [vars(h) | {name: {str(k): v for k, v in getattr(h, name).items()}
                                      for name in ("flagged", "verdicts", "covered", "wrong")} for h in held],
                 "flagged": {"healthy": healthy, "sick": sick}, "int8_loses": lost},
        notes=[
            "Each fold is held out once. Threshold, temperature and guard come from validation cells of the other three, in sums.",
            (f"A slide is {CELLS:,} cells drawn from the held-out fold, {SLIDES:,} slides of each kind. Flagged: the corrected prevalence is "
             "at least 1 %. Above or below the line: the whole interval is. Cells that the guard refuses are not counted."),
            "Slides of one fold share its cells, and its model: what differs between folds tells how sure the figures are.",
            f"A slide of one site: all its cells are of one of the study's sites that has at least {FEW} schistocytes in the fold; means over these.",
        ],
        grids=[
            Grid("On cells never seen", ["fold", "AUROC", "int8", "balanced", "int8", "refused"], rows),
            Grid("At the safe point: said by the bundle, found on cells never seen",
                 ["fold", "sensitivity", "found", "specificity", "found"], rates),
            Grid("Slides flagged, by their share of schistocytes", ["fold", *each], flagged),
            Grid("Verdicts", ["fold", *(f"{e} {w}" for e in (each[0], each[-1]) for w in ("above", "below"))], verdicts),
            Grid("Slides of one site's cells: truth inside the interval, verdict wrong",
                 ["fold", *(f"{e} inside" for e in each), f"{each[0]} wrong", f"{each[-1]} wrong"], alone),
        ],
        figures=[("Slides flagged, by their share of schistocytes", _figure(held))],
        checks=[
            Check(f"of slides with 0.2 % schistocytes at most {100 * HEALTHY:g} % are flagged", healthy <= HEALTHY, _folds(held, SHARES[0])),
            Check(f"of slides with 2 % at least {100 * SICK:g} % are", sick >= SICK, _folds(held, SHARES[-1])),
            Check(f"of slides of one site at most {100 * WRONG:g} % get a verdict that is the opposite of the truth", wrong <= WRONG, f"mean {100 * wrong:.2f} %"),
            Check(f"eight bits lose at most {LOSES_BALANCED} of balanced accuracy", lost["balanced"] <= LOSES_BALANCED, f"{lost['balanced']:+.4f}"),
            Check(f"and at most {LOSES_AUROC} of AUROC", lost["auroc"] <= LOSES_AUROC, f"{lost['auroc']:+.4f}"),
        ],
    )  # fmt: skip


@styled()
def _figure(held: list[Held]) -> Figure:
    figure, axes = new_figure(HALF)
    for n, h in enumerate(held):
        axes.plot(
            [100 * s for s in SHARES],
            [100 * h.flagged[s] for s in SHARES],
            marker="o",
            color=PALETTE[n],
            label=f"fold {h.fold}",
        )
    axes.axvline(1, linestyle="--", linewidth=0.8, color="grey")
    axes.set_xlabel("Schistocytes on the slide, %")
    axes.set_ylabel("Slides flagged, %")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _folds(held: list[Held], share: float) -> str:
    each = ", ".join(f"{100 * h.flagged[share]:.1f} %" for h in held)
    return f"mean {100 * fmean(h.flagged[share] for h in held):.1f} %; by fold {each}"


def _judged(done: Run, root: Path | None, fold: int) -> Held:
    from deploy.bundle.bundle import Bundle
    from deploy.bundle.trust_store import Trust
    from deploy.export.export import export
    from deploy.inference.metrics import area, balanced
    from deploy.inference.runtime import Runtime
    from privacy.ledger import keys

    folder, key = RunFolder.open(done.path), keys.generate()
    with tempfile.TemporaryDirectory() as place:
        trust = Trust(Path(place) / "trust.json")
        trust.add("this run", keys.public_hex(key))
        bundle = Bundle.open(export(folder, "global", Path(place) / "bundle", key, int8=True).folder, trust)
    study = folder.study()
    data = study.data.load(root, study.seed)
    rows = data.where("test")
    images, y = np.ascontiguousarray(data.x[rows].permute(0, 2, 3, 1).numpy()), data.y[rows].numpy()
    answers = {p: Runtime(bundle, p).answer(images) for p in bundle.manifest.precisions}
    runtime = Runtime(bundle)
    used = answers[runtime.precision]
    point = bundle.calibration.point()
    assert point is not None
    flags, kept = runtime.flagged(used.probabilities, point), np.array([why is None for why in used.refused])
    counted = {share: _slides(flags, kept, y == 1, share, point) for share in SHARES}
    site = data.keys["batch"].codes[rows].numpy()
    alone = [site == one for one in np.unique(site) if (y[site == one] == 1).sum() >= FEW]
    apart = {
        share: [_slides(flags[mine], kept[mine], y[mine] == 1, share, point) for mine in alone] for share in SHARES
    }
    return Held(
        fold,
        {p: area(a.probabilities, y, 1) for p, a in answers.items()},
        {p: balanced(a.probabilities, y) for p, a in answers.items()},
        float((~kept).mean()),
        (float(point.sensitivity or 0), float(flags[y == 1].mean())),
        (float(point.specificity or 0), float((~flags[y == 0]).mean())),
        {share: found.flagged for share, found in counted.items()},
        {share: found.verdicts for share, found in counted.items()},
        {share: fmean(one.covered for one in found) for share, found in apart.items()},
        {share: fmean(one.wrong for one in found) for share, found in apart.items()},
    )


@dataclass(frozen=True)
class Slides:
    """Shares of slides."""

    flagged: float
    verdicts: dict[str, float]
    covered: float
    wrong: float


def _slides(flags: Any, kept: Any, own: Any, share: float, point: Any) -> Slides:
    from deploy.slide.prevalence import ABOVE, BELOW, LINE, judge

    rng = np.random.default_rng([1, round(share * 1e6)])
    broken = round(CELLS * share)
    opposite = ABOVE if share < LINE else BELOW if share > LINE else ""
    said = []
    for _ in range(SLIDES):
        drawn = np.concatenate(
            [rng.choice(np.flatnonzero(own), broken), rng.choice(np.flatnonzero(~own), CELLS - broken)]
        )
        seen = drawn[kept[drawn]]
        said.append(judge(len(seen), int(flags[seen].sum()), point))
    return Slides(
        fmean(one.look for one in said),
        {verdict: n / SLIDES for verdict, n in Counter(one.verdict for one in said).items()},
        fmean(one.low is not None and one.high is not None and one.low <= share <= one.high for one in said),
        fmean(one.verdict == opposite for one in said),
    )
