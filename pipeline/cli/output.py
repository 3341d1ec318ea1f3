"""Output of the commands: JSON, tables, and a live table of rounds."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipeline.reports.document.formatting import UNDEFINED_TEXT, format_bytes, format_score

if TYPE_CHECKING:
    from pipeline.records.round_record import RoundRecord

# without markup: names that come from data and studies are printed as they are
console = Console(markup=False, highlight=False)
stderr_console = Console(stderr=True, markup=False, highlight=False)
MAX_SHOWN_ROUNDS = 12  # rounds in the live table
SCORE_DIGITS = 4
SHORT_METRIC_NAMES = {"positive_auroc": "AUROC"}


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def short_metric_name(metric: str) -> str:
    return SHORT_METRIC_NAMES.get(metric, metric)


def build_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", num_text_columns: int = 1
) -> Table:
    """The first `num_text_columns` columns are text, the others numbers. A single text column does not wrap."""
    table = Table(title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        is_wrapping = index < num_text_columns and num_text_columns > 1
        table.add_column(
            column,
            justify="left" if index < num_text_columns else "right",
            overflow="fold" if is_wrapping else "ellipsis",
            no_wrap=not is_wrapping,
        )
    for row in rows:
        table.add_row(*row)
    return table


class RoundProgressTable:
    """A live table of the last rounds with the time left; without a terminal, one line per round."""

    _metric_title = "val accuracy"

    def __init__(self, name: str, rounds: int, quiet: bool) -> None:
        self.quiet = quiet
        self._name = name
        self._recent_rows: deque[list[str]] = deque(maxlen=MAX_SHOWN_ROUNDS)
        self._progress_bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=stderr_console,
        )
        self._task_id = self._progress_bar.add_task(name, total=rounds)
        self._live = Live(console=stderr_console, refresh_per_second=4, transient=False)

    def __enter__(self) -> RoundProgressTable:
        if stderr_console.is_terminal and not self.quiet:
            self._live.start()
            self._refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def __call__(self, record: RoundRecord) -> None:
        if self.quiet:
            return
        from pipeline.records.scores import HeadlineScore

        headline = HeadlineScore.select(record.metrics)
        score_text, loss_text = UNDEFINED_TEXT, UNDEFINED_TEXT
        if headline is not None:
            self._metric_title = f"{headline.split} {short_metric_name(headline.metric)}"
            score_text = format_score(headline.metric, headline.value, SCORE_DIGITS)
            loss_text = format_score("loss", headline.metrics.loss, SCORE_DIGITS)
        num_missed = len(record.failures)
        row = [
            str(record.round),
            score_text,
            loss_text,
            (f"{len(record.accepted)}/{len(record.sampled_clients)}" if record.sampled_clients else UNDEFINED_TEXT)
            + (f" ({num_missed} missed)" if num_missed else ""),
            format_bytes(record.bytes.training_total),
            f"{record.seconds.total:.2f} s",
        ]
        if self._live.is_started:
            self._recent_rows.append(row)
            self._progress_bar.update(self._task_id, completed=record.round)
            self._refresh()
        else:
            void_text = f"  VOID: {record.void}" if record.void else ""
            stderr_console.print(
                f"{self._name} round {row[0]}: {self._metric_title} {row[1]}, loss {row[2]}, sites {row[3]}, {row[5]}{void_text}",
                soft_wrap=True,
            )

    def _refresh(self) -> None:
        columns = ["round", self._metric_title, "loss", "sites", "traffic", "time"]
        self._live.update(Group(build_table(columns, self._recent_rows), self._progress_bar))
