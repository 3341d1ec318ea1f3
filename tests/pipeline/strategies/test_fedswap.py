"""FedSwap on paper: who gets whose model, when, and what the average is meanwhile."""

import numpy as np
import pytest
import torch

from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.messages import Aggregate, ClientUpdate, Message, Reply
from pipeline.protocol.tasks import ActivationsJob, ActivationsResult
from pipeline.strategies.base import StrategyContext
from pipeline.strategies.fedswap import SWAP_SEED_SALT, FedSwap, draw_permutation, permutation_from_pairs

EMPTY = torch.zeros(0)
# two layers of one number each
SPEC = ParameterSpec(("one.weight", "two.weight"), ((1,), (1,)), ("body", "head"))
PLAN = StrategyContext(SPEC, 4, lambda turn: 0.1, 3, epochs=5, steps=None)


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


class Answers:
    """An Ask whose sites answer what the test says."""

    def __init__(self, moves, weights=None, stats=None, layers=None):
        self.moves, self.weights, self.stats, self.layers = moves, weights or {}, stats or {}, layers
        self.jobs = []

    def each(self, sends):
        return [
            Reply(
                s,
                "train",
                1,
                0,
                ClientUpdate({"delta": m, "stats": self.stats.get(s, EMPTY)}),
                self.weights.get(s, 1.0),
            )
            for s, m in self.moves.items()
        ]

    def combined(self, replies):
        return Aggregate.from_replies(replies)

    def here(self, jobs):
        self.jobs = jobs
        return [ActivationsResult(self.layers["inputs"], self.layers[float(job.weights[0])]) for job in jobs]


def begin(strategy, *weights):
    return strategy.start(ModelState(vec(*weights), EMPTY), PLAN)


def after(strategy, state, moves, **how):
    return strategy.round(state, sorted(moves), Answers(moves, **how), PLAN)


def held(strategy, state, sites="abcd"):
    return {site: strategy.train_payload(state, site)["weights"].tolist() for site in sites}


# Random swaps


def test_everybody_in_turn_swaps_with_anybody():
    """For k = 1..K: transpose k's model with that of a random r, which may be k."""
    for seed in range(20):
        dice, models = np.random.default_rng(seed), list("abcdef")
        for k in range(6):
            r = dice.integers(6)
            models[k], models[r] = models[r], models[k]
        order = draw_permutation(6, np.random.default_rng(seed), pairs=False)
        assert ["abcdef"[n] for n in order] == models
    orders = {tuple(draw_permutation(3, np.random.default_rng(seed), pairs=False)) for seed in range(200)}
    assert len(orders) == 6  # every order of three can come out, the one in which nothing changed too


@pytest.mark.parametrize("count", [2, 5, 6])
def test_pairs_are_disjoint_and_leave_one_out_at_most(count):
    for seed in range(20):
        order = draw_permutation(count, np.random.default_rng(seed), pairs=True)
        assert [order[n] for n in order] == list(range(count))  # swapping twice is not swapping
        assert sum(n == place for place, n in enumerate(order)) == count % 2


def test_a_random_round_can_be_replayed():
    strategy = FedSwap(swap="random", h2=5)
    moves = {site: vec(n, 10 * n) for n, site in enumerate("abcd", start=1)}
    stats = {site: vec(n) for n, site in enumerate("abcd", start=1)}
    state = after(strategy, begin(strategy, 100, 100), moves, stats=stats)
    order = list(range(4))
    dice = np.random.default_rng([3, SWAP_SEED_SALT, 1])  # the study's seed, and the round
    for k in range(4):
        r = int(dice.integers(4))
        order[k], order[r] = order[r], order[k]
    assert order == [1, 3, 0, 2]  # no swap of pairs: who takes the wrong way round is found out
    assert held(strategy, state) == {s: [101 + order[k], 110 + 10 * order[k]] for k, s in enumerate("abcd")}
    assert [float(strategy.train_payload(state, s)["stats"]) for s in "abcd"] == [
        n + 1 for n in order
    ]  # with their statistics


def test_exchanged_is_what_it_says():
    assert permutation_from_pairs(5, [(0, 3), (1, 4)]) == [3, 4, 2, 0, 1]


# Swaps with the least similar: sums of absolute differences are ab 10, ad 9, ac 8, bc 8, bd 8, cd 1

SPREAD = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(5, 3), "d": vec(5.5, 3.5)}


