"""Validation profiles: a site's sums, computed by hand too, and what the coordinator derives from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.probe.feature_names import MAX_FEATURES, QUALITY_MEASURES
from models.probe.feature_probe import (
    FeatureProbe,
    measure_image_quality,
    random_projection,
    split_head,
)
from pipeline.coordinator.validation_profile import (
    between_site_variance,
    fit_temperature,
    fit_whitening,
    read_profile,
    sites_by_model,
    split_into_disjoint_batches,
)
from pipeline.protocol.tasks import TEMPERATURES, FeatureWhitening, ProfileJob, ProfileSums
from sites.training.base import TrainRequest
from sites.training.sequential import SequentialTrainer


def profile_at_site(context, site: str, **job) -> ProfileSums:
    state = context.spec.read_state(context.make_model())
    (profile,) = SequentialTrainer(context).run(
        [TrainRequest(site, 1, 0, ProfileJob(state.weights, "val", state.norm_stats, **job))]
    )
    assert isinstance(profile, ProfileSums)
    return profile


def test_profile_sums_of_one_site(make_trainer_context):
    context = make_trainer_context(net="cnn")
    profile = profile_at_site(context, "a")
    rows = context.split_indices["a"].val
    x, y, module = context.pool.inputs(rows), context.pool.labels(rows), context.make_model().eval()
    with torch.inference_mode():
        logits = module(x)
    assert float(profile.n) == len(rows)
    middle = len(TEMPERATURES) // 2
    assert TEMPERATURES[middle] == 1
    for position, t in ((middle, 1.0), (0, TEMPERATURES[0])):
        expected = torch.nn.functional.cross_entropy(logits / t, y, reduction="sum")
        assert float(profile.nll_by_temperature[position]) == pytest.approx(float(expected), rel=1e-5)
    assert int(profile.confusion.sum()) == int(profile.scores[0].sum()) == len(rows)
    assert profile.image_measures.sum(1).tolist() == [len(rows)] * len(QUALITY_MEASURES)
    assert not profile.distances.any()


def test_profile_sums_add_up_over_sites(make_trainer_context):
    context = make_trainer_context(net="cnn")
    both = profile_at_site(context, "a") + profile_at_site(context, "b")
    rows = torch.cat([context.split_indices[s].val for s in "ab"])
    probe = FeatureProbe(context.make_model(), (1, 28, 28))
    with torch.inference_mode():
        features = probe(context.pool.inputs(rows))[1].double()
    y = context.pool.labels(rows)
    for c in range(3):
        assert torch.allclose(both.feature_sums[c], features[y == c].sum(0), atol=1e-4)
    assert torch.allclose(both.feature_product_sums, features.T @ features, rtol=1e-4, atol=1e-4)


def test_profile_feature_whitening(make_trainer_context):
    context = make_trainer_context({"a": 400}, net="cnn")
    first = profile_at_site(context, "a")
    whitening = fit_whitening(first)
    with torch.inference_mode():
        features = FeatureProbe(context.make_model(), (1, 28, 28))(context.pool.inputs(context.split_indices["a"].val))[
            1
        ].double()
    y = context.pool.labels(context.split_indices["a"].val)
    whitened = (features - whitening.mean) @ whitening.whitening.double()
    assert whitened.mean(0).abs().max() < 1e-3
    for c in range(3):
        assert torch.allclose(whitened[y == c].mean(0), whitening.class_centers[c].double(), atol=1e-2)
    residual = whitened - whitening.class_centers.double()[y]
    covariance = residual.T @ residual / len(whitened)
    assert float(covariance.diagonal().max()) < 1.01  # below 1 for features that hardly vary
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < 0.01
    second = profile_at_site(context, "a", whitening=whitening)
    assert second.distances.sum(1).tolist() == torch.bincount(y, minlength=3).tolist()


def test_fit_temperature_finds_the_minimum_of_a_parabola():
    grid = np.log(np.array(TEMPERATURES))
    for best in (0.3, 1.0, 2.7):
        loss = torch.from_numpy((grid - np.log(best)) ** 2)
        assert fit_temperature(loss) == pytest.approx(best, rel=1e-6)
    assert fit_temperature(torch.arange(len(TEMPERATURES)).double()) == TEMPERATURES[0]


def test_feature_probe_tta_is_invariant_to_rotation_and_flip(make_trainer_context):
    context = make_trainer_context(net="cnn")
    probe = FeatureProbe(context.make_model(), (1, 28, 28))
    x = context.pool.x[:5]
    with torch.inference_mode():
        a, b = probe.forward_tta(x, 8), probe.forward_tta(torch.rot90(x, 1, (2, 3)).flip(3), 8)
    assert torch.allclose(a[0], b[0], atol=1e-5)
    assert torch.allclose(a[1], b[1], atol=1e-4)


def test_profile_temperature_changes_scores_and_not_the_confusion_matrix(make_trainer_context):
    context = make_trainer_context(net="cnn")
    uncalibrated = profile_at_site(context, "a")
    num_features = uncalibrated.feature_sums.shape[1]
    scaled = profile_at_site(
        context,
        "a",
        whitening=FeatureWhitening(
            torch.zeros(num_features), torch.eye(num_features), torch.zeros(3, num_features), 0.25
        ),
    )
    assert torch.equal(uncalibrated.confusion, scaled.confusion)
    assert not torch.equal(uncalibrated.scores, scaled.scores)


def test_profile_of_an_empty_split_is_zero(make_trainer_context):
    context = make_trainer_context(net="cnn")
    without_val = replace(context.split_indices["a"], val=torch.zeros(0, dtype=torch.int64))
    profile = profile_at_site(replace(context, split_indices={"a": without_val}), "a")
    assert float(profile.n) == 0
    assert not profile.nll_by_temperature.any()


def test_measure_image_quality():
    flat = torch.full((1, 3, 32, 32), 0.8)
    cell = flat.clone()
    cell[:, :, 10:22, 10:22] = 0.4
    noisy = (cell + 0.2 * torch.randn(cell.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    red = cell * torch.tensor([1.0, 0.6, 0.6]).view(1, 3, 1, 1)
    names = list(QUALITY_MEASURES)
    measures_by_image = {
        name: dict(zip(names, measure_image_quality(x)[0].tolist(), strict=True))
        for name, x in {"flat": flat, "cell": cell, "noisy": noisy, "red": red, "dark": cell * 0.3}.items()
    }
    assert (
        measures_by_image["dark"]["brightness"]
        < measures_by_image["cell"]["brightness"]
        < measures_by_image["flat"]["brightness"]
    )
    assert measures_by_image["flat"]["contrast"] == pytest.approx(0, abs=1e-6)
    assert measures_by_image["noisy"]["sharpness"] > measures_by_image["cell"]["sharpness"]
    assert measures_by_image["red"]["color"] > measures_by_image["cell"]["color"]
    assert (
        measures_by_image["cell"]["center_darkness"]
        > measures_by_image["flat"]["center_darkness"]
        == pytest.approx(0.5)
    )


def test_split_head_splits_before_the_last_dense_layer():
    from models.networks.cnn import CNN72

    module = CNN72().init_network((3, 48, 48), 2, 0)
    body, head = split_head(module)
    x = torch.rand(2, 3, 48, 48)
    with torch.inference_mode():
        assert torch.allclose(head(body(x)), module.eval()(x), atol=1e-6)
        assert body(x).shape == (2, 128)
    assert random_projection(128).shape == (128, MAX_FEATURES)
    assert torch.equal(random_projection(128), random_projection(128))
    assert torch.equal(random_projection(5), torch.eye(5))


def test_feature_probe_network_without_a_dense_head():
    class DenseLayerBeforeTanh(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(12, 4)

        def forward(self, x):
            return self.dense(x.flatten(1)).tanh() * 3

    probe = FeatureProbe(DenseLayerBeforeTanh(), (3, 2, 2))
    x = torch.rand(3, 3, 2, 2)
    with torch.inference_mode():
        assert torch.equal(probe.body(x), probe.head(probe.body(x)))


def test_sites_by_model_and_disjoint_batches():
    sites = ("a", "b", "c")
    models = dict.fromkeys(("global", "cluster/0", "cluster/0.1", "site/b"))
    members = sites_by_model(models, {"a": "0", "b": "0.1", "c": "1"}, sites)
    assert members == {"global": sites, "cluster/0": ("a", "b"), "cluster/0.1": ("b",), "site/b": ("b",)}
    batches = [set(batch) for batch in split_into_disjoint_batches(members)]
    assert batches == [{"global"}, {"cluster/0"}, {"cluster/0.1"}, {"site/b"}]
    assert [set(b) for b in split_into_disjoint_batches({"cluster/0": ("a",), "cluster/1": ("b", "c")})] == [
        {"cluster/0", "cluster/1"}
    ]


def make_profile(own: list[int], others: list[int]) -> ProfileSums:
    """Scores in two bins (low, high): counts of one class and of the other classes. All other sums are zero."""
    fields = {name: torch.zeros(()) for name in ProfileSums.__dataclass_fields__}
    return ProfileSums(**fields | {"scores": torch.tensor([[others, own]])})


def test_between_site_variance_by_hand():
    """High scores: 10 of 20 and 2 of 20. (20 (0.2^2 + 0.2^2) - 0.3 x 0.7) / (40 - 800/40): between sites minus chance."""
    variance = between_site_variance([make_profile([10, 10], [50, 50]), make_profile([18, 2], [50, 50])])
    assert variance.shape == (1, 2, 2)
    assert float(variance[0, 1, 1]) == pytest.approx((1.6 - 0.21) / 20)
    assert float(variance[0, 1, 0]) == 0  # every score is at least the lowest threshold
    assert float(variance[0, 0, 1]) == 0  # the other classes score alike at both sites
    one_site = [make_profile([18, 2], [50, 50])]
    assert not between_site_variance(one_site).any()
    assert not between_site_variance([make_profile([18, 2], [50, 50]), make_profile([0, 0], [9, 9])])[0, 1].any()


def test_between_site_variance_removes_sampling_variance():
    rng = np.random.default_rng(1)
    size, equal_sites = 200, []
    for _ in range(300):
        high = rng.binomial(size, 0.3, 5)
        equal_sites.append(
            float(between_site_variance([make_profile([size - int(h), int(h)], [1, 1]) for h in high])[0, 1, 1])
        )
    varying_sites = []
    for _ in range(300):
        high = rng.binomial(size, rng.normal(0.3, 0.1, 5).clip(0, 1))
        varying_sites.append(
            float(between_site_variance([make_profile([size - int(h), int(h)], [1, 1]) for h in high])[0, 1, 1])
        )
    assert np.mean(equal_sites) < 0.001
    assert np.mean(varying_sites) == pytest.approx(0.01, rel=0.15)


def test_two_moons_run_has_no_profile(run_study, moons, tmp_path):
    folder, _ = run_study(moons(rounds=1))
    assert read_profile(folder.path, "global") is None
    assert not (folder.path / "profile.safetensors").exists()
