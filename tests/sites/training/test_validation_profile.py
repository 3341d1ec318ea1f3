"""A profile against plain sums over the same images, and from sites' sums to what a bundle says."""

from __future__ import annotations

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


def profiled(bench, site: str, **job) -> ProfileSums:
    weights = bench.spec.read(bench.make())
    (found,) = SequentialTrainer(bench).run(
        [TrainRequest(site, 1, 0, ProfileJob(weights.weights, "val", weights.stats, **job))]
    )
    assert isinstance(found, ProfileSums)
    return found


def test_sums_are_those_of_the_images(bench):
    made = bench(net="cnn")
    seen = profiled(made, "a")
    rows = made.examples["a"].val
    x, y, module = made.pool.inputs(rows), made.pool.labels(rows), made.make().eval()
    with torch.inference_mode():
        logits = module(x)
    assert float(seen.n) == len(rows)
    middle = len(TEMPERATURES) // 2
    assert TEMPERATURES[middle] == 1
    for place, t in ((middle, 1.0), (0, TEMPERATURES[0])):
        want = torch.nn.functional.cross_entropy(logits / t, y, reduction="sum")
        assert float(seen.nll_by_temperature[place]) == pytest.approx(float(want), rel=1e-5)
    assert int(seen.confusion.sum()) == int(seen.scores[0].sum()) == len(rows)
    assert seen.image_measures.sum(1).tolist() == [len(rows)] * len(QUALITY_MEASURES)
    assert not seen.distances.any()


def test_sums_over_sites_are_sums_over_their_images(bench):
    made = bench(net="cnn")
    both = profiled(made, "a") + profiled(made, "b")
    rows = torch.cat([made.examples[s].val for s in "ab"])
    eye = FeatureProbe(made.make(), (1, 28, 28))
    with torch.inference_mode():
        traits = eye(made.pool.inputs(rows))[1].double()
    y = made.pool.labels(rows)
    for c in range(3):
        assert torch.allclose(both.feature_sums[c], traits[y == c].sum(0), atol=1e-4)
    assert torch.allclose(both.feature_product_sums, traits.T @ traits, rtol=1e-4, atol=1e-4)


def test_a_lens_whitens(bench):
    made = bench({"a": 400}, net="cnn")
    first = profiled(made, "a")
    lens = fit_whitening(first)
    with torch.inference_mode():
        traits = FeatureProbe(made.make(), (1, 28, 28))(made.pool.inputs(made.examples["a"].val))[1].double()
    y = made.pool.labels(made.examples["a"].val)
    white = (traits - lens.mean) @ lens.whitening.double()
    assert white.mean(0).abs().max() < 1e-3
    for c in range(3):
        assert torch.allclose(white[y == c].mean(0), lens.class_centers[c].double(), atol=1e-2)
    about = white - lens.class_centers.double()[y]
    spread = about.T @ about / len(white)
    assert float(spread.diagonal().max()) < 1.01  # less where a feature hardly varies
    assert (spread - torch.diag(spread.diagonal())).abs().max() < 0.01
    second = profiled(made, "a", lens=lens)
    assert second.distances.sum(1).tolist() == torch.bincount(y, minlength=3).tolist()


def test_temperature_is_the_parabolas():
    grid = np.log(np.array(TEMPERATURES))
    for best in (0.3, 1.0, 2.7):
        loss = torch.from_numpy((grid - np.log(best)) ** 2)
        assert fit_temperature(loss) == pytest.approx(best, rel=1e-6)
    assert fit_temperature(torch.arange(len(TEMPERATURES)).double()) == TEMPERATURES[0]


def test_eight_views_do_not_depend_on_how_images_lie(bench):
    made = bench(net="cnn")
    eye = FeatureProbe(made.make(), (1, 28, 28))
    x = made.pool.x[:5]
    with torch.inference_mode():
        a, b = eye.forward_tta(x, 8), eye.forward_tta(torch.rot90(x, 1, (2, 3)).flip(3), 8)
    assert torch.allclose(a[0], b[0], atol=1e-5)
    assert torch.allclose(a[1], b[1], atol=1e-4)


def test_a_temperature_changes_scores_not_classes(bench):
    made = bench(net="cnn")
    plain = profiled(made, "a")
    width = plain.feature_sums.shape[1]
    cold = profiled(made, "a", lens=FeatureWhitening(torch.zeros(width), torch.eye(width), torch.zeros(3, width), 0.25))
    assert torch.equal(plain.confusion, cold.confusion)
    assert not torch.equal(plain.scores, cold.scores)


