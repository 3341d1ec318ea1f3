"""How a strategy's question becomes parcels on an engine and answers become totals; written once for every engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import torch

from pipeline.aggregation.rules import MEAN, Combine, lengths
from pipeline.core.errors import BadMessage, BadReply, BadStrategy, TooFew
from pipeline.protocol.compression import PLAIN, Wire
from pipeline.protocol.messages import (
    Excuse,
    Identity,
    Message,
    Reply,
    Sees,
    SiteId,
    Total,
    Vectors,
    Wait,
    Weighting,
    weigh,
)
from pipeline.protocol.serialization import read_reply
from pipeline.protocol.tasks import Job, Result, Split

if TYPE_CHECKING:
    from pipeline.aggregation.secure_aggregation import Masking

Parts = tuple[
    tuple[str, str, tuple[int, ...], torch.dtype], ...
]  # (mean or sum, key, shape, type) of all that was sent
AT_ONCE = 256 << 20  # bytes of answers that a frugal coordinator still takes in all at once
SIGHT: Sequence[Sees] = ("totals", "groups", "each")


class Engine(Protocol):
    """All that an engine has to be."""

    def exchange(self, parcels: Mapping[SiteId, bytes], wait: Wait) -> Iterator[tuple[SiteId, bytes]]: ...


@dataclass
class Log:
    """What happened in one ask, for the record of the round."""

    asked: list[SiteId] = field(default_factory=list)
    accepted: list[Reply] = field(default_factory=list)  # without their vectors
    missed: dict[SiteId, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the accepted vectors, all alike
    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class Asking:
    """One turn's `Ask`. `log` collects what came of it."""

    engine: Engine
    run_here: Callable[[Sequence[Job], int], list[Result]]
    task: str
    turn: int
    attempt: int
    wait: Wait
    counted: Mapping[SiteId, Identity]
    splits: tuple[Split, ...] = ()
    sees: Sees = "each"  # what the asker declared
    wire: Wire = PLAIN
    combine: Combine = MEAN
    weighting: Weighting | None = None  # the rule that a site's weight has to follow; None: whatever it says
    masking: Masking | None = None  # totals are secure sums
    frugal: bool = False  # answers come from far away and are many: not all of them in memory at once
    log: Log = field(default_factory=Log)

    def total(self, sends: Mapping[SiteId, Vectors]) -> Total:
        if self.masking is not None:
            from pipeline.aggregation.secure_aggregation import masked_total  # cryptography is an extra

            self._first(sends)
            return self.combine.summed(masked_total(self, self.masking, sends))
        if self.frugal and self.combine.adds and _bytes(sends) > AT_ONCE:
            return self._added(sends)
        return self.combine.total(self._replies(sends, 1))

    def groups(self, sends: Mapping[SiteId, Vectors], count: int) -> dict[int, Total]:
        self._may("groups", "sums of groups")
        replies = self._replies(sends, count)
        by_group = {g: [r for r in replies if r.update.group == g] for g in range(count)}
        return {g: self.combine.total(mine) for g, mine in by_group.items() if mine}

    def each(self, sends: Mapping[SiteId, Vectors]) -> list[Reply]:
        self._may("each", "single replies")
        return self._replies(sends)

    def combined(self, replies: Sequence[Reply]) -> Total:
        return self.combine.total(replies)

    def here(self, jobs: Sequence[Job]) -> list[Result]:
        return self.run_here(jobs, self.turn)

    def _may(self, needed: Sees, what: str) -> None:
        if SIGHT.index(self.sees) < SIGHT.index(needed):
            raise BadStrategy(
                f"a strategy that sees {self.sees} may not look at {what}; its `sees` has to say {needed!r}"
            )

    def _replies(self, sends: Mapping[SiteId, Vectors], groups: int | None = None) -> list[Reply]:
        """In the order of arrival; an engine that must repeat itself bit for bit yields in site order."""
        self._first(sends)
        replies = self.exchanged(self.task, sends, groups)
        kept = self._kept(replies, [_form(r) for r in replies], [(r.site, lengths(r)) for r in replies])
        self.note([replies[place] for place in kept], sends)
        return [replies[place] for place in kept]

    def _added(self, sends: Mapping[SiteId, Vectors]) -> Total:
        """Like the total of `_replies`, with one answer in memory at a time: who is quarantined shows at the end only, so
        all are put aside and read again."""
        self._first(sends)
        bare, forms, long = [], [], []
        with Shelf() as shelf:
            for reply, parcel in self._arrivals(self.task, sends, 1):
                shelf.put(parcel)
                bare.append(_bare(reply))
                forms.append(_form(reply))
                long.append((reply.site, lengths(reply)))
            kept = self._kept(bare, forms, long)
            self.note([bare[place] for place in kept], sends)
            again = (read_reply(bare[place].site, shelf.get(place), self.wire.open_up) for place in kept)
            return Total.of(reply for reply in again if isinstance(reply, Reply))

    def _kept(
        self, replies: Sequence[Reply], forms: Sequence[Parts], long: Sequence[tuple[SiteId, Mapping[str, float]]]
    ) -> list[int]:
        """Places of those that sent what most sent, whoever came first, and nothing absurd."""
        if not replies:
            return []
        usual = max(forms, key=forms.count)
        self.log.shapes = {key: shape for _, key, shape, _ in usual}
        for reply, form in zip(replies, forms, strict=True):
            if form != usual:
                sent = {key: shape for _, key, shape, _ in form}
                self.log.missed[reply.site] = (
                    f"quarantined: {reply.site}: sent {sent} where others sent {self.log.shapes}"
                )
        alike = [place for place, form in enumerate(forms) if form == usual]
        outcasts = self.combine.outcasts([long[place] for place in alike]) if self.task == "train" else {}
        self.log.missed.update(outcasts)
        return [place for place in alike if replies[place].site not in outcasts]

    def _first(self, sends: Mapping[SiteId, Vectors]) -> None:
        if self.log.asked:
            raise BadStrategy("a round makes one ask: a site's memory belongs to a turn, and a turn is one question")
        self.log.asked.extend(sends)

    def exchanged(self, task: str, sends: Mapping[SiteId, Vectors], groups: int | None = None) -> list[Reply]:
        """One exchange: whatever answers came and may be read. What else happened is in the log."""
        return [reply for reply, _ in self._arrivals(task, sends, groups)]

    def _arrivals(
        self, task: str, sends: Mapping[SiteId, Vectors], groups: int | None
    ) -> Iterator[tuple[Reply, bytes]]:
        parcels = self.wire.parcels({site: self._message(task, site, vectors) for site, vectors in sends.items()})
        self.log.down += sum(map(len, parcels.values()))
        before: list[Reply] = []
        for site, parcel in self.engine.exchange(parcels, self.wait):
            self.log.up += len(parcel)
            try:
                reply = self._accept(task, site, read_reply(site, parcel, self.wire.open_up), before)
                if reply is not None and groups is not None and not 0 <= reply.update.group < groups:
                    raise BadReply(f"{site}: chose group {reply.update.group}, but there are {groups}")
            except (BadReply, BadMessage) as error:
                self.log.missed[site] = f"quarantined: {error}"
                continue
            if reply is not None:
                before.append(_bare(reply))
                yield reply, parcel

    def note(self, replies: Sequence[Reply], sends: Mapping[SiteId, Vectors]) -> None:
        """Who counted, for the record; too few void the round."""
        self.log.accepted.extend(map(_bare, replies))
        answered = {reply.site for reply in replies}
        for site in sends:
            if site not in answered:
                self.log.missed.setdefault(site, "no answer")
        if len(answered) < self.wait.quorum:
            raise TooFew(f"{len(answered)} of {len(sends)} sites answered, waiting.quorum is {self.wait.quorum}")

    def _message(self, task: str, site: SiteId, vectors: Vectors) -> Message:
        return Message(
            task=task,
            turn=self.turn,
            vectors=vectors,
            attempt=self.attempt,
            counted=self.counted.get(site),
            deadline=self.wait.deadline,
            partial=self.wait.partial == "keep",
            splits=self.splits,
        )

    def _accept(self, task: str, site: SiteId, answer: Reply | Excuse, before: Sequence[Reply]) -> Reply | None:
        if isinstance(answer, Excuse):
            self.log.missed[site] = answer.reason
            return None
        late = answer.turn < self.turn and self.wait.late == "keep"
        if answer.task != task or not (late or (answer.turn, answer.attempt) == (self.turn, self.attempt)):
            raise BadReply(f"{site}: answered turn {answer.turn} ({answer.task}) when asked turn {self.turn}")
        if not late and site not in self.log.asked:
            raise BadReply(f"{site}: answered without being asked")
        if any((r.site, r.turn, r.attempt) == (site, answer.turn, answer.attempt) for r in before):
            raise BadReply(f"{site}: answered turn {answer.turn} twice")
        work = answer.update.work
        if self.weighting is not None and self.masking is None and answer.weight != weigh(self.weighting, work):
            raise BadReply(f"{site}: claims a weight of {answer.weight:g}, but weighting is {self.weighting!r}")
        if work is not None and work.partial and self.wait.partial == "drop":
            self.log.missed[site] = f"late: {work.done} of {work.asked} steps"
            return None
        return answer


