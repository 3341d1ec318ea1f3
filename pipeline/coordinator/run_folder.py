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
from pipeline.core.files import load_round_records, raise_no_space, write_atomically
from pipeline.core.parameters import ModelState
from pipeline.core.tensor_io import save_tensors
from pipeline.study.offer import RUN_NAME_PATTERN
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study, to_toml

RUN_FORMAT = 2  # of run.json and all that a run writes; format 1 had no run.json


@dataclass
class RunFolder:
    path: Path
    checkpoint_seconds: float = 0.0  # of the last checkpoint

    @classmethod
    def create(cls, path: Path, study: Study) -> RunFolder:
        """Reuses a folder without a checkpoint, e.g. after a start that failed because the data were missing."""
        existing_names = [p.name for p in path.iterdir() if not p.name.startswith(".")] if path.exists() else []
        if (
            not set(existing_names)
            <= {"run.json", "homes.json", "study.toml", "sites.json", "rounds.jsonl", "checkpoint", "cells"}
            or cls(path).has_checkpoint
        ):
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

    def append_round(self, record: Mapping[str, Any]) -> None:
        file = self.path / "rounds.jsonl"
        with raise_no_space(file), file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def load_rounds(self) -> list[dict[str, Any]]:
        return load_round_records(self.path / "rounds.jsonl")

    def truncate_rounds(self, round: int) -> None:
        """Removes the records after `round`: the checkpoint is authoritative."""
        lines = [json.dumps(record) + "\n" for record in self.load_rounds() if record["round"] <= round]
        write_atomically(self.path / "rounds.jsonl", "".join(lines).encode())

    def write_checkpoint(self, round: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        started_at = time.perf_counter()
        save_checkpoint(self.path / "checkpoint", round, header, tensors)
        self.checkpoint_seconds = time.perf_counter() - started_at

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return load_checkpoint(self.path / "checkpoint")

    def next_attempt(self, round: int) -> int:
        """The next attempt number of a round, written to disk before any request, so that every execution has its own."""
        file = self.path / "checkpoint" / "attempt.json"
        last_record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        attempt = last_record["attempt"] + 1 if last_record.get("round") == round else 1
        write_atomically(file, json.dumps({"round": round, "attempt": attempt}).encode())
        return attempt

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
        return (self.path / "results.json").is_file()

    def save_model(self, name: str, model: ModelState, header: Mapping[str, Any]) -> Path:
        path = self.path / "models" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, header, {"weights": model.weights, "stats": model.norm_stats})
        return path


def find_run_folder(home: Path, run: str) -> Path:
    """The folder of an offered run. `run` comes from a job, so it must not name any other path."""
    folder = home / "runs" / run
    if not re.fullmatch(RUN_NAME_PATTERN, run) or not (folder / "offer.json").is_file():
        raise RunFolderError(f"there is no run {run!r} in {home}; offer it first")
    return folder
