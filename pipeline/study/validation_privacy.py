"""Finds what conflicts with a study's `[privacy]` before the first round; every message names a cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.tasks import EvaluateJob, GradientJob, TrainJob
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import DpSgdConfig
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from sites.population.simulated_sites import FederatedDataset

MIN_SECURE_AGGREGATION_CLIENTS = 3  # with two, each site learns the other's update


def find_privacy_conflicts(
    study: Study, spec: ParameterSpec, dataset: FederatedDataset, dry_run_rounds: Sequence[DryRunRound], num_sites: int
) -> Iterator[str]:
    """`num_sites`: of the study; `dataset` may hold only one of them."""
    privacy = study.privacy
    if privacy.dp_sgd is not None:
        yield from _dp_sgd_conflicts(study, privacy.dp_sgd, spec, dataset, num_sites)
        yield from _job_conflicts(study.strategy.name, dry_run_rounds)
    if privacy.client_level_dp is not None:
        yield from _client_level_dp_conflicts(study, spec, dry_run_rounds)
    if privacy.secure_aggregation is not None:
        yield from _secure_aggregation_conflicts(study, num_sampled_clients(num_sites, study.client_sampling.fraction))


def _dp_sgd_conflicts(
    study: Study, dp_sgd: DpSgdConfig, spec: ParameterSpec, dataset: FederatedDataset, num_sites: int
) -> Iterator[str]:
    local = study.local
    if study.strategy.requires_pooled_data:
        yield f"{study.strategy.name} trains on pooled data, where no site protects its patients; use a federated strategy"
    if spec.num_norm_stats:
        yield "BatchNorm mixes the examples of a batch, so a patient's gradient cannot be clipped, and its statistics would leave the site; set model.norm = 'group'"
    if study.trainer == "stacked":
        yield "trainer = 'stacked' has no privacy mechanism; use 'auto'"
    if local.class_balance == "sample":
        yield "local.class_balance = 'sample' samples by the site's own class counts, but DP-SGD samples all patients at the same rate; use 'root' with public.data, or 'none'"
    elif local.class_balance != "none" and not len(dataset.public_indices):
        yield f"local.class_balance = {local.class_balance!r} would weight by the site's own class counts, which reveals its patients; give public.data, whose class counts are then used, or use 'none'"
    if study.normalization.name not in ("none", "image"):
        yield f"normalization = {study.normalization.name!r} is fitted to all of a site's images, so that one patient changes every other's; use 'image' or 'none'"
    if "train" in study.evaluation.splits and study.evaluation.evaluate_at != "coordinator":
        yield "evaluation.splits = 'train' would send scores of the protected patients; use 'val'"
    yield from _privacy_unit_conflicts(dp_sgd, dataset)
    for key in ("epsilon", "epsilon_budget"):
        values = getattr(dp_sgd, key)
        if isinstance(values, tuple) and len(values) != num_sites:
            yield f"privacy.dp_sgd.{key} has {len(values)} values for {num_sites} sites; give one each, or one for all"


def _privacy_unit_conflicts(dp_sgd: DpSgdConfig, dataset: FederatedDataset) -> Iterator[str]:
    if dp_sgd.privacy_unit == "example":
        return
    if dataset.privacy_unit is None:
        yield "the data do not say whose each example is; add a patient, slide or group (docs/data.md), or set privacy.dp_sgd.privacy_unit = 'example', which protects single images, not patients"
        return
    if dp_sgd.privacy_unit not in ("auto", dataset.privacy_unit):
        yield f"privacy.dp_sgd.privacy_unit = {dp_sgd.privacy_unit!r}, but the data have {dataset.privacy_unit!r}; use 'auto', or 'example' for single images"
    if any(dataset.split_indices[site].examples_per_epoch is not None for site in dataset.sites):
        yield "a partition that redraws every epoch gives every site all examples; use 'iid', 'quantity' or 'key'"
    num_shared = _count_shared_units(dataset)
    if num_shared:
        yield f"{num_shared} of the {dataset.privacy_unit}s have training examples at more than one site, and every site would spend privacy budget on them; use partition 'key', 'iid' or 'quantity', which keep a {dataset.privacy_unit} at one site"


def _count_shared_units(dataset: FederatedDataset) -> int:
    """Units that more than one site trains on."""
    assert dataset.pool.unit_ids is not None
    num_sites_of_unit: dict[int, int] = {}
    for site in dataset.sites:
        for unit in dataset.pool.unit_ids[dataset.split_indices[site].train].unique().tolist():
            num_sites_of_unit[unit] = num_sites_of_unit.get(unit, 0) + 1
    return sum(count > 1 for count in num_sites_of_unit.values())


def _job_conflicts(strategy_name: str, dry_run_rounds: Sequence[DryRunRound]) -> Iterator[str]:
    jobs = [job for dry_run_round in dry_run_rounds for job in dry_run_round.jobs]
    if any(isinstance(job, TrainJob) and job.inexactness is not None for job in jobs):
        yield f"{strategy_name}.gamma measures the full local gradient after every epoch, without noise; leave strategy.gamma out"
    if any(isinstance(job, TrainJob) and job.maml_lr for job in jobs):
        yield f"{strategy_name} takes a gradient at a point reached with other patients' gradients, which has no privacy mechanism; use fedavg with finetune, or ditto"
    if any(isinstance(job, GradientJob) for job in jobs):
        yield f"{strategy_name} sends full-batch gradients, which have no privacy mechanism here; use fedavg with local.steps = 1"
    if any(isinstance(job, EvaluateJob) for job in jobs):
        yield f"{strategy_name} decides by losses on the patients' examples, which no mechanism protects; use a strategy that only trains, such as fedavg, fedprox or ditto"


def _client_level_dp_conflicts(
    study: Study, spec: ParameterSpec, dry_run_rounds: Sequence[DryRunRound]
) -> Iterator[str]:
    name = study.strategy.name
    if study.strategy.visibility != "totals":
        yield f"privacy.client_level_dp adds noise to one sum, and {name} has to see {study.strategy.visibility}; use a strategy that sees totals"
    unprotected_keys = {
        key
        for dry_run_round in dry_run_rounds
        for key in (*dry_run_round.update.averaged, *dry_run_round.update.summed)
    } - {"delta", "stats", "train_loss"}
    if unprotected_keys:
        yield f"{name} also sends {', '.join(sorted(unprotected_keys))}, to which privacy.client_level_dp adds no noise; use fedavg, fedprox or fedopt"
    if spec.num_norm_stats:
        yield "BatchNorm's statistics would leave the coordinator without noise; set model.norm = 'group'"
    if study.weighting != "equal":
        yield "privacy.client_level_dp needs equal weights of all sites; set weighting = 'equal'"
    if study.aggregation.name != "mean":
        yield f"aggregation = {study.aggregation.name!r} and privacy.client_level_dp both decide how updates are aggregated; use aggregation = 'mean'"
    if study.round.late_updates == "keep":
        yield "with round.late_updates = 'keep' a site could appear twice in one sum; privacy.client_level_dp needs 'drop'"


def _secure_aggregation_conflicts(study: Study, num_clients: int) -> Iterator[str]:
    name, strategy = study.strategy.name, study.strategy
    if strategy.visibility != "totals":
        explanation = (
            "the mean of a cluster of one site is that site's update"
            if strategy.visibility == "groups"
            else "single updates"
        )
        yield f"{name} has to see {strategy.visibility} ({explanation}), which secure aggregation hides; use a strategy that sees totals, or leave privacy.secure_aggregation out"
    if study.aggregation.visibility != "totals":
        yield f"aggregation = {study.aggregation.name!r} compares single updates, which secure aggregation hides; use aggregation = 'mean'"
    if study.uplink_codecs:
        yield "secure aggregation sends integers modulo 2^k, which no other codec can compress; set compression.uplink = []"
    if study.round.late_updates == "keep":
        yield "a late reply carries the masks of its own round; privacy.secure_aggregation needs round.late_updates = 'drop'"
    if study.weighting == "inverse":
        yield "privacy.secure_aggregation supports the weightings 'examples' and 'equal'"
    if num_clients < MIN_SECURE_AGGREGATION_CLIENTS:
        yield f"secure aggregation of {num_clients} sites hides no update from the other; sample at least {MIN_SECURE_AGGREGATION_CLIENTS} a round"
