"""Clustering by similarity by hand: by distances of weights and by CKA of activations."""

import pytest
import torch

from pipeline.core.parameters import ModelState
from pipeline.strategies._clustered import pairwise_distances
from pipeline.strategies.similarity_clustering import SimilarityClustering
from tests.support.federation import EMPTY, FOUR_SITES, init_state, run_round, vec

SIMILARITY = SimilarityClustering(k=2, cluster_every=2)
TWO_PAIRS = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(1, 0), "d": vec(12, 0)}


def test_similarity_clustering_finds_planted_clusters_every_nth_round():
    state = run_round(SIMILARITY, init_state(SIMILARITY, 0, 0), TWO_PAIRS, weights={"d": 3})
    torch.testing.assert_close(state.weights, {"0": vec((10 + 1 + 36) / 6, 0)})  # no clustering in this round: FedAvg
    global_weights = state.weights["0"]
    state = run_round(SIMILARITY, state, TWO_PAIRS, weights={"d": 3})
    clusters = {
        frozenset(s for s in state.cluster_of if state.cluster_of[s] == c) for c in set(state.cluster_of.values())
    }
    assert clusters == {frozenset("ac"), frozenset("bd")}
    means = {state.cluster_of["a"]: vec(0.5, 0), state.cluster_of["b"]: vec((10 + 36) / 4, 0)}
    for cluster, delta in means.items():  # the weighted mean of the members' last models
        torch.testing.assert_close(state.weights[cluster], global_weights + delta)
    # Ward: pairs at their distance, two pairs at sqrt(2 * 2 * 2 / (2 + 2)) times that of their middles
    assert [round(h, 4) for _, _, h, _ in state.merges] == [1.0, 2.0, round(2**0.5 * 10.5, 4)]


def test_similarity_clustering_with_average_linkage():
    strategy = SIMILARITY.model_copy(update={"linkage": "average"})
    state = run_round(strategy, init_state(strategy, 0, 0), TWO_PAIRS)
    state = run_round(strategy, state, TWO_PAIRS)
    assert [round(h, 4) for _, _, h, _ in state.merges] == [1.0, 2.0, (10 + 12 + 9 + 11) / 4]


def test_similarity_clustering_keeps_the_model_of_an_unchanged_cluster():
    state = run_round(SIMILARITY, init_state(SIMILARITY, 0, 0), TWO_PAIRS)
    state = run_round(SIMILARITY, state, TWO_PAIRS)
    before, names = state.weights, dict(state.cluster_of)
    for _ in range(2):
        state = run_round(SIMILARITY, state, {"a": vec(1, 0), "b": vec(0, 0), "c": vec(1, 0), "d": vec(0, 0)})
    assert state.cluster_of == names
    torch.testing.assert_close(state.weights[names["a"]], before[names["a"]] + vec(2, 0))
    torch.testing.assert_close(state.weights[names["b"]], before[names["b"]])


def test_similarity_clustering_with_k_1_compares_nothing():
    strategy = SimilarityClustering(k=1, cluster_every=1)
    assert set(run_round(strategy, init_state(strategy, 0, 0), TWO_PAIRS).cluster_of.values()) == {"0"}


def test_similarity_clustering_by_cka_of_activations():
    """By weights the clusters are a-b and c-d, by activations on public examples a-c and b-d."""
    rng = torch.Generator().manual_seed(0)
    one, other, inputs = (torch.randn(8, 3, generator=rng) for _ in range(3))
    deltas = {"a": vec(0, 0), "b": vec(1, 0), "c": vec(10, 0), "d": vec(11, 0)}
    layers = {(0, 0): one, (10, 0): 3 * one, (1, 0): other, (11, 0): -other}
    activations = {"inputs": inputs} | {weights: (layer,) for weights, layer in layers.items()}
    for cluster_by, cluster in (("weights", "ab"), ("cka", "ac")):
        strategy = SimilarityClustering(k=2, cluster_every=1, cluster_by=cluster_by, num_probes=8)
        state = run_round(strategy, init_state(strategy, 0, 0), deltas, activations=activations)
        assert {s for s in "abcd" if state.cluster_of[s] == state.cluster_of["a"]} == set(cluster)


@pytest.mark.parametrize("sites", [20, 40])
def test_pairwise_distances_of_nearly_equal_models(sites):
    """Beyond 25 rows torch computes |a|^2 + |b|^2 - 2ab: here its rounding error would exceed the distances."""
    rng = torch.Generator().manual_seed(0)
    common, shift = torch.randn(5000, generator=rng), 1e-5 * torch.randn(5000, generator=rng)
    flat = [common + shift * (n % 2) + 1e-6 * torch.randn(5000, generator=rng) for n in range(sites)]
    distances = pairwise_distances(flat)
    for n in range(1, sites):
        assert float(distances[0, n]) == pytest.approx(float((flat[0].double() - flat[n].double()).norm()), rel=1e-3)
    deltas = {f"{n:02}": delta for n, delta in enumerate(flat)}
    strategy = SimilarityClustering(k=2, cluster_every=1)
    state = strategy.init_state(ModelState(torch.zeros(5000), EMPTY), FOUR_SITES)
    state = run_round(strategy, state, deltas)
    assert len({cluster for site, cluster in state.cluster_of.items() if int(site) % 2}) == 1
    assert len(set(state.cluster_of.values())) == 2
