"""FedAvg, FedProx, FedSGD, FedPAQ, local training and centralized training by hand and against each other."""

import pytest
import torch

from pipeline.codecs.qsgd import Qsgd
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.parameters import ParameterSpec
from pipeline.core.registry import registered_components
from pipeline.protocol.tasks import GradientResult, LocalWork, TrainResult
from pipeline.strategies.base import GlobalModelState
from pipeline.strategies.fedavg import FedAvg
from pipeline.strategies.fedpaq import FedPaq
from pipeline.strategies.fedprox import FedProx
from pipeline.strategies.fedsgd import FedSgd
from tests.support.federation import EMPTY, FakeRequests, finish_task, make_context, make_message, make_reply, vec
from tests.support.studies import final_weights

CONTEXT = make_context(lr_schedule=lambda round_number: 0.1 * round_number)
W = torch.tensor([1.0, -1.0])


def test_fedprox_regularizes_toward_the_received_weights():
    job = next(FedProx(mu=2.0, gamma=0.3).client_train(make_message(W), {}, CONTEXT))
    assert job.regularizer.slope == 2.0
    assert job.regularizer.offset.tolist() == [-2.0, 2.0]
    assert (job.epochs, job.inexactness) == (5, 0.3)
    assert FedProx().partial_updates == "keep"
    assert FedAvg().partial_updates == "drop"


def test_fedprox_with_mu_zero_requests_the_job_of_fedavg():
    assert next(FedProx(mu=0).client_train(make_message(W), {}, CONTEXT)) == next(
        FedAvg().client_train(make_message(W), {}, CONTEXT)
    )


def test_fedavg_adds_the_weighted_mean():
    requests = FakeRequests(make_reply("a", 1, delta=vec(4, 0)), make_reply("b", 3, delta=vec(0, 8)))
    state = FedAvg().run_round(GlobalModelState(W, EMPTY), ["a", "b"], requests, CONTEXT)
    assert state.weights.tolist() == [2.0, 5.0]


def test_fedavg_client_sends_its_delta():
    task = FedAvg().client_train(make_message(W), {"kept": W}, CONTEXT)
    next(task)
    update, client_state = finish_task(task, TrainResult(vec(3, 3), EMPTY, LocalWork(5, 5, 10), 0.25, 0.5))
    assert update.averaged["delta"].tolist() == [2.0, 4.0]
    assert update.summed["train_loss"].item() == 2.5
    assert client_state == {"kept": W}


def test_fedpaq_takes_tau_steps_and_quantizes():
    job = next(FedPaq(tau=7).client_train(make_message(W), {}, CONTEXT))
    assert (job.steps, job.epochs) == (7, None)
    assert FedPaq(bits=2).default_codec == (Qsgd(bits=2),)


def test_fedsgd_steps_along_the_mean_gradient_with_the_rounds_rate():
    task = FedSgd().client_train(make_message(W, round_number=3), {}, CONTEXT)
    next(task)
    update, _ = finish_task(task, GradientResult(vec(10, 0), LocalWork(1, 1, 4), 1.0))
    assert update.averaged["delta"].tolist() == pytest.approx([-3.0, 0.0])


def test_fedsgd_is_fedavg_with_one_whole_batch(moons, run_study):
    local = {"lr": 0.5, "batch_size": "all", "epochs": 1}
    one, _ = run_study(moons(local=local, strategy="fedsgd"), "sgd")
    other, _ = run_study(moons(local=local, strategy="fedavg"), "avg")
    torch.testing.assert_close(final_weights(one), final_weights(other), rtol=1e-5, atol=1e-6)


def test_fedprox_with_mu_zero_is_fedavg_to_the_bit(moons, run_study):
    one, _ = run_study(moons(strategy={"name": "fedprox", "mu": 0.0}), "prox")
    other, _ = run_study(moons(strategy="fedavg"), "avg")
    assert torch.equal(final_weights(one), final_weights(other))


def test_fedprox_with_large_mu_stays_near_the_received_weights(moons, run_study):
    distances = []
    for mu in (0.0, 5.0):
        folder, _ = run_study(moons(rounds=1, strategy={"name": "fedprox", "mu": mu}), f"mu-{mu}")
        network = RunFolder(folder.path).load_study().model.init_network((2,), 2, 3)
        initial = ParameterSpec.from_module(network).read_state(network)
        distances.append(float((final_weights(folder) - initial.weights).norm()))
    assert distances[1] < 0.6 * distances[0]


def test_fedavg_with_one_site_equals_centralized_training(moons, run_study):
    """FedAvg over one site, centralized and local training differ only in the shuffling seeds; not with full batches."""
    local = {"lr": 0.5, "batch_size": "all", "epochs": 3}
    # without validation data the last round counts
    one = {"local": local, "sites": {"count": 1}, "data": {"name": "moons", "points": 200}}
    fed, a = run_study(moons(strategy="fedavg", **one), "fed")
    central, b = run_study(moons(strategy="centralized", **one), "centralized")
    _, c = run_study(moons(strategy="local_only", **one), "local")
    torch.testing.assert_close(final_weights(fed), final_weights(central), rtol=1e-4, atol=1e-5)
    assert a.test.pooled.accuracy == b.test.pooled.accuracy == c.test.pooled.accuracy


def test_local_only_sites_do_not_share(moons, run_study):
    """A site's local model does not depend on the other sites."""
    partition = {"name": "classes", "per_site": 1}
    _, results = run_study(moons(strategy="local_only", sites={"count": 2}, partition=partition, rounds=20), "local")
    assert [m.accuracy for m in results.test.sites.values()] == [1.0, 1.0]  # each site has one class only
    _, shared = run_study(moons(strategy="fedavg", sites={"count": 2}, partition=partition, rounds=20), "fed")
    assert min(m.accuracy for m in shared.test.sites.values()) < 1.0


def test_every_strategy_is_registered_with_a_visibility():
    assert {"fedavg", "fedprox", "fedsgd", "local_only", "centralized"} <= registered_components("strategies").keys()
    for name, cls in registered_components("strategies").items():
        assert cls(name=name).visibility in ("totals", "groups", "each")
