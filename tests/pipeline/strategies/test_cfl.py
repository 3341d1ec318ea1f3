"""CFL by hand: four sites, a and b move to the right, c and d to the left, each pair slightly apart."""

import math

import pytest

from pipeline.strategies.cfl import Cfl
from tests.support.federation import init_state, run_round, vec

OPPOSED = {"a": vec(1, 0.1), "b": vec(1, -0.1), "c": vec(-1, 0.1), "d": vec(-1, -0.1)}
CFL = Cfl(eps1=0.4, eps2=0.2, gap=0.5)


def weights_by_cluster(state):
    return {cluster: weights.tolist() for cluster, weights in state.weights.items()}


def test_cfl_splits_a_stationary_cluster_along_the_planted_populations():
    state = run_round(CFL, init_state(CFL, 5, 5), OPPOSED)
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1", "d": "1"}
    assert weights_by_cluster(state) == {
        "0": [5, 5],
        "1": [5, 5],
    }  # the mean delta is 0; the new cluster starts from the same model
    assert CFL.dendrogram(state).leaves == ("a", "b", "c", "d")
    assert CFL.dendrogram(state).merges == ((0, 1, 0.0, 2), (2, 3, 0.0, 2), (4, 5, 1.0, 4))
    state = run_round(CFL, state, OPPOSED, round_number=2)  # from now on each half has its own model
    assert weights_by_cluster(state) == {"0": [6, 5], "1": [4, 5]}
    assert CFL.train_payload(state, "c")["weights"].tolist() == [4, 5]
    assert CFL.train_payload(state, "new")["weights"].tolist() == [6, 5]  # an unknown client is in the first cluster


def test_cfl_does_not_split_while_the_mean_delta_is_large():
    """The same deltas plus 1 upwards for all: |mean| = 1 is not below 0.4 * 1.5."""
    state = run_round(CFL, init_state(CFL, 0, 0), {site: delta + vec(0, 1) for site, delta in OPPOSED.items()})
    assert weights_by_cluster(state) == {"0": [0, 1]}


def test_cfl_does_not_split_parallel_deltas():
    """Small enough to be stationary, but parallel: the cosine is 1 within and across halves, so there is no gap."""
    state = run_round(CFL, init_state(CFL, 0, 0), {"a": vec(0, 10), "b": vec(0, 9), "c": vec(0, 10), "d": vec(0, 9)})
    assert state.norm_unit == 10
    state = run_round(CFL, state, {site: vec(0, 3) for site in "abcd"}, round_number=2)  # 3 < 4 and 3 > 2
    assert set(state.cluster_of.values()) == {"0"}


@pytest.mark.parametrize("same_delta", [vec(0.1, 0.3), vec(0, 0)])
def test_cfl_survives_equal_and_zero_deltas(same_delta):
    """Rounding takes the cosine of (0.1, 0.3) with itself beyond 1; a zero delta has no cosine."""
    strategy = Cfl(eps1=2.0, eps2=0.0, gap=0.0)
    state = run_round(
        strategy, init_state(strategy, 0, 0), {"a": vec(1, 3), "b": same_delta, "c": same_delta, "d": same_delta}
    )
    state = run_round(strategy, state, dict.fromkeys("abcd", same_delta), round_number=2)
    assert state.splits == ()


@pytest.mark.parametrize(("length", "num_splits"), [(1.9, 0), (2.1, 1)])
def test_cfl_eps2_bounds_the_longest_delta_from_below(length, num_splits):
    state = run_round(
        CFL, init_state(CFL, 0, 0), dict.fromkeys("abcd", vec(10, 0))
    )  # sets the unit; not stationary, so no split
    state = run_round(
        CFL,
        state,
        {"a": vec(length, 0), "b": vec(length, 0), "c": vec(-length, 0), "d": vec(-length, 0)},
        round_number=2,
    )
    assert len(state.splits) == num_splits


@pytest.mark.parametrize(("eps1", "num_splits"), [(0.29, 0), (0.31, 1)])
def test_cfl_eps1_bounds_the_mean_delta_from_above(eps1, num_splits):
    deltas = {"a": vec(10, 3), "b": vec(10, 3), "c": vec(-10, 3), "d": vec(-10, 3)}
    unit = 109**0.5  # the mean is (0, 3): 0.287 of it
    strategy = Cfl(eps1=eps1 * 10 / unit, eps2=0.2, gap=0.5)
    assert len(run_round(strategy, init_state(strategy, 0, 0), deltas).splits) == num_splits


