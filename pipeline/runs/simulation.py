"""Runs a study with simulated sites in one process: builds data, trainer, engine and round loop, writes a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch

from models.networks.base import ModelConfig
from pipeline.coordinator.bootstrap import (
    CONFIDENCE_LEVEL,
    MIN_UNITS,
    NUM_RESAMPLES,
    ScoredExamples,
    bootstrap_metrics,
    confidence_intervals,
)
from pipeline.coordinator.results import write_results
from pipeline.coordinator.round_loop import RoundLoop, RunState
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.core.parameters import ModelState
from pipeline.engines.simulated import ClientSpeedModel, SimulatedEngine
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import BootstrapIntervals, PairedResamples, RunResults
from pipeline.records.scores import headline_metric
from pipeline.records.site_homes import SiteHomesRecord
from pipeline.records.sites_record import SitesRecord
from pipeline.reports.run.contact_sheets import write_contact_sheets
from pipeline.runs.assembly import build_round_loop
from pipeline.study.run_spec import RunSpec, model_header
from pipeline.study.schema import Study
from pipeline.study.validation import validate_study
from sites.population.simulated_sites import COORDINATOR, FederatedDataset, load_federated_data
from sites.training.base import TrainerContext
from sites.training.evaluation import compute_logits, score_bins
from sites.training.select_trainer import make_training_config, restored_num_threads, select_device
from sites.training.setup import TrainingSetup, set_up_training

if TYPE_CHECKING:
    from pipeline.runs.privacy_setup import PrivacySetup

RoundCallback = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Simulation:
    round_loop: RoundLoop
    engine: SimulatedEngine
    dataset: FederatedDataset
    trainer_context: TrainerContext
    model: ModelConfig
    privacy_setup: PrivacySetup | None = None


def build_simulation(
    study: Study,
    folder: RunFolder,
    data_path: Path | None,
    recorded_environment: dict[str, Any] | None,
    on_round_end: RoundCallback,
    dataset: FederatedDataset | None = None,
    homes_folder: Path | None = None,
    is_dry_run: bool = False,
) -> Simulation:
    """`recorded_environment`: trainer, threads etc. of the checkpoint that is resumed. `dataset`: if loaded already.
    `homes_folder`: of the simulated sites' ledgers, if not in the run folder. `is_dry_run`: nothing is written."""
    dataset = dataset or load_federated_data(study, data_path, select_device(study))
    run_spec = RunSpec(study, dataset.shape, dataset.classes, len(dataset.sites))
    training_config = make_training_config(study, run_spec.lr)
    validate_study(study, run_spec.parameter_spec, dataset, run_spec.dry_run_rounds)
    privacy_setup, dp_sgd = None, None
    if run_spec.dry_run_rounds:
        from pipeline.runs.privacy_setup import setup_privacy  # opacus and cryptography are optional
        from sites.privacy.plan import dp_sgd_training

        run_path = None if is_dry_run else folder.path
        privacy_setup = setup_privacy(study, dataset, run_spec.dry_run_rounds, training_config, run_path, homes_folder)
        dataset, dp_sgd = privacy_setup.dataset, dp_sgd_training(study, privacy_setup.privacy_plans)
    training = set_up_training(
        run_spec, dataset, training_config, dp_sgd=dp_sgd, recorded_environment=recorded_environment
    )
    _check_same_environment(folder, training, recorded_environment)
    engine = SimulatedEngine(
        sites=dataset.sites,
        trainer=training.trainer,
        strategy=study.strategy,
        context=run_spec.context,
        weighting=study.weighting,
        speed_model=_client_speed_model(study, dataset),
        compression=run_spec.compression,
        privacy_by_site=privacy_setup.privacy_by_site if privacy_setup else {},
    )
    round_loop = build_round_loop(
        run_spec,
        sites=dataset.sites,
        engine=engine,
        training=training,
        folder=folder,
        on_round_end=on_round_end,
        aggregation_rule=privacy_setup.aggregation_rule if privacy_setup else None,
        secure_aggregation=privacy_setup.secure_aggregation if privacy_setup else None,
    )
    return Simulation(round_loop, engine, dataset, training.context, study.model, privacy_setup)


