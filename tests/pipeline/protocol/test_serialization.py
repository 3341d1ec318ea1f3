"""Messages and replies survive serialization or are refused."""

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from pipeline.core.errors import MessageError, ReplyError
from pipeline.protocol.messages import DECLINE_KINDS, Aggregate, ClientUpdate, Declined, Message, Reply
from pipeline.protocol.serialization import (
    MAX_DECLINE_TEXT_LENGTH,
    deserialize_frame,
    deserialize_message,
    deserialize_reply,
    serialize_frame,
    serialize_message,
    serialize_reply,
)
from pipeline.protocol.tasks import LocalWork


def make_reply(site="a", weight=2.0, values=(1.0, 2.0), round_number=3):
    update = ClientUpdate({"delta": torch.tensor(values)}, {"n": torch.tensor(5)}, LocalWork(4, 4, 10, 0.5))
    return Reply(site, "train", round_number, 0, update, weight)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 5), st.booleans(), st.one_of(st.none(), st.floats(0.1, 1e6)))
def test_message_round_trip(size, attempt, partial, deadline):
    message = Message(
        "train",
        7,
        {"weights": torch.randn(size), "stats": torch.zeros(0)},
        attempt,
        (6, 1),
        deadline,
        partial,
        ("val",),
    )
    got = deserialize_message(serialize_message(message))
    assert {k: v for k, v in vars(got).items() if k != "vectors"} == {
        k: v for k, v in vars(message).items() if k != "vectors"
    }
    assert torch.equal(got.vectors["weights"], message.vectors["weights"])


def test_tensors_that_share_memory_are_serialized_separately():
    x = torch.arange(10.0)
    got = deserialize_message(serialize_message(Message("train", 1, {"all": x, "head": x[:3], "again": x})))
    assert torch.equal(got.vectors["head"], x[:3])
    assert torch.equal(got.vectors["again"], x)


def test_slice_is_serialized_without_its_storage():
    x = torch.zeros(100_000)
    assert len(serialize_message(Message("train", 1, {"w": x[:10]}))) < 1000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused(draws):
    data = bytearray(serialize_reply(make_reply()))
    position = draws.draw(st.integers(0, len(data) - 1))
    if draws.draw(st.booleans()):
        data[position] ^= draws.draw(st.integers(1, 255))
    else:
        del data[position:]
    with pytest.raises((MessageError, ReplyError)):
        deserialize_reply("a", bytes(data))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(value):
    with pytest.raises(ReplyError, match=r"delta is not finite; lower local\.lr"):
        deserialize_reply("a", serialize_reply(make_reply(values=(1.0, value))))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_weight_is_refused(weight):
    with pytest.raises(ReplyError, match="must be > 0"):
        deserialize_reply("a", serialize_reply(make_reply(weight=weight)))


def test_reply_in_another_sites_name_is_refused():
    with pytest.raises(ReplyError, match="replied in the name of 'b'"):
        deserialize_reply("a", serialize_reply(make_reply(site="b")))


@pytest.mark.parametrize("kind", sorted(DECLINE_KINDS))
def test_declined_round_trip(kind):
    declined = Declined("a", "train", 3, kind, "in words")
    assert deserialize_reply("a", serialize_reply(declined)) == declined


def test_declined_of_an_unknown_kind_becomes_other():
    header, tensors = deserialize_frame(serialize_reply(Declined("a", "train", 3, "busy", "in words")))
    data = serialize_frame(header | {"kind": "on_holiday"}, tensors)
    assert deserialize_reply("a", data) == Declined("a", "train", 3, "other", "in words")


@pytest.mark.parametrize("changes", [{"kind": ["busy"]}, {"kind": {}}, {"round": "three"}])
def test_declined_with_malformed_fields_is_refused(changes):
    header, tensors = deserialize_frame(serialize_reply(Declined("a", "train", 3, "busy", "in words")))
    with pytest.raises(ReplyError, match="missing or wrong"):
        deserialize_reply("a", serialize_frame(header | changes, tensors))


def test_message_of_format_2_is_refused():
    data = serialize_reply(make_reply())
    with pytest.raises(MessageError, match="not a hemofed message of this version"):
        deserialize_reply("a", b"HF2\0" + data[4:])


def test_deeply_nested_header_is_refused():
    """The JSON parser raises RecursionError, which would end the run."""
    body = save({"x": torch.zeros(1)}, {"hemofed": "[" * 100_000})
    with pytest.raises(MessageError, match="cannot be read"):
        deserialize_reply("a", b"HF3\0" + struct.pack("<I", zlib.crc32(body)) + body)


def test_text_of_a_declined_reply_is_cut():
    declined = deserialize_reply("a", serialize_reply(Declined("a", "train", 2, "failed", "x" * 10**6)))
    assert len(declined.text) == MAX_DECLINE_TEXT_LENGTH == 2000


def test_aggregate_by_hand():
    aggregate = Aggregate()
    aggregate.add(make_reply("a", 1.0, (1.0, 0.0)))
    aggregate.add(make_reply("b", 3.0, (5.0, 4.0)))
    assert aggregate.mean("delta").tolist() == [4.0, 3.0]
    assert aggregate.sum("n").item() == 10
    assert aggregate.num_replies == 2
    assert list(aggregate.work_by_client) == ["a", "b"]
