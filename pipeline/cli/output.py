"""What commands print: JSON for machines, tables for people, and a live table of rounds."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipeline.reports.document.formatting import size

# names come from data and studies: nothing in them is markup
console = Console(markup=False, highlight=False)
errors = Console(stderr=True, markup=False, highlight=False)
SHOWN = 12  # rounds in the live table


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def percent(value: Any) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def area(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", words: int = 1) -> Table:
    """The first `words` columns are text, the rest numbers. Several columns of text may wrap; a single name never vanishes."""
    out = Table(title=title or None, title_justify="left")
    for number, column in enumerate(columns):
        wraps = number < words and words > 1
        out.add_column(
            column,
            justify="left" if number < words else "right",
            overflow="fold" if wraps else "ellipsis",
            no_wrap=not wraps,
        )
    for row in rows:
        out.add_row(*row)
    return out


class Rounds:
    """A live table of the last rounds with the time left; a line a round where there is no terminal."""

    def __init__(self, name: str, rounds: int, quiet: bool) -> None:
        self.quiet = quiet
        self._name = name
        self._rows: deque[list[str]] = deque(maxlen=SHOWN)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=errors,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=rounds)
        self._live = Live(console=errors, refresh_per_second=4, transient=False)
        self._last = time.perf_counter()

    def __enter__(self) -> Rounds:
        if errors.is_terminal and not self.quiet:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        if self.quiet:
            return
        from pipeline.coordinator.evaluation import headline

        split, shown = headline(record)
        detects = "positive_auroc" in shown  # the study names a class that matters
        self._leads = f"{split} {'AUROC' if detects else 'accuracy'}"
        missed = len(record["missed"])
        row = [
            str(record["round"]),
            area(shown["positive_auroc"]) if detects else percent(shown.get("accuracy")),
            "–" if shown.get("loss") is None else f"{shown['loss']:.4f}",
            (f"{len(record['counted'])}/{len(record['asked'])}" if record["asked"] else "–")
            + (f" ({missed} missed)" if missed else ""),
            size(record["bytes"]["up"] + record["bytes"]["down"]),
            f"{sum(record['seconds'].values()):.2f} s",
        ]
        if self._live.is_started:
            self._rows.append(row)
            self._bar.update(self._task, completed=record["round"])
            self._draw()
        else:
            void = f"  VOID: {record['void']}" if record["void"] else ""
            errors.print(
                f"{self._name} round {row[0]}: {self._leads} {row[1]}, loss {row[2]}, sites {row[3]}, {row[5]}{void}",
                soft_wrap=True,
            )

    _leads = "val accuracy"

    def _draw(self) -> None:
        columns = ["round", self._leads, "loss", "sites", "traffic", "time"]
        self._live.update(Group(table(columns, self._rows), self._bar))
