"""A run on disk: study.toml, sites.json, rounds.jsonl, checkpoint/, results.json, models/, cells/, plots/, report.html."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.coordinator.checkpoint import load_checkpoint, save_checkpoint, save_tensors
from pipeline.core.errors import BadRun
from pipeline.core.files import full_disk_is_named, read_rounds, write_atomically
from pipeline.core.parameters import Snapshot
from pipeline.study.schema import Study
from pipeline.study.toml_file import read_study, to_toml


@dataclass
class RunFolder:
    path: Path
    save_seconds: float = 0.0  # of the last checkpoint

    @classmethod
    def create(cls, path: Path, study: Study) -> RunFolder:
        """A folder in which nothing was run yet, e.g. because the data were missing, may be taken over."""
        taken = [p.name for p in path.iterdir() if not p.name.startswith(".")] if path.exists() else []
        if not set(taken) <= {"study.toml", "sites.json", "rounds.jsonl", "checkpoint", "cells"} or cls(path).begun:
            raise BadRun(
                f"{path} is not empty; choose another --out, or continue it with `hemofed run --resume {path}`"
            )
        write_atomically(path / "study.toml", to_toml(study.dump()).encode())
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "study.toml").is_file():
            raise BadRun(f"{path} is no run folder: it has no study.toml")
        return cls(path)

    def study(self) -> Study:
        file = self.path / "study.toml"
        return read_study(file.read_text(encoding="utf-8"), str(file), {})

    def append(self, record: Mapping[str, Any]) -> None:
        file = self.path / "rounds.jsonl"
        with full_disk_is_named(file), file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def rounds(self) -> list[dict[str, Any]]:
        return read_rounds(self.path / "rounds.jsonl")

    def cut_back(self, round: int) -> None:
        """Forgets what came after `round`: the checkpoint decides what happened."""
        kept = [json.dumps(record) + "\n" for record in self.rounds() if record["round"] <= round]
        write_atomically(self.path / "rounds.jsonl", "".join(kept).encode())

    def checkpoint(self, round: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        began = time.perf_counter()
        save_checkpoint(self.path / "checkpoint", round, header, tensors)
        self.save_seconds = time.perf_counter() - began

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return load_checkpoint(self.path / "checkpoint")

    def next_attempt(self, round: int) -> int:
        """Numbers the executions of one turn; on disk before anybody is asked, so that no two share an identity."""
        file = self.path / "checkpoint" / "attempt.json"
        last = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        attempt = last["attempt"] + 1 if last.get("round") == round else 1
        write_atomically(file, json.dumps({"round": round, "attempt": attempt}).encode())
        return attempt

    @property
    def begun(self) -> bool:
        return any((self.path / "checkpoint").glob("round-*.safetensors"))

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BadRun(f"{self.path} has no {name}; finish it with `hemofed run --resume {self.path}`") from error
        except ValueError as error:
            raise BadRun(f"{self.path / name} is damaged ({error})") from error

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").is_file()

    def save_model(self, name: str, model: Snapshot, header: Mapping[str, Any]) -> Path:
        path = self.path / "models" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, header, {"weights": model.weights, "stats": model.stats})
        return path