def _check_same_environment(
    folder: RunFolder, training: TrainingSetup, recorded_environment: Mapping[str, Any] | None
) -> None:
    for key, recorded in (recorded_environment or {}).items():
        if training.environment[key] != recorded:
            raise RunFolderError(
                f"{folder.path} was started with {key} {recorded}, here it is {training.environment[key]}: it cannot resume bit for bit"
            )


@restored_num_threads()
def run_simulation(
    study: Study,
    folder: RunFolder,
    data_path: Path | None = None,
    on_round_end: RoundCallback = lambda record: None,
    is_baseline: bool = False,
    homes_folder: Path | None = None,
) -> RunResults:
    """Starts the run or resumes it from the last checkpoint.

    `is_baseline`: waits for another process that computes the same cached baseline, and writes no images.
    `homes_folder`: of simulated sites whose ledgers outlive the run.
    """
    with exclusive_lock(folder.path, wait=is_baseline):
        return _run_or_resume(
            study, folder, data_path, on_round_end, not is_baseline, _resolve_homes_folder(folder, homes_folder)
        )


def _resolve_homes_folder(folder: RunFolder, homes_folder: Path | None) -> Path | None:
    """The folder that the run was started with, so that a resumed run finds its site homes."""
    if record := SiteHomesRecord.read_if_present(folder.path):
        return Path(record.folder)
    if homes_folder is not None:
        SiteHomesRecord(folder=str(homes_folder.resolve())).write(folder.path)
    return homes_folder and homes_folder.resolve()


def _run_or_resume(
    study: Study,
    folder: RunFolder,
    data_path: Path | None,
    on_round_end: RoundCallback,
    with_images: bool,
    homes_folder: Path | None,
) -> RunResults:
    if folder.is_finished:
        return RunResults.read(folder.path)
    if folder.has_checkpoint:
        header, tensors = folder.load_checkpoint()
        if header["study"] != study.hash:
            raise RunFolderError(
                f"{folder.path} belongs to another study or version; start a new run with `hemofed run`"
            )
        simulation = build_simulation(
            study, folder, data_path, header["environment"], on_round_end, homes_folder=homes_folder
        )
        _check_same_data(folder, simulation.dataset)
        run_state = simulation.round_loop.restore(header, tensors)
        folder.truncate_rounds(run_state.round)
    else:
        simulation = build_simulation(study, folder, data_path, None, on_round_end, homes_folder=homes_folder)
        folder.truncate_rounds(-1)
        _describe_sites(simulation.dataset).write(folder.path)
        if simulation.privacy_setup:
            simulation.privacy_setup.privacy_record.write(folder.path)
        if with_images:
            write_contact_sheets(folder.path, simulation.dataset, study.evaluation.positive_class)
        run_state = simulation.round_loop.start_run(
            simulation.trainer_context.spec.read_state(simulation.trainer_context.make_model())
        )
    run_state, stop_reason = simulation.round_loop.run(run_state)
    _check_any_round_counted(folder)
    state = simulation.round_loop.select_result(run_state)[0]
    _save_personal_models(simulation, study, state, run_state, folder)
    test_intervals = _bootstrap_test_metrics(simulation, study, state)
    shape, classes = simulation.dataset.shape, simulation.dataset.classes
    return write_results(
        round_loop=simulation.round_loop,
        folder=folder,
        run_state=run_state,
        stop_reason=stop_reason,
        shape=shape,
        classes=classes,
        intervals=test_intervals,
        with_profile=with_images,
    )


def _save_personal_models(
    simulation: Simulation, study: Study, state: Any, run_state: RunState, folder: RunFolder
) -> None:
    """Saves each site's personal model, which a real site would keep to itself."""
    if not (study.strategy.personalized or study.strategy.result_in_client_states):
        return
    simulation.round_loop.save_personal_models(state, run_state)
    header = model_header(
        study, simulation.dataset.shape, simulation.dataset.classes, simulation.round_loop.select_result(run_state)[1]
    )
    for site, client_state in simulation.engine.client_states.items():
        personal_model = ModelState(client_state.personal_model["weights"], client_state.personal_model["stats"])
        folder.save_model(f"site/{quote(site, safe='')}", personal_model, header)


