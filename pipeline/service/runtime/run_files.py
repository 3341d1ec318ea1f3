"""What a run's folder shows to others: rounds, results, models. Files are read again only when they have changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import BadRun
from pipeline.core.files import read_rounds

# what may be downloaded, and as what. Never checkpoints, single sites' models or pictures of cells
SHOWN = {
    "models/global.safetensors": "model",
    "models/group/*.safetensors": "model",
    "report.html": "report",
    "audit/*.html": "report",
    "audit/*.pdf": "report",
    "results.json": "table",
    "rounds.jsonl": "table",
    "privacy.json": "table",
    "study.toml": "table",
    "*.csv": "table",
    "plots/*.png": "plot",
    "plots/*.svg": "plot",
}
MODELS = "models"
ENDING = ".safetensors"


@dataclass
class Folders:
    """Of all runs, below one folder."""

    root: Path
    _kept: dict[Path, tuple[tuple[int, int], Any]] = field(default_factory=dict)

    def rounds(self, run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cached(self.root / run / "rounds.jsonl", _rounds) or []
        return found

    def json(self, run: str, name: str) -> Any:
        """None if the run has no such file, or one that cannot be read yet."""
        return self._cached(self.root / run / name, _json)

    def text(self, run: str, name: str) -> str:
        file = self.root / run / name
        return file.read_text("utf-8") if file.is_file() else ""

    def files(self, run: str) -> dict[str, str]:
        """Path within the run -> kind. Only what stands here is ever sent, so no path leads out of the folder."""
        folder = self.root / run
        found = {
            file.relative_to(folder).as_posix(): kind
            for pattern, kind in SHOWN.items()
            for file in sorted(folder.glob(pattern))
            if file.is_file() and _inside(file, folder)
        }
        return dict(sorted(found.items()))

    def models_of(self, run: str, site: str) -> list[str]:
        """Those that this site may have: the common one, and its own group's."""
        grouped: dict[str, str] = next((r["groups"] for r in reversed(self.rounds(run)) if r.get("groups")), {})
        mine = ["global"] + ([f"group/{grouped[site]}"] if site in grouped else [])
        there = self.files(run)
        return [name for name in mine if f"{MODELS}/{name}{ENDING}" in there]

    def model(self, run: str, name: str) -> Path:
        return self.root / run / MODELS / f"{name}{ENDING}"

    def _cached(self, file: Path, read: Callable[[Path], Any]) -> Any:
        try:
            about = file.stat()
        except OSError:
            return None
        stamp = (about.st_mtime_ns, about.st_size)
        kept = self._kept.get(file)
        if kept is None or kept[0] != stamp:
            kept = (stamp, read(file))
            self._kept[file] = kept
        return kept[1]


def _rounds(file: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = _without_nan(read_rounds(file))
        return found
    except (BadRun, OSError):
        return []


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"), parse_constant=lambda name: None)
    except (OSError, ValueError):
        return None


def _without_nan(value: Any) -> Any:
    """A diverged loss is no JSON for a browser."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def _inside(file: Path, folder: Path) -> bool:
    """A link may lead anywhere."""
    return file.resolve().is_relative_to(folder.resolve())
