"""Messages and replies as bytes: a checksum, then safetensors with a JSON header. Vectors may travel encoded."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pipeline.core.errors import BadMessage, BadReply
from pipeline.core.tensor_io import finite, to_bytes
from pipeline.protocol.messages import Excuse, Message, Packed, Reply, SiteId, Update, Vectors
from pipeline.protocol.tasks import Work

_MAGIC = b"HF2\0"
HEAVIEST = 1e9  # examples that a site may hold; in float32 nothing would be left of the others beside more
LONGEST = 2000  # characters of an excuse: it is kept with the round, and shown
_PART = "@"  # stands between a vector's name and that of a part of its encoding


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
    except (SafetensorError, KeyError, ValueError, struct.error, RecursionError) as error:
        raise BadMessage(f"a message cannot be read ({error}); is the other side of the same version?") from error
    if not isinstance(header, dict):
        raise BadMessage("a message's header is no table; is the other side of the same version?")
    return header, tensors


def task_of(parcel: bytes) -> str:
    """Without reading the rest of it, and only to be shown: "" if it cannot be told."""
    try:
        (length,) = struct.unpack("<Q", parcel[8:16])
        return str(json.loads(json.loads(parcel[16 : 16 + length])["__metadata__"]["hemofed"])["task"])
    except (struct.error, ValueError, KeyError, TypeError):
        return ""


Open = Callable[[Packed], Tensor]  # decodes
_NOTHING: Mapping[str, Packed] = {}


def closed(packed: Packed) -> Tensor:
    raise BadMessage("a vector came encoded, but this study names no codec for that way")


def _flat(packed: Mapping[str, Packed]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Encoded vectors as a header and tensors."""
    tensors = {f"{key}{_PART}{name}": part for key, one in packed.items() for name, part in one.parts.items()}
    return {key: one.n for key, one in packed.items()}, tensors


def _opened(header: dict[str, Any], tensors: Vectors, unseal: Open) -> dict[str, Tensor]:
    """All vectors as they were before they were encoded."""
    parts: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name, sign, part = key.partition(_PART)
        if sign:
            parts.setdefault(name, {})[part] = value
        else:
            plain[key] = value
    try:
        sizes = {str(key): int(n) for key, n in header.pop("packed").items()}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadMessage(
            f"a message does not say what of it is encoded ({error}); is it of the same version?"
        ) from error
    if not parts.keys() <= sizes.keys() or sizes.keys() & plain.keys():
        raise BadMessage("a message does not say how long its encoded vectors are; it is damaged")
    return plain | {key: unseal(Packed(n, parts.get(key, {}))) for key, n in sizes.items()}


def message_bytes(message: Message, packed: Mapping[str, Packed] = _NOTHING) -> bytes:
    """`packed`: vectors that travel encoded, instead of those of the message by the same name."""
    sizes, parts = _flat(packed)
    header = {k: v for k, v in vars(message).items() if k != "vectors"} | {"packed": sizes}
    return pack(header, {k: v for k, v in message.vectors.items() if k not in packed} | parts)


def read_message(parcel: bytes, unseal: Open = closed) -> Message:
    header, tensors = unpack(parcel)
    vectors = _opened(header, tensors, unseal)
    try:
        counted = header.pop("counted")
        return Message(
            **(header | {"splits": tuple(header["splits"])}),
            counted=counted and (counted[0], counted[1]),
            vectors=vectors,
        )
    except (KeyError, TypeError, IndexError) as error:
        raise BadMessage(f"a message lacks a field ({error}); is the other side of the same version?") from error


def reply_bytes(answer: Reply | Excuse, packed: Mapping[str, Packed] = _NOTHING) -> bytes:
    """`packed`: means that travel encoded, instead of those of the update by the same name."""
    if isinstance(answer, Excuse):
        return pack(asdict(answer) | {"packed": {}}, {})
    update = answer.update
    sizes, parts = _flat({f"mean/{key}": one for key, one in packed.items()})
    header = {"site": answer.site, "task": answer.task, "turn": answer.turn, "attempt": answer.attempt}
    header |= {"weight": answer.weight, "work": update.work and _work(update.work), "group": update.group}
    means = {f"mean/{k}": v for k, v in update.mean.items() if k not in packed}
    return pack(header | {"packed": sizes}, means | {f"sum/{k}": v for k, v in update.sum.items()} | parts)


def _work(work: Work) -> dict[str, Any]:
    """Seconds in a fixed width, so that the length of a reply does not depend on the clock."""
    return asdict(work) | {"seconds": f"{work.seconds:015.6f}"}


def _read_work(fields: Mapping[str, Any]) -> Work:
    counts = {key: int(fields[key]) for key in ("asked", "done", "examples", "looks")}
    if not 0 <= counts["done"] <= counts["asked"] or counts["examples"] < 1 or counts["looks"] < 0:
        raise ValueError(f"work {counts}")
    return Work(**counts, seconds=float(fields["seconds"]))


def read_reply(site: SiteId, parcel: bytes, unseal: Open = closed) -> Reply | Excuse:
    """`site` is whom the engine had it from; a reply in another's name is refused."""
    header, found = unpack(parcel)
    if header.get("site") != site:
        raise BadReply(f"{site}: answered in the name of {header.get('site')!r}")
    tensors = _opened(header, found, unseal)
    try:
        if "reason" in header:
            return Excuse(site, header["task"], int(header["turn"]), str(header["reason"])[:LONGEST])
        weight = float(header["weight"])
        work = header["work"] and _read_work(header["work"])
        turn, attempt, group = int(header["turn"]), int(header["attempt"]), int(header["group"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadReply(f"{site}: a field is missing or wrong ({error}); is the site of the same version?") from error
    if not 0 < weight <= HEAVIEST:
        raise BadReply(
            f"{site}: weight {weight} must be > 0 and at most {HEAVIEST:g}; run `hemofed study check` on its data"
        )
    for key, value in tensors.items():
        if key.startswith("mean/") and value.dtype != torch.float32:
            raise BadReply(f"{site}: {key.partition('/')[2]} came as {value.dtype}, not as float32")
        if value.is_floating_point() and not finite(value):
            raise BadReply(f"{site}: {key.partition('/')[2]} is not finite; lower local.lr or look at the site's data")
    parts = {
        kind: {k[len(kind) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
        for kind in ("mean", "sum")
    }
    return Reply(site, header["task"], turn, attempt, Update(parts["mean"], parts["sum"], work, group), weight)
