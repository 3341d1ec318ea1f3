"""A site that joins a finished run: it is assigned to a cluster, trains its personal parameters and keeps its model.

The global models do not change: nothing that the new site computes is aggregated.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import DataError, RunFolderError, StudyError
from pipeline.core.tensor_io import save_tensors
from pipeline.protocol.messages import RoundAttempt, RoundPolicy, SiteId
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums
from pipeline.records.join_results import JoinResults
from pipeline.records.scores import ModelMetrics
from pipeline.records.sites_record import SitesRecord
from pipeline.runs.simulation import Simulation, build_simulation, run_simulation
from pipeline.strategies.local_only import LocalOnly
from pipeline.study.run_spec import model_header
from pipeline.study.schema import Study
from pipeline.study.toml_file import load_study
from sites.population.simulated_sites import COORDINATOR, FederatedDataset, load_federated_data
from sites.training.base import TrainRequest
from sites.training.select_trainer import restored_num_threads


@dataclass(frozen=True)
class LateJoiner:
    name: SiteId
    data_path: Path | None
    overrides: Mapping[str, Any]
    num_rounds: int  # of local training


@restored_num_threads()
def join_run(folder: RunFolder, late_joiner: LateJoiner) -> JoinResults:
    """The results and the model are saved in joined/NAME of the run folder."""
    if not folder.is_finished:
        raise RunFolderError(f"{folder.path} is not finished; continue it with `hemofed run --resume {folder.path}`")
    study = _late_join_study(folder, late_joiner)
    if study.strategy.requires_pooled_data:
        raise StudyError(f"{study.strategy.name} has no sites that could join; use a federated run")
    dataset = _select_only_site(
        load_federated_data(study, late_joiner.data_path, torch.device("cpu")), late_joiner.name
    )
    _check_data_format(folder, dataset)
    run_study = folder.load_study()
    if late_joiner.data_path is None and (study.data, study.seed) == (run_study.data, run_study.seed):
        raise DataError(
            "these are the run's own examples; give the new site's data (--data), or sample others: --set seed=7"
        )
    if not issubclass(run_study.strategy.state_type, study.strategy.state_type):
        raise StudyError(
            f"{study.strategy.name} cannot continue a run of {run_study.strategy.name}: their states differ"
        )
    joined_folder = folder.path / "joined" / quote(late_joiner.name, safe="")
    if joined_folder.exists():
        raise RunFolderError(f"{joined_folder} exists already; give the new site another --name, or remove that folder")
    try:
        return _train_and_save(folder, study, run_study, dataset, late_joiner, joined_folder)
    except BaseException:
        shutil.rmtree(joined_folder, ignore_errors=True)  # a failed join leaves its name free
        raise


def _train_and_save(
    folder: RunFolder,
    study: Study,
    run_study: Study,
    dataset: FederatedDataset,
    late_joiner: LateJoiner,
    joined_folder: Path,
) -> JoinResults:
    simulation = build_simulation(
        study, RunFolder(joined_folder), late_joiner.data_path, None, lambda record: None, dataset
    )
    run_state = simulation.round_loop.read_run_state(*folder.load_checkpoint(), run_study.strategy.state_type)
    state, best_round, _ = simulation.round_loop.select_result(run_state)
    state, cluster = _assign_best_cluster(simulation, state, late_joiner.name)
    if cluster is None and not study.strategy.personalized:
        raise StudyError(
            f"{study.strategy.name} has no personal models; score the global model with `hemofed evaluate`, or "
            "fine-tune it: --set strategy=finetune"
        )
    last_accepted: dict[SiteId, RoundAttempt] = {}
    for round_number in range(best_round + 1, best_round + 1 + late_joiner.num_rounds):
        request = simulation.round_loop.create_request(
            "train", replace(run_state, round=round_number, last_accepted=last_accepted), RoundPolicy()
        )
        (reply,) = replace(request, visibility="each").collect(
            {late_joiner.name: study.strategy.train_payload(state, late_joiner.name)}
        )
        state = study.strategy.on_client_joined(state, reply)
        last_accepted = {late_joiner.name: (round_number, run_state.attempt)}
    joined_state = replace(run_state, last_accepted=last_accepted)
    test_scores = simulation.round_loop.evaluate(state, ("test",), joined_state).final_scores(
        simulation.round_loop.positive_class
    )
    simulation.round_loop.save_personal_models(state, joined_state)
    personal_tensors = simulation.engine.client_states[late_joiner.name].personal_model
    save_tensors(
        joined_folder / "models" / "own.safetensors",
        model_header(study, dataset.shape, dataset.classes, best_round),
        personal_tensors,
    )
    results = JoinResults(
        site=late_joiner.name,
        run=str(folder.path),
        strategy=study.strategy.name,
        cluster=cluster,
        rounds=late_joiner.num_rounds,
        examples=dataset.class_counts(late_joiner.name),
        personalized_model=test_scores.pooled,
        global_model=test_scores.comparison("global").pooled,
        local_only=_train_alone(study, late_joiner, joined_folder),
        model_file=str(joined_folder / "models" / "own.safetensors"),
    )
    results.write(joined_folder)
    return results


def _late_join_study(folder: RunFolder, late_joiner: LateJoiner) -> Study:
    """The run's study with the new site as its only site, at the constant initial learning rate."""
    overrides = {
        "sites": {"count": 1},
        "partition": "iid",
        "public": {},
        "local.lr_schedule": "constant",
        "client_sampling": {},
        "round": {},
        "evaluation.evaluate_at": "sites",
        "compression": {"uplink": []},
        "aggregation": "mean",
        "feature_skew": "none",
        "trainer": "auto",
        "privacy": {},
    }
    return load_study(folder.path / "study.toml", overrides | dict(late_joiner.overrides))