def test_no_images_no_profile(bench):
    made = bench(net="cnn")
    empty = {"a": type(made.examples["a"])(made.examples["a"].train, torch.zeros(0, dtype=torch.int64), torch.zeros(0))}
    from dataclasses import replace

    seen = profiled(replace(made, examples=empty), "a")
    assert float(seen.n) == 0
    assert not seen.nll_by_temperature.any()


def test_measures_say_what_they_are_called():
    flat = torch.full((1, 3, 32, 32), 0.8)
    cell = flat.clone()
    cell[:, :, 10:22, 10:22] = 0.4
    noisy = (cell + 0.2 * torch.randn(cell.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    red = cell * torch.tensor([1.0, 0.6, 0.6]).view(1, 3, 1, 1)
    names = list(QUALITY_MEASURES)
    by = {
        name: dict(zip(names, measure_image_quality(x)[0].tolist(), strict=True))
        for name, x in {"flat": flat, "cell": cell, "noisy": noisy, "red": red, "dark": cell * 0.3}.items()
    }
    assert by["dark"]["brightness"] < by["cell"]["brightness"] < by["flat"]["brightness"]
    assert by["flat"]["contrast"] == pytest.approx(0, abs=1e-6)
    assert by["noisy"]["sharpness"] > by["cell"]["sharpness"]
    assert by["red"]["colour"] > by["cell"]["colour"]
    assert by["cell"]["middle"] > by["flat"]["middle"] == pytest.approx(0.5)


def test_networks_are_parted_before_their_last_dense_layer():
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


def test_a_network_that_does_not_end_dense_is_its_own_body():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(12, 4)

        def forward(self, x):
            return self.dense(x.flatten(1)).tanh() * 3

    eye = FeatureProbe(Late(), (3, 2, 2))
    x = torch.rand(3, 3, 2, 2)
    with torch.inference_mode():
        assert torch.equal(eye.body(x), eye.head(eye.body(x)))


def test_whose_images_a_model_is_for():
    sites = ("a", "b", "c")
    models = dict.fromkeys(("global", "group/0", "group/0.1", "site/b"))
    members = sites_by_model(models, {"a": "0", "b": "0.1", "c": "1"}, sites)
    assert members == {"global": sites, "group/0": ("a", "b"), "group/0.1": ("b",), "site/b": ("b",)}
    batches = [set(batch) for batch in split_into_disjoint_batches(members)]
    assert batches == [{"global"}, {"group/0"}, {"group/0.1"}, {"site/b"}]
    assert [set(b) for b in split_into_disjoint_batches({"group/0": ("a",), "group/1": ("b", "c")})] == [
        {"group/0", "group/1"}
    ]


def scored(own: list[int], others: list[int]) -> ProfileSums:
    """(low, high) counts of one class and of the others; all else is nothing."""
    parts = {name: torch.zeros(()) for name in ProfileSums.__dataclass_fields__}
    return ProfileSums(**parts | {"scores": torch.tensor([[others, own]])})


def test_variance_between_sites_by_hand():
    """10 of 20 and 2 of 20 score high: 20 (0.2^2 + 0.2^2) = 1.6 apart, of which 0.3 x 0.7 is chance, over 40 - 800/40 = 20."""
    found = between_site_variance([scored([10, 10], [50, 50]), scored([18, 2], [50, 50])])
    assert found.shape == (1, 2, 2)
    assert float(found[0, 1, 1]) == pytest.approx((1.6 - 0.21) / 20)
    assert float(found[0, 1, 0]) == 0  # all score at least the least
    assert float(found[0, 0, 1]) == 0  # alike
    assert not between_site_variance([scored([18, 2], [50, 50])]).any()  # one site tells nothing of others
    assert not between_site_variance([scored([18, 2], [50, 50]), scored([0, 0], [9, 9])])[0, 1].any()


def test_sites_that_differ_by_chance_alone_hardly_differ():
    rng = np.random.default_rng(1)
    sizes, apart = 200, []
    for _ in range(300):
        high = rng.binomial(sizes, 0.3, 5)
        apart.append(float(between_site_variance([scored([sizes - int(h), int(h)], [1, 1]) for h in high])[0, 1, 1]))
    drawn = []
    for _ in range(300):
        high = rng.binomial(sizes, rng.normal(0.3, 0.1, 5).clip(0, 1))
        drawn.append(float(between_site_variance([scored([sizes - int(h), int(h)], [1, 1]) for h in high])[0, 1, 1]))
    assert np.mean(apart) < 0.001
    assert np.mean(drawn) == pytest.approx(0.01, rel=0.15)


def test_points_are_not_profiled(go, moons, tmp_path):
    folder, _ = go(moons(rounds=1))
    assert read_profile(folder.path, "global") is None
    assert not (folder.path / "profile.safetensors").exists()
