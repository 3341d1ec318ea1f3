"""Reads and writes study files; errors name the key, its line and the valid choices.

Not tomli-w for writing: it breaks every list over several lines, and a resolved study should be as short as the original.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from pipeline.core.errors import IncompatibleStudyError, StudyError
from pipeline.core.registry import registered_components, suggest_names
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from sites.data.base import DataSource

PACKAGED_STUDIES = Path(__file__).parent / "packaged"
# section of a study file -> kind of component in the registry
_COMPONENT_KINDS = {
    "data": "data",
    "partition": "partitions",
    "feature_skew": "feature_skews",
    "normalization": "normalizations",
    "model": "models",
    "strategy": "strategies",
    "aggregation": "aggregation_rules",
}


def find_study(name: str | Path) -> Path:
    """Path of a study file, or of the packaged study of that name."""
    path = Path(name)
    packaged = PACKAGED_STUDIES / f"{name}.toml"
    if path.is_file():
        return path
    if packaged.is_file():
        return packaged
    study_names = [p.stem for p in PACKAGED_STUDIES.glob("*.toml")]
    raise StudyError(
        f"there is no study file {str(name)!r} and no packaged study of that name; {suggest_names(str(name), study_names)}"
    )


def parse_override(text: str) -> tuple[str, Any]:
    """`local.lr=0.1` -> ("local.lr", 0.1); a value that is not TOML is a string."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise StudyError(f"--set {text!r} should look like --set local.lr=0.1")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def load_study(path: Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """A relative data.path starts at the study file's folder, in an override at the working directory; a run stores it absolute."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise StudyError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    given = overrides or {}
    return _resolve_data_paths(parse_study(text, str(path), given), path.parent, given)


