"""What a finished run leaves behind."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pipeline.coordinator.round_loop import Coordinator, Progress
from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import write_profile
from pipeline.study.run_spec import model_header


def write_results(
    coordinator: Coordinator,
    folder: RunFolder,
    progress: Progress,
    why: str,
    shape: Sequence[int],
    classes: Sequence[str],
    intervals: Mapping[str, Any] | None,
    profile: bool = True,
) -> dict[str, Any]:
    """The one look at `test`, the models and results.json of a run that has come to its end."""
    study, (state, at, chosen_by) = coordinator.study, coordinator.result(progress)
    test = coordinator.judge(state, ("test",), progress).final(coordinator.focus)
    by_site = {s: m["accuracy"] for s, m in test.get("sites", {}).items() if m["accuracy"] is not None}
    worst = min(by_site, key=lambda s: by_site[s]) if by_site else None
    for name, model in study.strategy.models(state).items():
        folder.save_model(name, model, model_header(study, shape, classes, at))
    if profile:
        write_profile(coordinator, state, progress, tuple(shape))
    results = {
        "study": study.name,
        "hash": study.hash,
        "strategy": study.strategy.name,
        "model": study.model.name,
        "parameters": coordinator.plan.spec.size,
        "rounds": progress.round,
        "best_round": at,
        "chosen_by": chosen_by,
        "stopped": why,
        "void_rounds": sum(record["void"] is not None for record in folder.rounds()),
        "positive": study.evaluation.positive,
        "test": test,
        "worst": worst and {"site": worst, "accuracy": by_site[worst]},
        "spread": {"accuracy": statistics.pstdev(by_site.values())} if by_site else None,
        "intervals": intervals,
        "yardsticks": {},
        "traffic": {"up": progress.up, "down": progress.down},
        "seconds": round(progress.seconds, 3),
        "software": {"hemofed": version("hemofed"), "python": platform.python_version(), **coordinator.machine},
    }
    folder.write_json("results.json", results)
    return results
