"""What travels survives the trip or is refused."""

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from pipeline.core.errors import MessageError, ReplyError
from pipeline.protocol.messages import Aggregate, ClientUpdate, Declined, Message, Reply
from pipeline.protocol.serialization import deserialize_message, deserialize_reply, serialize_message, serialize_reply
from pipeline.protocol.tasks import LocalWork


def reply(site="a", weight=2.0, values=(1.0, 2.0), turn=3):
    update = ClientUpdate({"delta": torch.tensor(values)}, {"n": torch.tensor(5)}, LocalWork(4, 4, 10, 0.5))
    return Reply(site, "train", turn, 0, update, weight)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 5), st.booleans(), st.one_of(st.none(), st.floats(0.1, 1e6)))
def test_a_message_comes_back_as_it_was(size, attempt, partial, deadline):
    sent = Message(
        "train",
        7,
        {"weights": torch.randn(size), "stats": torch.zeros(0)},
        attempt,
        (6, 1),
        deadline,
        partial,
        ("val",),
    )
    got = deserialize_message(serialize_message(sent))
    assert {k: v for k, v in vars(got).items() if k != "vectors"} == {
        k: v for k, v in vars(sent).items() if k != "vectors"
    }
    assert torch.equal(got.vectors["weights"], sent.vectors["weights"])


def test_tensors_that_share_memory_are_sent_apart():
    x = torch.arange(10.0)
    got = deserialize_message(serialize_message(Message("train", 1, {"all": x, "head": x[:3], "again": x})))
    assert torch.equal(got.vectors["head"], x[:3])
    assert torch.equal(got.vectors["again"], x)


def test_a_slice_does_not_carry_its_surroundings():
    x = torch.zeros(100_000)
    assert len(serialize_message(Message("train", 1, {"w": x[:10]}))) < 1000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_found_wherever_it_is(data):
    parcel = bytearray(serialize_reply(reply()))
    where = data.draw(st.integers(0, len(parcel) - 1))
    if data.draw(st.booleans()):
        parcel[where] ^= data.draw(st.integers(1, 255))
    else:
        del parcel[where:]
    with pytest.raises((MessageError, ReplyError)):
        deserialize_reply("a", bytes(parcel))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_never_enters_the_state(bad):
    with pytest.raises(ReplyError, match=r"delta is not finite; lower local\.lr"):
        deserialize_reply("a", serialize_reply(reply(values=(1.0, bad))))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_refused(weight):
    with pytest.raises(ReplyError, match="must be > 0"):
        deserialize_reply("a", serialize_reply(reply(weight=weight)))


def test_nobody_answers_in_anothers_name():
    with pytest.raises(ReplyError, match="in the name of 'b'"):
        deserialize_reply("a", serialize_reply(reply(site="b")))


def test_an_excuse_comes_back():
    assert deserialize_reply("a", serialize_reply(Declined("a", "train", 3, "budget spent"))) == Declined(
        "a", "train", 3, "budget spent"
    )


def test_what_nests_without_end_is_no_message():
    """The library that reads it gives up with an error of its own, which would end the run."""
    body = save({"x": torch.zeros(1)}, {"hemofed": "[" * 100_000})
    with pytest.raises(MessageError, match="cannot be read"):
        deserialize_reply("a", b"HF2\0" + struct.pack("<I", zlib.crc32(body)) + body)


def test_an_excuse_is_short():
    assert len(deserialize_reply("a", serialize_reply(Declined("a", "train", 2, "x" * 10**6))).reason) == 2000


def test_totals_by_hand():
    total = Aggregate()
    total.add(reply("a", 1.0, (1.0, 0.0)))
    total.add(reply("b", 3.0, (5.0, 4.0)))
    assert total.mean("delta").tolist() == [4.0, 3.0]
    assert total.sum("n").item() == 10
    assert total.num_replies == 2
    assert list(total.work_by_client) == ["a", "b"]
