"""What holds for every strategy that keeps several models: linkage, names of clusters, new clients and late replies."""

import pytest
import torch

from pipeline.strategies._clustered import compute_linkage, match_cluster_names
from pipeline.strategies.cfl import Cfl
from pipeline.strategies.demlearn import DemLearn
from pipeline.strategies.fedswap import FedSwap
from pipeline.strategies.ifca import Ifca
from pipeline.strategies.similarity_clustering import SimilarityClustering
from tests.support.federation import init_state, run_round, vec

OPPOSED = {"a": vec(1, 0.1), "b": vec(1, -0.1), "c": vec(-1, 0.1), "d": vec(-1, -0.1)}
CFL = Cfl(eps1=0.4, eps2=0.2, gap=0.5)
SIMILARITY = SimilarityClustering(k=2, cluster_every=2)


def test_centroid_and_average_linkage():
    """The third corner of an equilateral triangle is 0.87 of a side from the midpoint of the others, but a side from each."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])
    assert compute_linkage(torch.cdist(corners, corners), "centroid")[1][2] == pytest.approx(0.75**0.5, rel=1e-5)
    assert compute_linkage(torch.cdist(corners, corners), "average")[1][2] == pytest.approx(1.0, rel=1e-5)


def test_match_cluster_names_by_largest_overlap():
    before = {"a": "0", "b": "0", "c": "1", "d": "1", "e": "3"}
    assert match_cluster_names({"a": 7, "b": 7, "c": 4, "d": 4, "e": 4}, before) == dict(
        zip("abcde", "00111", strict=True)
    )
    # b changes clusters, names stay; e's cluster no longer exists, and a new one gets the first unused name
    assert match_cluster_names({"a": 1, "b": 2, "c": 2, "d": 2, "new": 3}, before) == {
        "a": "0",
        "b": "1",
        "c": "1",
        "d": "1",
        "new": "2",
    }
    assert match_cluster_names({"a": 5, "b": 6}, {}) == {"a": "0", "b": "1"}


@pytest.mark.parametrize("strategy", [Ifca(k=2), CFL, SIMILARITY, DemLearn(tau=2), FedSwap(h2=5)], ids=lambda s: s.name)
def test_new_client_joins_clusters_in_round_four(strategy):
    state = init_state(strategy, 0, 0)
    for round_number in range(1, 4):
        state = run_round(strategy, state, OPPOSED, round_number=round_number)
    payload = strategy.train_payload(state, "new")
    assert all(bool(torch.isfinite(v).all()) for v in payload.values())
    for round_number in range(4, 8):
        state = run_round(strategy, state, OPPOSED | {"new": OPPOSED["c"]}, round_number=round_number)
        assert all(bool(torch.isfinite(m.weights).all()) for m in strategy.global_models(state).values())
    if strategy.name != "fedswap":
        assert "new" in strategy.cluster_assignment(state)


@pytest.mark.parametrize("strategy", [CFL, SIMILARITY, DemLearn(tau=2), FedSwap(h2=3)], ids=lambda s: s.name)
def test_late_reply_of_a_client_that_was_not_asked_joins_a_cluster(strategy):
    """The model it started from is not known: its delta counts from the model that the client would receive now."""
    state = init_state(strategy, 0, 0)
    for round_number in range(1, 7):
        late = {"d": round_number - 1} if round_number % 2 else {}
        asked = ["a", "b", "c"] if late else ["a", "b", "c", "d"]
        state = run_round(strategy, state, OPPOSED, sites=asked, round_number=round_number, late=late)
        assert all(bool(torch.isfinite(m.weights).all()) for m in strategy.global_models(state).values())
    assert strategy.name == "fedswap" or "d" in strategy.cluster_assignment(state)
