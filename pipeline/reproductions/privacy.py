"""Accuracy against epsilon: Fashion-MNIST with image-level DP, and real cells with group-level DP (groups of fields)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import MissingDataError
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, PALETTE, apply_figure_style, new_figure
from pipeline.reproductions.base import (
    ClaimCheck,
    ReproductionContext,
    ReproductionResult,
    ReproductionRun,
    ResultTable,
    defined_value,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "privacy"
DESCRIPTION = (
    "Accuracy against epsilon for Fashion-MNIST (unit: image) and real cells (unit: group), and which settings help"
)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
UNPROTECTED_OVERRIDES: dict[str, Any] = {"privacy": {}}
UNCLIPPED_OVERRIDES: dict[str, Any] = {"local__lr": 0.5}  # suits training without clipping
TRAINING_VARIANTS: Mapping[str, dict[str, Any]] = {
    "as packaged: batches of 100, high learning rate": {},
    "batches of 600": {"local__batch_size": 600},
    "low learning rate (0.5)": {"local__lr": 0.5},
}
NO_WARMUP_LABEL = "8, without rendered cells"
FULL_TRAINING_OVERRIDES: dict[str, Any] = {
    "local__batch_size": 16,
    "local__trainable": ["body", "norm", "head"],
    "local__lr_schedule": "cosine",
}


def run(context: ReproductionContext) -> ReproductionResult:
    image_runs = {e: context.run_study("privacy", f"images-{e:g}", privacy__dp_sgd__epsilon=e) for e in EPSILONS}
    image_runs[math.inf] = context.run_study(
        "privacy", "images-unprotected", **UNPROTECTED_OVERRIDES, **UNCLIPPED_OVERRIDES
    )
    variant_runs = {
        name: context.run_study("privacy", f"variant-{n}", privacy__dp_sgd__epsilon=2.0, **overrides)
        for n, (name, overrides) in enumerate(TRAINING_VARIANTS.items())
        if overrides
    }
    variant_runs = {next(iter(TRAINING_VARIANTS)): image_runs[2.0], **variant_runs}
    accuracy = {e: _test_accuracy(study_run) for e, study_run in image_runs.items()}
    try:
        cell_runs = _run_cells(context)
    except MissingDataError as error:
        cell_runs, missing_notes = {}, [f"Without the cells: {error}"]
    else:
        missing_notes = []
    auroc = {
        key: defined_value(study_run.results.test.pooled, "positive_auroc") for key, study_run in cell_runs.items()
    }
    by_epsilon = {e: auroc[epsilon_label(e)] for e in (*EPSILONS, math.inf) if epsilon_label(e) in auroc}
    return ReproductionResult(
        payload={
            "images": {epsilon_label(e): round(a, 2) for e, a in accuracy.items()},
            "cells": {key: round(a, 4) for key, a in auroc.items()},
            "variants": {name: round(_test_accuracy(study_run), 2) for name, study_run in variant_runs.items()},
        },
        notes=[
            "Test accuracy (images) and test AUROC for schistocytes (cells, pooled over sites) of the round that was best on validation data. One seed.",
            "Fashion-MNIST: ten sites of 5,400 training images, unit = image. Unprotected: the same number of passes without clipping and noise, at a suitable learning rate.",
            "Cells: four sites of 28 to 129 groups, unit = group; sites train the last layer of a network pre-trained on rendered cells. Unprotected: they train all layers, in small batches.",
            *missing_notes,
        ],
        tables=[
            ResultTable(
                "Fashion-MNIST",
                ["epsilon", "noise multiplier", "accuracy", "vs unprotected"],
                [
                    [
                        epsilon_label(e),
                        _noise_multiplier_text(image_runs[e]),
                        f"{a:.2f}",
                        f"{a - accuracy[math.inf]:+.2f}",
                    ]
                    for e, a in accuracy.items()
                ],
            ),
            ResultTable(
                "Settings at epsilon 2",
                ["setting", "noise multiplier", "accuracy"],
                [
                    [name, _noise_multiplier_text(study_run), f"{_test_accuracy(study_run):.2f}"]
                    for name, study_run in variant_runs.items()
                ],
            ),
            *(
                [
                    ResultTable(
                        "Cells",
                        ["", "noise multiplier", "AUROC"],
                        [[key, _noise_multiplier_text(cell_runs[key]), f"{a:.4f}"] for key, a in auroc.items()],
                    )
                ]
                if cell_runs
                else []
            ),
        ],
        figures=[
            ("Fashion-MNIST: test accuracy against epsilon", plot_by_epsilon(accuracy, "Test accuracy, %")),
            *(
                [("Cells: test AUROC against epsilon", plot_by_epsilon(by_epsilon, "Test AUROC, schistocytes"))]
                if cell_runs
                else []
            ),
        ],
        checks=[
            ClaimCheck(
                "no site spends more than its epsilon",
                all(map(_is_within_budget, (*image_runs.values(), *variant_runs.values(), *cell_runs.values()))),
                "all ledgers",
            ),
            ClaimCheck(
                "epsilon 8 is at least as good as epsilon 1",
                accuracy[8.0] >= accuracy[1.0],
                f"{accuracy[8.0] - accuracy[1.0]:+.2f} points",
            ),
            ClaimCheck(
                "a high learning rate helps at equal epsilon",
                _test_accuracy(image_runs[2.0]) > _test_accuracy(list(variant_runs.values())[-1]),
                f"{_test_accuracy(image_runs[2.0]) - _test_accuracy(list(variant_runs.values())[-1]):+.2f} points",
            ),
            *(
                [
                    ClaimCheck(
                        "pre-training on rendered cells helps at equal epsilon",
                        auroc["8"] > auroc[NO_WARMUP_LABEL],
                        f"{auroc['8'] - auroc[NO_WARMUP_LABEL]:+.4f}",
                    )
                ]
                if cell_runs
                else []
            ),
        ],
    )


def _run_cells(context: ReproductionContext) -> dict[str, ReproductionRun]:
    runs_by_epsilon = {
        epsilon_label(e): context.run_study("smear-private", f"cells-{e:g}", privacy__dp_sgd__epsilon=e)
        for e in reversed(EPSILONS)
    }
    runs_by_epsilon = dict(reversed(runs_by_epsilon.items()))
    runs_by_epsilon[epsilon_label(math.inf)] = context.run_study(
        "smear-private", "cells-unprotected", **UNPROTECTED_OVERRIDES, **FULL_TRAINING_OVERRIDES
    )
    runs_by_epsilon[NO_WARMUP_LABEL] = context.run_study(
        "smear-private", "cells-8-no-warmup", public__warmup_epochs=0, local__lr=0.01
    )
    return runs_by_epsilon


def epsilon_label(epsilon: float) -> str:
    return "unprotected" if math.isinf(epsilon) else f"{epsilon:g}"


def _test_accuracy(study_run: ReproductionRun) -> float:
    return 100 * defined_value(study_run.results.test.coordinator)


def _noise_multiplier_text(study_run: ReproductionRun) -> str:
    privacy_record = PrivacyRecord.read_if_present(study_run.path)
    if privacy_record is None:
        return "–"
    noise_multipliers = [plan.noise_multiplier for plan in privacy_record.dp_sgd.values()]
    low, high = f"{min(noise_multipliers):.2f}", f"{max(noise_multipliers):.2f}"
    return low if low == high else f"{low} to {high}"


def _is_within_budget(study_run: ReproductionRun) -> bool:
    """Whether every site's ledger is valid and its spent epsilon is within the budget."""
    from privacy.ledger.verify import verify_ledger

    ledgers = [verify_ledger(path) for path in (study_run.path / "homes").glob("*/ledger.jsonl")]
    return all(
        verification.is_valid
        and verification.state is not None
        and _max_epsilon_spent(verification.entries) <= verification.state.budget.epsilon
        for verification in ledgers
    )


def _max_epsilon_spent(entries: Any) -> float:
    from privacy.ledger.summary import list_charges

    return max((charge.total_epsilon for charge in list_charges(entries)), default=0.0)


@apply_figure_style()
def plot_by_epsilon(values: Mapping[float, float], label: str) -> Figure:
    figure, axes = new_figure(HALF_WIDTH_INCHES)
    finite_values = [(e, v) for e, v in values.items() if math.isfinite(e)]
    axes.plot(
        [e for e, _ in finite_values], [v for _, v in finite_values], color=PALETTE[0], marker="o", label="DP-SGD"
    )
    if math.inf in values:
        axes.axhline(values[math.inf], color=PALETTE[1], linestyle="--", label="unprotected")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(EPSILONS), [f"{e:g}" for e in EPSILONS])
    axes.set_xlabel("epsilon")
    axes.set_ylabel(label)
    axes.legend(loc="center right")
    return figure
