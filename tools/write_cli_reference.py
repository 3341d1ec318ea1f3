"""Writes docs/commands.md, the reference of all commands, from the command line's own definitions.

Run it after every change of a command: `.venv/bin/python tools/write_cli_reference.py`. A test compares the page with
the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from pipeline.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
INTRODUCTION = """# Commands

All commands of `hemofed`, with their arguments and options. Every command also has `--help`. This page is generated
from the code: change the help texts there, then run `tools/write_cli_reference.py`.
"""
VALUE_NAMES = {Path: "path", str: "text", int: "integer", float: "number"}


@dataclass(frozen=True)
class CommandEntry:
    """A command or a group of commands; `node` is typer's object, whose class differs between typer's versions."""

    name: str
    node: Any

    @property
    def summary(self) -> str:
        return " ".join((self.node.help or "").split())

    @property
    def is_group(self) -> bool:
        return hasattr(self.node, "commands")

    @property
    def link(self) -> str:
        return f"[`{self.name}`](#{self.name.replace(' ', '-')})"


def render_reference() -> str:
    root = CommandEntry("hemofed", typer.main.get_command(app))
    top_level = list(_list_children(root))
    leaves = [entry for top in top_level for entry in _list_leaves(top)]
    parts = [INTRODUCTION, _render_table(("command", "what it does"), [(leaf.link, leaf.summary) for leaf in leaves])]
    for top in top_level:
        parts.append(f"## `{top.name}`\n\n{top.summary}\n")
        if top.is_group:
            parts += [f"### `{leaf.name}`\n\n{leaf.summary}\n\n{_render_command(leaf)}" for leaf in _list_leaves(top)]
        else:
            parts.append(_render_command(top))
    return "\n".join(parts)


def _list_children(entry: CommandEntry) -> Iterator[CommandEntry]:
    return (CommandEntry(f"{entry.name} {name}", node) for name, node in entry.node.commands.items())


def _list_leaves(entry: CommandEntry) -> Iterator[CommandEntry]:
    if not entry.is_group:
        yield entry
        return
    for child in _list_children(entry):
        yield from _list_leaves(child)


def _render_command(entry: CommandEntry) -> str:
    hints = get_type_hints(entry.node.callback, include_extras=True)
    rows = [_render_parameter(parameter, hints[parameter.name]) for parameter in entry.node.params]
    usage = " ".join([entry.name, *filter(None, map(_usage_word, entry.node.params))])
    if any(parameter.param_type_name == "option" for parameter in entry.node.params):
        usage += " [options]"
    table = "\n" + _render_table(("argument or option", "value", "default", "meaning"), rows) if rows else ""
    return f"```text\n{usage}\n```\n{table}"


def _usage_word(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return f"{parameter.opts[0]} VALUE" if parameter.required else ""
    word = _argument_name(parameter) + ("..." if parameter.nargs == -1 else "")
    return word if parameter.required else f"[{word}]"


def _argument_name(parameter: Any) -> str:
    return str(parameter.name).upper()


def _render_parameter(parameter: Any, hint: Any) -> tuple[str, str, str, str]:
    """Name, value, default, meaning."""
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [_argument_name(parameter)]
    meaning = parameter.help + (f"; also set by `{parameter.envvar}`" if parameter.envvar else "")
    return ", ".join(f"`{name}`" for name in names), _describe_value(hint), _describe_default(parameter), meaning


def _describe_value(hint: Any) -> str:
    """What to write after the option, from its type hint and typer's settings in `Annotated`."""
    annotated_type, settings = get_args(hint)[:2]
    value_type = next((t for t in get_args(annotated_type) if t is not type(None)), annotated_type)
    if get_origin(annotated_type) is list or get_origin(value_type) is list:
        (value_type,) = get_args(value_type) or (value_type,)
    if value_type is bool:
        return ""
    if issubclass(value_type, Enum):
        return ", ".join(f"`{choice.value}`" for choice in value_type)
    name = f"`{settings.metavar}`" if settings.metavar else VALUE_NAMES[value_type]
    limits = [
        f"{word} {limit:g}" for word, limit in (("from", settings.min), ("to", settings.max)) if limit is not None
    ]
    return " ".join([name, *limits])


def _describe_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if default is None or default is False or default in ("", []):
        return ""
    return f"`{parameter.opts[0] if default is True else default}`"


def _render_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render_reference(), "utf-8")
