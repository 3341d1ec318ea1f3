"""Weights of clients in the mean: by examples, equal, inverse."""

import pytest
import torch

from pipeline.protocol.messages import Aggregate, client_weight
from pipeline.protocol.tasks import LocalWork
from tests.support.federation import make_reply, vec


@pytest.mark.parametrize(("rule", "mean"), [("examples", 1.0), ("equal", 2.0), ("inverse", 3.0)])
def test_weighting_by_hand(rule, mean):
    """Deltas 4 and 0 of sites with 10 and 30 examples."""
    replies = [
        make_reply(s, client_weight(rule, LocalWork(1, 1, n)), delta=vec(d)) for s, n, d in (("a", 10, 4), ("b", 30, 0))
    ]
    assert float(Aggregate.from_replies(replies).mean("delta")) == pytest.approx(mean)


def test_summed_vectors_are_not_weighted():
    aggregate = Aggregate.from_replies(
        [
            make_reply("a", 10, summed={"loss": torch.tensor(2.0)}),
            make_reply("b", 30, summed={"loss": torch.tensor(3.0)}),
        ]
    )
    assert float(aggregate.sum("loss")) == 5.0
