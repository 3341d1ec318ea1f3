"""What a reproduction is: packaged studies, our numbers beside the published ones, and claims that hold or do not."""

from __future__ import annotations

import csv
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStudy
from pipeline.study.schema import load_study
from pipeline.study.toml_file import find_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCE = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class Check:
    claim: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class Grid:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Reproduction:
    payload: Mapping[str, Any]  # what --json prints
    notes: Sequence[str]
    grids: Sequence[Grid]
    figures: Sequence[tuple[str, Figure]]  # caption, figure
    checks: Sequence[Check]


@dataclass(frozen=True)
class Run:
    study: str
    path: Path
    results: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]

    def curve(self, split: str, metric: str = "accuracy", where: str = "coordinator") -> list[float]:
        return [r["metrics"][split][where][metric] for r in self.rounds if r["metrics"]]

    def judged_rounds(self) -> list[int]:
        return [r["round"] for r in self.rounds if r["metrics"]]

    def by_site(self, split: str, metric: str) -> dict[int, list[float]]:
        return {
            r["round"]: [m[metric] for m in r["metrics"][split]["sites"].values()] for r in self.rounds if r["metrics"]
        }


@dataclass(frozen=True)
class Context:
    """Runs studies below `out`; a run that is already there is continued or taken as it is."""

    out: Path
    data: Path | None
    quiet: bool

    def run(self, study: str, label: str, **overrides: Any) -> Run:
        """Overrides by dotted key, dots written as two underscores: local__epochs=5."""
        from pipeline.cli.output import Rounds
        from pipeline.runs.simulation import run

        sets = {key.replace("__", "."): value for key, value in overrides.items()}
        loaded = load_study(find_study(study), sets).model_copy(update={"name": label})
        path = self.out / label
        folder = RunFolder.open(path) if (path / "study.toml").is_file() else RunFolder.create(path, loaded)
        if folder.study().hash != loaded.hash:
            raise BadStudy(f"{path} holds another version of this study; choose another --out or remove it")
        with Rounds(label, loaded.rounds, self.quiet or folder.finished) as watch:
            results = run(loaded, folder, self.data, watch)
        return Run(label, path, results, folder.rounds())


def names() -> dict[str, Any]:
    """name -> module, of every file here that reproduces something."""
    package = importlib.import_module("pipeline.reproductions")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {module.NAME: module for module in modules if hasattr(module, "NAME")}


def reference(name: str) -> list[dict[str, str]]:
    with (REFERENCE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
