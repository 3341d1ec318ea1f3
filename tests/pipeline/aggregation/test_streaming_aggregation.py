"""Streaming aggregation: the same mean and quarantine as all at once, with memory independent of the number of sites."""

import weakref

import pytest
import torch

from pipeline.aggregation import exchange as exchange_module
from pipeline.aggregation import requests as requests_module
from pipeline.aggregation.requests import SpooledReplies
from pipeline.protocol.messages import ClientUpdate, Reply
from pipeline.protocol.serialization import serialize_reply
from tests.support.federation import make_round_request


@pytest.fixture(autouse=True)
def _no_buffering(monkeypatch):
    monkeypatch.setattr(requests_module, "MAX_BUFFERED_REPLY_BYTES", 0)


class LazyEngine:
    """Creates each reply only when it is read."""

    def __init__(self, deltas):
        self.deltas = deltas

    def exchange(self, message_bytes, round_policy):
        for site, make_delta in self.deltas.items():
            yield site, serialize_reply(Reply(site, "train", 1, 0, ClientUpdate({"delta": make_delta()}), 2.0))


def run_request(deltas, stream):
    engine = LazyEngine(deltas)
    request = make_round_request(engine, stream_aggregation=stream)
    return request, request.aggregate({site: {"weights": torch.zeros(1)} for site in deltas})


def test_streaming_aggregation_equals_buffered_aggregation():
    values = {"a": 1.0, "b": 2.0, "c": 1e6, "d": float("nan"), "e": 3.0}
    deltas = {site: (lambda v=value: torch.full((5,), v)) for site, value in values.items()}
    deltas["f"] = lambda: torch.ones(4)
    (request, streamed), (other, buffered) = run_request(deltas, True), run_request(deltas, False)
    assert streamed.clients == buffered.clients == ["a", "b", "e"]
    assert torch.equal(streamed.mean("delta"), buffered.mean("delta"))
    assert request.log.failures == other.log.failures
    assert request.log.failures.keys() == {"c", "d", "f"}
    assert (request.log.bytes_up, request.log.vector_shapes) == (other.log.bytes_up, other.log.vector_shapes)


@pytest.mark.parametrize("sites", [4, 40])
def test_spooled_replies_are_read_back(sites):
    with SpooledReplies(max_bytes_in_memory=100) as spool:
        for number in range(sites):
            spool.append(bytes([number]) * (number + 1))
        for number in reversed(range(sites)):
            assert spool.read(number) == bytes([number]) * (number + 1)


def max_replies_in_memory(stream, monkeypatch):
    """The most vectors in memory at a time, of 20 replies."""
    references, most = [], [0]
    real = requests_module.deserialize_reply

    def deserialize(*args):
        reply = real(*args)
        references.append(weakref.ref(reply.update.averaged["delta"]))
        most[0] = max(most[0], sum(ref() is not None for ref in references))
        return reply

    for module in (exchange_module, requests_module):
        monkeypatch.setattr(module, "deserialize_reply", deserialize)
    run_request({f"s{n}": (lambda n=n: torch.full((100,), float(n + 1))) for n in range(20)}, stream)
    return most[0]


def test_streaming_aggregation_memory_is_independent_of_the_number_of_sites(monkeypatch):
    assert max_replies_in_memory(True, monkeypatch) <= 3
    monkeypatch.setattr(requests_module, "MAX_BUFFERED_REPLY_BYTES", 10_000)  # below the limit: all are buffered
    assert max_replies_in_memory(True, monkeypatch) == 20
    assert max_replies_in_memory(False, monkeypatch) == 20
