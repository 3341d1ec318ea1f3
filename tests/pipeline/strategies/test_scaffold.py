"""SCAFFOLD by hand: control variates, and where it converges compared with FedAvg."""

import pytest
import torch

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import Message, Reply
from pipeline.protocol.tasks import LocalWork, TrainResult
from pipeline.strategies.fedavg import FedAvg
from pipeline.strategies.scaffold import Scaffold, ScaffoldState
from tests.support.federation import EMPTY, FakeRequests, finish_task, make_context, make_reply, vec

W = torch.tensor([1.0, -1.0])
CONTEXT = make_context()


def make_message(control):
    return Message("train", 1, {"weights": W, "stats": EMPTY, "control": control})


def test_scaffold_client_corrects_its_steps_and_updates_its_control_variate():
    c, c_k = vec(0.5, 0.5), vec(0.25, 0)
    task = Scaffold().client_train(make_message(c), {"control": c_k}, CONTEXT)
    job = next(task)
    assert job.regularizer.slope == 0
    assert job.regularizer.offset.tolist() == [0.25, 0.5]  # c - c_k
    update, client_state = finish_task(task, TrainResult(vec(0, 0), EMPTY, LocalWork(5, 5, 10), 0.1, lr_sum=0.5))
    # c_k - c + (w_t - w) / lr_sum = (0.25 - 0.5 + 1 / 0.5, 0 - 0.5 - 1 / 0.5)
    assert client_state["control"].tolist() == [1.75, -2.5]
    assert update.summed["control"].tolist() == [1.5, -2.5]  # its change
    assert update.averaged["delta"].tolist() == [-1, 1]


def test_scaffold_without_a_local_step_keeps_its_control_variate():
    task = Scaffold().client_train(make_message(W), {"control": vec(3, 3)}, CONTEXT)
    next(task)
    update, client_state = finish_task(task, TrainResult(W, EMPTY, LocalWork(5, 0, 10), 0.0, lr_sum=0.0))
    assert update.summed["control"].tolist() == [0, 0]
    assert client_state["control"].tolist() == [3, 3]


def test_scaffold_server_control_is_the_mean_over_all_clients():
    requests = FakeRequests(
        make_reply("a", 1, delta=vec(4, 0), summed={"control": vec(4, 0)}),
        make_reply("b", 3, delta=vec(0, 8), summed={"control": vec(0, 8)}),
    )
    state = Scaffold(server_lr=0.5).run_round(
        ScaffoldState(W, EMPTY, vec(1, 1)), ["a", "b"], requests, make_context(num_sites=4)
    )
    assert state.weights.tolist() == [1 + 0.5 * 1, -1 + 0.5 * 6]  # weighted: (4 + 0) / 4 and 3 * 8 / 4
    assert state.control.tolist() == [1 + 4 / 4, 1 + 8 / 4]  # two of four clients replied; each counts once


class QuadraticClient:
    """A client with the loss h/2 (w - a)^2: its gradient is h (w - a)."""

    def __init__(self, a, h=1.0):
        self.a, self.h = a, h

    def train(self, job, lr):
        w = job.initial_weights.clone()
        for _ in range(job.steps):
            w = w - lr * (self.h * (w - self.a) + job.regularizer.slope * w + job.regularizer.offset)
        return TrainResult(w, EMPTY, LocalWork(job.steps, job.steps, 1), 0.0, lr_sum=lr * job.steps)


def run_quadratic(strategy, clients, weights, rounds, lr=0.1, steps=10):
    """The final weight and the client states after this many rounds of both halves."""
    context = make_context(num_sites=len(clients), lr_schedule=lambda round_number: lr, epochs=None, steps=steps)
    state, client_states = strategy.init_state(ModelState(vec(0), EMPTY), context), {site: {} for site in clients}
    for round_number in range(1, rounds + 1):
        replies = []
        for site, client in clients.items():
            message = Message("train", round_number, strategy.train_payload(state, site))
            task = strategy.client_train(message, client_states[site], context)
            update, client_states[site] = finish_task(task, client.train(next(task), lr))
            replies.append(Reply(site, "train", round_number, 0, update, weights[site]))
        state = strategy.run_round(state, list(clients), FakeRequests(*replies), context)
    return float(state.weights), client_states


def test_scaffold_converges_to_the_minimum_of_the_summed_loss_and_fedavg_does_not():
    """(w - 0)^2 / 2 + 3 (w - 4)^2 / 2 is least at 3; FedAvg with ten steps stops where the deltas cancel."""
    clients, equal = {"a": QuadraticClient(0.0, 1.0), "b": QuadraticClient(4.0, 3.0)}, {"a": 1.0, "b": 1.0}
    near, far = 1 - 0.9**10, 1 - 0.7**10  # fraction of the way to its optimum that a client goes
    assert run_quadratic(FedAvg(), clients, equal, 60)[0] == pytest.approx(4 * far / (near + far), abs=1e-4)
    assert run_quadratic(Scaffold(), clients, equal, 60)[0] == pytest.approx(3.0, abs=1e-4)


def test_scaffold_converges_to_the_unweighted_optimum_whatever_the_weights():
    clients = {"a": QuadraticClient(0.0), "b": QuadraticClient(4.0)}
    assert run_quadratic(FedAvg(), clients, {"a": 1.0, "b": 3.0}, 60)[0] == pytest.approx(3.0, abs=1e-4)
    assert run_quadratic(Scaffold(), clients, {"a": 1.0, "b": 3.0}, 200)[0] == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_scaffold_control_variate_equals_the_gradient_for_any_correction(correction):
    """At convergence c_k = h (w - a)."""
    w, client_states = run_quadratic(
        Scaffold(correction=correction),
        {"a": QuadraticClient(0.0), "b": QuadraticClient(4.0)},
        {"a": 1, "b": 1},
        80,
        steps=1,
    )
    assert w == pytest.approx(2.0, abs=1e-3)
    assert float(client_states["a"]["control"]) == pytest.approx(2.0, abs=1e-2)
    assert float(client_states["b"]["control"]) == pytest.approx(-2.0, abs=1e-2)


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
@pytest.mark.parametrize("local", [{"optimizer": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.01}])
def test_scaffold_and_fednova_require_plain_sgd(moons, run_study, name, local):
    with pytest.raises(IncompatibleStudyError, match=rf"{name} assumes plain SGD steps; set local\.optimizer = 'sgd'"):
        run_study(moons(strategy=name, local={"lr": 0.1, "batch_size": 8} | local))
