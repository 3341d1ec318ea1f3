"""q-FedAvg by hand: deltas weighted by a power of the loss, and the bound on the step."""

import pytest
import torch

from pipeline.core.parameters import ModelState
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, LocalWork, TrainResult
from pipeline.strategies.qfedavg import QFedAvg
from tests.support.federation import EMPTY, FakeRequests, finish_task, make_context, make_message, make_reply, vec

W = torch.tensor([1.0, -1.0])
CONTEXT = make_context()


def make_evaluation(loss, n):
    none = torch.zeros(1)
    return EvaluationSums(torch.tensor(float(n)), torch.tensor(float(loss)), none, none, none)


def test_qfedavg_client_weighs_its_delta_by_its_loss():
    task = QFedAvg(q=0.5).client_train(make_message(W, round_number=2), {}, make_context(lr_schedule=lambda r: 0.1 * r))
    next(task)  # in round 2 the learning rate is 0.2, so L = 5
    job = task.send(TrainResult(W + vec(3, 4), EMPTY, LocalWork(5, 5, 10), 0.1, 0.5))
    assert isinstance(job, EvaluateJob)
    assert job.split == "train"
    assert torch.equal(job.weights, W)  # the loss of the received model, not of the trained one
    update, _ = finish_task(task, make_evaluation(40, 10))  # F = 4
    torch.testing.assert_close(update.averaged["delta"], vec(6, 8))  # F^q = 2 times the delta
    # q F^(q-1) |delta|^2 L + F^q = 0.5 * 0.5 * 25 * 5 + 2
    assert float(update.averaged["bound"]) == pytest.approx(33.25)


def test_qfedavg_steps_by_the_sum_of_deltas_over_the_sum_of_bounds():
    requests = FakeRequests(
        make_reply("a", 1, delta=vec(6, 8), bound=torch.tensor(33.0)),
        make_reply("b", 1, delta=vec(2, 0), bound=torch.tensor(7.0)),
    )
    strategy = QFedAvg()
    state = strategy.run_round(strategy.init_state(ModelState(W, EMPTY), CONTEXT), ["a", "b"], requests, CONTEXT)
    torch.testing.assert_close(state.weights, vec(1 + 8 / 40, -1 + 8 / 40))
