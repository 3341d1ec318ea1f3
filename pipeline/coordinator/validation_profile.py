"""The validation profile of an exported model: sums over the sites' validation images, collected when a run is over.

Two passes: the sums of the first give the whitening of the features and the temperature; with these the second pass
collects histograms of scores and distances. RUN/profile.safetensors keeps them for `hemofed export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.core.errors import RunFolderError
from pipeline.core.parameters import ModelState, NamedTensors
from pipeline.core.tensor_io import load_tensors, save_tensors
from pipeline.protocol.messages import RoundPolicy, SiteId
from pipeline.protocol.tasks import TEMPERATURES, FeatureWhitening, ProfileJob, ProfileSums, whitening_from_dict

if TYPE_CHECKING:
    from pipeline.coordinator.round_loop import RoundLoop, RunState
    from pipeline.study.schema import Study

PROFILE_FILE_NAME = "profile.safetensors"
# of the mean variance: nearly constant features must not dominate the out-of-distribution distance
RIDGE_FRACTION = 1e-3
SitesByModel = Mapping[str, tuple[SiteId, ...]]


@dataclass(frozen=True)
class ModelProfile:
    """What a bundle knows of the validation images."""

    sums: ProfileSums  # after whitening, summed over sites
    whitening: FeatureWhitening
    # (C, 2, PROFILE_SCORE_BINS): variance between sites of the fraction of [others, class] with at least this score
    between_site_variance: Tensor


def write_profile(round_loop: RoundLoop, state: Any, run_state: RunState, shape: tuple[int, ...]) -> None:
    """Profiles every model that can be exported; only for image data."""
    study = round_loop.study
    if not study.evaluation.validation_profile or len(shape) != 3:
        return
    profiles: dict[str, ModelProfile] = {}
    num_views = num_tta_views(study, shape)
    models = study.strategy.global_models(state)
    if study.evaluation.evaluate_at == "coordinator":
        profiles |= {
            name: profile
            for name, model in models.items()
            if (profile := _profile_on_coordinator(round_loop, model, run_state, num_views))
        }
    else:
        for model_sites in split_into_disjoint_batches(
            sites_by_model(models, study.strategy.cluster_assignment(state), round_loop.sites)
        ):
            payloads = {
                s: _profile_payload(models[name], num_views) for name, sites in model_sites.items() for s in sites
            }
            profiles |= _profile_models(round_loop, "profile", model_sites, payloads, run_state)
        if study.strategy.personalized or study.strategy.result_in_client_states:
            personal_models = {f"site/{site}": (site,) for site in round_loop.sites if f"site/{site}" not in profiles}
            payloads = {
                site: {**study.strategy.eval_payload(state, site), "tta_views": torch.tensor(num_views)}
                for (site,) in personal_models.values()
            }
            profiles |= _profile_models(round_loop, "profile_personal", personal_models, payloads, run_state)
    if profiles:
        tensors = {
            f"{name}:{key}": value
            for name, model_profile in profiles.items()
            for key, value in {
                **model_profile.sums.to_dict(),
                **model_profile.whitening.to_dict(),
                "between": model_profile.between_site_variance,
            }.items()
        }
        save_tensors(round_loop.folder.path / PROFILE_FILE_NAME, {"models": list(profiles), "split": "val"}, tensors)


def read_profile(path: Path, name: str) -> ModelProfile | None:
    """None if the run has no profile of this model: switched off, or no validation images."""
    if not (path / PROFILE_FILE_NAME).exists():
        return None
    header, tensors = load_tensors(path / PROFILE_FILE_NAME)
    if name not in header["models"]:
        return None
    model_tensors = {key.rpartition(":")[2]: value for key, value in tensors.items() if key.rpartition(":")[0] == name}
    try:
        return ModelProfile(
            ProfileSums.from_dict(model_tensors), whitening_from_dict(model_tensors), model_tensors["between"]
        )
    except KeyError as error:
        raise RunFolderError(
            f"{path / PROFILE_FILE_NAME} lacks {error}; it is damaged or of another version: run the study again"
        ) from error


def sites_by_model(
    models: Mapping[str, ModelState], clusters: Mapping[SiteId, str], sites: Sequence[SiteId]
) -> SitesByModel:
    """The sites whose images profile a model: one site, the sites of a cluster and the clusters below it, or all."""
    model_sites: dict[str, tuple[SiteId, ...]] = {}
    for name in models:
        kind, _, member_name = name.partition("/")
        if kind == "site":
            model_sites[name] = tuple(s for s in sites if s == member_name)
        elif kind == "cluster":
            model_sites[name] = tuple(s for s in sites if f"{clusters.get(s, '')}.".startswith(f"{member_name}."))
        else:
            model_sites[name] = tuple(sites)
    return {name: members for name, members in model_sites.items() if members}


def split_into_disjoint_batches(model_sites: SitesByModel) -> Iterator[SitesByModel]:
    """Batches of models in which every site has at most one model, so that one request can profile a batch."""
    remaining = dict(model_sites)
    while remaining:
        batch: dict[str, tuple[SiteId, ...]] = {}
        busy_sites: set[SiteId] = set()
        for name, sites in remaining.items():
            if not busy_sites & set(sites):
                batch[name] = sites
                busy_sites |= set(sites)
        yield batch
        remaining = {name: sites for name, sites in remaining.items() if name not in batch}


def fit_whitening(sums: ProfileSums) -> FeatureWhitening:
    """Within-class covariance around the class means, so that a rare class does not count as out of distribution."""
    class_counts = sums.confusion.sum(1).double()  # images of each class
    num_images = float(class_counts.sum())
    mean = sums.feature_sums.sum(0) / num_images
    class_means = torch.where(class_counts[:, None] > 0, sums.feature_sums / class_counts.clamp(min=1)[:, None], mean)
    covariance = (
        sums.feature_product_sums / num_images - (class_means * (class_counts / num_images)[:, None]).T @ class_means
    )
    scale = float(covariance.diagonal().mean())
    eigenvalues, eigenvectors = torch.linalg.eigh(
        covariance + max(RIDGE_FRACTION * scale, 1e-12) * torch.eye(len(mean), dtype=torch.float64)
    )
    whiten = eigenvectors / eigenvalues.clamp(min=1e-12).sqrt()
    centers = (class_means - mean) @ whiten
    return FeatureWhitening(mean.float(), whiten.float(), centers.float(), fit_temperature(sums.nll_by_temperature))


def fit_temperature(nll_by_temperature: Tensor) -> float:
    """The temperature of least loss: the vertex of a parabola through the best one and its neighbours, in log scale."""
    best_index = int(nll_by_temperature.argmin())
    if best_index in (0, len(nll_by_temperature) - 1):
        return float(TEMPERATURES[best_index])
    low, center, high = nll_by_temperature[best_index - 1 : best_index + 2].double().tolist()
    curvature = low - 2 * center + high
    shift = 0.5 * (low - high) / curvature if curvature > 0 else 0.0
    return float(TEMPERATURES[best_index] * (TEMPERATURES[1] / TEMPERATURES[0]) ** shift)


def num_tta_views(study: Study, shape: tuple[int, ...]) -> int:
    return study.augmentation.num_tta_views if shape[1] == shape[2] else 1


def _profile_payload(model: ModelState, num_views: int) -> NamedTensors:
    return {"weights": model.weights, "stats": model.norm_stats, "tta_views": torch.tensor(num_views)}


def _profile_models(
    round_loop: RoundLoop,
    task: str,
    model_sites: SitesByModel,
    payloads: Mapping[SiteId, NamedTensors],
    run_state: RunState,
) -> dict[str, ModelProfile]:
    first_sums = _collect_sums(round_loop, task, model_sites, payloads, run_state)
    whitenings = {name: fit_whitening(_sum_profiles(site_sums)) for name, site_sums in first_sums.items()}
    whitening_payloads = {
        s: {**payloads[s], **whitenings[name].to_dict()} for name in whitenings for s in model_sites[name]
    }
    second_sums = _collect_sums(
        round_loop, task, {name: model_sites[name] for name in whitenings}, whitening_payloads, run_state
    )
    return {
        name: ModelProfile(_sum_profiles(site_sums), whitenings[name], between_site_variance(site_sums))
        for name, site_sums in second_sums.items()
    }


def _collect_sums(
    round_loop: RoundLoop,
    task: str,
    model_sites: SitesByModel,
    payloads: Mapping[SiteId, NamedTensors],
    run_state: RunState,
) -> dict[str, list[ProfileSums]]:
    """Each site's sums by model, without models that have no images."""
    if not payloads:
        return {}
    replies = round_loop.create_request(task, run_state, RoundPolicy(quorum=0), ("val",)).collect(payloads)
    by_site = {reply.site: ProfileSums.from_dict(reply.update.summed) for reply in replies}
    sums_by_model = {}
    for name, sites in model_sites.items():
        site_sums = [by_site[site] for site in sites if site in by_site]
        if any(float(one_site.n) for one_site in site_sums):
            sums_by_model[name] = site_sums
    return sums_by_model


