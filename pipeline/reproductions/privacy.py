"""Accuracy against epsilon: Fashion-MNIST with every image protected, real cells with every group of fields protected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import MissingData
from pipeline.reports.document.figure_style import HALF, PALETTE, new_figure, styled
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "privacy"
ABOUT = "Accuracy against epsilon for Fashion-MNIST (images protected) and real cells (groups protected), and what pays"
EPSILONS = (1.0, 2.0, 4.0, 8.0)
OPEN: dict[str, Any] = {"privacy": {}}  # nobody is protected
PLAIN: dict[str, Any] = {"local__lr": 0.5}  # what suits training without clipping
TRICKS: Mapping[str, dict[str, Any]] = {
    "as packaged: batches of 100, long steps": {},
    "batches of 600": {"local__batch": 600},
    "short steps (lr 0.5)": {"local__lr": 0.5},
}
COLD = "8, without rendered cells"
WHOLE: dict[str, Any] = {"local__batch": 16, "local__trains": ["body", "norm", "head"], "local__schedule": "cosine"}


def run(context: Context) -> Reproduction:
    images = {e: context.run("privacy", f"images-{e:g}", privacy__at_site__epsilon=e) for e in EPSILONS}
    images[math.inf] = context.run("privacy", "images-open", **OPEN, **PLAIN)
    tricks = {
        name: context.run("privacy", f"trick-{n}", privacy__at_site__epsilon=2.0, **sets)
        for n, (name, sets) in enumerate(TRICKS.items())
        if sets
    }
    tricks = {next(iter(TRICKS)): images[2.0], **tricks}
    accuracy = {e: 100 * done.results["test"]["coordinator"]["accuracy"] for e, done in images.items()}
    try:
        cells = _cells(context)
    except MissingData as error:
        cells, missing = {}, [f"The cells were left out: {error}"]
    else:
        missing = []
    auroc = {key: done.results["test"]["pooled"]["positive_auroc"] for key, done in cells.items()}
    by_epsilon = {e: auroc[words(e)] for e in (*EPSILONS, math.inf) if words(e) in auroc}
    return Reproduction(
        payload={"images": {words(e): round(a, 2) for e, a in accuracy.items()},
                 "cells": {key: round(a, 4) for key, a in auroc.items()},
                 "tricks": {name: round(_test(done), 2) for name, done in tricks.items()}},
        notes=[
            "Test accuracy (images) and test AUROC for schistocytes (cells, pooled over sites) of the round that was best on val. One seed.",
            "Fashion-MNIST: ten sites of 5,400 training images, unit = image. Open: the same passes without clipping and noise, at a rate that suits them.",
            "Cells: four sites of 28 to 129 groups, unit = group; sites train the last layer of a network that has learnt on rendered cells. Open: they train all of it, in small batches.",
            *missing,
        ],
        grids=[
            Grid("Fashion-MNIST", ["epsilon", "noise", "accuracy", "to open"],
                 [[words(e), _noise(images[e]), f"{a:.2f}", f"{a - accuracy[math.inf]:+.2f}"] for e, a in accuracy.items()]),
            Grid("What pays at epsilon 2", ["setting", "noise", "accuracy"],
                 [[name, _noise(done), f"{_test(done):.2f}"] for name, done in tricks.items()]),
            *([Grid("Cells", ["", "noise", "AUROC"],
                    [[key, _noise(cells[key]), f"{a:.4f}"] for key, a in auroc.items()])] if cells else []),
        ],
        figures=[
            ("Fashion-MNIST: test accuracy against epsilon", against(accuracy, "Test accuracy, %")),
            *([("Cells: test AUROC against epsilon", against(by_epsilon, "Test AUROC, schistocytes"))] if cells else []),
        ],
        checks=[
            Check("no site spends more than its epsilon", all(map(_kept, (*images.values(), *tricks.values(), *cells.values()))), "all ledgers"),
            Check("more epsilon does not hurt: 8 at least as good as 1", accuracy[8.0] >= accuracy[1.0], f"{accuracy[8.0] - accuracy[1.0]:+.2f} points"),
            Check("long steps pay at equal epsilon", _test(images[2.0]) > _test(list(tricks.values())[-1]), f"{_test(images[2.0]) - _test(list(tricks.values())[-1]):+.2f} points"),
            *([Check("rendered cells pay at equal epsilon", auroc["8"] > auroc[COLD], f"{auroc['8'] - auroc[COLD]:+.4f}")] if cells else []),
        ],
    )  # fmt: skip


def _cells(context: Context) -> dict[str, Run]:
    found = {
        words(e): context.run("smear-private", f"cells-{e:g}", privacy__at_site__epsilon=e) for e in reversed(EPSILONS)
    }
    found = dict(reversed(found.items()))
    found[words(math.inf)] = context.run("smear-private", "cells-open", **OPEN, **WHOLE)
    found[COLD] = context.run("smear-private", "cells-8-cold", public__warmup_epochs=0, local__lr=0.01)
    return found


def words(epsilon: float) -> str:
    return "open" if math.isinf(epsilon) else f"{epsilon:g}"


def _test(done: Run) -> float:
    return 100 * float(done.results["test"]["coordinator"]["accuracy"])


def _noise(done: Run) -> str:
    from pipeline.coordinator.run_folder import RunFolder

    if not (done.path / "privacy.json").is_file():
        return "–"
    told = [site["noise"] for site in RunFolder(done.path).read_json("privacy.json")["at_site"].values()]
    low, high = f"{min(told):.2f}", f"{max(told):.2f}"
    return low if low == high else f"{low} to {high}"


def _kept(done: Run) -> bool:
    """Read from the ledgers themselves."""
    from privacy.ledger.verify import verify

    ledgers = [verify(path) for path in (done.path / "homes").glob("*/ledger.jsonl")]
    return all(v.ok and v.standing is not None and _spent(v.entries) <= v.standing.budget.epsilon for v in ledgers)


def _spent(entries: Any) -> float:
    from privacy.ledger.summary import charges

    return max((charge.epsilon for charge in charges(entries)), default=0.0)


@styled()
def against(values: Mapping[float, float], label: str) -> Figure:
    figure, axes = new_figure(HALF)
    known = [(e, v) for e, v in values.items() if math.isfinite(e)]
    axes.plot([e for e, _ in known], [v for _, v in known], color=PALETTE[0], marker="o", label="protected")
    if math.inf in values:
        axes.axhline(values[math.inf], color=PALETTE[1], linestyle="--", label="open")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(EPSILONS), [f"{e:g}" for e in EPSILONS])
    axes.set_xlabel("epsilon")
    axes.set_ylabel(label)
    axes.legend(loc="center right")
    return figure
