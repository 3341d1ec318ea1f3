"""A run folder as a report reads it: finished or still running, with whatever parts are there."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core.errors import BadRun
from pipeline.core.files import read_rounds

Json = Mapping[str, Any]
SPLIT_ORDER = ("test", "val", "train")


@dataclass(frozen=True)
class Record:
    folder: Path
    rounds: Sequence[Json]  # by round, one each: a resumed run's later line wins
    data: Json  # sites.json
    results: Json | None  # None while the run goes on
    study: str  # study.toml

    @cached_property
    def settings(self) -> Json:
        try:
            return tomllib.loads(self.study)
        except tomllib.TOMLDecodeError as error:
            raise BadRun(f"{self.folder / 'study.toml'}: {error}; restore the file that the run wrote") from error

    @cached_property
    def name(self) -> str:
        named = (self.results or {}).get("study") or self.settings.get("name") or self.folder.resolve().name
        return str(named)

    def part(self, section: str) -> str | None:
        """What the run used as `strategy` or `model`."""
        chosen = (self.results or {}).get(section) or self.settings.get(section)
        named = chosen.get("name") if isinstance(chosen, Mapping) else chosen
        return str(named) if named else None

    @property
    def sites(self) -> list[str]:
        """In the order of sites.json, then any other that was ever asked."""
        asked = (site for line in self.rounds for site in line.get("asked") or ())
        return list(dict.fromkeys([*(self.data.get("sites") or {}), *asked]))

    @property
    def last_round(self) -> int:
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def seconds(self) -> float | None:
        if self.results and (total := number(self.results.get("seconds"))) is not None:
            return total
        spent = [value for line in self.rounds for value in map(number, (line.get("seconds") or {}).values())]
        return sum(value for value in spent if value is not None) if spent else None

    def traffic(self, way: str) -> int:
        total = ((self.results or {}).get("traffic") or {}).get(way)
        return int(total) if total is not None else sum(bytes_of(line, way) for line in self.rounds)

    def judged(self, split: str, where: str, metric: str) -> list[tuple[int, float]]:
        """(round, value) as the coordinator saw it, or pooled over sites; undefined values are left out."""
        found = ((int(line["round"]), number(judgement(line, split, where).get(metric))) for line in self.rounds)
        return [(turn, value) for turn, value in found if value is not None]

    def judged_by_sites(self, split: str, metric: str) -> dict[int, list[float]]:
        """round -> the sites' values."""
        found = {int(line["round"]): site_values(judgement(line, split, "sites"), metric) for line in self.rounds}
        return {turn: list(values.values()) for turn, values in found.items() if values}

    def best_split(self) -> str:
        """The split that most rounds were judged on; a tie goes to test, then validation."""
        judged = {split: sum(split in (line.get("metrics") or {}) for line in self.rounds) for split in SPLIT_ORDER}
        return max(SPLIT_ORDER, key=lambda split: judged[split])

    def scores(self) -> tuple[str, Json]:
        """(split, {"coordinator", "pooled", "sites"}): the final test, or the last round judged so far."""
        if self.results:
            return "test", self.results.get("test") or {}
        split = self.best_split()
        judged = [found for line in self.rounds if (found := (line.get("metrics") or {}).get(split))]
        return split, judged[-1] if judged else {}

    @cached_property
    def personal(self) -> bool:
        """Every site was judged by a model of its own, and by the common one beside it."""
        return bool(view(self.scores()[1], "global").get("sites"))

    @cached_property
    def several(self) -> bool:
        """The sites' scores come from more than one model."""
        groups: Json = next((found for line in reversed(self.rounds) if (found := line.get("groups"))), {})
        return self.personal or len(set(groups.values())) > 1 or self.part("strategy") == "local"


def read_run(folder: Path) -> Record:
    if not (folder / "rounds.jsonl").exists() and not (folder / "study.toml").exists():
        raise BadRun(
            f"{folder} is no run folder: it has neither rounds.jsonl nor study.toml; give what `hemofed run` made"
        )
    study = folder / "study.toml"
    results = folder / "results.json"
    return Record(
        folder=folder,
        rounds=read_rounds(folder / "rounds.jsonl"),
        data=_object(folder / "sites.json"),
        results=_object(results) if results.exists() else None,
        study=study.read_text("utf-8") if study.exists() else "",
    )


def number(value: object) -> float | None:
    """A finite number, else None: JSON may hold null, and Python writes NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def judgement(line: Json, split: str, where: str) -> Json:
    return ((line.get("metrics") or {}).get(split) or {}).get(where) or {}


def view(scores: Json, name: str) -> Json:
    """Of another model at the sites: "global" or "group"; as {"pooled", "sites"}."""
    return (scores.get("views") or {}).get(name) or {}


def site_values(sites: Json, metric: str) -> dict[str, float]:
    found = {site: number((metrics or {}).get(metric)) for site, metrics in sites.items()}
    return {site: value for site, value in found.items() if value is not None}


def bytes_of(line: Json, way: str) -> int:
    return int((line.get("bytes") or {}).get(way) or 0)


def _object(path: Path) -> Json:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BadRun(f"{path}: {error}; restore it, or resume the run to write it again") from error
    if not isinstance(found, dict):
        raise BadRun(f"{path} holds no JSON object; restore it, or resume the run to write it again")
    return found
