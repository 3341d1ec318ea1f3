"""What no federation and full pooling would reach with the same number of passes. Cached by study hash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from pipeline.commands.output import Rounds, headline
from pipeline.run_folder import RunFolder
from pipeline.simulate import run
from pipeline.strategies.base import Strategy
from pipeline.strategies.central import Central
from pipeline.strategies.local import Local
from pipeline.study import Selection, Sites, Study, Waiting


def measure(study: Study, folder: RunFolder, data: Path | None, quiet: bool) -> dict[str, Any]:
    fingerprint = folder.read_json("sites.json")["fingerprint"]
    return {s.name: _one(yardstick(study, s), s.name, fingerprint, data, quiet) for s in (Local(), Central())}


def yardstick(study: Study, strategy: Strategy) -> Study:
    """The same data, model and passes; everybody takes part, on time."""
    calm = {"sites": Sites(count=study.sites.count), "selection": Selection(), "waiting": Waiting()}
    patient = {"evaluation": study.evaluation.model_copy(update={"patience": None})}
    return study.model_copy(update={"strategy": strategy, "name": f"{study.name}-{strategy.name}", **calm, **patient})


def _one(study: Study, name: str, fingerprint: str, data: Path | None, quiet: bool) -> dict[str, Any]:
    path = user_cache_path("hemofed") / "yardsticks" / study.hash[:32]
    if (path / "sites.json").is_file() and RunFolder(path).read_json("sites.json")["fingerprint"] != fingerprint:
        shutil.rmtree(path)  # the same study on other data
    cached = RunFolder.open(path) if (path / "study.toml").is_file() else RunFolder.create(path, study)
    with Rounds(name, study.rounds, quiet or cached.finished) as watch:
        results = run(study, cached, data, watch)
    curve = [[r["round"], headline(r)[1].get("accuracy")] for r in cached.rounds() if r["metrics"]]
    return {"test": results["test"], "curve": curve}
