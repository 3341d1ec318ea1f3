"""FedOpt by hand: momentum, Adagrad, Adam and Yogi at the coordinator."""

import math

import pytest
import torch

from pipeline.core.parameters import ModelState
from pipeline.strategies.fedopt import FedOpt
from tests.support.federation import EMPTY, FakeRequests, make_context, make_reply, vec

W = torch.tensor([1.0, -1.0])
CONTEXT = make_context()
# the weighted mean of the deltas is (6 * 1 + 2 * 3) / 4 = 3 in the first coordinate and -3 in the second
REQUESTS = FakeRequests(make_reply("a", 1, vec(5), delta=vec(6, -6)), make_reply("b", 3, vec(1), delta=vec(2, -2)))


@pytest.mark.parametrize(
    ("optimizer", "second_moment"),
    [
        ("adagrad", 16 + 9),  # v + delta^2
        ("adam", 0.75 * 16 + 0.25 * 9),  # beta2 v + (1 - beta2) delta^2
        ("yogi", 16 - 0.25 * 9),  # 16 > 9: v falls by (1 - beta2) delta^2
    ],
)
def test_fedopt_adaptive_step_by_hand(optimizer, second_moment):
    strategy = FedOpt(optimizer=optimizer, server_lr=6, beta1=0.5, beta2=0.75, tau=4)  # v starts at tau^2 = 16
    state = strategy.init_state(ModelState(W, vec(0)), CONTEXT)
    state = strategy.run_round(state, ["a", "b"], REQUESTS, CONTEXT)
    step = 6 * 1.5 / (math.sqrt(second_moment) + 4)  # m = 0.5 * 0 + 0.5 * 3: no bias correction
    torch.testing.assert_close(state.second_moment, torch.full((2,), float(second_moment)))
    torch.testing.assert_close(state.weights, vec(1 + step, -1 - step))
    assert state.norm_stats.tolist() == [2]  # (5 + 3 * 1) / 4: averaged, not stepped


def test_fedopt_yogi_second_moment_grows_with_large_deltas():
    strategy = FedOpt(optimizer="yogi", beta2=0.75, tau=2)  # v = 4 < 9
    state = strategy.run_round(strategy.init_state(ModelState(W, EMPTY), CONTEXT), ["a", "b"], REQUESTS, CONTEXT)
    assert state.second_moment.tolist() == [4 + 0.25 * 9] * 2


def test_fedopt_momentum_accumulates():
    strategy = FedOpt(optimizer="momentum", beta1=0.5)
    state = strategy.init_state(ModelState(vec(0, 0), EMPTY), CONTEXT)
    state = strategy.run_round(state, ["a", "b"], REQUESTS, CONTEXT)
    assert state.weights.tolist() == [3, -3]
    state = strategy.run_round(state, ["a", "b"], REQUESTS, CONTEXT)
    assert state.weights.tolist() == [7.5, -7.5]  # 3 + (0.5 * 3 + 3)


def test_fedopt_adam_keeps_its_moments_between_rounds():
    strategy = FedOpt(optimizer="adam", server_lr=1, beta1=0.5, beta2=0.5, tau=1)
    state = strategy.init_state(ModelState(vec(0), EMPTY), CONTEXT)
    for _ in range(2):
        state = strategy.run_round(state, ["a"], FakeRequests(make_reply("a", delta=vec(3))), CONTEXT)
    assert state.first_moment.tolist() == [2.25]  # 1.5, then 0.75 + 1.5
    assert state.second_moment.tolist() == [7]  # 1, 5, 7
    torch.testing.assert_close(state.weights, vec(1.5 / (math.sqrt(5) + 1) + 2.25 / (math.sqrt(7) + 1)))
