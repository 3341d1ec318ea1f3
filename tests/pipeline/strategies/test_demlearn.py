"""DemLearn by hand: four sites on a line, 0 2 . . 10 . . 16."""

import pytest
import torch

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import Message
from pipeline.strategies._clustered import compute_linkage
from pipeline.strategies.demlearn import DemLearn, ancestor_paths, cluster_sizes, cut_dendrogram
from tests.support.federation import EMPTY, FOUR_SITES, init_state, run_round, vec

LINE = {"a": vec(0, 0), "b": vec(2, 0), "c": vec(10, 0), "d": vec(16, 0)}


def first_weight_by_cluster(state):
    return {path: float(weights[0]) for path, weights in state.weights.items()}


def test_demlearn_with_three_levels():
    strategy = DemLearn(levels=3, alpha=0.5, amplify=1.5)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    assert state.cluster_of == {"a": "0.0.0", "b": "0.0.1", "c": "0.1.0", "d": "0.1.1"}
    # bottom-up: 0 3 15 24 (amplified once), 1.5 and 19.5, 10.5; top-down: each is half its parent's
    assert first_weight_by_cluster(state) == {
        "0": 10.5,
        "0.0": (10.5 + 1.5) / 2,
        "0.1": (10.5 + 19.5) / 2,
        "0.0.0": (6 + 0) / 2,
        "0.0.1": (6 + 3) / 2,
        "0.1.0": (15 + 15) / 2,
        "0.1.1": (15 + 24) / 2,
    }
    assert {s: float(w[0]) for s, w in state.latest_weights.items()} == {
        "a": 0,
        "b": 2,
        "c": 10,
        "d": 16,
    }  # not amplified
    assert [round(h, 6) for _, _, h, _ in strategy.dendrogram(state).merges] == [2, 6, 12]  # between centroids: 13 - 1
    assert float(strategy.train_payload(state, "a")["weights"][0]) == 3
    assert (
        float(strategy.train_payload(state, "new")["weights"][0]) == 10.5
    )  # an unknown client starts from the top model


def test_demlearn_weighs_clusters_by_sites_not_by_examples():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0)
    deltas = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(11, 0), "d": vec(12, 0)}
    state = run_round(strategy, init_state(strategy, 0, 0), deltas, weights={"a": 1000})
    assert state.cluster_of == {"a": "0.0", "b": "0.1", "c": "0.1", "d": "0.1"}
    assert first_weight_by_cluster(state) == {"0": (0 + 3 * 11) / 4, "0.0": 0, "0.1": 11}


def test_demlearn_norm_stats_are_averaged_but_neither_amplified_nor_mixed():
    strategy = DemLearn(levels=2, alpha=0.5, amplify=1.5)
    stats = {"a": vec(1), "b": vec(3), "c": vec(5), "d": vec(7)}
    state = strategy.init_state(ModelState(vec(0, 0), vec(0)), FOUR_SITES)
    state = run_round(strategy, state, LINE, stats=stats)
    assert {path: float(v) for path, v in state.norm_stats.items()} == {"0": 4, "0.0": 2, "0.1": 6}


def test_demlearn_deltas_count_from_the_cluster_model():
    strategy = DemLearn(levels=2, alpha=0.5, amplify=1.0)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    assert first_weight_by_cluster(state) == {"0": 7, "0.0": 4, "0.1": 10}  # means 1, 13 and 7
    state = run_round(strategy, state, {"a": vec(1, 0), "b": vec(1, 0), "c": vec(1, 0), "d": vec(1, 0)})
    assert {s: float(w[0]) for s, w in state.latest_weights.items()} == {"a": 5, "b": 5, "c": 11, "d": 11}


def test_demlearn_amplify_rounds():
    strategy = DemLearn(levels=1, amplify=2.0, amplify_rounds=1)
    state = run_round(strategy, init_state(strategy, 0, 0), {"a": vec(4, 0)})
    assert first_weight_by_cluster(state) == {"0": 8}
    assert first_weight_by_cluster(run_round(strategy, state, {"a": vec(1, 0)})) == {"0": 9}


def test_demlearn_alpha_decay():
    strategy = DemLearn(levels=2, alpha=0.5, alpha_decay=0.5, amplify=1.0, tau=9)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    deltas = {site: target - strategy.train_payload(state, site)["weights"] for site, target in LINE.items()}
    assert first_weight_by_cluster(run_round(strategy, state, deltas)) == {
        "0": 7,
        "0.0": 0.25 * 7 + 0.75 * 1,
        "0.1": 0.25 * 7 + 0.75 * 13,
    }


