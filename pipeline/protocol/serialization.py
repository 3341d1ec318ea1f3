"""Messages and replies as bytes: a checksum, then safetensors with a JSON header. Vectors may be encoded by codecs."""

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

from pipeline.codecs.base import EncodedVector
from pipeline.core.errors import MessageError, ReplyError
from pipeline.core.parameters import NamedTensors
from pipeline.core.tensor_io import is_finite, tensors_to_bytes
from pipeline.protocol.messages import DECLINE_KINDS, ClientUpdate, Declined, DeclineKind, Message, Reply, SiteId
from pipeline.protocol.tasks import LocalWork

_MAGIC = b"HF3\0"
MAX_CLIENT_WEIGHT = 1e9  # examples; with a larger weight the other clients would vanish in a float32 mean
MAX_DECLINE_TEXT_LENGTH = 2000  # characters; the text is kept with the round's record and displayed
_PART_SEPARATOR = "@"  # between a vector's name and the name of a part of its encoding


def serialize_frame(header: Mapping[str, Any], tensors: NamedTensors) -> bytes:
    body = tensors_to_bytes(header, tensors)
    return b"".join((_MAGIC, struct.pack("<I", zlib.crc32(body)), body))


def deserialize_frame(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if len(data) < 16 or data[:4] != _MAGIC:
        raise MessageError("these bytes are not a hemofed message of this version; do both sides run the same version?")
    body = data[8:]
    if zlib.crc32(body) != struct.unpack("<I", data[4:8])[0]:
        raise MessageError(f"a message of {len(data)} bytes arrived damaged or cut short; send it again")
    try:
        tensors = load(body)
        (length,) = struct.unpack("<Q", body[:8])
        header = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["hemofed"])
    except (SafetensorError, KeyError, ValueError, struct.error, RecursionError) as error:
        raise MessageError(f"a message cannot be read ({error}); do both sides run the same version?") from error
    if not isinstance(header, dict):
        raise MessageError("a message's header is not a table; do both sides run the same version?")
    return header, tensors


def peek_task(data: bytes) -> str:
    """The task of a serialized message, for display only, without reading the tensors; "" if unreadable."""
    try:
        (length,) = struct.unpack("<Q", data[8:16])
        return str(json.loads(json.loads(data[16 : 16 + length])["__metadata__"]["hemofed"])["task"])
    except (struct.error, ValueError, KeyError, TypeError):
        return ""


VectorDecoder = Callable[[EncodedVector], Tensor]
_NO_ENCODED_VECTORS: Mapping[str, EncodedVector] = {}


def reject_encoded_vector(encoded: EncodedVector) -> Tensor:
    raise MessageError("a vector came encoded, but this study names no codec for this direction")


