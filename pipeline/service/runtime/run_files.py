"""The files of a run folder that the service shows: rounds, results, models. A file is read again only after it changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunFolderError
from pipeline.core.files import load_round_records

# glob pattern -> kind. Checkpoints, the models of single sites and images of cells are never offered for download
DOWNLOADABLE_FILES = {
    "models/global.safetensors": "model",
    "models/cluster/*.safetensors": "model",
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
MODELS_FOLDER = "models"
MODEL_SUFFIX = ".safetensors"


@dataclass
class RunFiles:
    """Cached access to the folders of all runs below `root`."""

    root: Path
    _cache: dict[Path, tuple[tuple[int, int], Any]] = field(default_factory=dict)

    def load_rounds(self, run: str) -> list[dict[str, Any]]:
        rounds: list[dict[str, Any]] = self._load_cached(self.root / run / "rounds.jsonl", _load_rounds) or []
        return rounds

    def load_json(self, run: str, name: str) -> Any:
        """None if the file does not exist or is not complete JSON yet."""
        return self._load_cached(self.root / run / name, _load_json)

    def read_text(self, run: str, name: str) -> str:
        file = self.root / run / name
        return file.read_text("utf-8") if file.is_file() else ""

    def list_files(self, run: str) -> dict[str, str]:
        """Path within the run -> kind. Only listed files are ever sent, so no request can reach outside the folder."""
        folder = self.root / run
        kind_by_path = {
            file.relative_to(folder).as_posix(): kind
            for pattern, kind in DOWNLOADABLE_FILES.items()
            for file in sorted(folder.glob(pattern))
            if file.is_file() and _is_inside(file, folder)
        }
        return dict(sorted(kind_by_path.items()))

    def models_for_site(self, run: str, site: str) -> list[str]:
        """The models that this site may download: the global model, and the model of its own cluster."""
        cluster_by_site: dict[str, str] = next(
            (r["clusters"] for r in reversed(self.load_rounds(run)) if r.get("clusters")), {}
        )
        allowed = ["global"] + ([f"cluster/{cluster_by_site[site]}"] if site in cluster_by_site else [])
        existing = self.list_files(run)
        return [name for name in allowed if f"{MODELS_FOLDER}/{name}{MODEL_SUFFIX}" in existing]

    def model_path(self, run: str, name: str) -> Path:
        return self.root / run / MODELS_FOLDER / f"{name}{MODEL_SUFFIX}"

    def _load_cached(self, file: Path, load: Callable[[Path], Any]) -> Any:
        try:
            file_stat = file.stat()
        except OSError:
            return None
        stamp = (file_stat.st_mtime_ns, file_stat.st_size)
        cached = self._cache.get(file)
        if cached is None or cached[0] != stamp:
            cached = (stamp, load(file))
            self._cache[file] = cached
        return cached[1]


def _load_rounds(file: Path) -> list[dict[str, Any]]:
    try:
        rounds: list[dict[str, Any]] = _replace_nan(load_round_records(file))
        return rounds
    except (RunFolderError, OSError):
        return []


def _load_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"), parse_constant=lambda name: None)
    except (OSError, ValueError):
        return None


def _replace_nan(value: Any) -> Any:
    """NaN and infinity, such as a diverged loss, become null: browsers reject them in JSON."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def _is_inside(file: Path, folder: Path) -> bool:
    """False for a symbolic link that points outside the folder."""
    return file.resolve().is_relative_to(folder.resolve())