def _sum_profiles(site_sums: Sequence[ProfileSums]) -> ProfileSums:
    return sum(site_sums[1:], site_sums[0])


def between_site_variance(site_sums: Sequence[ProfileSums]) -> Tensor:
    """The between-site variance component of an analysis of variance, beyond binomial noise; 0 for a single site.

    A slide comes from one site, so a pooled rate is less certain for it than its count suggests.
    """
    scores = torch.stack([one_site.scores for one_site in site_sums]).double()  # (S, C, 2, B)
    num_examples = scores.sum(3, keepdim=True)
    num_reached = scores.flip(3).cumsum(3).flip(3)  # at or above this bin's lower edge
    total_examples, num_sites = num_examples.sum(0), (num_examples > 0).sum(0)
    pooled_rate = num_reached.sum(0) / total_examples.clamp(min=1)
    between_squares = (num_examples * (num_reached / num_examples.clamp(min=1) - pooled_rate) ** 2).sum(0)
    effective_size = total_examples - (num_examples**2).sum(0) / total_examples.clamp(min=1)
    variance = (
        between_squares - (num_sites - 1).clamp(min=0) * pooled_rate * (1 - pooled_rate)
    ) / effective_size.clamp(min=1)
    return torch.where(num_sites > 1, variance.clamp(min=0), 0.0).float()


def _profile_on_coordinator(
    round_loop: RoundLoop, model: ModelState, run_state: RunState, num_views: int
) -> ModelProfile | None:
    """Profiles a model on the coordinator's validation images."""

    def compute_sums(whitening: FeatureWhitening | None) -> ProfileSums:
        job = ProfileJob(model.weights, "val", model.norm_stats, whitening, num_views)
        (result,) = round_loop.run_jobs([job], run_state.round)
        assert isinstance(result, ProfileSums)
        return result

    first_sums = compute_sums(None)
    if not float(first_sums.n):
        return None
    whitening = fit_whitening(first_sums)
    return ModelProfile(second_sums := compute_sums(whitening), whitening, between_site_variance([second_sums]))
