"""The layout and the naming rules of CONTRIBUTING.md: what a person sees in the file listing and in the class list."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("pipeline", "sites", "models", "privacy", "deploy")
PACKAGES = ("hemofed", *ROOMS)  # hemofed is no room: a small public API of modules
MAX_MODULES = 16  # in one folder
FORMATTER_OFF = "# fmt:" + " skip"
MAX_POSITIONAL = 6  # arguments of one call
ONE_FILE_EACH = {"pipeline/strategies", "pipeline/reproductions"}  # one algorithm, one published table a file
# rows of data, aligned by hand: file -> how many; everywhere else the formatter decides
DATA_TABLES = {
    "deploy/bundle/bundle.py": 1,
    "deploy/export/model_card.py": 1,
    "deploy/slide/dicom_sources.py": 1,
    "pipeline/core/extras.py": 1,
    "pipeline/flare/provisioning.py": 2,
    "pipeline/reports/document/figure_style.py": 1,
    "pipeline/service/web/routes_downloads.py": 1,
    "privacy/ledger/records.py": 1,
    "sites/data/fashion_mnist.py": 1,
    "sites/data/smear/records.py": 1,
    "sites/data_check/phi_dicom.py": 1,
    "sites/population/feature_skew.py": 1,
    "sites/worker/flare_hardening.py": 1,
}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def classes(room: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for file in modules(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield relative(file), node


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_holds_sub_packages_only(room):
    assert [file.name for file in (ROOT / room).glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("room", [*PACKAGES, "tests"])
def test_folder_size(room):
    counts = Counter(relative(file.parent) for file in modules(room) if file.name != "__init__.py")
    too_full = {folder: n for folder, n in counts.items() if n > MAX_MODULES and folder not in ONE_FILE_EACH}
    assert not too_full


@pytest.mark.parametrize("room", PACKAGES)
def test_every_package_says_what_it_is_for(room):
    for file in (ROOT / room).rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        assert text, f"{relative(file)} has no docstring"
        assert len(text.splitlines()) <= 3, f"{relative(file)}: one to three lines"


@pytest.mark.parametrize("room", PACKAGES)
def test_class_names_are_unique_in_a_room(room):
    where = defaultdict(list)
    for file, node in classes(room):
        where[node.name].append(file)
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_class_names_hardly_repeat_between_rooms():
    counts = Counter(node.name for room in ROOMS for _, node in classes(room))
    assert len([name for name, n in counts.items() if n > 1]) <= 10


def test_class_names_have_two_words():
    names = {node.name.lstrip("_") for room in ROOMS for _, node in classes(room)}
    single = {name for name in names if len(re.findall(r"[A-Z][a-z0-9]*", re.sub(r"([A-Z])(?=[A-Z])", "", name))) < 2}
    assert len(single) < 0.25 * len(names), sorted(single)


def test_exceptions_end_in_error():
    bases = {
        node.name: [ast.unparse(base).split(".")[-1] for base in node.bases] for r in PACKAGES for _, node in classes(r)
    }

    def is_exception(name: str) -> bool:
        known = name.endswith(("Error", "Exception", "Warning"))
        return known if name not in bases else any(map(is_exception, bases[name]))

    assert not [name for name in bases if is_exception(name) and not name.endswith("Error")]


def test_the_formatter_decides_except_in_tables_of_data():
    counts = {
        relative(f): f.read_text(encoding="utf-8").count(FORMATTER_OFF) for room in PACKAGES for f in modules(room)
    }
    assert {file: n for file, n in counts.items() if n} == DATA_TABLES


@pytest.mark.parametrize("room", PACKAGES)
def test_calls_name_their_arguments(room):
    long = []
    for file in modules(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                is_variadic = any(isinstance(argument, ast.Starred) for argument in node.args)
                long += [] if is_variadic else [f"{relative(file)}:{node.lineno}"]
    assert not long


@pytest.mark.parametrize("room", PACKAGES)
def test_private_modules_stay_inside_their_package(room):
    for file in modules(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                hidden = next(
                    (i for i, part in enumerate(parts) if part.startswith("_") and part != "__future__"), None
                )
                if hidden is not None:
                    assert relative(file).startswith("/".join(parts[:hidden]) + "/"), f"{relative(file)}: {node.module}"


TERMS = (
    "round",
    "client",
    "site",
    "global model",
    "aggregation rule",
    "baseline",
    "secure aggregation",
    "noise multiplier",
    "max_grad_norm",
    "sampling rate",
    "privacy unit",
    "operating point",
    "calibration",
    "out-of-distribution guard",
)


def test_the_glossary_names_a_module_for_each_term():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and "`" in line
    ]
    module_by_term = {row[0]: re.findall(r"`([a-z_/]+(?:\.py)?)`", row[-1]) for row in rows}
    assert not set(TERMS) - set(module_by_term)
    assert not [
        (term, path)
        for term, paths in module_by_term.items()
        for path in paths
        if "/" in path and not (ROOT / path).exists()
    ]
    assert not [term for term, paths in module_by_term.items() if not paths]
