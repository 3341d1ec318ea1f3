"""A strategy or plugin that breaks its contract raises StrategyContractError with the cure."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch

from pipeline.coordinator.checkpoint import serialize_state
from pipeline.core.errors import StrategyContractError
from pipeline.core.registry import registered_components
from pipeline.protocol.messages import ClientUpdate
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import GlobalModelState, Strategy


@dataclass(frozen=True)
class StateWithSpeed(GlobalModelState):
    speed: torch.Tensor


class BrokenStrategy(Strategy):
    name: Literal["broken"] = "broken"


class ForgotStateType(BrokenStrategy):
    def init_state(self, initial_model, context):
        return StateWithSpeed(initial_model.weights, initial_model.norm_stats, torch.zeros(1))


class ForgotReturn(BrokenStrategy):
    state_type: ClassVar[type] = GlobalModelState

    def run_round(self, state, clients, requests, context) -> Any:
        requests.aggregate({site: self.train_payload(state, site) for site in clients})


class CollectsWithoutVisibility(BrokenStrategy):
    def run_round(self, state, clients, requests, context):
        requests.collect({site: self.train_payload(state, site) for site in clients})
        return state


class RequestsTwice(BrokenStrategy):
    def run_round(self, state, clients, requests, context):
        for _ in range(2):
            requests.aggregate({site: self.train_payload(state, site) for site in clients})
        return state


class WrongKey(BrokenStrategy):
    def run_round(self, state, clients, requests, context):
        return GlobalModelState(
            requests.aggregate({site: self.train_payload(state, site) for site in clients}).mean("deltas"),
            state.norm_stats,
        )


class ForgotYieldFrom(BrokenStrategy):
    def client_train(self, message, client_state, context):
        yield run_training(TrainJob(message.vectors["weights"], epochs=1))
        return ClientUpdate(), client_state


class ForgotClientState(BrokenStrategy):
    def client_train(self, message, client_state, context):
        yield from run_training(TrainJob(message.vectors["weights"], epochs=1))
        return ClientUpdate()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            ForgotStateType,
            "broken.init_state returned a StateWithSpeed, but the class says state_type = GlobalModelState",
        ),
        (ForgotReturn, "broken.run_round returned a NoneType"),
        (CollectsWithoutVisibility, "its `visibility` must be 'each'"),
        (RequestsTwice, "a round makes one request"),
        (WrongKey, "no client sent 'deltas' to be averaged; its ClientUpdate holds ['delta', 'stats']"),
        (ForgotYieldFrom, "yielded a generator, which is not a job; is `yield from` missing?"),
        (ForgotClientState, "ends with `return ClientUpdate(...), client_state`"),
    ],
)
def test_broken_strategies_are_refused_with_the_cure(moons, run_study, strategy, message):
    study = moons(rounds=2).model_copy(update={"strategy": strategy()})
    with pytest.raises(StrategyContractError) as error:
        run_study(study)
    assert message in str(error.value)


@pytest.mark.parametrize(("value", "message"), [({1: 2}, "strings as keys"), (object(), "cannot be checkpointed")])
def test_states_that_cannot_be_checkpointed_are_refused(value, message):
    with pytest.raises(StrategyContractError, match=message):
        serialize_state({"x": value}, "state", {})


def install_plugin(tmp_path, monkeypatch, code: str, value: str) -> None:
    """A package installed outside, as pip would leave it."""
    (tmp_path / "outsider.py").write_text(code)
    info = tmp_path / "outsider-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hemofed.strategies]\nany = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outsider", raising=False)
    registered_components.cache_clear()


@pytest.fixture(autouse=True)
def no_cached_components():
    registered_components.cache_clear()
    yield
    registered_components.cache_clear()


PLUGIN_CODE = """
from typing import Literal
from pipeline.strategies import Strategy
class Outside(Strategy):
    name: Literal["outside"] = "outside"
"""


def test_plugin_is_registered_and_its_version_is_part_of_the_study_hash(tmp_path, monkeypatch, moons):
    hash_before = moons().hash
    install_plugin(tmp_path, monkeypatch, PLUGIN_CODE, "outsider:Outside")
    assert "outside" in registered_components("strategies")
    assert moons().hash == hash_before  # a study that does not use it is the same study
    plugin_hash = moons(strategy="outside").hash
    (tmp_path / "outsider-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outsider\nVersion: 1.1\n"
    )
    assert moons(strategy="outside").hash != plugin_hash


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        (
            PLUGIN_CODE.replace('"outside"', '"fedavg"'),
            "outsider:Outside",
            "the name 'fedavg' is taken by pipeline.strategies.fedavg",
        ),
        ("import nothing_of_that_name", "outsider:Outside", "the plugin outsider:Outside cannot be loaded"),
        ("Outside = 3", "outsider:Outside", "is not a component"),
    ],
)
def test_broken_plugin_is_refused(tmp_path, monkeypatch, code, value, message):
    install_plugin(tmp_path, monkeypatch, code, value)
    with pytest.raises(StrategyContractError, match=message):
        registered_components("strategies")
