"""What vectors go through on their way: encoded or not, what is remembered of the loss, and how many bytes it takes."""

from dataclasses import replace

import pytest
import torch

from pipeline.aggregation.requests import RoundRequest
from pipeline.codecs.base import VectorLayout
from pipeline.codecs.fp16 import Fp16Codec
from pipeline.codecs.qsgd import Qsgd
from pipeline.codecs.topk import TopK
from pipeline.core.errors import MessageError
from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression, drop_residuals, select_residuals
from pipeline.protocol.messages import ClientUpdate, Message, Reply, RoundPolicy
from pipeline.protocol.serialization import (
    deserialize_frame,
    deserialize_message,
    deserialize_reply,
    serialize_message,
    serialize_reply,
)
from pipeline.protocol.tasks import LocalWork, TrainResult
from pipeline.strategies.base import GlobalModelState, StrategyContext
from pipeline.strategies.fedavg import FedAvg
from sites.worker.client_state import ClientStateStore
from sites.worker.task_session import TaskSession
from tests.conftest import final_weights

EMPTY = torch.zeros(0)
PLAN = StrategyContext(ParameterSpec(("w",), ((4,),), ("head",)), 2, lambda turn: 0.1, 0, epochs=1, steps=None)
HALF = UpdateCompression(uplink=(TopK(fraction=0.5),), layout=VectorLayout((4,), 2))  # the two largest of four numbers


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


def moved(*delta):
    return ClientUpdate({"delta": vec(*delta), "stats": EMPTY})


def sent(wire, packed):
    return wire.decode_uplink(packed["delta"]).tolist()


# Error feedback


def test_what_was_lost_is_added_to_the_next_update():
    packed, lost = HALF.compress_update(moved(4, 3, 2, 1), {}, "a", 1)
    assert sent(HALF, packed) == [4, 3, 0, 0]
    assert lost["residual/delta"].tolist() == [0, 0, 2, 1]
    packed, lost = HALF.compress_update(moved(1, 0, 0, 2), lost, "a", 2)
    assert sent(HALF, packed) == [0, 0, 2, 3]  # of 1 0 2 3
    assert lost["residual/delta"].tolist() == [1, 0, 0, 0]


def test_without_feedback_what_was_lost_is_gone():
    plain = UpdateCompression(uplink=(TopK(fraction=0.5, error_feedback=False),), layout=HALF.layout)
    packed, lost = plain.compress_update(moved(4, 3, 2, 1), {"residual/delta": vec(9, 9, 9, 9)}, "a", 1)
    assert sent(plain, packed) == [4, 3, 0, 0]
    assert lost == {}


