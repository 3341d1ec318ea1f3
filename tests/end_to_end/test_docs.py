"""Runs the commands of the documentation. README.md and docs/*.md hold blocks that these tests read:

```console          lines with `$ ` are run in order, in one temporary folder for each page, and must succeed
                    (`> ` continues a command); other lines must occur in the block's output
```console fails    its commands must fail
```console soon     tried again, for at most two minutes, until it succeeds with the output on the page
```console slow     only with `make test-all`
```console fashion  needs Fashion-MNIST; without it the page is skipped
```console cells    needs real cells, in HEMOFED_DATA or ../shared/data; without them the page is skipped
```toml study       becomes study.toml, and must be a valid study
```python file=a.py becomes a.py (any language); a pyproject.toml with entry points counts as installed
```sh               is not run: its make targets and extras must exist

In console blocks variables that a command sets hold for the commands after it. A command that ends in `&` runs in the
background until the end of the page, is then terminated, must exit with 0 and leave no process. 8443 becomes a free port.
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
from pipeline.study.schema import Study, StudySection
from pipeline.study.toml_file import _toml_value, load_study
from tests.end_to_end.docs_shell import DocsShell, open_docs_shell
from tests.support.markers import FASHION_MNIST, REAL_CELLS
from tools.write_cli_reference import render_reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_LINKS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PACKAGE_BY_KEY = {
    "data": "data",
    "partition": "partitions",
    "feature_skew": "feature_skews",
    "normalization": "normalizations",
    "model": "models",
    "strategy": "strategies",
    "compression": "codecs",
    "aggregation": "aggregation_rules",
}
COMMAND_SECONDS = 300  # timeout of a command; commands of slow blocks have none
SOON_SECONDS = 120.0
PORT = "8443"  # on the pages
HEMOFED_COMMAND = re.compile(r"(?:^|\$\(|\bdo )(hemofed [^|;&<>()]*)", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block becomes."""
        named = [mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")]
        return named[0] if named else "study.toml" if self.language == "toml" and "study" in self.marks else None

    @property
    def commands(self) -> list[str]:
        commands: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                commands.append(line[2:])
            elif line == ">" or line.startswith("> "):
                commands[-1] += f"\n{line[2:]}"
        return commands

    @property
    def expected_output(self) -> list[str]:
        """Lines that must occur in the output."""
        return [
            line
            for line in self.text.splitlines()
            if line.strip() and line != ">" and not line.startswith(("$ ", "> ")) and line.strip() != "..."
        ]


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m[1], tuple(m[2].split()), m[3]) for m in FENCE.finditer(text)
    ]


def read_prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with_commands(slow: bool) -> list[Path]:
    """Pages with a console block that is slow, or is not."""
    return [
        page
        for page in PAGES
        if any(b.language == "console" and ("slow" in b.marks) == slow for b in read_blocks(page))
    ]


@pytest.mark.parametrize("page", pages_with_commands(slow=False), ids=page_name)
def test_page_commands_run(page: Path, tmp_path: Path, hemofed_command: Path) -> None:
    run_blocks(tmp_path, hemofed_command, [b for b in read_blocks(page) if "slow" not in b.marks])


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands(slow=True), ids=page_name)
def test_slow_page_commands_run(page: Path, tmp_path: Path, hemofed_command: Path) -> None:
    run_blocks(tmp_path, hemofed_command, read_blocks(page))


def run_blocks(folder: Path, hemofed_command: Path, blocks: list[Block]) -> None:
    if any("fashion" in b.marks for b in blocks) and not FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist")
    if any("cells" in b.marks for b in blocks) and REAL_CELLS is None:
        pytest.skip("chula_rbc12.npz is neither in HEMOFED_DATA nor in ../shared/data: name its folder there")
    with open_docs_shell(folder, hemofed_command) as shell:
        for block in blocks:
            if block.file:
                write_file(block, folder)
            if block.language == "console":
                assert_block_runs(block, shell)


def write_file(block: Block, folder: Path) -> None:
    assert block.file
    file = folder / block.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, "utf-8")
    if file.name == "pyproject.toml":
        write_entry_points(tomllib.loads(block.text)["project"], folder)


def write_entry_points(project: dict[str, Any], folder: Path) -> None:
    """Writes the files by which an installed package's entry points are found."""
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


def assert_block_runs(block: Block, shell: DocsShell) -> None:
    if "cells" in block.marks:
        shell.env["HEMOFED_DATA"] = str(REAL_CELLS)
    deadline = time.monotonic() + SOON_SECONDS
    while (problem := find_problem(block, shell)) and "soon" in block.marks and time.monotonic() < deadline:
        assert not (ended := shell.ended_commands()), f"{problem}\n{shell.read_output(ended[0])} has ended meanwhile"
        time.sleep(0.5)
    assert not problem, problem


