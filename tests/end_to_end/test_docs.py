"""The documentation is run. README.md and docs/*.md hold blocks that these tests read:

```console          lines with `$ ` are run in order, one temporary folder a page, and must succeed
                    (`> ` continues a command); other lines must occur in the block's output
```console fails    its commands must fail
```console soon     tried again until they succeed and show what is promised, for a minute or two
```console slow     only with `make test-all`
```console fashion  needs Fashion-MNIST; without it the page is skipped
```console cells    needs real cells, in HEMOFED_DATA or ../shared/data; without them the page is skipped
```toml study       becomes study.toml, and must be a valid study
```python file=a.py becomes a.py (any language); a pyproject.toml with entry points counts as installed
```sh               is not run: its make targets and extras must exist

In console blocks variables that a command sets hold for those after it. A command that ends in `&` goes on beside them
until the page is over; then it is told to stop, must do so well, and leave no process behind. 8443 becomes a free port.
"""

from __future__ import annotations

import re
import shlex
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.cli.main import app
from pipeline.core.registry import COMPONENT_PACKAGES, registered_components
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study, StudySection, load_study
from pipeline.study.toml_file import _toml_value
from tests.support.docs_shell import Shell, shell
from tests.support.markers import REAL_CELLS

ROOT = Path(__file__).parents[2]
FASHION = Path("/usr/share/datasets/fashion-mnist")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
KINDS = {
    "data": "data",
    "partition": "partitions",
    "feature_skew": "feature_skews",
    "normalization": "normalizations",
    "model": "models",
    "strategy": "strategies",
    "compression": "codecs",
    "aggregation": "aggregation_rules",
}
TIMEOUT = 300  # seconds a command; a slow block may take as long as it needs
SOON = 120.0  # seconds
PORT = "8443"  # on the pages
INVOKED = re.compile(r"(?:^|\$\(|\bdo )(hemofed [^|;&<>()]*)", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        named = [mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")]
        return named[0] if named else "study.toml" if self.language == "toml" and "study" in self.marks else None

    @property
    def commands(self) -> list[str]:
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif line == ">" or line.startswith("> "):
                found[-1] += f"\n{line[2:]}"
        return found

    @property
    def shown(self) -> list[str]:
        """Output that the page promises."""
        return [
            line
            for line in self.text.splitlines()
            if line.strip() and line != ">" and not line.startswith(("$ ", "> ")) and line.strip() != "..."
        ]


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m[1], tuple(m[2].split()), m[3]) for m in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def having(mark: str | None) -> list[Path]:
    """Pages with a console block, or with one that is marked so."""
    found = [[b for b in blocks(page) if b.language == "console"] for page in PAGES]
    return [
        page
        for page, here in zip(PAGES, found, strict=True)
        if any(mark in b.marks if mark else "slow" not in b.marks for b in here)
    ]


@pytest.mark.parametrize("page", having(None), ids=name_of)
def test_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    play(page, tmp_path, [b for b in blocks(page) if "slow" not in b.marks])


@pytest.mark.slow
@pytest.mark.parametrize("page", having("slow"), ids=name_of)
def test_slow_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    play(page, tmp_path, blocks(page))


def play(page: Path, folder: Path, todo: list[Block]) -> None:
    if any("fashion" in b.marks for b in todo) and not FASHION.is_dir():
        pytest.skip("Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist")
    if any("cells" in b.marks for b in todo) and REAL_CELLS is None:
        pytest.skip("chula_rbc12.npz is neither in HEMOFED_DATA nor in ../shared/data: name its folder there")
    with shell(folder) as commands:
        for block in todo:
            if block.file:
                write(block, folder)
            if block.language == "console":
                run(block, commands)


def write(block: Block, folder: Path) -> None:
    assert block.file
    file = folder / block.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, "utf-8")
    if file.name == "pyproject.toml":
        as_installed(tomllib.loads(block.text)["project"], folder)


