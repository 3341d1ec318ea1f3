"""What travels between coordinator and sites, and its bytes: a checksum, then safetensors with a JSON header.

A turn is an identity: a re-run keeps its turn and raises `attempt`. `counted` is the last (turn, attempt) in
which *this site's* reply entered the state, so a site knows which of its pending memories to keep.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pipeline.errors import BadMessage, BadReply, BadStrategy
from pipeline.tensors import to_bytes
from pipeline.work import Job, Result, Split, Work

SiteId = str
Identity = tuple[int, int]  # (turn, attempt)
Memory = Mapping[str, Tensor]  # a site's own state; never leaves it
Vectors = Mapping[str, Tensor]
_MAGIC = b"HF1\0"


@dataclass(frozen=True)
class Message:
    task: str
    turn: int
    vectors: Vectors
    attempt: int = 0
    counted: Identity | None = None
    deadline: float | None = None
    partial: bool = True  # whether work cut short by the deadline is welcome
    splits: tuple[Split, ...] = ()  # what `judge` looks at


@dataclass(frozen=True)
class Update:
    """`mean` entries are averaged by the study's weighting rule, `sum` entries added."""

    mean: Vectors = field(default_factory=dict)
    sum: Vectors = field(default_factory=dict)
    work: Work | None = None


@dataclass(frozen=True)
class Reply:
    site: SiteId
    task: str
    turn: int
    attempt: int
    update: Update
    weight: float


@dataclass(frozen=True)
class Excuse:
    """A site that sits this turn out says why."""

    site: SiteId
    task: str
    turn: int
    reason: str


@dataclass(frozen=True)
class Wait:
    deadline: float | None = None
    quorum: int = 1
    partial: Literal["drop", "keep"] = "keep"
    late: Literal["drop", "keep"] = "drop"


Flow = Generator[Job, Result, tuple[Update, Memory]]


class Total:
    """Sums over replies, in the order of arrival; an engine that must repeat itself bit for bit yields in site order."""

    def __init__(self) -> None:
        self.works: dict[SiteId, Work] = {}
        self.count = 0
        self._weight = 0.0
        self._means: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, reply: Reply) -> None:
        update = reply.update
        self.count += 1
        self._weight += reply.weight
        for key, value in update.mean.items():
            _accumulate(self._means, key, value, reply.weight)
        for key, value in update.sum.items():
            _accumulate(self._sums, key, value, 1.0)
        if update.work is not None:
            self.works[reply.site] = update.work

    def mean(self, key: str) -> Tensor:
        return _get(self._means, key, "mean") / self._weight

    def sum(self, key: str) -> Tensor:
        return _get(self._sums, key, "sum")


def _get(have: Mapping[str, Tensor], key: str, kind: str) -> Tensor:
    if key not in have:
        raise BadStrategy(f"no site sent {key!r} as a {kind}; its Update holds {sorted(have)}")
    return have[key]


def _accumulate(into: dict[str, Tensor], key: str, value: Tensor, weight: float) -> None:
    if key in into:
        into[key].add_(value, alpha=weight) if value.is_floating_point() else into[key].add_(value)
    else:
        into[key] = value * weight if value.is_floating_point() else value.clone()


def pack(header: Mapping[str, Any], tensors: Vectors) -> bytes:
    body = to_bytes(header, tensors)
    return b"".join((_MAGIC, struct.pack("<I", zlib.crc32(body)), body))


def unpack(parcel: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if len(parcel) < 16 or parcel[:4] != _MAGIC:
        raise BadMessage("these bytes are no hemofed message; is the other side of the same version?")
    body = parcel[8:]
    if zlib.crc32(body) != struct.unpack("<I", parcel[4:8])[0]:
        raise BadMessage(f"a message of {len(parcel)} bytes arrived damaged or cut short; it has to be sent again")
    try:
        tensors = load(body)
        (length,) = struct.unpack("<Q", body[:8])
        header = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["hemofed"])
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise BadMessage(f"a message cannot be read ({error}); is the other side of the same version?") from error
    return header, tensors


def message_bytes(message: Message) -> bytes:
    header = {k: v for k, v in vars(message).items() if k != "vectors"}
    return pack(header, message.vectors)


def read_message(parcel: bytes) -> Message:
    header, vectors = unpack(parcel)
    try:
        counted = header.pop("counted")
        return Message(
            **(header | {"splits": tuple(header["splits"])}),
            counted=counted and (counted[0], counted[1]),
            vectors=vectors,
        )
    except (KeyError, TypeError, IndexError) as error:
        raise BadMessage(f"a message lacks a field ({error}); is the other side of the same version?") from error


def reply_bytes(answer: Reply | Excuse) -> bytes:
    if isinstance(answer, Excuse):
        return pack(asdict(answer), {})
    update = answer.update
    header = {"site": answer.site, "task": answer.task, "turn": answer.turn, "attempt": answer.attempt}
    header |= {"weight": answer.weight, "work": update.work and _work(update.work)}
    return pack(
        header, {f"mean/{k}": v for k, v in update.mean.items()} | {f"sum/{k}": v for k, v in update.sum.items()}
    )


def _work(work: Work) -> dict[str, Any]:
    """Seconds in a fixed width, so that the length of a reply does not depend on the clock."""
    return asdict(work) | {"seconds": f"{work.seconds:015.6f}"}


def read_reply(site: SiteId, parcel: bytes) -> Reply | Excuse:
    """`site` is whom the engine had it from; a reply in another's name is refused."""
    header, tensors = unpack(parcel)
    if header.get("site") != site:
        raise BadReply(f"{site}: answered in the name of {header.get('site')!r}")
    try:
        if "reason" in header:
            return Excuse(site, header["task"], int(header["turn"]), str(header["reason"]))
        weight = float(header["weight"])
        work = header["work"] and Work(**(header["work"] | {"seconds": float(header["work"]["seconds"])}))
        turn, attempt = int(header["turn"]), int(header["attempt"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadReply(f"{site}: a field is missing or wrong ({error}); is the site of the same version?") from error
    if not 0 < weight < float("inf"):
        raise BadReply(f"{site}: weight {weight} must be > 0; run `hemofed study check` on its data")
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadReply(f"{site}: {key.partition('/')[2]} is not finite; lower local.lr or look at the site's data")
    parts = {
        kind: {k[len(kind) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
        for kind in ("mean", "sum")
    }
    return Reply(site, header["task"], turn, attempt, Update(parts["mean"], parts["sum"], work), weight)
