"""Aggregation rules by hand: weighted mean, median, trimmed mean, Krum, Multi-Krum, norm bound."""

from dataclasses import replace

import pytest
import torch

from pipeline.aggregation.rules import CoordinateMedian, Krum, MultiKrum, NormBound, TrimmedMean, WeightedMean
from pipeline.core.errors import QuorumNotReachedError
from pipeline.protocol.messages import ClientUpdate
from tests.support.federation import EMPTY, make_reply, vec

# five sites; e claims a large weight
FIVE_REPLIES = [
    make_reply(s, w, stats=vec(d), delta=vec(d), summed={"train_loss": torch.tensor(1.0)})
    for s, w, d in (("a", 1, 0), ("b", 1, 1), ("c", 1, 2), ("d", 1, 10), ("e", 1e6, 11))
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (CoordinateMedian(), 2.0),
        (TrimmedMean(trim_fraction=0.2), (1 + 2 + 10) / 3),  # one from each end
        (TrimmedMean(trim_fraction=0.39), (1 + 2 + 10) / 3),  # 1.95 of five is one
        (TrimmedMean(trim_fraction=0.4), 2.0),
        # squared distances to the 5 - 1 - 2 = 2 nearest: a 1 + 4, b 1 + 1, c 1 + 4, d 1 + 64, e 1 + 81
        (Krum(num_byzantine=1), 1.0),
        (MultiKrum(num_byzantine=1, num_selected=3), 1.0),  # a, b, c
        (MultiKrum(num_byzantine=1), (0 + 1 + 2 + 10) / 4),  # all but one
    ],
)
def test_robust_rules_ignore_client_weights(rule, expected):
    aggregate = rule.aggregate(FIVE_REPLIES)
    assert float(aggregate.mean("delta")) == pytest.approx(expected)
    assert float(aggregate.mean("stats")) == pytest.approx(expected)
    assert float(aggregate.sum("train_loss")) == 5.0  # of all
    assert aggregate.num_replies == 5
    assert rule.visibility == "each"


def test_median_of_an_even_number_of_replies():
    assert float(CoordinateMedian().aggregate(FIVE_REPLIES[:4]).mean("delta")) == 1.5


@pytest.mark.parametrize(
    "rule",
    [WeightedMean(), CoordinateMedian(), TrimmedMean(), Krum(num_byzantine=0), MultiKrum(num_byzantine=0), NormBound()],
)
def test_rules_accept_models_without_norm_stats(rule):
    """`stats` have the length 0 without BatchNorm."""
    aggregate = rule.aggregate([make_reply(s, 1, EMPTY, delta=vec(1, 1)) for s in "abc"])
    assert aggregate.mean("delta").tolist() == [1, 1]
    assert aggregate.mean("stats").tolist() == []


@pytest.mark.parametrize("rule", [Krum(num_byzantine=1), MultiKrum(num_byzantine=1)])
def test_krum_needs_2f_plus_3_replies(rule):
    with pytest.raises(QuorumNotReachedError, match=r"aggregation\.num_byzantine = 1 needs 5 replies, 4 came"):
        rule.aggregate(FIVE_REPLIES[:4])


REPLIES_OF_NORMS_5_10_1 = [
    make_reply("a", delta=vec(3, 4)),
    make_reply("b", delta=vec(6, 8)),
    make_reply("c", delta=vec(0.6, 0.8)),
]


def test_norm_bound_clips_updates_and_leaves_norm_stats():
    aggregate = NormBound().aggregate(
        [replace(r, update=ClientUpdate({**r.update.averaged, "stats": vec(9)})) for r in REPLIES_OF_NORMS_5_10_1]
    )
    torch.testing.assert_close(
        aggregate.mean("delta"), vec((3 + 3 + 0.6) / 3, (4 + 4 + 0.8) / 3)
    )  # clipped to the median norm
    assert aggregate.mean("stats").tolist() == [9]
    torch.testing.assert_close(NormBound(max_norm=1).aggregate(REPLIES_OF_NORMS_5_10_1).mean("delta"), vec(0.6, 0.8))
    torch.testing.assert_close(
        NormBound(max_norm=50).aggregate(REPLIES_OF_NORMS_5_10_1).mean("delta"), vec(3.2, 12.8 / 3)
    )


def test_weighted_mean():
    assert float(WeightedMean().aggregate(FIVE_REPLIES[:2]).mean("delta")) == 0.5
    assert float(WeightedMean().aggregate([FIVE_REPLIES[0], FIVE_REPLIES[4]]).mean("delta")) == pytest.approx(
        11, rel=1e-4
    )
