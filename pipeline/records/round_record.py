"""A line of rounds.jsonl: what happened in a round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically
from pipeline.protocol.messages import ClientFailure, SiteId
from pipeline.protocol.tasks import LocalWork
from pipeline.records.base import FiniteOrNone, FrozenRecord, describe_invalid
from pipeline.records.scores import MetricsBySplit
from pipeline.strategies.base import Dendrogram

ROUNDS_FILE = "rounds.jsonl"


class RoundTraffic(FrozenRecord):
    """Bytes of training messages, and of evaluation messages."""

    up: int
    down: int
    evaluate_up: int = 0
    evaluate_down: int = 0

    @property
    def training_total(self) -> int:
        return self.up + self.down


class RoundSeconds(FrozenRecord):
    """Real time. `save`: of the checkpoint before this line."""

    train: float
    evaluate: float
    save: float

    @property
    def total(self) -> float:
        return self.train + self.evaluate + self.save


class RoundRecord(FrozenRecord):
    round: int  # 0: the initial model
    lr: float | None  # None in round 0
    sampled_clients: tuple[SiteId, ...]  # sites that were sent a message
    accepted: tuple[SiteId, ...]  # sites whose reply entered the model, including late replies to earlier rounds
    failures: Mapping[SiteId, ClientFailure]
    work: Mapping[SiteId, LocalWork]  # empty under secure aggregation
    train_loss: Mapping[SiteId, FiniteOrNone]  # empty with DP-SGD and under secure aggregation
    bytes: RoundTraffic
    seconds: RoundSeconds
    clock: FiniteOrNone  # virtual time at the end of the round
    void: str | None  # why the round changed nothing
    clusters: Mapping[SiteId, str] = {}  # of the sites that have replied
    dendrogram: Dendrogram | None = None
    epsilon: Mapping[SiteId, float] = {}  # spent so far at each site, over all studies; with DP-SGD
    attempt: int | None = None  # how often the round was started before; with client-level DP, where each attempt costs
    evaluation_failures: Mapping[SiteId, ClientFailure]
    metrics: MetricsBySplit  # empty in rounds without evaluation

    def to_line(self) -> str:
        return json.dumps(self.to_dict()) + "\n"


def load_round_records(folder: Path) -> list[RoundRecord]:
    """Ordered by round. The last line of a repeated round counts; a truncated last line is ignored."""
    path = folder / ROUNDS_FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    by_round: dict[int, RoundRecord] = {}
    for line_number, text in enumerate(lines, start=1):
        try:
            record = RoundRecord.model_validate_json(text)
        except ValidationError as error:
            if line_number == len(lines) and not _is_json(text):
                break
            raise RunFolderError(
                f"{path}, line {line_number}: {describe_invalid(error)}; remove the line, or resume the run"
            ) from error
        by_round[record.round] = record
    return [by_round[round_number] for round_number in sorted(by_round)]


def write_round_records(folder: Path, records: Sequence[RoundRecord]) -> None:
    write_atomically(folder / ROUNDS_FILE, "".join(record.to_line() for record in records).encode())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
