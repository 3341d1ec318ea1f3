"""A study on this machine from start to end: the simulation, its report, and the baselines."""

from __future__ import annotations

from pathlib import Path

from pipeline.coordinator.run_folder import RunFolder
from pipeline.records.run_results import RunResults
from pipeline.reports.run.report import write_report
from pipeline.runs.baselines import RoundCallbackFactory, run_baselines
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study


def run_study(
    study: Study,
    folder: RunFolder,
    data_path: Path | None,
    open_callback: RoundCallbackFactory,
    with_baselines: bool | None = None,
    homes_folder: Path | None = None,
) -> RunResults:
    """Starts the run or resumes it. A report is written before the baselines too.

    `open_callback`: called for the study and for each baseline. `with_baselines` None: local-only for personalized
    studies, because their gain is measured against each site alone.
    """
    with open_callback(study) as on_round_end:
        results = run_simulation(study, folder, data_path, on_round_end, homes_folder=homes_folder)
    write_report(folder.path)
    baseline_names = None if with_baselines else {"local_only"}
    should_run_baselines = study.strategy.personalized if with_baselines is None else with_baselines
    if should_run_baselines and not results.baselines.keys() >= (baseline_names or {"local_only", "centralized"}):
        baselines = run_baselines(study, folder, data_path, open_callback, baseline_names)
        results = results.model_copy(update={"baselines": baselines})
        results.write(folder.path)
        write_report(folder.path)
    return results