def test_demlearn_tau_growth():
    strategy = DemLearn(tau=2, tau_growth=2.0)
    state, clustering_rounds = init_state(strategy, 0, 0), []
    for _ in range(8):
        state = run_round(strategy, state, LINE)
        clustering_rounds.append(state.next_clustering_round)
    assert clustering_rounds == [3, 3, 7, 7, 7, 7, 15, 15]  # after rounds 1, 3 and 7


def test_demlearn_new_client_joins_the_top_cluster_until_the_next_clustering():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0, tau=2)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    assert first_weight_by_cluster(state) == {"0": 7, "0.0": 1, "0.1": 13}
    state = run_round(strategy, state, {"new": vec(3, 0)})  # from the top model's 7 to 10
    assert state.cluster_of == {"a": "0.0", "b": "0.0", "c": "0.1", "d": "0.1", "new": "0"}
    # clusters without a reply remain
    assert first_weight_by_cluster(state) == pytest.approx({"0": (2 * 1 + 2 * 13 + 10) / 5, "0.0": 1, "0.1": 13})
    state = run_round(strategy, state, {"a": vec(0, 0)})
    assert state.cluster_of["new"] == state.cluster_of["c"]  # 10 is nearer to 13 than to 1


def test_demlearn_proximal_to_the_cluster_model():
    strategy = DemLearn(mu=0.5, mu_decay=0.5)
    message = Message("train", 2, {"weights": vec(4, 6), "stats": EMPTY})
    regularizer = next(strategy.client_train(message, {}, FOUR_SITES)).regularizer
    assert regularizer.slope == 0.25  # halved in the second round
    assert regularizer.offset.tolist() == [-1, -1.5]
    assert next(DemLearn(mu=0).client_train(message, {}, FOUR_SITES)).regularizer.is_zero


def test_demlearn_proximal_to_all_ancestors_by_their_size():
    strategy = DemLearn(levels=3, alpha=0.5, amplify=1.5, proximal_to="all", mu=0.5)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    payload = strategy.train_payload(state, "a")
    assert float(payload["slope"]) == 1 / 1 + 1 / 2 + 1 / 4
    assert float(payload["anchor"][0]) == 3 / 1 + 6 / 2 + 10.5 / 4
    job = next(strategy.client_train(Message("train", 1, payload), {}, FOUR_SITES))
    assert job.initial_weights.tolist() == [3, 0]
    assert job.regularizer.slope == 0.5 * 1.75
    assert job.regularizer.offset.tolist() == [-0.5 * 8.625, 0]
    assert float(strategy.train_payload(init_state(strategy, 2, 2), "a")["slope"]) == 1  # before the first round


def test_demlearn_evaluates_personal_cluster_and_top_model():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)
    payload = strategy.eval_payload(state, "d")
    assert [float(payload[key][0]) for key in ("weights", "cluster/weights", "global/weights")] == [16, 13, 7]
    views = strategy.comparison_models(Message("evaluate", 1, payload))
    assert {name: float(model.weights[0]) for name, model in views.items()} == {"cluster": 13, "global": 7}
    models = {name: float(model.weights[0]) for name, model in strategy.global_models(state).items()}
    assert models == {
        "global": 7,
        "cluster/0.0": 1,
        "cluster/0.1": 13,
        "site/a": 0,
        "site/b": 2,
        "site/c": 10,
        "site/d": 16,
    }


@pytest.mark.parametrize(("cluster_by", "clusters"), [("weights", "0011"), ("deltas", "0101")])
def test_demlearn_clusters_by_weights_or_by_deltas(cluster_by, clusters):
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0, cluster_by=cluster_by)
    state = run_round(strategy, init_state(strategy, 0, 0), LINE)  # both settings: a b | c d
    state = run_round(strategy, state, {"a": vec(0, 1), "b": vec(0, -1), "c": vec(0, 1), "d": vec(0, -1)})
    assert [state.cluster_of[s] for s in "abcd"] == [f"0.{g}" for g in clusters]


def test_cut_dendrogram():
    points = torch.tensor([[0.0], [1.0], [10.0], [30.0]])
    merges = compute_linkage(torch.cdist(points, points), "centroid")
    assert cut_dendrogram("abcd", merges, 1) == dict.fromkeys("abcd", "0")
    assert cut_dendrogram("abcd", merges, 2) == {"a": "0.0", "b": "0.0", "c": "0.0", "d": "0.1"}
    clusters = cut_dendrogram("abcd", merges, 3)
    assert clusters == {"a": "0.0.0", "b": "0.0.0", "c": "0.0.1", "d": "0.1"}  # d is alone one level higher
    assert cluster_sizes(clusters) == {"0": 4, "0.0": 3, "0.0.0": 2, "0.0.1": 1, "0.1": 1}
    assert ancestor_paths("0.0.1") == ["0.0.1", "0.0", "0"]