def find_problem(block: Block, shell: DocsShell) -> str | None:
    """Runs the block's commands, and describes the first difference from the page."""
    output = ""
    for command in (c.replace(PORT, shell.port) for c in block.commands):
        if command.endswith(" &"):
            shell.start(command.removesuffix(" &"))
            continue
        code, command_output = shell.run(command, None if "slow" in block.marks else COMMAND_SECONDS)
        if (code != 0) != ("fails" in block.marks) or "Traceback" in command_output:
            return f"{block.location}: $ {command}\n{command_output}"
        output += command_output
    missing = [line for line in block.expected_output if squeeze(line.replace(PORT, shell.port)) not in squeeze(output)]
    return f"{block.location}: {missing[0]!r} is not in\n{output}" if missing else None


def squeeze(text: str) -> str:
    """The words only, without line breaks and lines of tables."""
    return " ".join(re.sub(r"[│┃━─┏┓┗┛┡┩└┘┌┐├┤╇┳┴┬╭╮╰╯]", " ", text).split())


def test_studies_on_pages_are_valid(tmp_path: Path) -> None:
    # a study that needs the page's own plugin is valid only where its commands run
    pages = [page for page in PAGES if not any(b.file == "pyproject.toml" for b in read_blocks(page))]
    for block in (b for page in pages for b in read_blocks(page) if b.file == "study.toml"):
        file = tmp_path / "study.toml"
        file.write_text(block.text, "utf-8")
        load_study(file)


def hemofed_commands() -> Iterator[tuple[str, str]]:
    """(location, command) of every `hemofed ...` in blocks and in the text."""
    for page in PAGES_WITH_LINKS:
        for block in read_blocks(page):
            if block.language in ("console", "sh"):
                lines = block.commands if block.language == "console" else block.text.splitlines()
                yield from ((block.location, part) for line in lines for part in HEMOFED_COMMAND.findall(line))
        quoted = re.findall(r"`(hemofed[^`\n]*)`", read_prose(page))
        yield from ((page_name(page), part) for code in quoted for part in HEMOFED_COMMAND.findall(code))


def test_every_hemofed_command_exists() -> None:
    root: Any = typer.main.get_command(app)
    for location, line in hemofed_commands():
        command = root
        for word in shlex.split(line, comments=True)[1:]:
            if word.startswith("-"):
                options = {o for p in command.params for o in p.opts} | {"--help"}
                assert word.partition("=")[0] in options, f"{location}: {line}: no option {word}"
            elif hasattr(command, "commands"):
                assert word in command.commands, f"{location}: {line}: no command {word}"
                command = command.commands[word]


def test_make_targets_and_extras_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    for page in PAGES_WITH_LINKS:
        text = page.read_text("utf-8")
        named_targets = [
            t for b in read_blocks(page) if b.language == "sh" for t in re.findall(r"^make ([a-z-]+)", b.text, re.M)
        ]
        named_targets += re.findall(r"`make ([a-z-]+)`", text)
        assert set(named_targets) <= targets, f"{page_name(page)}: no make target {set(named_targets) - targets}"
        named_extras = {
            e.strip() for group in re.findall(r"(?:hemofed|\.)\[([a-z, -]+)\]'", text) for e in group.split(",")
        }
        assert named_extras <= extras, f"{page_name(page)}: no extra {named_extras - extras}"


def test_links_and_anchors_exist() -> None:
    for page in PAGES_WITH_LINKS:
        for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page_name(page)}: {target} does not exist"
            assert not anchor or anchor in heading_anchors(file), f"{page_name(page)}: {target}: no such heading"


def heading_anchors(page: Path) -> set[str]:
    """As GitHub makes them: in lower case, without punctuation, with hyphens for blanks."""
    titles = re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_index_links_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, f"docs/index.md does not link to {page.name}"


def test_command_reference_is_current() -> None:
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert page == render_reference(), "run .venv/bin/python tools/write_cli_reference.py"


# docs/study-file.md: `## [section]`, below it `### component`, and rows "| `key` | type | default | meaning |"


