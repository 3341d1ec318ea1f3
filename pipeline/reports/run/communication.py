"""Describes the compression of updates and models, and what it saved against float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from pipeline.codecs.base import Codec
from pipeline.core.registry import Component, registered_components
from pipeline.reports.document.formatting import format_bytes
from pipeline.reports.run.record import RunRecord, Settings

FLOAT32_BYTES = 4
TrafficDirection = Literal["up", "down"]


def compression_chains(record: RunRecord) -> dict[TrafficDirection, list[Settings]]:
    """Direction -> its codecs in order; empty if the study compresses neither direction."""
    compression: Settings = record.settings.get("compression") or {}
    uplink_chain = (
        _as_codec_list(compression["uplink"])
        if "uplink" in compression
        else _strategy_codecs(record)
        if compression
        else []
    )
    chain_by_direction: dict[TrafficDirection, list[Settings]] = {
        "up": uplink_chain,
        "down": _as_codec_list(compression.get("downlink") or ()),
    }
    return chain_by_direction if any(chain_by_direction.values()) else {}


def _as_codec_list(value: object) -> list[Settings]:
    """Accepts a list of codecs, a single codec, or a codec's name."""
    codecs = [value] if isinstance(value, str | Mapping) else list(value) if isinstance(value, Sequence) else []
    return [{"name": codec} if isinstance(codec, str) else codec for codec in codecs]


def _strategy_codecs(record: RunRecord) -> list[Settings]:
    """The strategy's default codecs, used if the study gives none (FedPAQ quantises)."""
    strategy = _find_component("strategies", record.settings.get("strategy"))
    return [codec.model_dump() for codec in getattr(strategy, "default_codec", ())]


def _find_component(kind: str, table: object) -> Component | None:
    """None if the table is of a plugin that is not installed, or of another version."""
    settings = {"name": table} if isinstance(table, str) else table
    if not isinstance(settings, Mapping):
        return None
    cls = registered_components(kind).get(str(settings.get("name")))
    try:
        return cls.model_validate(settings) if cls else None
    except ValidationError:
        return None


def describe_compression(chains: Mapping[TrafficDirection, Sequence[Settings]]) -> str:
    return f"Uplink (updates): {_describe_chain(chains['up'])}. Downlink (models): {_describe_chain(chains['down'])}."


def _describe_chain(chain: Sequence[Settings]) -> str:
    if not chain:
        return "uncompressed float32"
    return ", then ".join(_describe_codec(codec) for codec in chain)


def _describe_codec(codec: Settings) -> str:
    name = str(codec.get("name"))
    component = _find_component("codecs", codec)
    return f"{name} ({component.summary})" if isinstance(component, Codec) else name


def float32_bytes(record: RunRecord, direction: TrafficDirection) -> float | None:
    """Bytes of one float32 model for every accepted reply (up) or every request (down)."""
    if record.results is None:
        return None
    num_models = sum(len(line.accepted if direction == "up" else line.sampled_clients) for line in record.round_records)
    return FLOAT32_BYTES * record.results.num_parameters * num_models


def describe_savings(record: RunRecord, direction: TrafficDirection) -> tuple[str, str] | None:
    """(bytes in float32, by which factor the run sent less or more); None if unknown."""
    uncompressed_bytes = float32_bytes(record, direction)
    sent_bytes = sum(line.bytes.up if direction == "up" else line.bytes.down for line in record.round_records)
    if not uncompressed_bytes or not sent_bytes:
        return None
    ratio = uncompressed_bytes / sent_bytes
    if 0.95 < ratio < 1.05:
        return format_bytes(uncompressed_bytes), "about as much"
    return format_bytes(uncompressed_bytes), f"{ratio:.1f} times less" if ratio > 1 else f"{1 / ratio:.1f} times more"
