"""What does not go with a study's `[privacy]`, each with its cure. Said when the study is read."""

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

MIN_SECURE_AGGREGATION_CLIENTS = 3  # with two, each knows the other's


def find_privacy_conflicts(
    study: Study, spec: ParameterSpec, dataset: FederatedDataset, dry_run_rounds: Sequence[DryRunRound], num_sites: int
) -> Iterator[str]:
    """`sites`: of the study, of which `people` may be one."""
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
        yield f"{study.strategy.name} trains in one place, where there is no site to protect anybody; use a federated strategy"
    if spec.num_norm_stats:
        yield "BatchNorm mixes the examples of a batch, so no patient's part can be clipped, and its statistics would leave the site; set model.norm = 'group'"
    if study.trainer == "stacked":
        yield "trainer = 'stacked' has no privacy mechanism; use 'auto'"
    if local.class_balance == "sample":
        yield "local.class_balance = 'sample' draws by the site's own classes, where privacy draws patients alike; use 'root' with public.data, or 'none'"
    elif local.class_balance != "none" and not len(dataset.public_indices):
        yield f"local.class_balance = {local.class_balance!r} would weigh by how many the site has of each class, which tells of its patients; give public.data, from which the weights are then taken, or use 'none'"
    if study.normalization.name not in ("none", "image"):
        yield f"normalise = {study.normalization.name!r} measures all of a site's images together, so that one patient changes everybody's; use 'image' or 'none'"
    if "train" in study.evaluation.splits and study.evaluation.evaluate_at != "coordinator":
        yield "evaluation.splits = 'train' would send scores of the very patients who are protected; watch 'val'"
    yield from _privacy_unit_conflicts(dp_sgd, dataset)
    for key in ("epsilon", "budget"):
        values = getattr(dp_sgd, key)
        if isinstance(values, tuple) and len(values) != num_sites:
            yield f"privacy.dp_sgd.{key} has {len(values)} values for {num_sites} sites; give one each, or one for all"


def _privacy_unit_conflicts(dp_sgd: DpSgdConfig, dataset: FederatedDataset) -> Iterator[str]:
    if dp_sgd.privacy_unit == "example":
        return
    if dataset.privacy_unit is None:
        yield "these data do not say whose each example is; give them a patient, slide or group (docs/data.md), or ask for privacy.dp_sgd.privacy_unit = 'example', which protects single images, not patients"
        return
    if dp_sgd.privacy_unit not in ("auto", dataset.privacy_unit):
        yield f"privacy.dp_sgd.privacy_unit = {dp_sgd.privacy_unit!r}, but these data have {dataset.privacy_unit!r}; use 'auto', or 'example' for single images"
    if any(dataset.split_indices[site].examples_per_epoch is not None for site in dataset.sites):
        yield "a partition that draws each epoch afresh gives every site everybody's examples; use 'iid', 'quantity' or 'key'"
    num_shared = _count_shared_units(dataset)
    if num_shared:
        yield f"{num_shared} of the {dataset.privacy_unit}s have training examples at more than one site, each of which would spend on them; use partition 'key', 'iid' or 'quantity', which keep a {dataset.privacy_unit} whole"


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
        yield f"{strategy_name}.gamma looks at the whole local gradient after every epoch, without noise; leave strategy.gamma out"
    if any(isinstance(job, TrainJob) and job.maml_lr for job in jobs):
        yield f"{strategy_name} takes a gradient at a point that other patients' gradients led to, which has no privacy mechanism; use fedavg with finetune, or ditto"
    if any(isinstance(job, GradientJob) for job in jobs):
        yield f"{strategy_name} sends whole gradients, which have no privacy mechanism here; use fedavg with local.steps = 1"
    if any(isinstance(job, EvaluateJob) for job in jobs):
        yield f"{strategy_name} decides by losses on the patients' examples, which nothing protects; use a strategy that only trains, such as fedavg, fedprox or ditto"


def _client_level_dp_conflicts(
    study: Study, spec: ParameterSpec, dry_run_rounds: Sequence[DryRunRound]
) -> Iterator[str]:
    name = study.strategy.name
    if study.strategy.visibility != "totals":
        yield f"privacy.client_level_dp noises one sum, and {name} looks at {study.strategy.visibility}; use a strategy that sees totals"
    unprotected_keys = {
        key
        for dry_run_round in dry_run_rounds
        for key in (*dry_run_round.update.averaged, *dry_run_round.update.summed)
    } - {"delta", "stats", "train_loss"}
    if unprotected_keys:
        yield f"{name} also sends {', '.join(sorted(unprotected_keys))}, for which privacy.client_level_dp has no noise; use fedavg, fedprox or fedopt"
    if spec.num_norm_stats:
        yield "BatchNorm's statistics would leave the coordinator without noise; set model.norm = 'group'"
    if study.weighting != "equal":
        yield "privacy.client_level_dp lets all sites count alike; set weighting = 'equal'"
    if study.aggregation.name != "mean":
        yield f"combine = {study.aggregation.name!r} and privacy.client_level_dp both decide how updates are added up; use combine = 'mean'"
    if study.round.late_updates == "keep":
        yield "with round.late_updates = 'keep' a site could be twice in one sum; privacy.client_level_dp needs 'drop'"


def _secure_aggregation_conflicts(study: Study, num_clients: int) -> Iterator[str]:
    name, strategy = study.strategy.name, study.strategy
    if strategy.visibility != "totals":
        explanation = (
            "a group of one site is that site's update" if strategy.visibility == "groups" else "single updates"
        )
        yield f"{name} has to see {strategy.visibility} ({explanation}), which a secure sum hides; use a strategy that sees totals, or leave privacy.secure_aggregation out"
    if study.aggregation.visibility != "totals":
        yield f"combine = {study.aggregation.name!r} compares single updates, which a secure sum hides; use combine = 'mean'"
    if study.uplink_codecs:
        yield "a secure sum sends whole numbers on a ring, to which no other codec can be added; set compression.uplink = []"
    if study.round.late_updates == "keep":
        yield "an answer to an earlier turn carries that turn's masks; privacy.secure_aggregation needs round.late_updates = 'drop'"
    if study.weighting == "inverse":
        yield "privacy.secure_aggregation knows the weightings 'examples' and 'equal'"
    if num_clients < MIN_SECURE_AGGREGATION_CLIENTS:
        yield f"a secure sum of {num_clients} sites hides nothing from the others; ask at least {MIN_SECURE_AGGREGATION_CLIENTS} a round"
