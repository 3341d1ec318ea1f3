"""FedSwap by hand: which client gets which model, when, and the aggregated model."""

from functools import partial

import numpy as np
import pytest
import torch

from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.tasks import ActivationsJob
from pipeline.strategies.fedswap import SWAP_SEED_SALT, FedSwap, permutation_from_pairs, sample_permutation
from tests.support import federation
from tests.support.federation import FakeRequests, make_context, make_message, make_reply, vec

# two layers of one number each
SPEC = ParameterSpec(("one.weight", "two.weight"), ((1,), (1,)), ("body", "head"))
CONTEXT = make_context(SPEC, num_sites=4, seed=3)
init_state = partial(federation.init_state, context=CONTEXT)
run_round = partial(federation.run_round, context=CONTEXT)


def held_models(strategy, state, sites="abcd"):
    return {site: strategy.train_payload(state, site)["weights"].tolist() for site in sites}


# Random swaps


def test_random_swap_transposes_each_client_with_a_random_one():
    """For k = 1..K: transpose k's model with that of a random r, which may be k."""
    for seed in range(20):
        rng, models = np.random.default_rng(seed), list("abcdef")
        for k in range(6):
            r = rng.integers(6)
            models[k], models[r] = models[r], models[k]
        order = sample_permutation(6, np.random.default_rng(seed), pairs=False)
        assert ["abcdef"[n] for n in order] == models
    orders = {tuple(sample_permutation(3, np.random.default_rng(seed), pairs=False)) for seed in range(200)}
    assert len(orders) == 6  # every order of three occurs, also the identity


@pytest.mark.parametrize("count", [2, 5, 6])
def test_random_pairs_are_disjoint_and_leave_out_at_most_one(count):
    for seed in range(20):
        order = sample_permutation(count, np.random.default_rng(seed), pairs=True)
        assert [order[n] for n in order] == list(range(count))  # swapping twice restores the order
        assert sum(n == position for position, n in enumerate(order)) == count % 2


def test_random_swap_follows_from_the_seed_and_the_round():
    strategy = FedSwap(swap="random", h2=5)
    deltas = {site: vec(n, 10 * n) for n, site in enumerate("abcd", start=1)}
    stats = {site: vec(n) for n, site in enumerate("abcd", start=1)}
    state = run_round(strategy, init_state(strategy, 100, 100), deltas, stats=stats)
    order = list(range(4))
    rng = np.random.default_rng([3, SWAP_SEED_SALT, 1])  # the study's seed, and the round
    for k in range(4):
        r = int(rng.integers(4))
        order[k], order[r] = order[r], order[k]
    assert order == [1, 3, 0, 2]  # not a swap of pairs, so the inverse permutation would fail
    assert held_models(strategy, state) == {s: [101 + order[k], 110 + 10 * order[k]] for k, s in enumerate("abcd")}
    assert [float(strategy.train_payload(state, s)["stats"]) for s in "abcd"] == [
        n + 1 for n in order
    ]  # with their statistics


def test_permutation_from_pairs():
    assert permutation_from_pairs(5, [(0, 3), (1, 4)]) == [3, 4, 2, 0, 1]


# Swaps with the least similar: sums of absolute differences are ab 10, ad 9, ac 8, bc 8, bd 8, cd 1

SPREAD_MODELS = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(5, 3), "d": vec(5.5, 3.5)}


@pytest.mark.parametrize(
    ("matching", "partner"),
    [
        ("greedy", {"a": "b", "b": "a", "c": "d", "d": "c"}),  # 10 first, then 1 is left
        ("optimal", {"a": "d", "d": "a", "b": "c", "c": "b"}),  # 9 + 8 is the most that two pairs can have
    ],
)
def test_least_similar_models_are_swapped(matching, partner):
    strategy = FedSwap(swap="sumdiff", matching=matching, h2=5)
    state = run_round(strategy, init_state(strategy, 1, 1), SPREAD_MODELS)
    assert held_models(strategy, state) == {site: (1 + SPREAD_MODELS[partner[site]]).tolist() for site in "abcd"}


