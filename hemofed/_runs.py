"""Studies and runs: `load_study`, `run`, `load_run` and `Run`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from hemofed._calls import api_call
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.files import free_path
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults
from pipeline.records.sites_record import SitesRecord
from pipeline.study.schema import Study
from pipeline.study.toml_file import find_study, make_study
from pipeline.study.toml_file import load_study as load_study_file

if TYPE_CHECKING:
    from torch import nn

    from pipeline.runs.baselines import RoundCallbackFactory
    from pipeline.runs.simulation import RoundCallback

AnyPath = str | os.PathLike[str]
StudyLike = Study | AnyPath | Mapping[str, Any]  # also a packaged study's name, or the tables of a study file


@dataclass(frozen=True)
class Run:
    """A run on disk, finished or not. Everything is read from its folder when it is asked for."""

    path: Path

    @property
    def study(self) -> Study:
        return self._folder.load_study()

    @property
    def is_finished(self) -> bool:
        return self._folder.is_finished

    @property
    def results(self) -> RunResults:
        """`RunFolderError` if the run is not finished."""
        return RunResults.read(self.path)

    @property
    def rounds(self) -> list[RoundRecord]:
        """One record per round; round 0 is the model before training."""
        return self._folder.load_rounds()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the models' outputs."""
        return SitesRecord.read(self.path).classes

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the saved models: "global", "cluster/NAME", "site/NAME"."""
        return tuple(model_files(self._folder))

    @api_call()
    def load_model(self, name: str = "global") -> nn.Module:
        """The network in evaluation mode: float images (B, C, H, W) in [0, 1] -> logits (B, classes)."""
        from pipeline.runs.score_saved_model import load_model

        return load_model(self._folder, model_files(self._folder).get(name, name))[0]

    @property
    def cluster_models(self) -> dict[str, nn.Module]:
        """Cluster -> its model."""
        return self._load_models("cluster/")

    @property
    def personal_models(self) -> dict[str, nn.Module]:
        """Site -> its personalized model. Across hospitals these models stay at the sites."""
        return self._load_models("site/")

    @api_call()
    def report(self) -> Path:
        """Writes report.html and the plots again."""
        from pipeline.reports.run.report import write_report

        return write_report(self._folder.path)

    def resume(
        self,
        *,
        data: AnyPath | None = None,
        baselines: bool | None = None,
        progress: bool | RoundCallback = False,
    ) -> Run:
        """Continues an interrupted run bit for bit, or adds baselines to a finished one. For the options see `run`."""
        return _run_study(self.study, self._folder, data, baselines, progress)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder.open(self.path)

    def _load_models(self, prefix: str) -> dict[str, nn.Module]:
        return {name.removeprefix(prefix): self.load_model(name) for name in self.models if name.startswith(prefix)}


RunLike = Run | AnyPath


@api_call()
def load_study(study: StudyLike, overrides: Mapping[str, Any] | None = None) -> Study:
    """A study from a file, a packaged study's name, the tables of a study file, or another study.

    `overrides`: keys of the study file with their new values, such as {"rounds": 4, "local.lr": 0.1}.
    """
    if isinstance(study, str | os.PathLike):
        return load_study_file(find_study(os.fspath(study)), overrides)
    return make_study(study, overrides)


def run(
    study: StudyLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    out: AnyPath | None = None,
    data: AnyPath | None = None,
    baselines: bool | None = None,
    site_homes: AnyPath | None = None,
    progress: bool | RoundCallback = False,
) -> Run:
    """Runs a study with simulated sites on this machine, and writes a report.

    After an interrupt, `load_run(PATH).resume()` continues the run bit for bit.

    study, overrides: see `load_study`.
    out: the run folder to create; by default runs/NAME, or runs/NAME-2 and so on if it exists.
    data: the folder of the data sets; by default the environment variable HEMOFED_DATA.
    baselines: whether to train the baselines too; by default local-only for personalized studies, otherwise none.
    site_homes: the folder of the simulated sites' keys and ledgers, if they outlive the run.
    progress: True prints the rounds to stderr; a function is called with the record of each round.
    """
    loaded = load_study(study, overrides)
    folder = RunFolder.create(Path(out) if out is not None else free_path(Path("runs") / loaded.name), loaded)
    return _run_study(loaded, folder, data, baselines, progress, site_homes)


@api_call()
def load_run(path: AnyPath) -> Run:
    """A run that was made here or by `hemofed run`."""
    return Run(RunFolder.open(Path(path)).path)


def open_run_folder(run: RunLike) -> RunFolder:
    return RunFolder.open(run.path if isinstance(run, Run) else Path(run))


def model_files(folder: RunFolder) -> dict[str, str]:
    """Name of each model -> its file, in whose name a site is quoted."""
    from pipeline.runs.score_saved_model import list_models

    return {unquote(file): file for file in list_models(folder)}


def optional_path(path: AnyPath | None) -> Path | None:
    return None if path is None else Path(path)


def data_folder(path: AnyPath | None) -> Path | None:
    """By default the environment variable HEMOFED_DATA, as in the command."""
    return optional_path(path or os.environ.get("HEMOFED_DATA"))


@api_call()
def _run_study(
    study: Study,
    folder: RunFolder,
    data: AnyPath | None,
    baselines: bool | None,
    progress: bool | RoundCallback,
    site_homes: AnyPath | None = None,
) -> Run:
    from pipeline.runs.run_study import run_study

    try:
        run_study(
            study,
            folder,
            data_folder(data),
            _open_progress(study, progress),
            baselines,
            optional_path(site_homes),
        )
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"nothing is lost; continue with: hemofed.load_run({str(folder.path)!r}).resume()")
        raise
    return Run(folder.path)


def _open_progress(study: Study, progress: bool | RoundCallback) -> RoundCallbackFactory:
    """A function is called for the study's own rounds, and not for those of its baselines."""

    def open_progress(running: Study) -> AbstractContextManager[RoundCallback]:
        if progress is True:
            from pipeline.cli.output import RoundProgressTable

            return RoundProgressTable(running.name.removeprefix(f"{study.name}-"), running.rounds, quiet=False)
        return nullcontext(progress if progress and running is study else _ignore_round)

    return open_progress


def _ignore_round(record: object) -> None:
    return None
