"""Each algorithm against a case that a hand can check, and against FedAvg when its knob is off."""

import pytest
import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.parameters import ParameterSpec
from pipeline.core.registry import registered_components
from pipeline.protocol.messages import Aggregate, ClientUpdate, Message, Reply
from pipeline.protocol.tasks import GradientResult, LocalWork, TrainResult
from pipeline.strategies.base import GlobalModelState, StrategyContext
from pipeline.strategies.fedavg import FedAvg
from pipeline.strategies.fedprox import FedProx
from pipeline.strategies.fedsgd import FedSgd
from tests.conftest import final_weights

PLAN = StrategyContext(ParameterSpec(("w",), ((2,),), ("head",)), 2, lambda turn: 0.1 * turn, 0, epochs=5, steps=None)
W = torch.tensor([1.0, -1.0])
EMPTY = torch.zeros(0)


def message(turn=1):
    return Message("train", turn, {"weights": W, "stats": EMPTY})


class Answers:
    """An Ask whose sites answer what the test says."""

    def __init__(self, deltas):
        self.deltas = deltas

    def total(self, sends):
        total = Aggregate()
        for site in sends:
            delta, n = self.deltas[site]
            total.add(
                Reply(site, "train", 1, 0, ClientUpdate({"delta": torch.tensor(delta), "stats": EMPTY}), float(n))
            )
        return total


def test_fedprox_pulls_toward_the_weights_it_was_sent():
    job = next(FedProx(mu=2.0, gamma=0.3).client_train(message(), {}, PLAN))
    assert job.regularizer.slope == 2.0
    assert job.regularizer.offset.tolist() == [-2.0, 2.0]
    assert (job.epochs, job.inexactness) == (5, 0.3)
    assert FedProx().partial_updates == "keep"
    assert FedAvg().partial_updates == "drop"


def test_fedprox_without_mu_asks_for_fedavgs_work():
    assert next(FedProx(mu=0).client_train(message(), {}, PLAN)) == next(FedAvg().client_train(message(), {}, PLAN))


def test_fedavg_adds_the_weighted_mean():
    state = FedAvg().run_round(
        GlobalModelState(W, EMPTY), ["a", "b"], Answers({"a": ([4.0, 0.0], 1), "b": ([0.0, 8.0], 3)}), PLAN
    )
    assert state.weights.tolist() == [2.0, 5.0]


def test_a_site_sends_how_far_it_came():
    flow = FedAvg().client_train(message(), {"kept": W}, PLAN)
    next(flow)
    with pytest.raises(StopIteration) as end:
        flow.send(TrainResult(torch.tensor([3.0, 3.0]), EMPTY, LocalWork(5, 5, 10), 0.25, 0.5))
    update, memory = end.value.value
    assert update.mean["delta"].tolist() == [2.0, 4.0]
    assert update.sum["train_loss"].item() == 2.5
    assert memory == {"kept": W}


def test_fedsgd_steps_along_the_mean_gradient_with_the_rounds_rate():
    flow = FedSgd().client_train(message(turn=3), {}, PLAN)
    next(flow)
    with pytest.raises(StopIteration) as end:
        flow.send(GradientResult(torch.tensor([10.0, 0.0]), LocalWork(1, 1, 4), 1.0))
    assert end.value.value[0].mean["delta"].tolist() == pytest.approx([-3.0, 0.0])


def test_fedsgd_is_fedavg_with_one_whole_batch(moons, go):
    local = {"lr": 0.5, "batch": "all", "epochs": 1}
    one, _ = go(moons(local=local, strategy="fedsgd"), "sgd")
    other, _ = go(moons(local=local, strategy="fedavg"), "avg")
    torch.testing.assert_close(final_weights(one), final_weights(other), rtol=1e-5, atol=1e-6)


def test_fedprox_with_mu_zero_is_fedavg_to_the_bit(moons, go):
    one, _ = go(moons(strategy={"name": "fedprox", "mu": 0.0}), "prox")
    other, _ = go(moons(strategy="fedavg"), "avg")
    assert torch.equal(final_weights(one), final_weights(other))


def test_a_large_mu_holds_sites_near_the_start(moons, go):
    moved = []
    for mu in (0.0, 5.0):
        folder, _ = go(moons(rounds=1, strategy={"name": "fedprox", "mu": mu}), f"mu-{mu}")
        start = RunFolder(folder.path).load_study().model.init_network((2,), 2, 3)
        moved.append(float((final_weights(folder) - ParameterSpec.from_module(start).read_state(start).weights).norm()))
    assert moved[1] < 0.6 * moved[0]


def test_one_site_alone_is_central_training(moons, go):
    """FedAvg over one site, central and local are the same walk but for the shuffles' seeds; with whole batches, exactly."""
    local = {"lr": 0.5, "batch": "all", "epochs": 3}
    one = {
        "local": local,
        "sites": {"count": 1},
        "data": {"name": "moons", "points": 200},
    }  # no val: the last round counts
    fed, a = go(moons(strategy="fedavg", **one), "fed")
    central, b = go(moons(strategy="centralized", **one), "centralized")
    _, c = go(moons(strategy="local_only", **one), "local")
    torch.testing.assert_close(final_weights(fed), final_weights(central), rtol=1e-4, atol=1e-5)
    assert a["test"]["pooled"]["accuracy"] == b["test"]["pooled"]["accuracy"] == c["test"]["pooled"]["accuracy"]


def test_local_sites_do_not_share(moons, go):
    """A site's own model does not depend on how many others there are."""
    two = {"name": "classes", "per_site": 1}
    _, results = go(moons(strategy="local_only", sites={"count": 2}, partition=two, rounds=20), "local")
    assert [m["accuracy"] for m in results["test"]["sites"].values()] == [1.0, 1.0]  # each knows its one class only
    _, shared = go(moons(strategy="fedavg", sites={"count": 2}, partition=two, rounds=20), "fed")
    assert min(m["accuracy"] for m in shared["test"]["sites"].values()) < 1.0


def test_every_strategy_has_a_name_a_story_and_json_settings():
    assert {"fedavg", "fedprox", "fedsgd", "local_only", "centralized"} <= registered_components("strategies").keys()
    for name, cls in registered_components("strategies").items():
        assert cls(name=name).visibility in ("totals", "groups", "each")
