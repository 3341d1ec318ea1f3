"""Writes the results of a finished run."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version

from pipeline.coordinator.round_loop import RoundLoop, RunState
from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import write_profile
from pipeline.records.run_results import BootstrapIntervals, RunResults, RunTraffic, SiteDeviation, WorstSite
from pipeline.records.scores import metric_by_site
from pipeline.study.run_spec import model_header


def write_results(
    round_loop: RoundLoop,
    folder: RunFolder,
    run_state: RunState,
    stop_reason: str,
    shape: Sequence[int],
    classes: Sequence[str],
    intervals: BootstrapIntervals | None,
    with_profile: bool = True,
) -> RunResults:
    """Evaluates once on `test`, and writes the models and results.json."""
    study, (state, best_round, chosen_by) = round_loop.study, round_loop.select_result(run_state)
    test_scores = round_loop.evaluate(state, ("test",), run_state).final_scores(round_loop.positive_class)
    for name, model in study.strategy.global_models(state).items():
        folder.save_model(name, model, model_header(study, shape, classes, best_round))
    if with_profile:
        write_profile(round_loop, state, run_state, tuple(shape))
    accuracy_by_site = metric_by_site(test_scores.sites, "accuracy")
    worst_site = min(accuracy_by_site, key=lambda site: accuracy_by_site[site], default=None)
    results = RunResults(
        study=study.name,
        study_hash=study.hash,
        strategy=study.strategy.name,
        model=study.model.name,
        num_parameters=round_loop.context.spec.num_parameters,
        rounds=run_state.round,
        best_round=best_round,
        selected_by=chosen_by,
        stop_reason=stop_reason,
        void_rounds=sum(record.void is not None for record in folder.load_rounds()),
        positive_class=study.evaluation.positive_class,
        test=test_scores,
        worst_site=WorstSite(site=worst_site, accuracy=accuracy_by_site[worst_site]) if worst_site else None,
        site_std=SiteDeviation(accuracy=statistics.pstdev(accuracy_by_site.values())) if accuracy_by_site else None,
        intervals=intervals,
        baselines={},
        traffic=RunTraffic(up=run_state.bytes_up, down=run_state.bytes_down),
        seconds=round(run_state.seconds, 3),
        software={"hemofed": version("hemofed"), "python": platform.python_version(), **round_loop.environment},
    )
    results.write(folder.path)
    return results
