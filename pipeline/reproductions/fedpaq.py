"""FedPAQ: accuracy against uplink megabytes for updates quantised to 1, 2, 4, 8 and 32 bits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, PALETTE, apply_figure_style, new_figure
from pipeline.reports.run.curves import CurveSeries, plot_curves
from pipeline.reproductions.base import (
    ClaimCheck,
    ReproductionContext,
    ReproductionResult,
    ReproductionRun,
    ResultTable,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "fedpaq"
DESCRIPTION = (
    "FedPAQ on Fashion-MNIST with a CNN: accuracy against uplink megabytes, for 1, 2, 4, 8 and 32 bits per number"
)
BITS = (1, 2, 4, 8, 32)
SEEDS = (0, 1, 2)
NUM_FINAL_ROUNDS = 3  # the final accuracy is the mean of the last rounds
MIN_BYTES_SAVING, MAX_ACCURACY_LOSS_POINTS = 7.5, 0.5  # at four bits


def run(context: ReproductionContext) -> ReproductionResult:
    runs_by_bits = {
        bits: [
            context.run_study("fedpaq", f"bits-{bits}-seed-{seed}", seed=seed, **_bits_overrides(bits))
            for seed in SEEDS
        ]
        for bits in BITS
    }
    final_accuracy = {bits: fmean(map(_final_accuracy, runs)) for bits, runs in runs_by_bits.items()}
    uplink_bytes = {bits: fmean(r.results.traffic.up for r in runs) for bits, runs in runs_by_bits.items()}
    saving, loss = uplink_bytes[32] / uplink_bytes[4], final_accuracy[32] - final_accuracy[4]
    rows = [
        [
            str(bits),
            f"{final_accuracy[bits]:.2f}",
            f"{min(map(_final_accuracy, runs)):.2f} to {max(map(_final_accuracy, runs)):.2f}",
            f"{final_accuracy[bits] - final_accuracy[32]:+.2f}",
            f"{uplink_bytes[bits] / 1e6:.2f}",
            f"{uplink_bytes[32] / uplink_bytes[bits]:.2f}x",
        ]
        for bits, runs in runs_by_bits.items()
    ]
    series = [
        CurveSeries(bits_label(bits), r[0].evaluated_rounds()[1:], r[0].curve("test")[1:], color=color)
        for color, (bits, r) in zip(PALETTE, runs_by_bits.items(), strict=False)
    ]
    return ReproductionResult(
        payload={
            str(bits): {"accuracy": round(final_accuracy[bits], 2), "up_bytes": round(uplink_bytes[bits])}
            for bits in BITS
        },
        notes=[
            f"Accuracy is the mean of the last {NUM_FINAL_ROUNDS} rounds and of {len(SEEDS)} seeds. Bytes are the lengths of the serialized updates, headers included.",
            "32 bits is the same algorithm without a codec. Each block of 256 numbers has its own scale.",
        ],
        tables=[
            ResultTable(
                "Accuracy against megabytes",
                ["bits", "accuracy", "over seeds", "vs 32 bits", "uplink MB", "saving"],
                rows,
            )
        ],
        figures=[
            (
                "Test accuracy against cumulative uplink traffic, first seed",
                plot_accuracy_by_megabytes({b: r[0] for b, r in runs_by_bits.items()}),
            ),
            ("Test accuracy by round, first seed", plot_curves(series, "Test accuracy", percent=True)),
        ],
        checks=[
            ClaimCheck(
                f"four bits: at most 1/{MIN_BYTES_SAVING} of the bytes of float32",
                saving >= MIN_BYTES_SAVING,
                f"1/{saving:.2f}",
            ),
            ClaimCheck(
                f"four bits: at most {MAX_ACCURACY_LOSS_POINTS} points of accuracy lost",
                loss <= MAX_ACCURACY_LOSS_POINTS,
                f"{-loss:+.2f} points",
            ),
        ],
    )


def _bits_overrides(bits: int) -> dict[str, Any]:
    return {"compression": {"uplink": []}} if bits == 32 else {"strategy__bits": bits}


def _final_accuracy(study_run: ReproductionRun) -> float:
    return 100 * fmean(study_run.curve("test")[-NUM_FINAL_ROUNDS:])


@apply_figure_style()
def plot_accuracy_by_megabytes(runs: Mapping[int, ReproductionRun]) -> Figure:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = new_figure(HALF_WIDTH_INCHES)
    for color, (bits, study_run) in zip(PALETTE, runs.items(), strict=False):
        uplink_megabytes = list(accumulate(round_record.bytes.up / 1e6 for round_record in study_run.round_records))
        accuracy = [100 * a for a in study_run.curve("test")]
        axes.plot(uplink_megabytes[1:], accuracy[1:], color=color, label=bits_label(bits), marker="o", markersize=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda megabytes, _: f"{megabytes:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("Cumulative uplink, MB")
    axes.set_ylabel("Test accuracy, %")
    axes.legend(loc="lower right")
    return figure


def bits_label(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"