def _bytes(sends: Mapping[SiteId, Vectors]) -> int:
    """As much as goes down comes up, more or less."""
    return sum(vector.numel() * vector.element_size() for vectors in sends.values() for vector in vectors.values())


def _bare(reply: Reply) -> Reply:
    """Without its vectors."""
    single = {key: value for key, value in reply.update.sum.items() if value.dim() == 0}
    return replace(reply, update=replace(reply.update, mean={}, sum=single))


def _form(reply: Reply) -> Parts:
    parts = (("mean", reply.update.mean), ("sum", reply.update.sum))
    return tuple((p, k, tuple(vectors[k].shape), vectors[k].dtype) for p, vectors in parts for k in sorted(vectors))


# Parcels that are looked at twice: in memory while they are few, on disk from then on.

IN_MEMORY = 128 << 20  # bytes


class Shelf:
    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(in_memory)  # noqa: SIM115 (closed with the shelf)
        self._places: list[tuple[int, int]] = []  # begin, length

    def put(self, parcel: bytes) -> None:
        begin = self._file.seek(0, 2)
        self._file.write(parcel)
        self._places.append((begin, len(parcel)))

    def get(self, number: int) -> bytes:
        begin, length = self._places[number]
        self._file.seek(begin)
        return self._file.read(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
