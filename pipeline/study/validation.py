"""Finds all parts of a study that do not go together before the first round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.codecs.base import UNKNOWN_LAYOUT
from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ParameterSpec
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.schema import Study
from pipeline.study.validation_privacy import find_privacy_conflicts
from sites.data.base import SPLITS

if TYPE_CHECKING:
    from sites.population.simulated_sites import FederatedDataset


def validate_study(
    study: Study,
    spec: ParameterSpec,
    dataset: FederatedDataset,
    dry_run_rounds: Sequence[DryRunRound] = (),
    total_sites: int | None = None,
) -> None:
    """`dry_run_rounds`: needed with [privacy]. `total_sites`: of the study, if `dataset` holds only one of them."""
    num_sites = total_sites or len(dataset.sites)
    problems = [
        *_evaluation_conflicts(study, dataset, total_sites is not None),
        *_training_conflicts(study, spec, dataset),
        *_compression_conflicts(study, num_sampled_clients(num_sites, study.client_sampling.fraction)),
        *study.strategy.incompatibilities(study.local, spec),
        *(find_privacy_conflicts(study, spec, dataset, dry_run_rounds, num_sites) if dry_run_rounds else ()),
    ]
    if problems:
        raise IncompatibleStudyError("\n".join(problems))


def _compression_conflicts(study: Study, num_clients: int) -> Iterator[str]:
    for direction, chain in (("uplink", study.uplink_codecs), ("downlink", study.compression.downlink)):
        for before, after in pairwise(chain):
            if before.remaining_length(1000, UNKNOWN_LAYOUT) is None:
                yield f"compression.{direction}: {before.name} leaves {after.name} nothing to compress; swap them or drop one"
    for codec in study.compression.downlink:
        if not codec.supports_downlink:
            yield f"compression.downlink = {codec.name!r} would drop most of the model; use qsgd or fp16 on the downlink"
    if study.aggregation.visibility == "each" and study.strategy.bypasses_aggregation_rule:
        yield f"{study.strategy.name} sums more than the update, which aggregation = {study.aggregation.name!r} does not protect; use 'mean'"
    if study.aggregation.min_clients > num_clients:
        yield f"aggregation = {study.aggregation.name!r} needs {study.aggregation.min_clients} replies, but {num_clients} sites are sampled a round; lower aggregation.num_byzantine, or use 'median'"
    if study.aggregation.min_clients > 1 and study.strategy.visibility != "totals":
        yield f"aggregation = {study.aggregation.name!r} needs {study.aggregation.min_clients} replies at once, and {study.strategy.name} aggregates some of them at a time; use 'median'"
    if study.strategy.needs_public_probes and not (study.public.fraction or study.public.data):
        yield f"{study.strategy.name} compares networks on public examples; set public.fraction or public.data"


def _evaluation_conflicts(study: Study, dataset: FederatedDataset, is_single_site: bool) -> Iterator[str]:
    """`is_single_site`: the dataset is one site's, which need not have every class and split."""
    evaluation, classes = study.evaluation, ", ".join(dataset.classes)
    if evaluation.evaluate_at == "coordinator" and study.strategy.personalized:
        yield f"{study.strategy.name} gives every site its own model, which only the site can evaluate; set evaluation.evaluate_at to 'sites' or 'both'"
    if evaluation.patience is not None and "val" not in evaluation.splits:
        yield "evaluation.patience needs val; add it to evaluation.splits"
    if (
        evaluation.patience is not None
        and not is_single_site
        and not any(len(e.val) for e in dataset.split_indices.values())
    ):
        yield "evaluation.patience needs validation examples; set data.val > 0"
    if evaluation.target is not None and not evaluation.splits:
        yield "evaluation.target needs a split in evaluation.splits"
    if evaluation.selection_metric.startswith("positive_") and evaluation.positive_class is None:
        yield f"evaluation.selection_metric = {evaluation.selection_metric!r} needs evaluation.positive_class; classes: {classes}"
    if evaluation.positive_class is not None and evaluation.positive_class not in dataset.classes:
        yield f"evaluation.positive_class = {evaluation.positive_class!r} is not a class; classes: {classes}"
    elif evaluation.positive_class is not None and not is_single_site:
        class_index = dataset.classes.index(evaluation.positive_class)
        num_positive = {
            split: sum(dataset.class_counts(site)[split][class_index] for site in dataset.sites) for split in SPLITS
        }
        if missing_splits := [
            split for split, count in num_positive.items() if not count and _has_examples(dataset, split)
        ]:
            yield f"there is no {evaluation.positive_class} in {' and '.join(missing_splits)}, so it cannot be learnt or evaluated; choose other data, splits or evaluation.positive_class"


def _has_examples(dataset: FederatedDataset, split: str) -> bool:
    return any(len(getattr(dataset.split_indices[site], split)) for site in dataset.sites)


def _training_conflicts(study: Study, spec: ParameterSpec, dataset: FederatedDataset) -> Iterator[str]:
    local, round_config = study.local, study.round
    if study.augmentation != type(study.augmentation)() and len(dataset.shape) != 3:
        yield f"augmentation changes images, not data of shape {dataset.shape}; leave [augmentation] out"
    if study.strategy.full_batch_only and (
        study.augmentation != type(study.augmentation)() or local.class_balance == "sample"
    ):
        yield f"{study.strategy.name} takes full-batch gradients, so there is no batch to sample or augment; leave out [augmentation] and local.class_balance = 'sample'"
    if study.public.warmup_epochs and not (study.public.fraction or study.public.data):
        yield "public.warmup_epochs needs public.fraction > 0 or public.data to train on"
    if study.public.fraction and study.public.data:
        yield "public.fraction and public.data are two sources of public examples; give one of them"
    if round_config.late_updates == "keep" and (
        study.round_policy.partial_updates == "keep" or round_config.deadline is None
    ):
        yield "round.late_updates = 'keep' needs a deadline and round.partial_updates = 'drop': otherwise no update is late"
    if spec.num_norm_stats and local.batch_size != "all":
        affected_sites = [
            site for site in dataset.sites if dataset.split_indices[site].num_examples % local.batch_size == 1
        ]
        if affected_sites:
            yield f"{', '.join(affected_sites)}: the last batch is one example, for which BatchNorm has no variance; change local.batch_size"
