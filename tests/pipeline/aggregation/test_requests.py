"""A turn is an identity: who was not asked, answers twice, or in another shape, does not count."""

import pytest
import torch

from pipeline.aggregation.requests import RoundRequest
from pipeline.core.errors import QuorumNotReachedError
from pipeline.protocol.messages import ClientUpdate, Reply, RoundPolicy
from pipeline.protocol.serialization import serialize_reply
from pipeline.protocol.tasks import LocalWork

SENDS = {"a": {"weights": torch.zeros(3)}, "b": {"weights": torch.zeros(3)}}


def reply(site="a", turn=5, attempt=1, delta=(1.0, 1.0, 1.0), weight=1.0, task="train", **update):
    return Reply(site, task, turn, attempt, ClientUpdate({"delta": torch.tensor(delta)}, **update), weight)


class Posts:
    """An engine that delivers what the test says."""

    def __init__(self, *replies):
        self.replies = replies

    def exchange(self, parcels, wait):
        yield from ((r.site, serialize_reply(r)) for r in self.replies)


def ask(*replies, **wait):
    asking = RoundRequest(Posts(*replies), None, "train", 5, 1, RoundPolicy(**wait), {})
    return asking, asking.aggregate(SENDS)


def test_only_the_asked_identity_counts():
    asking, total = ask(
        reply("a"),
        reply("a", delta=(9.0, 9.0, 9.0)),
        reply("zz", weight=1e9),
        reply("b", attempt=7),
    )
    assert total.num_replies == 1
    assert total.mean("delta").tolist() == [1.0, 1.0, 1.0]
    assert "answered without being asked" in asking.log.failures["zz"]
    assert "answered turn 5 (train) when asked turn 5" in asking.log.failures["b"]
    assert "twice" in asking.log.failures["a"]


@pytest.mark.parametrize(
    "odd",
    [
        reply("b", delta=(1.0,)),
        reply("b", sum={"more": torch.ones(1)}),
        reply("b", task="evaluate"),
        reply("b", turn=4),
    ],
)
def test_odd_replies_are_quarantined_and_the_rest_goes_on(odd):
    asking, total = ask(reply("a"), odd)
    assert total.num_replies == 1
    assert asking.log.failures["b"].startswith("quarantined")


def test_late_replies_count_where_they_are_kept():
    assert ask(reply("a"), reply("b", turn=4, attempt=0), late="keep")[1].num_replies == 2
    assert ask(reply("a"), reply("b", turn=6, attempt=0), late="keep")[1].num_replies == 1


def test_partial_work_is_dropped_or_kept():
    cut = reply("b", work=LocalWork(steps_requested=10, steps_done=4, num_examples=5))
    asking, total = ask(reply("a"), cut, partial="drop")
    assert total.num_replies == 1
    assert asking.log.failures["b"] == "late: 4 of 10 steps"
    assert ask(reply("a"), cut, partial="keep")[1].num_replies == 2


def test_the_quorum():
    with pytest.raises(QuorumNotReachedError, match=r"1 of 2 sites answered, waiting\.quorum is 2"):
        ask(reply("a"), quorum=2)