@pytest.mark.parametrize(("gap", "num_splits"), [(1.07, 1), (1.09, 0)])
def test_cfl_separation_gap(gap, num_splits):
    """Within a half the cosine is 0.8; across halves it is -1, -0.8 and, of b and d, -0.64 + 0.36: a gap of 0.8 + 0.28."""
    strategy = Cfl(eps1=1.0, eps2=0.0, gap=gap)
    deltas = {"a": vec(1, 0), "b": vec(0.8, 0.6), "c": vec(-1, 0), "d": vec(-0.8, 0.6)}
    assert len(run_round(strategy, init_state(strategy, 0, 0), deltas).splits) == num_splits


def test_cfl_does_not_split_deltas_in_all_directions():
    """Six directions, 60 degrees apart: within any half some are 120 degrees apart, across halves some only 60."""
    deltas = {site: vec(math.cos(n * math.pi / 3), math.sin(n * math.pi / 3)) for n, site in enumerate("abcdef")}
    assert run_round(CFL, init_state(CFL, 0, 0), deltas).splits == ()
    forced = Cfl(gap=-1.6)
    assert len(run_round(forced, init_state(forced, 0, 0), deltas).splits) == 1


@pytest.mark.parametrize(("min_cluster_size", "num_splits"), [(1, 1), (2, 0)])
def test_cfl_min_cluster_size(min_cluster_size, num_splits):
    strategy = Cfl(eps1=0.6, min_cluster_size=min_cluster_size)  # the mean is 1/2
    deltas = {"a": vec(1, 0), "b": vec(1, 0), "c": vec(1, 0), "d": vec(-1, 0)}
    assert len(run_round(strategy, init_state(strategy, 0, 0), deltas).splits) == num_splits


def test_cfl_stationarity_uses_client_weights():
    """Two large sites move 1 to the right, two small ones 9 to the left: the weighted mean is 0, so the cluster is stationary."""
    deltas = {"a": vec(1, 0), "b": vec(1, 0), "c": vec(-9, 0), "d": vec(-9, 0)}
    weights = {"a": 9, "b": 9, "c": 1, "d": 1}
    state = run_round(CFL, init_state(CFL, 0, 0), deltas, weights=weights)
    assert weights_by_cluster(state) == {"0": [0, 0], "1": [0, 0]}
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1", "d": "1"}
    assert (
        run_round(CFL, init_state(CFL, 0, 0), deltas).splits == ()
    )  # with equal weights the mean is -4, not below 0.4 * 9


def test_cfl_remembers_deltas_until_all_members_have_replied():
    state = run_round(CFL, init_state(CFL, 0, 0), {"a": OPPOSED["a"], "c": OPPOSED["c"]})
    assert state.splits == ()  # two sites cannot form two clusters of two
    state = run_round(CFL, state, {"b": OPPOSED["b"], "d": OPPOSED["d"]}, round_number=2)
    assert state.cluster_of == {"a": "0", "c": "1", "b": "0", "d": "1"}


EIGHT = {f"{site}{n}": OPPOSED[site] for site in "abcd" for n in "12"}
LEFT_SPLITS = {
    "c1": vec(0, 1),
    "c2": vec(0, 1),
    "d1": vec(0, -1),
    "d2": vec(0, -1),
}  # then the left half splits


def test_cfl_waits_for_members_without_a_delta_since_the_last_split():
    state = run_round(CFL, init_state(CFL, 0, 0), EIGHT)
    assert state.splits == (("0", "1"),)
    without_d2 = {site: LEFT_SPLITS[site] for site in ("c1", "c2", "d1")}
    state = run_round(CFL, state, without_d2, round_number=2)
    assert state.splits == (("0", "1"),)  # d2's last delta is from before the split
    state = run_round(CFL, state, {"d2": LEFT_SPLITS["d2"]}, round_number=3)
    assert state.splits == (("0", "1"), ("1", "2"))
    assert {site for site, cluster in state.cluster_of.items() if cluster == "2"} == {"d1", "d2"}


def test_cfl_ignores_late_replies_from_before_the_split():
    state = run_round(CFL, init_state(CFL, 0, 0), EIGHT)
    state = run_round(CFL, state, LEFT_SPLITS, round_number=2, late={"d2": 1})
    assert state.splits == (("0", "1"),)
    assert "d2" not in state.deltas
    state = run_round(CFL, state, {"d2": LEFT_SPLITS["d2"]}, round_number=3)
    assert state.splits == (("0", "1"), ("1", "2"))