def as_installed(project: dict[str, Any], folder: Path) -> None:
    """What pip leaves of a package for entry points to be found, without pip."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")


def run(block: Block, commands: Shell) -> None:
    if "cells" in block.marks:
        commands.env["HEMOFED_DATA"] = str(REAL_CELLS)
    end = time.monotonic() + SOON
    while (problem := tried(block, commands)) and "soon" in block.marks and time.monotonic() < end:
        assert not (dead := commands.gone()), f"{problem}\nmeanwhile {commands.said(dead[0])} has ended"
        time.sleep(0.5)
    assert not problem, problem


def tried(block: Block, commands: Shell) -> str | None:
    """What is not as the page says."""
    output = ""
    for command in (c.replace(PORT, commands.port) for c in block.commands):
        if command.endswith(" &"):
            commands.start(command.removesuffix(" &"))
            continue
        code, said = commands.run(command, None if "slow" in block.marks else TIMEOUT)
        if (code != 0) != ("fails" in block.marks) or "Traceback" in said:
            return f"{block.place}: $ {command}\n{said}"
        output += said
    missing = [line for line in block.shown if squeeze(line.replace(PORT, commands.port)) not in squeeze(output)]
    return f"{block.place}: {missing[0]!r} is not in\n{output}" if missing else None


def squeeze(text: str) -> str:
    """Words only: where a table or a line is broken is no promise."""
    return " ".join(re.sub(r"[│┃━─┏┓┗┛┡┩└┘┌┐├┤╇┳┴┬╭╮╰╯]", " ", text).split())


def test_studies_on_pages_are_valid(tmp_path: Path) -> None:
    # where a page brings its own plugin, only its commands know that
    plain = [page for page in PAGES if not any(b.file == "pyproject.toml" for b in blocks(page))]
    for block in (b for page in plain for b in blocks(page) if b.file == "study.toml"):
        file = tmp_path / "study.toml"
        file.write_text(block.text, "utf-8")
        load_study(file)


def command_lines() -> Iterator[tuple[str, str]]:
    """(place, line) of every `hemofed ...` in blocks and in the text."""
    for page in LINKED:
        for block in blocks(page):
            if block.language in ("console", "sh"):
                lines = block.commands if block.language == "console" else block.text.splitlines()
                yield from ((block.place, part) for line in lines for part in INVOKED.findall(line))
        quoted = re.findall(r"`(hemofed[^`\n]*)`", prose(page))
        yield from ((name_of(page), part) for code in quoted for part in INVOKED.findall(code))


def test_every_hemofed_command_is_known() -> None:
    whole: Any = typer.main.get_command(app)
    for place, line in command_lines():
        known = whole
        for word in shlex.split(line, comments=True)[1:]:
            if word.startswith("-"):
                options = {o for p in known.params for o in p.opts} | {"--help"}
                assert word.partition("=")[0] in options, f"{place}: {line}: no option {word}"
            elif hasattr(known, "commands"):
                assert word in known.commands, f"{place}: {line}: no command {word}"
                known = known.commands[word]


def test_shell_blocks_name_what_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    for page in LINKED:
        text = page.read_text("utf-8")
        named = [t for b in blocks(page) if b.language == "sh" for t in re.findall(r"^make ([a-z-]+)", b.text, re.M)]
        named += re.findall(r"`make ([a-z-]+)`", text)
        assert set(named) <= targets, f"{name_of(page)}: no make target {set(named) - targets}"
        asked = {e.strip() for group in re.findall(r"(?:hemofed|\.)\[([a-z, -]+)\]'", text) for e in group.split(",")}
        assert asked <= extras, f"{name_of(page)}: no extra {asked - extras}"


def test_links_lead_somewhere() -> None:
    for page in LINKED:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{name_of(page)}: {target} does not exist"
            assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, blanks to hyphens."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_every_page_is_on_the_map() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, f"docs/index.md does not lead to {page.name}"


# docs/study-file.md: `## [section]`, below it `### component`, and rows "| `key` | type | default | meaning |"


def reference() -> dict[tuple[str, str], dict[str, str]]:
    """(section, component) -> key -> default as printed; "" where there is no section or no component."""
    found: dict[tuple[str, str], dict[str, str]] = {("", ""): {}}
    at = ("", "")
    for line in (ROOT / "docs" / "study-file.md").read_text("utf-8").splitlines():
        if title := re.match(r"## (?:`\[(\w+)\]`)?", line):
            at = (title[1] or "", "")
        elif title := re.match(r"### `(\w+)`", line):
            at = (at[0], title[1])
        elif row := re.match(r"\| `(\w+)` \|[^|]*\| ([^|]*?) \|", line):
            found.setdefault(at, {})[row[1]] = row[2]
        found.setdefault(at, {})
    return found


def expected() -> Iterator[tuple[tuple[str, str], dict[str, FieldInfo]]]:
    top: dict[str, FieldInfo] = {}
    for key, field in Study.model_fields.items():
        kind = field.annotation
        if key in KINDS:
            yield from (((key, name), _own(cls)) for name, cls in registered_components(KINDS[key]).items())
        if kind is PrivacyConfig:  # its parts are tables of their own
            yield (key, ""), {}
            for name, part in PrivacyConfig.model_fields.items():
                (cls,) = (c for c in get_args(part.annotation) if c is not type(None))
                yield (key, name), dict(cls.model_fields)
        elif isinstance(kind, type) and issubclass(kind, StudySection):  # [codec] is one, and has components
            yield (key, ""), dict(kind.model_fields)
        elif key not in KINDS:
            top[key] = field
    yield ("", ""), top


def _own(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    return {key: field for key, field in cls.model_fields.items() if key != "name"}


def test_the_reference_of_the_study_file_is_complete_and_true() -> None:
    assert set(KINDS.values()) == set(COMPONENT_PACKAGES)
    written = reference()
    for place, fields in expected():
        where = " ".join(filter(None, place)) or "the top"
        assert place in written, f"docs/study-file.md has nothing about {where}"
        assert written[place].keys() == fields.keys(), f"docs/study-file.md, {where}: keys differ from the code's"
        for key, field in fields.items():
            if field.is_required():
                assert written[place][key] == "required", f"docs/study-file.md, {where}: {key} is required"
            elif field.default is not None:
                assert written[place][key] == f"`{_toml_value(field.default)}`", f"docs/study-file.md, {where}: {key}"


ENTRIES = ("strategies.md", "personalised.md", "clustered.md", "compression.md")


def entry_of(name: str) -> str:
    """The section under a heading that names the component, up to the next heading."""
    text = "\n".join((ROOT / "docs" / page).read_text("utf-8") for page in ENTRIES)
    found = [part for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE) if f"`{name}`" in part.split("\n", 1)[0]]
    assert len(found) == 1, f"{name} has {len(found)} entries in {', '.join(ENTRIES)}"
    return found[0]


@pytest.mark.parametrize(
    "name",
    sorted({*registered_components("strategies"), *registered_components("codecs")} - {"local_only", "centralized"}),
)
def test_every_algorithm_and_codec_says_when_to_use_it_and_when_not(name: str) -> None:
    entry = entry_of(name)
    assert re.search(r"\*\*Use it\*\*|\*\*Use\*\*", entry)
    assert re.search(r"\*\*Not\b", entry)


@pytest.mark.parametrize("name", sorted(registered_components("aggregation_rules")))
def test_every_rule_of_combining_has_its_row(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", (ROOT / "docs" / "strategies.md").read_text("utf-8"), re.MULTILINE)


def test_a_strategy_from_outside_takes_less_than_forty_lines() -> None:
    (block,) = [b for b in blocks(ROOT / "docs" / "add-a-strategy.md") if b.file == "cautious.py"]
    assert len(block.text.splitlines()) < 40
