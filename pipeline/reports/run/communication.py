"""In what form vectors travelled, in words, and what that saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.reports.document.formatting import size
from pipeline.reports.run.record import Json, Record, bytes_of, number

FLOAT = 4  # bytes
Way = str  # "up" or "down"


def _share(codec: Json) -> str:
    return f"{100 * float(codec.get('share', 0.01)):g} % of the numbers"


def _waits(codec: Json) -> str:
    return ", the rest waits for its turn" if codec.get("error_feedback", True) else ""


CODECS: Mapping[str, Callable[[Json], str]] = {
    "fp16": lambda codec: "half precision, two bytes a number",
    "qsgd": lambda codec: (
        f"rounded at random to {codec.get('bits', 4)} bit{'s' if codec.get('bits', 4) != 1 else ''} a number"
    ),
    "topk": lambda codec: f"only the largest {_share(codec)}{_waits(codec)}",
    "randk": lambda codec: f"{_share(codec)}, at random places{_waits(codec)}",
    "ring": lambda codec: "whole numbers that add up under masks",
}


def chains(record: Record) -> dict[Way, list[Json]]:
    """Way -> its codecs in their order; empty where the study has none either way."""
    chosen: Json = record.settings.get("codec") or {}
    up = _listed(chosen["up"]) if "up" in chosen else _of_strategy(record) if chosen else []
    found = {"up": up, "down": _listed(chosen.get("down") or ())}
    return found if any(found.values()) else {}


def _listed(value: object) -> list[Json]:
    """One codec may stand alone, and its name for itself."""
    several = [value] if isinstance(value, str | Mapping) else list(value) if isinstance(value, Sequence) else []
    return [{"name": one} if isinstance(one, str) else one for one in several]


def _of_strategy(record: Record) -> list[Json]:
    """What the strategy says where the study says nothing: FedPAQ rounds by itself."""
    from pydantic import ValidationError

    from pipeline.core.registry import choices

    table = record.settings.get("strategy")
    cls = choices("strategies").get(record.part("strategy") or "")
    try:
        strategy = cls.model_validate(table) if cls and isinstance(table, Mapping) else None
    except ValidationError:  # of another version
        return []
    return [codec.model_dump() for codec in getattr(strategy, "codec", ())]


def travel_words(chains: Mapping[Way, Sequence[Json]]) -> str:
    return f"Updates went up {_chain(chains['up'])}; models came down {_chain(chains['down'])}."


def _chain(chain: Sequence[Json]) -> str:
    if not chain:
        return "as they are, in float32"
    return "by " + ", then ".join(_one(codec) for codec in chain)


def _one(codec: Json) -> str:
    name = str(codec.get("name"))
    return f"{name} ({CODECS[name](codec)})" if name in CODECS else name


def plain_bytes(record: Record, way: Way) -> float | None:
    """What one model in float32 for every answer that counted (up) or that was asked for (down) would have taken."""
    parameters = number((record.results or {}).get("parameters"))
    who = "counted" if way == "up" else "asked"
    return FLOAT * parameters * sum(len(line.get(who) or ()) for line in record.rounds) if parameters else None


def saved(record: Record, way: Way) -> tuple[str, str] | None:
    """(what float32 would have taken, how many times less this was)."""
    plain, moved = plain_bytes(record, way), sum(bytes_of(line, way) for line in record.rounds)
    if not plain or not moved:
        return None
    times = plain / moved
    if 0.95 < times < 1.05:
        return size(plain), "about as much"
    return size(plain), f"{times:.1f} times less" if times > 1 else f"{1 / times:.1f} times more"