def visit(memory, turn, counted, *delta, wire=HALF):
    """One turn of FedAvg at a site that moves by `delta`; what arrives of it."""
    start = torch.zeros(4)
    message = Message("train", turn, {"weights": start, "stats": EMPTY}, last_accepted=counted)
    there = TaskSession("a", message, FedAvg(), PLAN, memory, "examples", 1.0, wire)
    there.submit_result(TrainResult(start + vec(*delta), EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
    return deserialize_reply("a", there.encode_reply(), wire.decode_uplink).update.averaged["delta"].tolist()


def test_a_residual_is_kept_if_the_reply_counted():
    memory = ClientStateStore()
    assert visit(memory, 1, None, 4, 3, 2, 1) == [4, 3, 0, 0]
    assert memory.committed == {}  # nobody has said yet that it counted
    assert select_residuals(memory.pending)["residual/delta"].tolist() == [0, 0, 2, 1]
    assert visit(memory, 2, (1, 0), 1, 0, 0, 2) == [0, 0, 2, 3]


def test_a_residual_is_dropped_if_the_reply_did_not_count():
    """The update of turn 1 never entered the state, so nothing of it may be added later."""
    memory = ClientStateStore()
    visit(memory, 1, None, 4, 3, 2, 1)
    assert visit(memory, 2, None, 1, 0, 0, 2) == [1, 0, 0, 2]
    assert visit(memory, 3, (2, 0), 0, 0, 0, 1) == [0, 0, 0, 1]  # turn 2 lost nothing


def test_a_strategy_never_sees_residuals():
    memory = {"residual/delta": vec(1), "control": vec(2)}
    assert drop_residuals(memory).keys() == {"control"}
    assert select_residuals(memory).keys() == {"residual/delta"}


# What is never encoded

EIGHT = UpdateCompression(uplink=(Qsgd(bits=8),), downlink=(Qsgd(bits=8),), layout=VectorLayout((4,), 2))


def test_statistics_sums_and_single_numbers_travel_as_they_are():
    update = ClientUpdate(
        {"delta": vec(1, 2, 3, 4), "stats": vec(5, 6), "travel": torch.tensor(0.1), "table": torch.ones(2, 2)},
        {"control": vec(1, 2, 3, 4), "train_loss": torch.tensor(0.3)},
    )
    packed, _ = EIGHT.compress_update(update, {}, "a", 1)
    assert packed.keys() == {"delta"}
    _, tensors = deserialize_frame(serialize_reply(Reply("a", "train", 1, 0, update, 1.0), packed))
    assert {key for key in tensors if "@" in key} == {"mean/delta@0.qsgd.codes", "mean/delta@0.qsgd.scales"}
    for key in ("mean/stats", "mean/travel", "mean/table", "sum/control", "sum/train_loss"):
        kind, _, name = key.partition("/")
        assert torch.equal(tensors[key], getattr(update, kind)[name])


@pytest.mark.parametrize(("task", "encoded"), [("train", {"weights", "anchor"}), ("evaluate", set()), ("keep", set())])
def test_on_the_way_down_only_what_is_trained_from_is_encoded(task, encoded):
    vectors = {"weights": vec(1, 2, 3, 4), "anchor": vec(4, 3, 2, 1), "stats": vec(5, 6), "slope": torch.tensor(0.5)}
    parcel = EIGHT.serialize_messages({"a": Message(task, 1, vectors)})["a"]
    assert {key.partition("@")[0] for key in deserialize_frame(parcel)[1] if "@" in key} == encoded
    got = deserialize_message(parcel, EIGHT.decode_downlink).vectors
    assert torch.equal(got["stats"], vectors["stats"])
    assert torch.equal(got["slope"], vectors["slope"])


def test_what_goes_to_many_is_the_same_for_all():
    """4 bits are drawn at random, but once."""
    wire = UpdateCompression(downlink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 2))
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parcels = wire.serialize_messages({site: Message("train", 1, {"weights": w, "stats": EMPTY}) for site in "ab"})
    a, b = (deserialize_message(parcels[site], wire.decode_downlink).vectors["weights"] for site in "ab")
    assert torch.equal(a, b)
    assert not torch.equal(a, w)


# The way down


class AtSites:
    """An engine of one site, which moves by `delta` from wherever it starts."""

    def __init__(self, wire, delta):
        self.wire, self.delta, self.started = wire, delta, None

    def exchange(self, parcels, wait):
        for site, parcel in parcels.items():
            message = deserialize_message(parcel, self.wire.open_down)
            there = TaskSession(site, message, FedAvg(), PLAN, ClientStateStore(), "examples", 1.0, self.wire)
            self.started = there.job.initial_weights
            there.submit_result(TrainResult(self.started + self.delta, EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
            self.length = (len(parcel), len(there.encode_reply()))
            yield site, there.encode_reply()


def test_a_site_trains_from_the_decoded_copy_and_the_coordinator_keeps_its_exact_model():
    """Half precision holds 11 bits: 2049 arrives as 2048. The site's move is counted from there, and added to 2049."""
    wire = UpdateCompression(downlink=(Fp16Codec(),), layout=VectorLayout((4,), 1))
    engine = AtSites(wire, vec(1, 0, 0, 0))
    asking = RoundRequest(engine, None, "train", 1, 0, RoundPolicy(), {}, compression=wire)
    state = FedAvg().run_round(GlobalModelState(vec(2049, 1, 1, 1), EMPTY), ["a"], asking, PLAN)
    assert engine.started.tolist() == [2048, 1, 1, 1]
    assert state.weights.tolist() == [2050, 1, 1, 1]


def test_bytes_are_the_lengths_of_what_travelled():
    engine = AtSites(EIGHT, vec(1, 0, 0, 0))
    asking = RoundRequest(engine, None, "train", 1, 0, RoundPolicy(), {}, compression=EIGHT)
    asking.aggregate({"a": {"weights": vec(1, 2, 3, 4), "stats": EMPTY}})
    assert (asking.log.bytes_down, asking.log.bytes_up) == engine.length


def test_the_record_of_a_run_counts_real_bytes(moons, go):
    """2-64-64-2: P = 4482 numbers. As float32 4 P bytes, in 4 bits P / 2 and a scale for every 256."""
    P, sites = 2 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2, 4
    net = {"model": {"name": "mlp", "hidden": [64, 64]}, "rounds": 2}
    plain, _ = go(moons(**net), "plain")
    small, results = go(moons(compression={"uplink": {"name": "qsgd", "bits": 4}, "downlink": "fp16"}, **net), "small")
    record, other = plain.rounds()[1]["bytes"], small.rounds()[1]["bytes"]
    headers = 1000  # at most, a parcel
    for way, numbers in (("up", P / 2 + 4 * -(-P // 256)), ("down", 2 * P)):
        assert 0 < record[way] - sites * 4 * P < sites * headers
        assert 0 < other[way] - sites * numbers < sites * headers
    assert record["up"] / other["up"] > 5
    assert results["traffic"]["up"] == sum(r["bytes"]["up"] for r in small.rounds())
    assert other["evaluate_down"] == record["evaluate_down"]  # what is judged is never encoded
    assert not torch.equal(final_weights(plain), final_weights(small))


def test_no_codec_at_all_is_the_same_as_none_named(moons, go):
    one, _ = go(moons(rounds=2, compression={"uplink": [], "downlink": []}), "none")
    other, _ = go(moons(rounds=2), "default")
    assert torch.equal(final_weights(one), final_weights(other))


# Two sides that do not agree


def reply_in(wire, n=1000):
    update = ClientUpdate({"delta": torch.linspace(-1, 1, n), "stats": EMPTY})
    packed, _ = wire.seal(update, {}, "a", 1)
    return serialize_reply(Reply("a", "train", 1, 0, update, 1.0), packed)


FOUR_BITS = UpdateCompression(uplink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 1))


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (FOUR_BITS, NO_COMPRESSION, "came encoded, but this study names no codec"),
        (replace(FOUR_BITS, up=(Qsgd(bits=8),)), FOUR_BITS, "'codes', not 500 of torch.uint8"),
        (replace(FOUR_BITS, up=(Qsgd(levels=7),)), replace(FOUR_BITS, up=(Qsgd(levels=3, bits=4),)), "levels the same"),
        (replace(FOUR_BITS, up=(Fp16Codec(),)), FOUR_BITS, "holds nothing as 'codes'"),
        (replace(FOUR_BITS, up=(TopK(fraction=0.1),)), FOUR_BITS, "is the other side's [compression] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, up=(TopK(fraction=0.1),)), "is the other side's [compression] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, layout=VectorLayout((999,), 1)), "claims 1000 numbers; the model has 999"),
    ],
)
def test_another_codec_is_refused_in_words(theirs, ours, says):
    class Posts:
        def exchange(self, parcels, wait):
            yield "a", reply_in(theirs)

    asking = RoundRequest(Posts(), None, "train", 1, 0, RoundPolicy(quorum=0), {}, compression=ours)
    assert asking.collect({"a": {"weights": EMPTY}}) == []
    assert asking.log.failures["a"].startswith("quarantined")
    assert says in asking.log.failures["a"]


def test_a_site_without_the_codec_refuses_the_model():
    parcel = EIGHT.serialize_messages({"a": Message("train", 1, {"weights": vec(1, 2, 3, 4), "stats": EMPTY})})["a"]
    with pytest.raises(MessageError, match="this study names no codec for that way"):
        deserialize_message(parcel, NO_COMPRESSION.decode_downlink)
    assert deserialize_message(serialize_message(Message("train", 1, {"weights": EMPTY}))).round == 1


def test_an_uncoded_answer_where_a_codec_is_named_is_taken():
    """As long as its shape is right: nothing is lost by sending more."""
    reply = Reply("a", "train", 1, 0, moved(1, 2, 3, 4), 1.0)
    assert deserialize_reply("a", serialize_reply(reply), HALF.decode_uplink).update.averaged["delta"].tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_a_site_whose_update_is_not_finite_says_so_instead_of_sending():
    memory = ClientStateStore()
    message = Message("train", 1, {"weights": torch.zeros(4), "stats": EMPTY})
    there = TaskSession("a", message, FedAvg(), PLAN, memory, "examples", 1.0, HALF)
    there.submit_result(TrainResult(vec(1, float("nan"), 0, 0), EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
    assert "not finite cannot be encoded" in deserialize_reply("a", there.encode_reply(), HALF.decode_uplink).reason
    assert memory.pending == {}
