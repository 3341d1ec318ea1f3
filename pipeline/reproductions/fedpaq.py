"""FedPAQ: accuracy against megabytes for updates of 1, 2, 4, 8 and 32 bits a number."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import HALF, PALETTE, new_figure, styled
from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "fedpaq"
ABOUT = "FedPAQ on Fashion-MNIST with a CNN: accuracy against megabytes sent up, for 1, 2, 4, 8 and 32 bits a number"
BITS = (1, 2, 4, 8, 32)
SEEDS = (0, 1, 2)
LAST = 3  # rounds that a final accuracy is the mean of
SAVING, LOSS = 7.5, 0.5  # at four bits: times fewer bytes, points


def run(context: Context) -> Reproduction:
    done = {
        bits: [context.run("fedpaq", f"bits-{bits}-seed-{seed}", seed=seed, **_setting(bits)) for seed in SEEDS]
        for bits in BITS
    }
    final = {bits: fmean(map(_final, runs)) for bits, runs in done.items()}
    sent = {bits: fmean(r.results["traffic"]["up"] for r in runs) for bits, runs in done.items()}
    saving, loss = sent[32] / sent[4], final[32] - final[4]
    rows = [
        [str(bits), f"{final[bits]:.2f}", f"{min(map(_final, runs)):.2f} to {max(map(_final, runs)):.2f}",
         f"{final[bits] - final[32]:+.2f}", f"{sent[bits] / 1e6:.2f}", f"{sent[32] / sent[bits]:.2f}x"]
        for bits, runs in done.items()
    ]  # fmt: skip
    by_round = [
        Series(words(bits), r[0].judged_rounds()[1:], r[0].curve("test")[1:], colour=colour)
        for colour, (bits, r) in zip(PALETTE, done.items(), strict=False)
    ]
    return Reproduction(
        payload={str(bits): {"accuracy": round(final[bits], 2), "up_bytes": round(sent[bits])} for bits in BITS},
        notes=[
            f"Accuracy is the mean of the last {LAST} rounds and of {len(SEEDS)} seeds. Bytes are the real lengths of what the sites would send, headers included.",
            "32 bits is the same algorithm without a codec. Each block of 256 numbers has a scale of its own.",
        ],
        grids=[Grid("Accuracy against megabytes", ["bits", "accuracy", "over seeds", "to 32 bits", "MB up", "saving"], rows)],
        figures=[
            ("Test accuracy against what the sites have sent so far, first seed", against_megabytes({b: r[0] for b, r in done.items()})),
            ("Test accuracy by round, first seed", curves(by_round, "Test accuracy", percent=True)),
        ],
        checks=[
            Check(f"four bits: at most 1/{SAVING} of the bytes of float32", saving >= SAVING, f"1/{saving:.2f}"),
            Check(f"four bits: at most {LOSS} points of accuracy lost", loss <= LOSS, f"{-loss:+.2f} points"),
        ],
    )  # fmt: skip


def _setting(bits: int) -> dict[str, Any]:
    return {"codec": {"up": []}} if bits == 32 else {"strategy__bits": bits}


def _final(done: Run) -> float:
    return 100 * fmean(done.curve("test")[-LAST:])


@styled()
def against_megabytes(runs: Mapping[int, Run]) -> Figure:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = new_figure(HALF)
    for colour, (bits, run) in zip(PALETTE, runs.items(), strict=False):
        up = list(accumulate(line["bytes"]["up"] / 1e6 for line in run.rounds))
        accuracy = [100 * a for a in run.curve("test")]
        axes.plot(up[1:], accuracy[1:], color=colour, label=words(bits), marker="o", markersize=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda megabytes, _: f"{megabytes:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("Megabytes sent up so far")
    axes.set_ylabel("Test accuracy, %")
    axes.legend(loc="lower right")
    return figure


def words(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"
