"""FedNova by hand: normalized deltas and the effective number of steps."""

import torch

from pipeline.core.parameters import ModelState
from pipeline.protocol.tasks import LocalWork, TrainResult
from pipeline.strategies.fednova import FedNova
from tests.support.federation import EMPTY, FakeRequests, finish_task, make_context, make_message, make_reply, vec

W = torch.tensor([1.0, -1.0])
CONTEXT = make_context()


def test_fednova_multiplies_mean_travel_and_mean_pace():
    requests = FakeRequests(
        make_reply("a", 1, pace=vec(10, 0), travel=torch.tensor(0.2)),  # two steps of 0.1
        make_reply("b", 3, pace=vec(0, 10), travel=torch.tensor(0.6)),  # six
    )
    strategy = FedNova()
    state = strategy.run_round(
        strategy.init_state(ModelState(vec(0, 0), EMPTY), CONTEXT), ["a", "b"], requests, CONTEXT
    )
    # mean travel (0.2 + 3 * 0.6) / 4 = 0.5, mean pace (2.5, 7.5); FedAvg would reach (2, 18) / 4 = (0.5, 4.5)
    torch.testing.assert_close(state.weights, vec(1.25, 3.75))


def test_fednova_client_sends_its_delta_per_unit_of_travel():
    task = FedNova().client_train(make_message(W), {}, CONTEXT)
    next(task)
    update, _ = finish_task(task, TrainResult(vec(2, 1), EMPTY, LocalWork(5, 5, 10), 0.1, lr_sum=0.25))
    torch.testing.assert_close(update.averaged["pace"], vec(4, 8))
    assert float(update.averaged["travel"]) == 0.25
    task = FedNova().client_train(make_message(W), {}, CONTEXT)
    next(task)
    update, _ = finish_task(task, TrainResult(W, EMPTY, LocalWork(5, 0, 10), 0.0, lr_sum=0.0))
    assert update.averaged["pace"].tolist() == [0, 0]
