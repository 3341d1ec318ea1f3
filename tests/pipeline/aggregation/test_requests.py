"""Round requests: only one valid reply of every requested client to this round and attempt is accepted."""

import pytest
import torch

from pipeline.core.errors import QuorumNotReachedError
from pipeline.protocol.messages import ClientFailure, ClientUpdate, Declined, Reply, RoundPolicy
from pipeline.protocol.serialization import serialize_reply
from pipeline.protocol.tasks import LocalWork
from tests.support.federation import FakeEngine, make_round_request

PAYLOADS = {"a": {"weights": torch.zeros(3)}, "b": {"weights": torch.zeros(3)}}


def make_reply(site="a", round_number=5, attempt=1, delta=(1.0, 1.0, 1.0), weight=1.0, task="train", **update):
    return Reply(site, task, round_number, attempt, ClientUpdate({"delta": torch.tensor(delta)}, **update), weight)


def run_request(*replies, **policy):
    request = make_round_request(FakeEngine(*replies), round_number=5, attempt=1, round_policy=RoundPolicy(**policy))
    return request, request.aggregate(PAYLOADS)


def test_only_replies_to_this_round_and_attempt_are_accepted():
    request, aggregate = run_request(
        make_reply("a"),
        make_reply("a", delta=(9.0, 9.0, 9.0)),
        make_reply("zz", weight=1e9),
        make_reply("b", attempt=7),
    )
    assert aggregate.num_replies == 1
    assert aggregate.mean("delta").tolist() == [1.0, 1.0, 1.0]
    assert "replied without being asked" in request.log.failures["zz"].text
    assert "replied to round 5 (train) when asked for round 5" in request.log.failures["b"].text
    assert "twice" in request.log.failures["a"].text


@pytest.mark.parametrize(
    "malformed",
    [
        make_reply("b", delta=(1.0,)),
        make_reply("b", summed={"more": torch.ones(1)}),
        make_reply("b", task="evaluate"),
        make_reply("b", round_number=4),
    ],
)
def test_malformed_replies_are_quarantined_and_the_others_accepted(malformed):
    request, aggregate = run_request(make_reply("a"), malformed)
    assert aggregate.num_replies == 1
    assert request.log.failures["b"].kind == "quarantined"


def test_late_updates_keep():
    assert (
        run_request(make_reply("a"), make_reply("b", round_number=4, attempt=0), late_updates="keep")[1].num_replies
        == 2
    )
    assert (
        run_request(make_reply("a"), make_reply("b", round_number=6, attempt=0), late_updates="keep")[1].num_replies
        == 1
    )


def test_partial_updates_drop_and_keep():
    partial = make_reply("b", work=LocalWork(steps_requested=10, steps_done=4, num_examples=5))
    request, aggregate = run_request(make_reply("a"), partial, partial_updates="drop")
    assert aggregate.num_replies == 1
    assert request.log.failures["b"] == ClientFailure("late", "4 of 10 steps")
    assert run_request(make_reply("a"), partial, partial_updates="keep")[1].num_replies == 2


def test_quorum():
    with pytest.raises(QuorumNotReachedError, match=r"1 of 2 sites replied, round\.quorum is 2"):
        run_request(make_reply("a"), quorum=2)


@pytest.mark.parametrize("text", ["busy with an earlier round", "quarantined: late: privacy budget spent", ""])
def test_declined_reply_is_recorded_by_kind_whatever_its_text(text):
    request, aggregate = run_request(make_reply("a"), ("b", serialize_reply(Declined("b", "train", 5, "busy", text))))
    assert aggregate.clients == ["a"]
    assert request.log.failures == {"b": ClientFailure("busy", text)}


def test_silent_client_is_recorded_as_no_reply():
    request, _ = run_request(make_reply("a"))
    assert request.log.failures["b"].kind == "no_reply"


def test_oversized_reply_that_the_engine_declined_is_quarantined():
    declined = Declined("b", "", 0, "too_large", "sent 1000 bytes, more than 10")
    request, _ = run_request(make_reply("a"), ("b", serialize_reply(declined)))
    assert request.log.failures["b"] == ClientFailure("quarantined", "sent 1000 bytes, more than 10")
