"""What no federation and full pooling would reach with the same number of passes. Cached by study hash."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from platformdirs import user_cache_path

from pipeline.aggregation.rules import MEAN
from pipeline.coordinator.evaluation import headline
from pipeline.study.privacy import Privacy
from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import Watch, run
from pipeline.strategies.base import Strategy
from pipeline.strategies.centralized import Central
from pipeline.strategies.local_only import Local
from pipeline.study.schema import Selection, Sites, Study, Travel, Waiting
from sites.population.color_normalization import NoNormalise, Site
from sites.population.feature_skew import Microscope, NoSkew

Watching = Callable[[Study], AbstractContextManager[Watch]]


def measure(
    study: Study, folder: RunFolder, data: Path | None, watching: Watching, only: Collection[str] | None = None
) -> dict[str, Any]:
    about = folder.read_json("sites.json")
    wanted = yardsticks(study, len(about["sites"]))
    return {name: _one(other, folder, data, watching) for name, other in wanted.items() if only is None or name in only}


def yardsticks(study: Study, sites: int) -> dict[str, Study]:
    """The same data, model and passes: alone, in one place, and, where scanners differ, without them or normalised.

    Of a private study: the same without privacy, which tells what it costs. Nobody sees these models.
    """
    found: dict[str, Study] = {s.name: _with(study, s, sites) for s in (Local(), Central())}
    if study.privacy != Privacy():
        found = {name: other.model_copy(update={"privacy": Privacy()}) for name, other in found.items()}
        found["unprotected"] = study.model_copy(update={"privacy": Privacy()})
    elif isinstance(study.skew, Microscope):
        found["unskewed"] = study.model_copy(update={"skew": NoSkew()})
        if isinstance(study.normalise, NoNormalise):
            found["normalised"] = study.model_copy(update={"normalise": Site()})
    return {name: other.model_copy(update={"name": f"{study.name}-{name}"}) for name, other in found.items()}


def _with(study: Study, strategy: Strategy, sites: int) -> Study:
    """Everybody takes part, on time, to the last round."""
    local = study.local
    if strategy.pools and local.steps is not None:  # as many steps as all sites take together
        local = local.model_copy(update={"steps": local.steps * sites})
    return study.model_copy(
        update={
            "strategy": strategy,
            "local": local,
            "sites": Sites(count=study.sites.count),
            "selection": Selection(),
            "waiting": Waiting(),
            "codec": Travel(),
            "combine": MEAN,
            "evaluation": study.evaluation.model_copy(update={"patience": None, "target": None}),
        }
    )


def _one(study: Study, folder: RunFolder, data: Path | None, watching: Watching) -> dict[str, Any]:
    cached = _entry(study, folder)
    with watching(study) as watch:
        results = run(study, cached, data, watch, aside=True)
    metric = "positive_auroc" if study.evaluation.positive else "accuracy"
    curve = [[r["round"], _followed(r, metric, study.strategy)] for r in cached.rounds() if r["metrics"]]
    return {"test": results["test"], "intervals": results.get("intervals"), "metric": metric, "curve": curve}


def _followed(record: dict[str, Any], metric: str, strategy: Strategy) -> float | None:
    """One number a round; where every site has a model of its own, their scores have no common order: the mean."""
    split, whole = headline(record)
    if metric == "accuracy" or not strategy.remembers:
        value: float | None = whole.get(metric)
        return value
    sites = record["metrics"][split].get("sites", {}).values()
    known = [m[metric] for m in sites if m.get(metric) is not None]
    return fmean(known) if known else None


def _entry(study: Study, folder: RunFolder) -> RunFolder:
    """In the user's cache, by study and data; beside the run where there is no cache to write to."""
    data = folder.read_json("sites.json")["fingerprint"]
    path = user_cache_path("hemofed") / "yardsticks" / f"{study.hash[:24]}-{data[:12]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = folder.path / "yardsticks" / study.hash[:24]
    if (path / "study.toml").is_file():
        return RunFolder.open(path)
    shutil.rmtree(path, ignore_errors=True)  # what a kill left of one that was never begun
    return RunFolder.create(path, study)
