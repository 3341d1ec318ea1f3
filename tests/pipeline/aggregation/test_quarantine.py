"""Quarantine: whatever an engine delivers, a malformed reply or an outlier does not enter the aggregate."""

import json
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from pipeline.aggregation.rules import WEIGHTED_MEAN, WeightedMean
from pipeline.codecs.base import VectorLayout
from pipeline.codecs.qsgd import Qsgd
from pipeline.core.errors import QuorumNotReachedError
from pipeline.protocol.compression import UpdateCompression
from pipeline.protocol.messages import ClientFailure, ClientUpdate, RoundPolicy
from pipeline.protocol.serialization import deserialize_frame, serialize_frame, serialize_reply
from pipeline.protocol.tasks import LocalWork
from tests.support.federation import EMPTY, FakeEngine, make_reply, make_round_request, vec

PAYLOADS = {site: {"weights": torch.zeros(2)} for site in "abcd"}
GOOD_REPLIES = [make_reply(s, delta=vec(1, 0), summed={"train_loss": torch.tensor(1.0)}) for s in "abc"]
WORK = LocalWork(4, 4, 10)
WORK_FIELDS = {"steps_requested": 1, "steps_done": 1, "num_examples": 1, "eval_steps": 0, "seconds": "1"}


def make_reply_of_d(**changes):
    """Like the good replies, with these changes."""
    reply = make_reply("d", delta=vec(1, 0), summed={"train_loss": torch.tensor(1.0)})
    return replace(reply, **({"update": replace(reply.update, work=WORK)} | changes))


def make_reply_with_delta(*delta):
    return make_reply_of_d(
        update=ClientUpdate({"delta": vec(*delta), "stats": EMPTY}, {"train_loss": torch.tensor(1.0)}, WORK)
    )


def run_request(*replies, rule=WEIGHTED_MEAN, compression=None, method="aggregate", **policy):
    request = make_round_request(
        FakeEngine(*replies),
        round_policy=RoundPolicy(**policy),
        compression=compression or UpdateCompression(),
        aggregation_rule=rule,
    )
    return request, getattr(request, method)(
        PAYLOADS, **({"num_clusters": 2} if method == "aggregate_by_cluster" else {})
    )


def assert_quarantined(request, text):
    assert request.log.failures["d"].kind == "quarantined"
    assert text in request.log.failures["d"].text


@pytest.mark.parametrize("norm", [101.0, 1e20, 1e30, 3e38])
def test_outlier_update_is_quarantined(norm):
    request, aggregate = run_request(*GOOD_REPLIES, make_reply_with_delta(0, norm))
    assert aggregate.mean("delta").tolist() == [1, 0]
    assert_quarantined(request, "times as long as the median one")
    assert [r.site for r in request.log.accepted] == ["a", "b", "c"]  # so d will not commit its pending state


def test_outlier_update_is_quarantined_from_collect():
    request, replies = run_request(*GOOD_REPLIES, make_reply_with_delta(0, 1e30), method="collect")
    assert [r.site for r in replies] == ["a", "b", "c"]
    assert "d" in request.log.failures


def test_update_below_the_outlier_factor_is_accepted():
    request, aggregate = run_request(*GOOD_REPLIES, make_reply_with_delta(0, 99))
    assert aggregate.num_replies == 4
    assert request.log.failures == {}


@pytest.mark.parametrize("outlier_factor", [None, 1e9])
def test_outlier_factor_of_the_study(outlier_factor):
    assert (
        run_request(*GOOD_REPLIES, make_reply_with_delta(0, 101), rule=WeightedMean(outlier_factor=outlier_factor))[
            1
        ].num_replies
        == 4
    )


def test_two_updates_have_no_outlier():
    assert run_request(GOOD_REPLIES[0], make_reply_with_delta(0, 1e9))[1].num_replies == 2


def test_quarantine_below_the_quorum_raises():
    with pytest.raises(QuorumNotReachedError, match="3 of 4 sites replied"):
        run_request(*GOOD_REPLIES, make_reply_with_delta(0, 1e30), quorum=4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["delta", "stats", "train_loss"])
def test_non_finite_values_are_quarantined(value, part):
    means = {"delta": vec(1, 0), "stats": EMPTY}
    sums = {"train_loss": torch.tensor(1.0)}
    if part == "train_loss":
        sums[part] = torch.tensor(value)
    else:
        means[part] = vec(value, 0)
    request, aggregate = run_request(*GOOD_REPLIES, make_reply_of_d(update=ClientUpdate(means, sums, WORK)))
    assert aggregate.mean("delta").tolist() == [1, 0]
    assert_quarantined(request, f"{part} is not finite")


@pytest.mark.parametrize("cluster", [-1, 2, 7])
def test_unknown_cluster_is_quarantined(cluster):
    chosen = [replace(r, update=replace(r.update, cluster=n % 2)) for n, r in enumerate(GOOD_REPLIES)]
    request, aggregates = run_request(
        *chosen,
        make_reply_of_d(update=replace(make_reply_of_d().update, cluster=cluster)),
        method="aggregate_by_cluster",
    )
    assert {g: aggregate.clients for g, aggregate in aggregates.items()} == {0: ["a", "c"], 1: ["b"]}
    assert request.log.failures["d"] == ClientFailure("quarantined", f"chose cluster {cluster}, but there are 2")


