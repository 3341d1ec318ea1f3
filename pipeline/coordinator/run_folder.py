"""A run on disk: run.json, study.toml, sites.json, rounds.jsonl, checkpoint/, results.json, models/, cells/, plots/, report.html."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.coordinator.checkpoint import load_checkpoint, save_checkpoint
from pipeline.core.errors import RunFolderError
from pipeline.core.files import raise_no_space, write_atomically
from pipeline.core.parameters import ModelState
from pipeline.core.tensor_io import save_tensors
from pipeline.records.attempt_record import next_attempt
from pipeline.records.round_record import ROUNDS_FILE, RoundRecord, load_round_records, write_round_records
from pipeline.records.run_results import RunResults
from pipeline.records.site_homes import SiteHomesRecord
from pipeline.records.sites_record import SitesRecord
from pipeline.study.offer import OFFER_FILE, RUN_NAME_PATTERN, StudyOffer, read_offer
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study, to_toml

RUN_FORMAT = 3  # of run.json and all that a run writes; format 1 had no run.json
# what a start that failed may have left, e.g. because the data were missing
FAILED_START_NAMES = frozenset(
    {"run.json", "study.toml", "checkpoint", "cells", ROUNDS_FILE, SiteHomesRecord.FILE_NAME, SitesRecord.FILE_NAME}
)


@dataclass
class RunFolder:
    path: Path
    checkpoint_seconds: float = 0.0  # of the last checkpoint

    @classmethod
    def create(cls, path: Path, study: Study) -> RunFolder:
        """Reuses a folder without a checkpoint, after a start that failed."""
        existing_names = [p.name for p in path.iterdir() if not p.name.startswith(".")] if path.exists() else []
        if not FAILED_START_NAMES.issuperset(existing_names) or cls(path).has_checkpoint:
            raise RunFolderError(
                f"{path} is not empty; choose another --out, or continue it with `hemofed run --resume {path}`"
            )
        folder = cls(path)
        folder.write_json("run.json", {"format": RUN_FORMAT})
        write_atomically(path / "study.toml", to_toml(study.to_dict()).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "study.toml").is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no study.toml")
        folder = cls(path)
        run_format = folder.read_json("run.json").get("format") if (path / "run.json").is_file() else 1
        if run_format != RUN_FORMAT:
            raise RunFolderError(
                f"{path} has run format {run_format}, but this version of hemofed reads format {RUN_FORMAT}; run the study again"
            )
        return folder

    def load_study(self) -> Study:
        file = self.path / "study.toml"
        return parse_study(file.read_text(encoding="utf-8"), str(file), {})

    def append_round(self, record: RoundRecord) -> None:
        file = self.path / ROUNDS_FILE
        with raise_no_space(file), file.open("a", encoding="utf-8") as out:
            out.write(record.to_line())
            out.flush()
            os.fsync(out.fileno())

    def load_rounds(self) -> list[RoundRecord]:
        return load_round_records(self.path)

    def truncate_rounds(self, round: int) -> None:
        """Removes the records after `round`: the checkpoint is authoritative."""
        write_round_records(self.path, [record for record in self.load_rounds() if record.round <= round])

    def write_checkpoint(self, round: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        started_at = time.perf_counter()
        save_checkpoint(self.path / "checkpoint", round, header, tensors)
        self.checkpoint_seconds = time.perf_counter() - started_at

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return load_checkpoint(self.path / "checkpoint")

    def next_attempt(self, round: int) -> int:
        return next_attempt(self.path / "checkpoint", round)

    @property
    def has_checkpoint(self) -> bool:
        return any((self.path / "checkpoint").glob("round-*.safetensors"))

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path} has no {name}; finish it with `hemofed run --resume {self.path}`"
            ) from error
        except ValueError as error:
            raise RunFolderError(f"{self.path / name} is damaged ({error})") from error

    @property
    def is_finished(self) -> bool:
        return (self.path / RunResults.FILE_NAME).is_file()

    def write_offer(self, offer: StudyOffer) -> None:
        write_atomically(self.path / OFFER_FILE, offer.model_dump_json(indent=1).encode())

    def load_offer(self) -> StudyOffer:
        return read_offer((self.path / OFFER_FILE).read_bytes())

    def save_model(self, name: str, model: ModelState, header: Mapping[str, Any]) -> Path:
        path = self.path / "models" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, header, {"weights": model.weights, "stats": model.norm_stats})
        return path


def find_run_folder(home: Path, run: str) -> Path:
    """The folder of an offered run. `run` comes from a job, so it must not name any other path."""
    folder = home / "runs" / run
    if not re.fullmatch(RUN_NAME_PATTERN, run) or not (folder / OFFER_FILE).is_file():
        raise RunFolderError(f"there is no run {run!r} in {home}; offer it first")
    return folder
