"""FedDyn with two sites whose local objective is (a/2) (w - c)^2, so that every step can be checked by hand."""

import torch
from feddyn import FedDyn

from hemofed.strategies import (
    Aggregate,
    LocalWork,
    Message,
    ModelState,
    ParameterSpec,
    Reply,
    StrategyContext,
    TrainResult,
)

NO_STATS = torch.zeros(0)
OBJECTIVES = {"north": (1.0, 0.0), "south": (3.0, 4.0)}  # site -> a, c; the mean objective is least at w = 3
SPEC = ParameterSpec(names=("w",), shapes=((1,),), roles=("head",))


def make_context(num_sites):
    return StrategyContext(spec=SPEC, num_sites=num_sites, lr_schedule=lambda round: 0.1, seed=0, epochs=1, steps=None)


class TwoSites:
    """`ClientRequests` to sites that minimize their local objective exactly."""

    def __init__(self, strategy, context):
        self.strategy, self.context = strategy, context
        self.client_states = {site: {} for site in OBJECTIVES}

    def aggregate(self, payloads):
        return Aggregate.from_replies([self.train(site, vectors) for site, vectors in payloads.items()])

    def train(self, site, vectors):
        a, c = OBJECTIVES[site]
        task = self.strategy.client_train(Message("train", 1, vectors), self.client_states[site], self.context)
        term = next(task).regularizer
        weights = (a * c - term.offset) / (a + term.slope)  # where a (w - c) + slope w + offset is 0
        try:
            task.send(TrainResult(torch.as_tensor(weights).reshape(1), NO_STATS, LocalWork(1, 1, 10), 0.0, 0.1))
        except StopIteration as end:
            update, self.client_states[site] = end.value
        return Reply(site, "train", 1, 0, update, weight=1.0)


def run_rounds(alpha, num_rounds, num_sites=2):
    strategy, context = FedDyn(alpha=alpha), make_context(num_sites)
    state = strategy.init_state(ModelState(torch.zeros(1), NO_STATS), context)
    requests = TwoSites(strategy, context)
    for _ in range(num_rounds):
        state = strategy.run_round(state, list(OBJECTIVES), requests, context)
    return state, requests


def test_first_round_by_hand():
    state, requests = run_rounds(alpha=1.0, num_rounds=1, num_sites=8)  # two of eight sites took part
    # north stays at 0; south goes to 3 * 4 / (3 + 1) = 3: the mean step is 1.5, and the correction -2/8 of it
    assert state.correction.item() == -0.375
    assert state.weights.item() == 1.875
    assert requests.client_states["north"]["linear"].item() == 0
    assert requests.client_states["south"]["linear"].item() == -3


def test_it_reaches_the_optimum_of_the_mean_objective_where_fedavg_does_not():
    assert abs(run_rounds(alpha=1.0, num_rounds=60)[0].weights.item() - 3) < 1e-4
    assert run_rounds(alpha=0.0, num_rounds=60)[0].weights.item() == 2  # FedAvg: the mean of the two minima