def _flatten_encoded(encoded: Mapping[str, EncodedVector]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Lengths for the header, and the parts as tensors."""
    tensors = {
        f"{key}{_PART_SEPARATOR}{name}": part for key, vector in encoded.items() for name, part in vector.parts.items()
    }
    return {key: vector.n for key, vector in encoded.items()}, tensors


def _decode_all(header: dict[str, Any], tensors: NamedTensors, decode_one: VectorDecoder) -> dict[str, Tensor]:
    """All vectors, decoded where they came encoded."""
    parts: dict[str, dict[str, Tensor]] = {}
    unencoded: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name, separator, part = key.partition(_PART_SEPARATOR)
        if separator:
            parts.setdefault(name, {})[part] = value
        else:
            unencoded[key] = value
    try:
        sizes = {str(key): int(n) for key, n in header.pop("packed").items()}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise MessageError(
            f"a message does not say which vectors are encoded ({error}); do both sides run the same version?"
        ) from error
    if not parts.keys() <= sizes.keys() or sizes.keys() & unencoded.keys():
        raise MessageError("a message does not say how long its encoded vectors are; it is damaged")
    return unencoded | {key: decode_one(EncodedVector(n, parts.get(key, {}))) for key, n in sizes.items()}


def serialize_message(message: Message, encoded: Mapping[str, EncodedVector] = _NO_ENCODED_VECTORS) -> bytes:
    """`encoded` vectors replace the message's vectors of the same name."""
    sizes, parts = _flatten_encoded(encoded)
    header = {k: v for k, v in vars(message).items() if k != "vectors"} | {"packed": sizes}
    return serialize_frame(header, {k: v for k, v in message.vectors.items() if k not in encoded} | parts)


def deserialize_message(data: bytes, decode_one: VectorDecoder = reject_encoded_vector) -> Message:
    header, tensors = deserialize_frame(data)
    vectors = _decode_all(header, tensors, decode_one)
    try:
        last_accepted = header.pop("last_accepted")
        return Message(
            **(header | {"splits": tuple(header["splits"])}),
            last_accepted=last_accepted and (last_accepted[0], last_accepted[1]),
            vectors=vectors,
        )
    except (KeyError, TypeError, IndexError) as error:
        raise MessageError(f"a message lacks a field ({error}); do both sides run the same version?") from error


def serialize_reply(reply: Reply | Declined, encoded: Mapping[str, EncodedVector] = _NO_ENCODED_VECTORS) -> bytes:
    """`encoded` vectors replace the update's `averaged` vectors of the same name."""
    if isinstance(reply, Declined):
        return serialize_frame(asdict(reply) | {"packed": {}}, {})
    update = reply.update
    sizes, parts = _flatten_encoded({f"mean/{key}": vector for key, vector in encoded.items()})
    header = {"site": reply.site, "task": reply.task, "round": reply.round, "attempt": reply.attempt}
    header |= {"weight": reply.weight, "work": update.work and _work_to_dict(update.work), "cluster": update.cluster}
    means = {f"mean/{k}": v for k, v in update.averaged.items() if k not in encoded}
    return serialize_frame(
        header | {"packed": sizes}, means | {f"sum/{k}": v for k, v in update.summed.items()} | parts
    )


def _work_to_dict(work: LocalWork) -> dict[str, Any]:
    """Seconds have a fixed width, so that the length of a reply does not depend on the clock."""
    return asdict(work) | {"seconds": f"{work.seconds:015.6f}"}


def _work_from_dict(fields: Mapping[str, Any]) -> LocalWork:
    counts = {key: int(fields[key]) for key in ("steps_requested", "steps_done", "num_examples", "eval_steps")}
    if (
        not 0 <= counts["steps_done"] <= counts["steps_requested"]
        or counts["num_examples"] < 1
        or counts["eval_steps"] < 0
    ):
        raise ValueError(f"work {counts}")
    return LocalWork(**counts, seconds=float(fields["seconds"]))


def deserialize_reply(site: SiteId, data: bytes, decode_one: VectorDecoder = reject_encoded_vector) -> Reply | Declined:
    """`site`: the sender as the engine knows it; a reply in another site's name is refused.

    A decline of an unknown kind gets the kind "other".
    """
    header, raw_tensors = deserialize_frame(data)
    if header.get("site") != site:
        raise ReplyError(f"{site}: replied in the name of {header.get('site')!r}")
    tensors = _decode_all(header, raw_tensors, decode_one)
    try:
        if "kind" in header:
            kind: DeclineKind = header["kind"] if header["kind"] in DECLINE_KINDS else "other"
            text = str(header["text"])[:MAX_DECLINE_TEXT_LENGTH]
            return Declined(site, header["task"], int(header["round"]), kind, text)
        weight = float(header["weight"])
        work = header["work"] and _work_from_dict(header["work"])
        round_number, attempt, cluster = int(header["round"]), int(header["attempt"]), int(header["cluster"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ReplyError(
            f"{site}: a field is missing or wrong ({error}); do both sides run the same version?"
        ) from error
    if not 0 < weight <= MAX_CLIENT_WEIGHT:
        raise ReplyError(
            f"{site}: weight {weight} must be > 0 and at most {MAX_CLIENT_WEIGHT:g}; run `hemofed study check` on its data"
        )
    for key, value in tensors.items():
        if key.startswith("mean/") and value.dtype != torch.float32:
            raise ReplyError(f"{site}: {key.partition('/')[2]} has type {value.dtype}, not float32")
        if value.is_floating_point() and not is_finite(value):
            raise ReplyError(f"{site}: {key.partition('/')[2]} is not finite; lower local.lr or check the site's data")
    parts = {
        kind: {k[len(kind) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
        for kind in ("mean", "sum")
    }
    return Reply(
        site, header["task"], round_number, attempt, ClientUpdate(parts["mean"], parts["sum"], work, cluster), weight
    )
