"""Answers added up one by one: the same total, the same quarantine, and memory that does not grow with the sites."""

import weakref

import pytest
import torch

from pipeline.aggregation import requests as asking_module
from pipeline.aggregation.requests import RoundRequest, SpooledReplies
from pipeline.protocol.messages import ClientUpdate, Reply, RoundPolicy
from pipeline.protocol.serialization import serialize_reply


@pytest.fixture(autouse=True)
def _little_room(monkeypatch):
    monkeypatch.setattr(asking_module, "AT_ONCE", 0)


class Far:
    """Sites that answer one after the other; each answer is made when it is its turn."""

    def __init__(self, deltas):
        self.deltas = deltas

    def exchange(self, parcels, wait):
        for site, make in self.deltas.items():
            yield site, serialize_reply(Reply(site, "train", 1, 0, ClientUpdate({"delta": make()}), 2.0))


def asked(deltas, frugal):
    asking = RoundRequest(Far(deltas), None, "train", 1, 0, RoundPolicy(), {}, stream_aggregation=frugal)
    return asking, asking.aggregate({site: {"weights": torch.zeros(1)} for site in deltas})


def test_the_total_and_the_quarantine_are_those_of_all_at_once():
    values = {"a": 1.0, "b": 2.0, "c": 1e6, "d": float("nan"), "e": 3.0}
    deltas = {site: (lambda v=value: torch.full((5,), v)) for site, value in values.items()}
    deltas["f"] = lambda: torch.ones(4)
    (one, frugal), (other, whole) = asked(deltas, True), asked(deltas, False)
    assert frugal.clients == whole.clients == ["a", "b", "e"]
    assert torch.equal(frugal.mean("delta"), whole.mean("delta"))
    assert one.log.failures == other.log.failures
    assert one.log.failures.keys() == {"c", "d", "f"}
    assert (one.log.bytes_up, one.log.vector_shapes) == (other.log.bytes_up, other.log.vector_shapes)


@pytest.mark.parametrize("sites", [4, 40])
def test_a_shelf_keeps_what_it_was_given(sites):
    with SpooledReplies(max_bytes_in_memory=100) as shelf:
        for number in range(sites):
            shelf.append(bytes([number]) * (number + 1))
        for number in reversed(range(sites)):
            assert shelf.read(number) == bytes([number]) * (number + 1)


def most_at_once(frugal, monkeypatch):
    """Of 20 answers' vectors, in memory."""
    held, most = [], [0]
    real = asking_module.deserialize_reply

    def read(*given):
        reply = real(*given)
        held.append(weakref.ref(reply.update.averaged["delta"]))
        most[0] = max(most[0], sum(ref() is not None for ref in held))
        return reply

    monkeypatch.setattr(asking_module, "read_reply", read)
    asked({f"s{n}": (lambda n=n: torch.full((100,), float(n + 1))) for n in range(20)}, frugal)
    return most[0]


def test_memory_does_not_grow_with_the_number_of_sites(monkeypatch):
    assert most_at_once(True, monkeypatch) <= 3
    monkeypatch.setattr(asking_module, "AT_ONCE", 10_000)  # few enough: they need not be read twice
    assert most_at_once(True, monkeypatch) == 20
    assert most_at_once(False, monkeypatch) == 20