@pytest.mark.parametrize(
    ("matching", "partner"),
    [
        ("greedy", {"a": "b", "b": "a", "c": "d", "d": "c"}),  # 10 first, then 1 is left
        ("optimal", {"a": "d", "d": "a", "b": "c", "c": "b"}),  # 9 + 8 is the most that two pairs can have
    ],
)
def test_the_least_similar_swap(matching, partner):
    strategy = FedSwap(swap="sumdiff", matching=matching, h2=5)
    state = after(strategy, begin(strategy, 1, 1), SPREAD)
    assert held(strategy, state) == {site: (1 + SPREAD[partner[site]]).tolist() for site in "abcd"}


def test_of_an_odd_number_one_keeps_its_model():
    strategy = FedSwap(swap="sumdiff", h2=5)
    state = after(strategy, begin(strategy, 0, 0), {s: SPREAD[s] for s in "abc"})
    assert held(strategy, state, "abc") == {"a": [10, 0], "b": [0, 0], "c": [5, 3]}


def test_models_are_compared_as_they_are_not_as_they_moved():
    """In the second round c moves most, but from where it stands it is still nearer to everybody than a to b."""
    strategy = FedSwap(swap="sumdiff", h2=9)
    state = after(strategy, begin(strategy, 0, 0), SPREAD)  # a holds 10 0, b 0 0, c 5.5 3.5, d 5 3
    state = after(strategy, state, {"a": vec(0, 0), "b": vec(0, 0), "c": vec(-1, -1), "d": vec(0, 0)})
    assert held(strategy, state) == {"a": [0, 0], "b": [10, 0], "c": [5, 3], "d": [4.5, 2.5]}


def test_layer_by_layer_only_that_layers_weights_change_places():
    strategy = FedSwap(swap="sumdiff", layerwise=True, h2=5)
    moves = {"a": vec(0, 0), "b": vec(10, 1), "c": vec(4, 10), "d": vec(5, 4)}
    stats = {site: vec(n) for n, site in enumerate("abcd")}
    state = after(strategy, begin(strategy, 0, 0), moves, stats=stats)
    # the first layer pairs a-b (10) and c-d (1), the second a-c (10) and b-d (3)
    assert held(strategy, state) == {"a": [10, 10], "b": [0, 4], "c": [5, 0], "d": [4, 1]}
    assert [float(strategy.train_payload(state, s)["stats"]) for s in "abcd"] == [0, 1, 2, 3]  # statistics stay


def test_networks_are_compared_on_public_examples():
    """a and b answer alike, and so do c and d: the least similar are across, whatever the weights say."""
    dice = torch.Generator().manual_seed(0)
    one, other, inputs = (torch.randn(8, 3, generator=dice) for _ in range(3))
    other = other - one @ torch.linalg.lstsq(one, other).solution  # nothing in common but noise
    layers = {"inputs": inputs, 0.0: (one, one), 10.0: (2 * one, one), 1.0: (other, other), 11.0: (other, -other)}
    strategy = FedSwap(swap="cka", matching="optimal", h2=5, num_probes=8)
    ask = Answers({"a": vec(0, 0), "b": vec(10, 0), "c": vec(1, 0), "d": vec(11, 0)}, layers=layers)
    state = strategy.run_round(begin(strategy, 0, 0), list("abcd"), ask, PLAN)
    assert all(isinstance(job, ActivationsJob) and job.num_examples == 8 for job in ask.jobs)
    got = {site: weights[0] for site, weights in held(strategy, state).items()}
    assert {got["a"], got["b"]} == {1, 11}
    assert {got["c"], got["d"]} == {0, 10}
    assert strategy.needs_public_probes
    assert not FedSwap(swap="cka", h2=1).needs_public_probes
    assert not FedSwap(swap="sumdiff").needs_public_probes


# When


def test_every_h2th_round_is_an_average_and_the_others_are_swaps():
    strategy = FedSwap(swap="sumdiff", h2=3)
    state, seen = begin(strategy, 0, 0), []
    for _ in range(6):
        state = after(strategy, state, {"a": vec(1, 0), "b": vec(3, 0)})
        seen.append((state.weights.tolist(), held(strategy, state, "ab")))
    assert [weights for weights, _ in seen] == [[0, 0], [0, 0], [6, 0], [6, 0], [6, 0], [12, 0]]
    # 1 and 3 change places, then 3 + 1 and 1 + 3, then 4 + 1 and 4 + 3 are averaged
    assert [tuple(h[s][0] for s in "ab") for _, h in seen] == [(3, 1), (4, 4), (6, 6), (9, 7), (10, 10), (12, 12)]
    assert state.deltas == {}