def _bootstrap_test_metrics(simulation: Simulation, study: Study, state: Any) -> BootstrapIntervals | None:
    """Bootstrap intervals of the global model on the test examples of the sites, or of the coordinator."""
    model = study.strategy.global_models(state).get("global")
    dataset, pool = simulation.dataset, simulation.dataset.pool
    holders = (COORDINATOR,) if study.evaluation.evaluate_at == "coordinator" else dataset.sites
    rows = torch.cat([dataset.split_indices[holder].test for holder in holders])
    if model is None or not len(rows):
        return None
    module = simulation.trainer_context.make_model().to(pool.device)
    simulation.trainer_context.spec.write_state(module, model)
    logits = compute_logits(module, pool, rows)
    unit = np.arange(len(rows)) if pool.unit_ids is None else pool.unit_ids[rows].cpu().numpy()
    examples = ScoredExamples(
        score_bins(logits).numpy(), logits.argmax(1).numpy(), pool.labels(rows).cpu().numpy(), unit
    )
    num_examples = [len(dataset.split_indices[holder].test) for holder in holders]
    holder_index = np.repeat(np.arange(len(holders)), num_examples)
    positive_class = simulation.round_loop.positive_class
    pooled = confidence_intervals(examples, positive_class, study.seed)
    by_site = {
        holder: confidence_intervals(examples.select(holder_index == n), positive_class, study.seed)
        for n, holder in enumerate(holders)
    }
    metric = headline_metric(study.evaluation.positive_class)
    resampled = bootstrap_metrics(examples, positive_class, study.seed).get(metric, np.empty(0))
    paired = PairedResamples(metric=metric, values=tuple(round(float(value), 5) for value in resampled))
    return BootstrapIntervals(
        privacy_unit=dataset.privacy_unit or "example",
        num_units=len(np.unique(unit)),
        min_units=MIN_UNITS,
        num_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE_LEVEL,
        paired=paired if np.isfinite(resampled).all() else None,
        **(
            {"coordinator": pooled}
            if study.evaluation.evaluate_at == "coordinator"
            else {"pooled": pooled, "sites": by_site}
        ),
    )


def _check_any_round_counted(folder: RunFolder) -> None:
    """Refuses results if every round was void; the run folder stays for inspection."""
    training_rounds = folder.load_rounds()[1:]
    if training_rounds and all(record.void for record in training_rounds):
        last_round = training_rounds[-1]
        reasons = "; ".join(f"{site}: {failure.text}" for site, failure in [*last_round.failures.items()][:3])
        raise HemofedError(
            f"all rounds were void, so there is no result ({last_round.void}). In the last round: {reasons}"
        )


def dry_run_study(study: Study, data_path: Path | None) -> Simulation:
    """Loads the data, builds the model and validates the study without running it."""
    return build_simulation(study, RunFolder(Path()), data_path, None, lambda record: None, is_dry_run=True)


def _client_speed_model(study: Study, dataset: FederatedDataset) -> ClientSpeedModel:
    def spread_over_sites(value: float | tuple[float, ...]) -> dict[str, float]:
        values = value if isinstance(value, tuple) else (value,) * len(dataset.sites)
        return dict(zip(dataset.sites, values, strict=True))

    return ClientSpeedModel(
        spread_over_sites(study.sites.speed), spread_over_sites(study.sites.dropout), study.sites.stragglers, study.seed
    )


def _describe_sites(dataset: FederatedDataset) -> SitesRecord:
    return SitesRecord(
        classes=dataset.classes,
        shape=dataset.shape,
        sites={site: dataset.class_counts(site) for site in dataset.sites},
        coordinator=dataset.class_counts(COORDINATOR),
        fingerprint=dataset.fingerprint,
        skipped=dataset.skipped,
    )


def _check_same_data(folder: RunFolder, dataset: FederatedDataset) -> None:
    recorded_fingerprint = SitesRecord.read(folder.path).fingerprint
    if recorded_fingerprint != dataset.fingerprint:
        raise RunFolderError(
            f"{folder.path} was started with other data (fingerprint {recorded_fingerprint[:12]}, now {dataset.fingerprint[:12]})"
        )