def read_documented_keys() -> dict[tuple[str, str], dict[str, str]]:
    """(section, component) -> key -> default as printed; "" for no section or no component."""
    documented: dict[tuple[str, str], dict[str, str]] = {("", ""): {}}
    table = ("", "")
    for line in (ROOT / "docs" / "study-file.md").read_text("utf-8").splitlines():
        if title := re.match(r"## (?:`\[(\w+)\]`)?", line):
            table = (title[1] or "", "")
        elif title := re.match(r"### `(\w+)`", line):
            table = (table[0], title[1])
        elif row := re.match(r"\| `(\w+)` \|[^|]*\| ([^|]*?) \|", line):
            documented.setdefault(table, {})[row[1]] = row[2]
        documented.setdefault(table, {})
    return documented


def list_study_keys() -> Iterator[tuple[tuple[str, str], dict[str, FieldInfo]]]:
    """The same from the code: (section, component), key -> field."""
    top_level: dict[str, FieldInfo] = {}
    for key, field in Study.model_fields.items():
        annotation = field.annotation
        if key in PACKAGE_BY_KEY:
            components = registered_components(PACKAGE_BY_KEY[key])
            yield from (((key, name), _component_fields(cls)) for name, cls in components.items())
        if annotation is PrivacyConfig:  # each part is a table
            yield (key, ""), {}
            for name, part in PrivacyConfig.model_fields.items():
                (cls,) = (c for c in get_args(part.annotation) if c is not type(None))
                yield (key, name), dict(cls.model_fields)
        elif isinstance(annotation, type) and issubclass(annotation, StudySection):  # [compression] also has components
            yield (key, ""), dict(annotation.model_fields)
        elif key not in PACKAGE_BY_KEY:
            top_level[key] = field
    yield ("", ""), top_level


def _component_fields(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    return {key: field for key, field in cls.model_fields.items() if key != "name"}


def test_study_file_reference_is_complete_and_correct() -> None:
    assert set(PACKAGE_BY_KEY.values()) == set(COMPONENT_PACKAGES)
    documented = read_documented_keys()
    for table, fields in list_study_keys():
        name = " ".join(filter(None, table)) or "the top level"
        assert table in documented, f"docs/study-file.md does not document {name}"
        assert documented[table].keys() == fields.keys(), f"docs/study-file.md, {name}: keys differ from the code's"
        for key, field in fields.items():
            if field.is_required():
                assert documented[table][key] == "required", f"docs/study-file.md, {name}: {key} is required"
            elif field.default is not None:
                default = f"`{_toml_value(field.default)}`"
                assert documented[table][key] == default, f"docs/study-file.md, {name}: {key}"


PAGES_WITH_ENTRIES = ("strategies.md", "personalised.md", "clustered.md", "compression.md")


def read_entry(name: str) -> str:
    """The section under a heading that names the component, up to the next heading."""
    text = "\n".join((ROOT / "docs" / page).read_text("utf-8") for page in PAGES_WITH_ENTRIES)
    found = [part for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE) if f"`{name}`" in part.split("\n", 1)[0]]
    assert len(found) == 1, (
        f"{name} has {len(found)} sections in {', '.join(PAGES_WITH_ENTRIES)}; it needs one, whose heading holds `{name}`"
    )
    return found[0]


@pytest.mark.parametrize(
    "name",
    sorted({*registered_components("strategies"), *registered_components("codecs")} - {"local_only", "centralized"}),
)
def test_strategy_and_codec_entries_say_when_to_use_them(name: str) -> None:
    entry = read_entry(name)
    assert re.search(r"\*\*Use it\*\*|\*\*Use\*\*", entry), (
        f"the section of {name} has no **Use it**: when does it help?"
    )
    assert re.search(r"\*\*Not\b", entry), f"the section of {name} has no **Not**: when does it not help?"


def test_strategies_and_codecs_are_described_as_in_the_code() -> None:
    table = (ROOT / "docs" / "strategies.md").read_text("utf-8")
    for name, cls in registered_components("strategies").items():
        assert re.search(rf"^\| \[`{name}`\]\([^)]*\) \| {re.escape(cls.description)} \|", table, re.MULTILINE), name
    for name, cls in registered_components("codecs").items():
        sentence = f"{cls.description[0].upper()}{cls.description[1:]}."
        assert sentence in read_entry(name).splitlines(), f"docs/compression.md, {name}: {sentence}"


@pytest.mark.parametrize("name", sorted(registered_components("aggregation_rules")))
def test_every_aggregation_rule_is_documented(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", (ROOT / "docs" / "strategies.md").read_text("utf-8"), re.MULTILINE)


def test_plugin_strategy_takes_less_than_forty_lines() -> None:
    (block,) = [b for b in read_blocks(ROOT / "docs" / "add-a-strategy.md") if b.file == "cautious.py"]
    assert len(block.text.splitlines()) < 40
