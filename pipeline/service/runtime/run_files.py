"""The files of a run folder that the service shows: rounds, results, models. A file is read again only after it changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.errors import MessageError, RunFolderError
from pipeline.records.base import FileRecord
from pipeline.records.live_status import LiveStatus
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.records.round_record import ROUNDS_FILE, RoundRecord, load_round_records
from pipeline.records.run_results import RunResults
from pipeline.study.offer import OFFER_FILE, StudyOffer, read_offer

# glob pattern -> kind. Checkpoints, the models of single sites and images of cells are never offered for download
DOWNLOADABLE_FILES = {
    "models/global.safetensors": "model",
    "models/cluster/*.safetensors": "model",
    "report.html": "report",
    "audit/*.html": "report",
    "audit/*.pdf": "report",
    RunResults.FILE_NAME: "table",
    ROUNDS_FILE: "table",
    PrivacyRecord.FILE_NAME: "table",
    "study.toml": "table",
    "*.csv": "table",
    "plots/*.png": "plot",
    "plots/*.svg": "plot",
}
MODELS_FOLDER = "models"
RecordType = TypeVar("RecordType", bound=FileRecord)
Content = TypeVar("Content")
MODEL_SUFFIX = ".safetensors"


@dataclass
class RunFiles:
    """Cached access to the folders of all runs below `root`."""

    root: Path
    _cache: dict[Path, tuple[tuple[int, int], Any]] = field(default_factory=dict)

    def load_rounds(self, run: str) -> list[RoundRecord]:
        return self._load_cached(self.root / run / ROUNDS_FILE, _load_rounds) or []

    def load_record(self, run: str, record_type: type[RecordType]) -> RecordType | None:
        """None if the file does not exist or is damaged."""
        file = self.root / run / record_type.FILE_NAME
        return self._load_cached(file, lambda file: record_type.read_if_valid(file.parent))

    def load_results(self, run: str) -> RunResults | None:
        return self.load_record(run, RunResults)

    def load_live_status(self, run: str) -> LiveStatus | None:
        return self.load_record(run, LiveStatus)

    def load_offer(self, run: str) -> dict[str, Any] | None:
        """As the sites receive it."""
        offer = self._load_cached(self.root / run / OFFER_FILE, _load_offer)
        return offer.model_dump(mode="json") if offer else None

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
        cluster_by_site = next((r.clusters for r in reversed(self.load_rounds(run)) if r.clusters), {})
        allowed = ["global"] + ([f"cluster/{cluster_by_site[site]}"] if site in cluster_by_site else [])
        existing = self.list_files(run)
        return [name for name in allowed if f"{MODELS_FOLDER}/{name}{MODEL_SUFFIX}" in existing]

    def model_path(self, run: str, name: str) -> Path:
        return self.root / run / MODELS_FOLDER / f"{name}{MODEL_SUFFIX}"

    def _load_cached(self, file: Path, load: Callable[[Path], Content]) -> Content | None:
        try:
            file_stat = file.stat()
        except OSError:
            return None
        stamp = (file_stat.st_mtime_ns, file_stat.st_size)
        cached = self._cache.get(file)
        if cached is None or cached[0] != stamp:
            cached = (stamp, load(file))
            self._cache[file] = cached
        content: Content = cached[1]
        return content


def _load_rounds(file: Path) -> list[RoundRecord]:
    try:
        return load_round_records(file.parent)
    except (RunFolderError, OSError):
        return []


def _load_offer(file: Path) -> StudyOffer | None:
    try:
        return read_offer(file.read_bytes())
    except (MessageError, OSError):
        return None


def _is_inside(file: Path, folder: Path) -> bool:
    """False for a symbolic link that points outside the folder."""
    return file.resolve().is_relative_to(folder.resolve())