def _select_only_site(dataset: FederatedDataset, name: SiteId) -> FederatedDataset:
    (original_name,) = dataset.sites
    examples = {name: dataset.split_indices[original_name], COORDINATOR: dataset.split_indices[COORDINATOR]}
    return replace(dataset, sites=(name,), split_indices=examples)


def _check_data_format(folder: RunFolder, dataset: FederatedDataset) -> None:
    recorded = SitesRecord.read(folder.path)
    if (tuple(dataset.classes), tuple(dataset.shape)) != (recorded.classes, recorded.shape):
        raise DataError(
            f"the new site's data have shape {dataset.shape} and the classes {', '.join(dataset.classes)}, the run's have "
            f"{recorded.shape} and {', '.join(recorded.classes)}; set data.size or data.classes accordingly"
        )


def _assign_best_cluster(simulation: Simulation, state: Any, name: SiteId) -> tuple[Any, str | None]:
    """Assigns the site to the cluster whose model has the lowest loss on its training examples."""
    strategy = simulation.round_loop.study.strategy
    candidates = strategy.joinable_clusters(state)
    if not candidates:
        return state, None
    train_requests = [
        TrainRequest(name, 0, n, EvaluateJob(m.weights, "train", m.norm_stats))
        for n, m in enumerate(candidates.values())
    ]
    losses = [
        float(result.loss)
        for result in simulation.engine.trainer.run(train_requests)
        if isinstance(result, EvaluationSums)
    ]
    cluster = list(candidates)[losses.index(min(losses))]
    return strategy.assign_cluster(state, name, cluster), cluster


def _train_alone(study: Study, late_joiner: LateJoiner, joined_folder: Path) -> ModelMetrics | None:
    """Test metrics of a model trained on the site's own examples alone, in as many rounds as the run had."""
    local_study = study.model_copy(update={"strategy": LocalOnly(), "name": f"{study.name}-alone"})
    local_folder = RunFolder.create(joined_folder / "alone", local_study)
    return run_simulation(local_study, local_folder, late_joiner.data_path).test.pooled