def test_with_h2_of_one_nothing_is_ever_swapped():
    strategy = FedSwap(h2=1)
    state = begin(strategy, 0, 0)
    for turn in (1, 2):
        state = after(strategy, state, {"a": vec(1, 0), "b": vec(3, 0)}, weights={"a": 3.0, "b": 1.0})
        assert state.weights.tolist() == [1.5 * turn, 0]
        assert state.deltas == {}


def test_a_round_is_h1_steps_or_the_studys_local_work():
    message = Message("train", 1, {"weights": vec(1, 1), "stats": EMPTY})
    job = next(FedSwap(h1=7).client_train(message, {}, PLAN))
    assert (job.steps, job.epochs) == (7, None)
    job = next(FedSwap().client_train(message, {}, PLAN))
    assert (job.steps, job.epochs) == (None, 5)


# What is averaged


def test_the_average_weighs_a_model_by_the_site_that_holds_it():
    strategy = FedSwap(swap="sumdiff", h2=2)
    weights, stats = {"a": 3.0, "b": 1.0}, {"a": vec(1), "b": vec(5)}
    state = after(strategy, begin(strategy, 0, 0), {"a": vec(8, 0), "b": vec(0, 4)}, weights=weights, stats=stats)
    assert held(strategy, state, "ab") == {"a": [0, 4], "b": [8, 0]}
    state = after(strategy, state, {"a": vec(0, 0), "b": vec(0, 0)}, weights=weights, stats=stats)
    assert state.weights.tolist() == [8 * 1 / 4, 4 * 3 / 4]  # a, which weighs 3, now has what b made
    assert state.norm_stats.tolist() == [(3 * 1 + 5) / 4]
    assert held(strategy, state, "abz") == {site: [2, 3] for site in "abz"}


def test_between_averages_the_global_model_is_the_average_as_it_would_be_now():
    strategy = FedSwap(swap="sumdiff", h2=9)
    state = begin(strategy, 1, 1)
    assert strategy.global_models(state)["global"].weights.tolist() == [1, 1]
    state = after(strategy, state, {"a": vec(8, 0), "b": vec(0, 4)}, weights={"a": 3.0, "b": 1.0})
    assert state.weights.tolist() == [1, 1]  # the last average
    assert strategy.global_models(state)["global"].weights.tolist() == [1 + 8 / 4, 1 + 3 * 4 / 4]
    state = after(strategy, state, {"a": vec(4, 0), "b": vec(0, 0)}, weights={"a": 3.0, "b": 1.0})
    # a held 0 4 and made 4 4 of it, b held 8 0; then they swapped again
    assert strategy.global_models(state)["global"].weights.tolist() == [1 + (3 * 8 + 4) / 4, 1 + 4 / 4]


def test_a_swap_alone_changes_no_equal_average():
    strategy = FedSwap(swap="random", h2=9)
    state = after(strategy, begin(strategy, 0, 0), SPREAD)
    torch.testing.assert_close(
        strategy.global_models(state)["global"].weights, torch.stack(list(SPREAD.values())).mean(0)
    )


def test_who_has_not_answered_since_the_average_holds_the_average():
    """Takes no part in swaps, and enters the next average only once it has answered."""
    strategy = FedSwap(swap="sumdiff", h2=4)
    state = after(strategy, begin(strategy, 0, 0), {"a": vec(4, 0), "b": vec(8, 0)})
    assert held(strategy, state, "abc") == {"a": [8, 0], "b": [4, 0], "c": [0, 0]}
    state = after(strategy, state, {"c": vec(0, 3)})  # a and b are silent; c is least like a (8 + 3)
    assert held(strategy, state, "abc") == {"a": [0, 3], "b": [4, 0], "c": [8, 0]}
    state = after(strategy, state, {"a": vec(0, 0)})
    assert held(strategy, state, "abc") == {"a": [8, 0], "b": [4, 0], "c": [0, 3]}
    state = after(strategy, state, {"b": vec(0, 0)})
    assert state.weights.tolist() == [4, 1]  # all three, silent or not