def test_with_an_odd_number_of_clients_one_keeps_its_model():
    strategy = FedSwap(swap="sumdiff", h2=5)
    state = run_round(strategy, init_state(strategy, 0, 0), {s: SPREAD_MODELS[s] for s in "abc"})
    assert held_models(strategy, state, "abc") == {"a": [10, 0], "b": [0, 0], "c": [5, 3]}


def test_models_are_compared_by_weights_not_by_deltas():
    """In the second round c has the longest delta, but its model is still nearer to the others than a to b."""
    strategy = FedSwap(swap="sumdiff", h2=9)
    state = run_round(strategy, init_state(strategy, 0, 0), SPREAD_MODELS)  # a holds 10 0, b 0 0, c 5.5 3.5, d 5 3
    state = run_round(strategy, state, {"a": vec(0, 0), "b": vec(0, 0), "c": vec(-1, -1), "d": vec(0, 0)})
    assert held_models(strategy, state) == {"a": [0, 0], "b": [10, 0], "c": [5, 3], "d": [4.5, 2.5]}


def test_layerwise_swap_moves_the_weights_of_one_layer():
    strategy = FedSwap(swap="sumdiff", layerwise=True, h2=5)
    deltas = {"a": vec(0, 0), "b": vec(10, 1), "c": vec(4, 10), "d": vec(5, 4)}
    stats = {site: vec(n) for n, site in enumerate("abcd")}
    state = run_round(strategy, init_state(strategy, 0, 0), deltas, stats=stats)
    # the first layer pairs a-b (10) and c-d (1), the second a-c (10) and b-d (3)
    assert held_models(strategy, state) == {"a": [10, 10], "b": [0, 4], "c": [5, 0], "d": [4, 1]}
    assert [float(strategy.train_payload(state, s)["stats"]) for s in "abcd"] == [0, 1, 2, 3]  # statistics stay


def test_cka_swap_compares_networks_on_public_examples():
    """The activations of a and b are alike, and of c and d: the least similar pairs are across, whatever the weights."""
    rng = torch.Generator().manual_seed(0)
    one, other, inputs = (torch.randn(8, 3, generator=rng) for _ in range(3))
    other = other - one @ torch.linalg.lstsq(one, other).solution  # uncorrelated
    layers = {(0, 0): (one, one), (10, 0): (2 * one, one), (1, 0): (other, other), (11, 0): (other, -other)}
    strategy = FedSwap(swap="cka", matching="optimal", h2=5, num_probes=8)
    deltas = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(1, 0), "d": vec(11, 0)}
    replies = [make_reply(site, delta=delta) for site, delta in deltas.items()]
    requests = FakeRequests(*replies, activations=layers | {"inputs": inputs})
    state = strategy.run_round(init_state(strategy, 0, 0), list("abcd"), requests, CONTEXT)
    assert all(isinstance(job, ActivationsJob) and job.num_examples == 8 for job in requests.jobs)
    first_weights = {site: weights[0] for site, weights in held_models(strategy, state).items()}
    assert {first_weights["a"], first_weights["b"]} == {1, 11}
    assert {first_weights["c"], first_weights["d"]} == {0, 10}
    assert strategy.needs_public_probes
    assert not FedSwap(swap="cka", h2=1).needs_public_probes
    assert not FedSwap(swap="sumdiff").needs_public_probes


# When


def test_every_h2th_round_averages_and_the_others_swap():
    strategy = FedSwap(swap="sumdiff", h2=3)
    state, history = init_state(strategy, 0, 0), []
    for _ in range(6):
        state = run_round(strategy, state, {"a": vec(1, 0), "b": vec(3, 0)})
        history.append((state.weights.tolist(), held_models(strategy, state, "ab")))
    assert [weights for weights, _ in history] == [[0, 0], [0, 0], [6, 0], [6, 0], [6, 0], [12, 0]]
    # 1 and 3 are swapped, then 3 + 1 and 1 + 3, then 4 + 1 and 4 + 3 are averaged
    assert [tuple(h[s][0] for s in "ab") for _, h in history] == [(3, 1), (4, 4), (6, 6), (9, 7), (10, 10), (12, 12)]
    assert state.deltas == {}


