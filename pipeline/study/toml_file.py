"""The text of a study file: parsing, overrides, and errors that name the key, its line and the valid choices."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipeline.core.errors import BadStudy, Refused
from pipeline.core.registry import choices, near
from pipeline.study.privacy import Privacy
from pipeline.study.schema import Study

PACKAGED = Path(__file__).parent / "packaged"
_KINDS = {"data": "data", "partition": "partitions", "skew": "skews", "normalise": "normalisers", "model": "models",
          "strategy": "strategies", "combine": "combines"}  # fmt: skip


def find_study(name: str | Path) -> Path:
    """A file, or the name of a packaged study."""
    path = Path(name)
    packaged = PACKAGED / f"{name}.toml"
    if path.is_file():
        return path
    if packaged.is_file():
        return packaged
    known = [p.stem for p in PACKAGED.glob("*.toml")]
    raise BadStudy(f"there is no study file {str(name)!r} and no packaged study of that name; {near(str(name), known)}")


def parse_override(text: str) -> tuple[str, Any]:
    """`local.lr=0.1` -> ("local.lr", 0.1); what is no TOML value is a string."""
    key, eq, value = text.partition("=")
    if not eq or not key.strip():
        raise BadStudy(f"--set {text!r} should look like --set local.lr=0.1")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def read_study(text: str, source: str, overrides: Mapping[str, Any]) -> Study:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadStudy(f"{source}: not valid TOML: {error}") from error
    for dotted, value in overrides.items():
        _override(raw, dotted, value)
    try:
        return Study.model_validate(raw)
    except ValidationError as error:
        raise BadStudy("\n".join(_explain_all(error, raw, text, source, overrides))) from error
    except Refused as error:
        raise Refused(f"{source}: {error}") from error


def to_toml(values: Mapping[str, Any]) -> str:
    """Plain values first, then a table a section: all that a resolved study needs."""
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    lines = [f"{k} = {_toml_value(v)}" for k, v in plain.items()]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{k} = {_toml_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            escaped = "".join(
                f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c
                for c in value.replace("\\", "\\\\").replace('"', '\\"')
            )
            return f'"{escaped}"'
        case Mapping():
            return "{" + ", ".join(f'"{k}" = {_toml_value(v)}' for k, v in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
    raise TypeError(f"{type(value)} has no place in a study file")


def _override(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    table = raw
    for depth, parent in enumerate(parents):
        fresh = {"name": default} if depth == 0 and (default := _default(parent)) else {}
        below = table.setdefault(parent, fresh)
        if isinstance(below, str) and depth == 0 and parent in _KINDS:  # strategy = "fedprox" and --set strategy.mu=1
            below = table[parent] = {"name": below}
        if not isinstance(below, dict):
            raise BadStudy(f"--set {dotted}: {parent} is a value, not a section")
        table = below
    if not parents and last in _KINDS and isinstance(value, str):
        value = {"name": value}
    if parents == ["local"] and last in ("epochs", "steps"):  # one measure replaces the other
        table.pop("steps" if last == "epochs" else "epochs", None)
    if last == "name" and len(parents) == 1 and table.get("name") not in (None, value):
        table.clear()  # another component: the old one's settings are not its own
    table[last] = value


def _default(section: str) -> str | None:
    """The component that a section stands for when the study does not say."""
    found = Study.model_fields[section].default if section in _KINDS else None
    return found if isinstance(found, str) else None


def _explain_all(
    failed: ValidationError, raw: Mapping[str, Any], text: str, source: str, overrides: Mapping[str, Any]
) -> list[str]:
    """One line a key: a value of several allowed kinds fails once for each of them."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for error in failed.errors():
        by_key.setdefault(_in_file(raw, error), []).append(error)
    lines = []
    for loc, found in by_key.items():
        key = ".".join(loc)
        overridden = next((k for k in overrides if key == k or key.startswith(f"{k}.")), None)
        line = _line_of(text, loc)
        place = f"--set {overridden}" if overridden else f"{source}:{line}" if line else source
        what = _what(loc, found, raw)
        lines.append(f"{place}: {what.removeprefix(f'{key}: ') if overridden == key else what}")
    return lines


def _in_file(raw: Mapping[str, Any], error: Any) -> tuple[str, ...]:
    """Where the error is in the file's own words: pydantic also names which of several kinds it tried."""
    path: list[str] = []
    here: Any = raw
    for part in error["loc"]:
        if (isinstance(here, Mapping) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]
        elif not isinstance(here, Mapping):
            break
        path.append(str(part))
    return tuple(path)


def _what(loc: Sequence[str], found: Sequence[Any], raw: Mapping[str, Any]) -> str:
    key, first = ".".join(loc), found[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {near(loc[-1], _fields_at(raw, loc[:-1]))}"
    if first["type"] == "missing":
        lacks = str(
            first["loc"][-1]
        )  # of a component named alone, like codec.up = "ring", the file has no place for it
        key = key if loc[-1] == lacks else f"{key}.{lacks}"
        return f"{key!r} is missing" + (f"; {near('', choices(_KINDS[key]))}" if key in _KINDS else "")
    told = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ").removeprefix("Input ") for e in found))
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{key}: {told}{shown}"


def _fields_at(raw: Mapping[str, Any], loc: Sequence[str]) -> list[str]:
    if not loc:
        return list(Study.model_fields)
    section = loc[0]
    table = raw.get(section)
    if tuple(loc) == ("public", "data") and isinstance(table, Mapping):
        section, table = "data", table.get("data")
    if section == "codec" and len(loc) > 1 and isinstance(table, Mapping):
        chain = table.get(loc[1])
        one = chain[int(loc[2])] if isinstance(chain, list) and len(loc) > 2 else chain
        codec = choices("codecs").get(str(one.get("name"))) if isinstance(one, Mapping) else None
        return list(codec.model_fields) if codec else []
    if section in _KINDS:
        cls = choices(_KINDS[section]).get(str(table.get("name"))) if isinstance(table, Mapping) else None
        return list(cls.model_fields) if cls else []
    kind = Study.model_fields[section].annotation
    if kind is Privacy and len(loc) > 1 and loc[1] in Privacy.model_fields:  # a table below a table
        kind = next(c for c in get_args(Privacy.model_fields[loc[1]].annotation) if c is not type(None))
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _line_of(text: str, loc: Sequence[str]) -> int | None:
    """The line of the key, else of the nearest table around it."""
    table: list[str] = []
    best, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            here = table
        elif key := re.match(r"\s*([\w.\"'-]+?)\s*=", line):
            here = table + [part.strip("\"'") for part in key[1].split(".")]
        else:
            continue
        if list(loc[: len(here)]) == here and len(here) > depth:
            best, depth = number, len(here)
    return best