def make_study(values: Study | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Study:
    """A study from the tables of a study file, or from another study. A relative data.path starts at the working directory."""
    tables = values.to_dict() if isinstance(values, Study) else values
    raw = {
        key: value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else deepcopy(value)
        for key, value in tables.items()
    }
    given = overrides or {}
    return _resolve_data_paths(build_study(raw, "the study", given), Path.cwd(), given)


def _resolve_data_paths(study: Study, folder: Path, overrides: Mapping[str, Any]) -> Study:
    def base_folder(section: str) -> Path:
        return Path.cwd() if {section, f"{section}.path"} & set(overrides) else folder

    public = study.public.model_copy(update={"data": _resolve_data_path(study.public.data, base_folder("public.data"))})
    return study.model_copy(update={"data": _resolve_data_path(study.data, base_folder("data")), "public": public})


def _resolve_data_path(source: DataSource | None, base_folder: Path) -> DataSource | None:
    if source is None or source.path is None or source.path.is_absolute():
        return source
    return source.model_copy(update={"path": (base_folder / source.path).resolve()})


def parse_study(text: str, source: str, overrides: Mapping[str, Any]) -> Study:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{source}: not valid TOML: {error}") from error
    return build_study(raw, source, overrides, text)


def build_study(raw: dict[str, Any], source: str, overrides: Mapping[str, Any], text: str = "") -> Study:
    """`raw`: the tables of a study file, to which the overrides are added. `text`: the file, for line numbers."""
    for dotted, value in overrides.items():
        _apply_override(raw, dotted, value)
    try:
        return Study.model_validate(raw)
    except ValidationError as error:
        raise StudyError("\n".join(_format_errors(error, raw, text, source, overrides))) from error
    except IncompatibleStudyError as error:
        raise IncompatibleStudyError(f"{source}: {error}") from error


def to_toml(values: Mapping[str, Any]) -> str:
    """Writes plain values first, then one table per section, which is all that a resolved study needs."""
    scalars = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    lines = [f"{k} = {_toml_value(v)}" for k, v in scalars.items()]
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
    raise TypeError(f"{type(value)} cannot be written into a study file")


def _apply_override(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, key = dotted.split(".")
    table = raw
    for depth, parent in enumerate(parents):
        new_table = {"name": default} if depth == 0 and (default := _default_component(parent)) else {}
        subtable = table.setdefault(parent, new_table)
        # strategy = "fedprox" and --set strategy.mu=1
        if isinstance(subtable, str) and depth == 0 and parent in _COMPONENT_KINDS:
            subtable = table[parent] = {"name": subtable}
        if not isinstance(subtable, dict):
            raise StudyError(f"--set {dotted}: {parent} is a value, not a section")
        table = subtable
    if not parents and key in _COMPONENT_KINDS and isinstance(value, str):
        value = {"name": value}
    if parents == ["local"] and key in ("epochs", "steps"):  # one replaces the other
        table.pop("steps" if key == "epochs" else "epochs", None)
    if key == "name" and len(parents) == 1 and table.get("name") not in (None, value):
        table.clear()  # another component does not take the old one's settings
    table[key] = value


def _default_component(section: str) -> str | None:
    """Name of the section's component if the study names none."""
    default = Study.model_fields[section].default if section in _COMPONENT_KINDS else None
    return default if isinstance(default, str) else None


def _format_errors(
    validation_error: ValidationError, raw: Mapping[str, Any], text: str, source: str, overrides: Mapping[str, Any]
) -> list[str]:
    """One line per key: pydantic reports an error for each type that the value could have."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for error in validation_error.errors():
        by_key.setdefault(_locate_in_file(raw, error), []).append(error)
    lines = []
    for loc, errors in by_key.items():
        key = ".".join(loc)
        override_key = next((k for k in overrides if key == k or key.startswith(f"{k}.")), None)
        line_number = _find_line(text, loc)
        location = f"--set {override_key}" if override_key else f"{source}:{line_number}" if line_number else source
        description = _describe_error(loc, errors, raw)
        lines.append(f"{location}: {description.removeprefix(f'{key}: ') if override_key == key else description}")
    return lines


def _locate_in_file(raw: Mapping[str, Any], error: Any) -> tuple[str, ...]:
    """The error's key in the file; pydantic's own path also names the types that it tried."""
    path: list[str] = []
    node: Any = raw
    for part in error["loc"]:
        if (isinstance(node, Mapping) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            node = node[part]
        elif not isinstance(node, Mapping):
            break
        path.append(str(part))
    return tuple(path)


def _describe_error(loc: Sequence[str], errors: Sequence[Any], raw: Mapping[str, Any]) -> str:
    key, first_error = ".".join(loc), errors[0]
    if first_error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {suggest_names(loc[-1], _fields_at(raw, loc[:-1]))}"
    if first_error["type"] == "missing":
        # a component given by its name, like compression.uplink = "ring", has no table in the file
        missing_key = str(first_error["loc"][-1])
        key = key if loc[-1] == missing_key else f"{key}.{missing_key}"
        return f"{key!r} is missing" + (
            f"; {suggest_names('', registered_components(_COMPONENT_KINDS[key]))}" if key in _COMPONENT_KINDS else ""
        )
    messages = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ").removeprefix("Input ") for e in errors))
    value = first_error.get("input")
    suffix = f" (given: {value!r})" if isinstance(value, str | int | float | bool) else ""
    return f"{key}: {messages}{suffix}"


def _fields_at(raw: Mapping[str, Any], loc: Sequence[str]) -> list[str]:
    if not loc:
        return list(Study.model_fields)
    section = loc[0]
    table = raw.get(section)
    if tuple(loc) == ("public", "data") and isinstance(table, Mapping):
        section, table = "data", table.get("data")
    if section == "compression" and len(loc) > 1 and isinstance(table, Mapping):
        chain = table.get(loc[1])
        entry = chain[int(loc[2])] if isinstance(chain, list) and len(loc) > 2 else chain
        codec = registered_components("codecs").get(str(entry.get("name"))) if isinstance(entry, Mapping) else None
        return list(codec.model_fields) if codec else []
    if section in _COMPONENT_KINDS:
        cls = (
            registered_components(_COMPONENT_KINDS[section]).get(str(table.get("name")))
            if isinstance(table, Mapping)
            else None
        )
        return list(cls.model_fields) if cls else []
    section_type = Study.model_fields[section].annotation
    if section_type is PrivacyConfig and len(loc) > 1 and loc[1] in PrivacyConfig.model_fields:  # a table below a table
        section_type = next(c for c in get_args(PrivacyConfig.model_fields[loc[1]].annotation) if c is not type(None))
    return (
        list(section_type.model_fields)
        if isinstance(section_type, type) and issubclass(section_type, BaseModel)
        else []
    )


def _find_line(text: str, loc: Sequence[str]) -> int | None:
    """Line of the key, else of the innermost table around it."""
    table: list[str] = []
    best_line, depth = None, 0
    for line_number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            key_path = table
        elif key := re.match(r"\s*([\w.\"'-]+?)\s*=", line):
            key_path = table + [part.strip("\"'") for part in key[1].split(".")]
        else:
            continue
        if list(loc[: len(key_path)]) == key_path and len(key_path) > depth:
            best_line, depth = line_number, len(key_path)
    return best_line