def test_with_h2_of_one_nothing_is_swapped():
    strategy = FedSwap(h2=1)
    state = init_state(strategy, 0, 0)
    for round_number in (1, 2):
        state = run_round(strategy, state, {"a": vec(1, 0), "b": vec(3, 0)}, weights={"a": 3.0, "b": 1.0})
        assert state.weights.tolist() == [1.5 * round_number, 0]
        assert state.deltas == {}


def test_h1_steps_or_the_local_work_of_the_study():
    message = make_message(vec(1, 1))
    job = next(FedSwap(h1=7).client_train(message, {}, CONTEXT))
    assert (job.steps, job.epochs) == (7, None)
    job = next(FedSwap().client_train(message, {}, CONTEXT))
    assert (job.steps, job.epochs) == (None, 5)


# What is averaged


def test_average_weighs_a_model_by_the_client_that_holds_it():
    strategy = FedSwap(swap="sumdiff", h2=2)
    weights, stats = {"a": 3.0, "b": 1.0}, {"a": vec(1), "b": vec(5)}
    state = run_round(
        strategy, init_state(strategy, 0, 0), {"a": vec(8, 0), "b": vec(0, 4)}, weights=weights, stats=stats
    )
    assert held_models(strategy, state, "ab") == {"a": [0, 4], "b": [8, 0]}
    state = run_round(strategy, state, {"a": vec(0, 0), "b": vec(0, 0)}, weights=weights, stats=stats)
    assert state.weights.tolist() == [8 * 1 / 4, 4 * 3 / 4]  # a has weight 3 and holds the model of b
    assert state.norm_stats.tolist() == [(3 * 1 + 5) / 4]
    assert held_models(strategy, state, "abz") == {site: [2, 3] for site in "abz"}


def test_global_model_between_averages_is_the_current_average():
    strategy = FedSwap(swap="sumdiff", h2=9)
    state = init_state(strategy, 1, 1)
    assert strategy.global_models(state)["global"].weights.tolist() == [1, 1]
    state = run_round(strategy, state, {"a": vec(8, 0), "b": vec(0, 4)}, weights={"a": 3.0, "b": 1.0})
    assert state.weights.tolist() == [1, 1]  # the last average
    assert strategy.global_models(state)["global"].weights.tolist() == [1 + 8 / 4, 1 + 3 * 4 / 4]
    state = run_round(strategy, state, {"a": vec(4, 0), "b": vec(0, 0)}, weights={"a": 3.0, "b": 1.0})
    # a trained its 0 4 to 4 4, b held 8 0; then they swapped again
    assert strategy.global_models(state)["global"].weights.tolist() == [1 + (3 * 8 + 4) / 4, 1 + 4 / 4]


def test_swap_does_not_change_the_unweighted_average():
    strategy = FedSwap(swap="random", h2=9)
    state = run_round(strategy, init_state(strategy, 0, 0), SPREAD_MODELS)
    torch.testing.assert_close(
        strategy.global_models(state)["global"].weights, torch.stack(list(SPREAD_MODELS.values())).mean(0)
    )


def test_client_without_a_reply_since_the_average_holds_the_average():
    """It takes no part in swaps and enters the next average only after it has replied."""
    strategy = FedSwap(swap="sumdiff", h2=4)
    state = run_round(strategy, init_state(strategy, 0, 0), {"a": vec(4, 0), "b": vec(8, 0)})
    assert held_models(strategy, state, "abc") == {"a": [8, 0], "b": [4, 0], "c": [0, 0]}
    state = run_round(strategy, state, {"c": vec(0, 3)})  # a and b are silent; c is least similar to a (8 + 3)
    assert held_models(strategy, state, "abc") == {"a": [0, 3], "b": [4, 0], "c": [8, 0]}
    state = run_round(strategy, state, {"a": vec(0, 0)})
    assert held_models(strategy, state, "abc") == {"a": [8, 0], "b": [4, 0], "c": [0, 3]}
    state = run_round(strategy, state, {"b": vec(0, 0)})
    assert state.weights.tolist() == [4, 1]  # all three, silent or not
