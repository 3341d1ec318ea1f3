"""Runs a study with simulated sites in one process: builds data, trainer, engine and round loop, writes a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from pipeline.coordinator.metrics import PositiveClass
from pipeline.coordinator.results import write_results
from pipeline.coordinator.round_loop import RoundLoop, RunState
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.core.parameters import ModelState
from pipeline.engines.simulated import ClientSpeedModel, SimulatedEngine
from pipeline.protocol.tasks import JobResult, LocalJob
from pipeline.reports.run.contact_sheets import write_contact_sheets
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.run_spec import RunSpec, model_header
from pipeline.study.schema import Study
from pipeline.study.validation import validate_study
from sites.population.simulated_sites import COORDINATOR, FederatedDataset, load_federated_data
from sites.training.base import TrainerContext, TrainingConfig, TrainRequest
from sites.training.evaluation import compute_logits, score_bins
from sites.training.select_trainer import (
    TrainerKind,
    make_trainer,
    make_trainer_context,
    make_training_config,
    restored_num_threads,
    select_device,
    select_num_threads,
    select_trainer_kind,
)

if TYPE_CHECKING:
    from pipeline.runs.privacy_setup import PrivacySetup

RoundCallback = Callable[[dict[str, Any]], None]


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
    device = select_device(study)
    dataset = dataset or load_federated_data(study, data_path, device)
    run_spec = RunSpec(study, dataset.shape, dataset.classes, len(dataset.sites))
    training_config = make_training_config(study, run_spec.lr)
    validate_study(study, run_spec.parameter_spec, dataset, run_spec.dry_run_rounds)
    privacy_setup = _setup_privacy(
        study, dataset, run_spec.dry_run_rounds, training_config, None if is_dry_run else folder.path, homes_folder
    )
    dataset = privacy_setup.dataset if privacy_setup else dataset
    trainer_context = make_trainer_context(run_spec, dataset, training_config)
    num_threads = (
        recorded_environment["threads"]
        if recorded_environment
        else select_num_threads(study.num_threads, trainer_context)
    )
    torch.set_num_threads(num_threads)
    trainer_kind: TrainerKind = (
        recorded_environment["trainer"]
        if recorded_environment
        else select_trainer_kind(
            study.trainer, trainer_context, num_threads, bool(privacy_setup and privacy_setup.privacy_plans)
        )
    )
    trainer = (
        privacy_setup.create_trainer(trainer_kind, trainer_context, study)
        if privacy_setup
        else make_trainer(trainer_kind, trainer_context)
    )
    context, compression = run_spec.context, run_spec.compression
    engine = SimulatedEngine(
        sites=dataset.sites,
        trainer=trainer,
        strategy=study.strategy,
        context=context,
        weighting=study.weighting,
        speed_model=_client_speed_model(study, dataset),
        compression=compression,
    )
    if privacy_setup:
        engine.secure_agg_clients = privacy_setup.secure_agg_clients

    def run_local(jobs: Sequence[LocalJob], round_number: int) -> list[JobResult]:
        return trainer.run([TrainRequest(COORDINATOR, round_number, index, job) for index, job in enumerate(jobs)])

    environment = {"trainer": trainer_kind, "threads": num_threads, "device": device.type, "torch": torch.__version__}
    for key, recorded in (recorded_environment or {}).items():
        if environment[key] != recorded:
            raise RunFolderError(
                f"{folder.path} was started with {key} {recorded}, here it is {environment[key]}: it cannot resume bit for bit"
            )
    positive_class = _positive_class(study, dataset)
    aggregation_rule, secure_aggregation = (
        (privacy_setup.aggregation_rule, privacy_setup.secure_aggregation) if privacy_setup else (None, None)
    )
    round_loop = RoundLoop(
        study=study,
        context=context,
        sites=dataset.sites,
        engine=engine,
        run_jobs=run_local,
        folder=folder,
        positive_class=positive_class,
        environment=environment,
        compression=compression,
        aggregation_rule=aggregation_rule,
        secure_aggregation=secure_aggregation,
        on_round_end=on_round_end,
        privacy_spent=privacy_setup.privacy_spent if privacy_setup else dict,
    )
    return Simulation(round_loop, engine, dataset, trainer_context, study.model, privacy_setup)


def _setup_privacy(
    study: Study,
    dataset: FederatedDataset,
    dry_run_rounds: Sequence[DryRunRound],
    training_config: TrainingConfig,
    run_path: Path | None,
    homes_folder: Path | None,
) -> PrivacySetup | None:
    if not dry_run_rounds:
        return None
    from pipeline.runs.privacy_setup import setup_privacy  # opacus and cryptography are optional

    return setup_privacy(study, dataset, dry_run_rounds, training_config, run_path, homes_folder)


@restored_num_threads()
def run_simulation(
    study: Study,
    folder: RunFolder,
    data_path: Path | None = None,
    on_round_end: RoundCallback = lambda record: None,
    is_baseline: bool = False,
    homes_folder: Path | None = None,
) -> dict[str, Any]:
    """Starts the run or resumes it from the last checkpoint; returns the content of results.json.

    `is_baseline`: waits for another process that computes the same cached baseline, and writes no images.
    `homes_folder`: of simulated sites whose ledgers outlive the run.
    """
    with exclusive_lock(folder.path, wait=is_baseline):
        return _run_or_resume(
            study, folder, data_path, on_round_end, not is_baseline, _resolve_homes_folder(folder, homes_folder)
        )


def _resolve_homes_folder(folder: RunFolder, homes_folder: Path | None) -> Path | None:
    """The folder that the run was started with, so that a resumed run finds its site homes."""
    file = folder.path / "homes.json"
    if file.exists():
        return Path(folder.read_json("homes.json"))
    if homes_folder is not None:
        folder.write_json("homes.json", str(homes_folder.resolve()))
    return homes_folder and homes_folder.resolve()


def _run_or_resume(
    study: Study,
    folder: RunFolder,
    data_path: Path | None,
    on_round_end: RoundCallback,
    with_images: bool,
    homes_folder: Path | None,
) -> dict[str, Any]:
    if folder.is_finished:
        results: dict[str, Any] = folder.read_json("results.json")
        return results
    if folder.has_checkpoint:
        header, tensors = folder.load_checkpoint()
        if header["study"] != study.hash:
            raise RunFolderError(
                f"{folder.path} belongs to another study or version; start a new run with `hemofed run`"
            )
        simulation = build_simulation(
            study, folder, data_path, header["machine"], on_round_end, homes_folder=homes_folder
        )
        _check_same_data(folder, simulation.dataset)
        run_state = simulation.round_loop.restore(header, tensors)
        folder.truncate_rounds(run_state.round)
    else:
        simulation = build_simulation(study, folder, data_path, None, on_round_end, homes_folder=homes_folder)
        folder.truncate_rounds(-1)
        folder.write_json("sites.json", _describe_sites(simulation.dataset))
        if simulation.privacy_setup:
            folder.write_json("privacy.json", simulation.privacy_setup.privacy_record)
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


def _bootstrap_test_metrics(simulation: Simulation, study: Study, state: Any) -> dict[str, Any] | None:
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
    headline_metric = "accuracy" if positive_class.class_index is None else "positive_auroc"
    paired = [
        round(float(v), 5) for v in bootstrap_metrics(examples, positive_class, study.seed).get(headline_metric, ())
    ]
    record = {
        "unit": dataset.privacy_unit or "example",
        "units": len(np.unique(unit)),
        "fewest": MIN_UNITS,
        "draws": NUM_RESAMPLES,
        "level": CONFIDENCE_LEVEL,
        "paired": {"metric": headline_metric, "values": paired} if np.isfinite(paired).all() else None,
    }
    if study.evaluation.evaluate_at == "coordinator":
        return record | {"coordinator": pooled}
    return record | {"pooled": pooled, "sites": by_site}


def _check_any_round_counted(folder: RunFolder) -> None:
    """Refuses results if every round was void; the run folder stays for inspection."""
    training_rounds = folder.load_rounds()[1:]
    if training_rounds and all(record["void"] for record in training_rounds):
        last_round = training_rounds[-1]
        reasons = "; ".join(f"{site}: {failure['text']}" for site, failure in [*last_round["failures"].items()][:3])
        raise HemofedError(
            f"all rounds were void, so there is no result ({last_round['void']}). In the last round: {reasons}"
        )


def dry_run_study(study: Study, data_path: Path | None) -> Simulation:
    """Loads the data, builds the model and validates the study without running it."""
    return build_simulation(study, RunFolder(Path()), data_path, None, lambda record: None, is_dry_run=True)


def _positive_class(study: Study, dataset: FederatedDataset) -> PositiveClass:
    class_name = study.evaluation.positive_class
    return PositiveClass(
        None if class_name is None else dataset.classes.index(class_name), study.evaluation.target_specificity
    )


def _client_speed_model(study: Study, dataset: FederatedDataset) -> ClientSpeedModel:
    def spread_over_sites(value: float | tuple[float, ...]) -> dict[str, float]:
        values = value if isinstance(value, tuple) else (value,) * len(dataset.sites)
        return dict(zip(dataset.sites, values, strict=True))

    return ClientSpeedModel(
        spread_over_sites(study.sites.speed), spread_over_sites(study.sites.dropout), study.sites.stragglers, study.seed
    )


def _describe_sites(dataset: FederatedDataset) -> dict[str, Any]:
    return {
        "classes": dataset.classes,
        "shape": dataset.shape,
        "sites": {site: dataset.class_counts(site) for site in dataset.sites},
        "coordinator": dataset.class_counts(COORDINATOR),
        "fingerprint": dataset.fingerprint,
        "skipped": dataset.skipped,
    }


def _check_same_data(folder: RunFolder, dataset: FederatedDataset) -> None:
    recorded_fingerprint = folder.read_json("sites.json")["fingerprint"]
    if recorded_fingerprint != dataset.fingerprint:
        raise RunFolderError(
            f"{folder.path} was started with other data (fingerprint {recorded_fingerprint[:12]}, now {dataset.fingerprint[:12]})"
        )