def test_without_clusters_only_cluster_0_is_valid():
    request, aggregate = run_request(
        *GOOD_REPLIES, make_reply_of_d(update=replace(make_reply_of_d().update, cluster=1))
    )
    assert aggregate.num_replies == 3
    assert_quarantined(request, "chose cluster 1, but there are 1")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_weight_is_quarantined(weight):
    request, aggregate = run_request(*GOOD_REPLIES, make_reply_of_d(weight=weight))
    assert aggregate.num_replies == 3
    assert_quarantined(request, "must be > 0")


QSGD = UpdateCompression(uplink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 4))


def make_encoded_reply(site, damage=lambda parts: parts, n=1000):
    """A reply of 1000 numbers, encoded by QSGD and then damaged."""
    reply = make_reply(site, delta=torch.ones(1000), summed={"train_loss": torch.tensor(1.0)})
    encoded, _ = QSGD.compress_update(reply.update, {}, site, 1)
    return site, serialize_reply(
        reply, {"delta": replace(encoded["delta"], n=n, parts=damage(dict(encoded["delta"].parts)))}
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda parts: parts | {"0.qsgd.codes": parts["0.qsgd.codes"][:-1]}, "not 500 of torch.uint8"),
        (lambda parts: parts | {"0.qsgd.scales": parts["0.qsgd.scales"][:0]}, "not 4 of torch.float32"),
        (lambda parts: parts | {"0.qsgd.scales": -parts["0.qsgd.scales"]}, "negative or not finite"),
        (lambda parts: {}, "holds nothing as 'codes'"),
    ],
)
def test_damaged_encoded_vector_is_quarantined(damage, text):
    request, aggregate = run_request(
        *(make_encoded_reply(s) for s in "abc"), make_encoded_reply("d", damage), compression=QSGD
    )
    assert aggregate.num_replies == 3
    assert_quarantined(request, text)


@pytest.mark.parametrize("n", [-1, 2**40])
def test_encoded_vector_of_impossible_length_is_quarantined_before_allocation(n):
    request, aggregate = run_request(
        *(make_encoded_reply(s) for s in "abc"), make_encoded_reply("d", n=n), compression=QSGD
    )
    assert aggregate.num_replies == 3
    assert_quarantined(request, f"claims {n} numbers")


def test_truncated_bytes_are_quarantined():
    request, aggregate = run_request(*GOOD_REPLIES, ("d", serialize_reply(make_reply_of_d())[:-5]))
    assert aggregate.num_replies == 3
    assert_quarantined(request, "damaged or cut short")


def make_bytes_with_fields(**changes):
    """d's reply with other fields in its header, and a matching checksum."""
    fields, tensors = deserialize_frame(serialize_reply(make_reply_of_d()))
    return "d", serialize_frame(fields | changes, tensors)


def make_bytes_with_tensor(key, value):
    fields, tensors = deserialize_frame(serialize_reply(make_reply_of_d()))
    return "d", serialize_frame(fields, tensors | {key: value})


def make_bytes_with_header(value):
    body = save({"mean/delta": vec(1, 0)}, metadata={"hemofed": json.dumps(value)})
    return "d", b"HF3\0" + struct.pack("<I", zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "malformed",
    [
        pytest.param(make_reply_with_delta(9), id="another length"),
        pytest.param(make_reply_with_delta(), id="no length"),
        pytest.param(make_bytes_with_tensor("mean/more", vec(1)), id="extra key"),
        pytest.param(make_bytes_with_tensor("mean/delta", torch.ones(2, dtype=torch.int64)), id="integers"),
        pytest.param(make_bytes_with_tensor("mean/delta", torch.ones(2, dtype=torch.float64)), id="double"),
        pytest.param(make_bytes_with_fields(round=float("inf")), id="infinite round"),
        pytest.param(make_bytes_with_fields(packed={"mean/more": float("inf")}), id="infinite length"),
        pytest.param(make_bytes_with_fields(work=WORK_FIELDS | {"steps_requested": "x"}), id="work as text"),
        pytest.param(make_bytes_with_fields(work=WORK_FIELDS | {"num_examples": 0}), id="work without examples"),
        pytest.param(make_bytes_with_fields(weight=1e300), id="weight beyond float32"),
        pytest.param(make_bytes_with_header([1]), id="header is a list"),
    ],
)
def test_malformed_reply_is_quarantined_even_if_it_arrives_first(malformed):
    request, aggregate = run_request(malformed, *GOOD_REPLIES)
    assert aggregate.clients == ["a", "b", "c"]
    assert aggregate.mean("delta").tolist() == [1, 0]
    assert aggregate.mean("delta").dtype == torch.float32
    assert request.log.failures["d"].kind == "quarantined"


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(ClientUpdate({"delta": vec(1, 0), "stats": vec(-1e30)}, {"control": vec(1, 0)}), id="norm stats"),
        pytest.param(
            ClientUpdate({"delta": vec(1, 0), "stats": vec(1)}, {"control": vec(1e30, 0)}),
            id="SCAFFOLD's control variate",
        ),
    ],
)
def test_outlier_norm_stats_and_summed_vectors_are_quarantined(update):
    """They enter the state as deltas do: a negative variance breaks every evaluation, a control variate of 1e30 every step."""
    good_replies = [
        make_reply_of_d(site=s, update=ClientUpdate({"delta": vec(1, 0), "stats": vec(1)}, {"control": vec(1, 0)}))
        for s in "abc"
    ]
    request, aggregate = run_request(*good_replies, make_reply_of_d(update=update))
    assert aggregate.mean("stats").tolist() == [1]
    assert aggregate.sum("control").tolist() == [3, 0]
    assert request.log.failures["d"].kind == "quarantined"
