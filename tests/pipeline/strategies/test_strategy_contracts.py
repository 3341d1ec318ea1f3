"""What an author of a strategy can get wrong is said in a sentence, when it happens."""

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
class WithSpeed(GlobalModelState):
    speed: torch.Tensor


class Base(Strategy):
    name: Literal["broken"] = "broken"


class ForgotState(Base):
    def init_state(self, start, plan):
        return WithSpeed(start.weights, start.norm_stats, torch.zeros(1))


class StartIsFine(Base):
    state_type: ClassVar[type] = GlobalModelState

    def run_round(self, state, sites, ask, plan) -> Any:
        ask.aggregate({site: self.train_payload(state, site) for site in sites})


class LooksAtEach(Base):
    def run_round(self, state, sites, ask, plan):
        ask.collect({site: self.train_payload(state, site) for site in sites})
        return state


class AsksTwice(Base):
    def run_round(self, state, sites, ask, plan):
        for _ in range(2):
            ask.aggregate({site: self.train_payload(state, site) for site in sites})
        return state


class WrongKey(Base):
    def run_round(self, state, sites, ask, plan):
        return GlobalModelState(
            ask.aggregate({site: self.train_payload(state, site) for site in sites}).mean("deltas"), state.stats
        )


class ForgotFrom(Base):
    def client_train(self, message, memory, plan):
        yield run_training(TrainJob(message.vectors["weights"], epochs=1))
        return ClientUpdate(), memory


class ForgotMemory(Base):
    def client_train(self, message, memory, plan):
        yield from run_training(TrainJob(message.vectors["weights"], epochs=1))
        return ClientUpdate()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (ForgotState, "broken.start returned a WithSpeed, but the class says state = Global"),
        (StartIsFine, "broken.round returned a NoneType"),
        (LooksAtEach, "its `sees` has to say 'each'"),
        (AsksTwice, "a round makes one ask"),
        (WrongKey, "no site sent 'deltas' as a mean; its Update holds ['delta', 'stats']"),
        (ForgotFrom, "yielded a generator, which is no job; is it `yield from`?"),
        (ForgotMemory, "ends with `return Update(...), memory`"),
    ],
)
def test_slips_are_named(moons, go, strategy, message):
    study = moons(rounds=2).model_copy(update={"strategy": strategy()})
    with pytest.raises(StrategyContractError) as error:
        go(study)
    assert message in str(error.value)


@pytest.mark.parametrize(("value", "message"), [({1: 2}, "texts for keys"), (object(), "cannot be checkpointed")])
def test_a_state_holds_what_a_checkpoint_can(value, message):
    with pytest.raises(StrategyContractError, match=message):
        serialize_state({"x": value}, "state", {})


def plugin(tmp_path, monkeypatch, code: str, value: str) -> None:
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
def fresh_choices():
    registered_components.cache_clear()
    yield
    registered_components.cache_clear()


GOOD = """
from typing import Literal
from pipeline.strategies.base import Strategy
class Outside(Strategy):
    name: Literal["outside"] = "outside"
"""


def test_a_plugin_is_found_and_its_version_is_part_of_the_hash(tmp_path, monkeypatch, moons):
    before = moons().hash
    plugin(tmp_path, monkeypatch, GOOD, "outsider:Outside")
    assert "outside" in registered_components("strategies")
    assert moons().hash == before  # a study that does not use it is the same study
    with_it = moons(strategy="outside").hash
    (tmp_path / "outsider-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outsider\nVersion: 1.1\n"
    )
    assert moons(strategy="outside").hash != with_it


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        (
            GOOD.replace('"outside"', '"fedavg"'),
            "outsider:Outside",
            "the name 'fedavg' is taken by pipeline.strategies.fedavg",
        ),
        ("import nothing_of_that_name", "outsider:Outside", "the plugin outsider:Outside cannot be loaded"),
        ("Outside = 3", "outsider:Outside", "is no component"),
    ],
)
def test_a_bad_plugin_is_named(tmp_path, monkeypatch, code, value, message):
    plugin(tmp_path, monkeypatch, code, value)
    with pytest.raises(StrategyContractError, match=message):
        registered_components("strategies")
