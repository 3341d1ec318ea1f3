"""Update compression: which vectors are encoded, error feedback, and the bytes counted."""

from dataclasses import replace

import pytest
import torch

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
from pipeline.strategies.base import GlobalModelState
from pipeline.strategies.fedavg import FedAvg
from sites.worker.client_state import ClientStateStore
from sites.worker.task_session import TaskSession
from tests.support.federation import EMPTY, FakeEngine, make_context, make_round_request, vec
from tests.support.studies import final_weights

CONTEXT = make_context(ParameterSpec(("w",), ((4,),), ("head",)), epochs=1)
TOP_HALF = UpdateCompression(
    uplink=(TopK(fraction=0.5),), layout=VectorLayout((4,), 2)
)  # the two largest of four numbers


def make_update(*delta):
    return ClientUpdate({"delta": vec(*delta), "stats": EMPTY})


def decode_delta(compression, encoded):
    return compression.decode_uplink(encoded["delta"]).tolist()


# Error feedback


def test_error_feedback_adds_the_residual_to_the_next_update():
    encoded, residuals = TOP_HALF.compress_update(make_update(4, 3, 2, 1), {}, "a", 1)
    assert decode_delta(TOP_HALF, encoded) == [4, 3, 0, 0]
    assert residuals["residual/delta"].tolist() == [0, 0, 2, 1]
    encoded, residuals = TOP_HALF.compress_update(make_update(1, 0, 0, 2), residuals, "a", 2)
    assert decode_delta(TOP_HALF, encoded) == [0, 0, 2, 3]  # of 1 0 2 3
    assert residuals["residual/delta"].tolist() == [1, 0, 0, 0]


def test_without_error_feedback_the_residual_is_lost():
    without_feedback = UpdateCompression(uplink=(TopK(fraction=0.5, error_feedback=False),), layout=TOP_HALF.layout)
    encoded, residuals = without_feedback.compress_update(
        make_update(4, 3, 2, 1), {"residual/delta": vec(9, 9, 9, 9)}, "a", 1
    )
    assert decode_delta(without_feedback, encoded) == [4, 3, 0, 0]
    assert residuals == {}


def send_delta(state_store, round_number, last_accepted, *delta, compression=TOP_HALF):
    """The delta that arrives when a client trains by `delta` in this round of FedAvg."""
    start = torch.zeros(4)
    message = Message("train", round_number, {"weights": start, "stats": EMPTY}, last_accepted=last_accepted)
    session = TaskSession("a", message, FedAvg(), CONTEXT, state_store, "examples", 1.0, compression)
    session.submit_result(TrainResult(start + vec(*delta), EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
    return deserialize_reply("a", session.encode_reply(), compression.decode_uplink).update.averaged["delta"].tolist()


def test_residual_is_kept_if_the_reply_was_accepted():
    state_store = ClientStateStore()
    assert send_delta(state_store, 1, None, 4, 3, 2, 1) == [4, 3, 0, 0]
    assert state_store.committed == {}  # the coordinator has not yet confirmed that it was accepted
    assert select_residuals(state_store.pending)["residual/delta"].tolist() == [0, 0, 2, 1]
    assert send_delta(state_store, 2, (1, 0), 1, 0, 0, 2) == [0, 0, 2, 3]


def test_residual_is_dropped_if_the_reply_was_not_accepted():
    """The update of round 1 never entered the state, so none of it may be added later."""
    state_store = ClientStateStore()
    send_delta(state_store, 1, None, 4, 3, 2, 1)
    assert send_delta(state_store, 2, None, 1, 0, 0, 2) == [1, 0, 0, 2]
    assert send_delta(state_store, 3, (2, 0), 0, 0, 0, 1) == [0, 0, 0, 1]  # round 2 lost nothing


def test_strategy_does_not_see_residuals():
    client_state = {"residual/delta": vec(1), "control": vec(2)}
    assert drop_residuals(client_state).keys() == {"control"}
    assert select_residuals(client_state).keys() == {"residual/delta"}


# What is never encoded

EIGHT_BITS = UpdateCompression(uplink=(Qsgd(bits=8),), downlink=(Qsgd(bits=8),), layout=VectorLayout((4,), 2))


def test_norm_stats_sums_and_scalars_are_not_encoded():
    update = ClientUpdate(
        {"delta": vec(1, 2, 3, 4), "stats": vec(5, 6), "travel": torch.tensor(0.1), "table": torch.ones(2, 2)},
        {"control": vec(1, 2, 3, 4), "train_loss": torch.tensor(0.3)},
    )
    encoded, _ = EIGHT_BITS.compress_update(update, {}, "a", 1)
    assert encoded.keys() == {"delta"}
    _, tensors = deserialize_frame(serialize_reply(Reply("a", "train", 1, 0, update, 1.0), encoded))
    assert {key for key in tensors if "@" in key} == {"mean/delta@0.qsgd.codes", "mean/delta@0.qsgd.scales"}
    for key in ("mean/stats", "mean/travel", "mean/table", "sum/control", "sum/train_loss"):
        kind, _, name = key.partition("/")
        vectors = {"mean": update.averaged, "sum": update.summed}[kind]
        assert torch.equal(tensors[key], vectors[name])


@pytest.mark.parametrize(
    ("task", "encoded"), [("train", {"weights", "anchor"}), ("evaluate", set()), ("save_personal", set())]
)
def test_downlink_encodes_training_messages_only(task, encoded):
    vectors = {"weights": vec(1, 2, 3, 4), "anchor": vec(4, 3, 2, 1), "stats": vec(5, 6), "slope": torch.tensor(0.5)}
    data = EIGHT_BITS.serialize_messages({"a": Message(task, 1, vectors)})["a"]
    assert {key.partition("@")[0] for key in deserialize_frame(data)[1] if "@" in key} == encoded
    vectors_received = deserialize_message(data, EIGHT_BITS.decode_downlink).vectors
    assert torch.equal(vectors_received["stats"], vectors["stats"])
    assert torch.equal(vectors_received["slope"], vectors["slope"])


def test_downlink_encodes_a_shared_vector_once():
    """Rounding to 4 bits is random, but it is drawn once for all clients."""
    compression = UpdateCompression(downlink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 2))
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    messages = compression.serialize_messages(
        {site: Message("train", 1, {"weights": w, "stats": EMPTY}) for site in "ab"}
    )
    a, b = (deserialize_message(messages[site], compression.decode_downlink).vectors["weights"] for site in "ab")
    assert torch.equal(a, b)
    assert not torch.equal(a, w)


# Downlink


class TrainingEngine:
    """Clients that move by `delta` from the weights that they receive."""

    def __init__(self, compression, delta):
        self.compression, self.delta, self.initial_weights = compression, delta, None

    def exchange(self, message_bytes, round_policy):
        for site, data in message_bytes.items():
            message = deserialize_message(data, self.compression.decode_downlink)
            session = TaskSession(
                site, message, FedAvg(), CONTEXT, ClientStateStore(), "examples", 1.0, self.compression
            )
            self.initial_weights = session.job.initial_weights
            session.submit_result(TrainResult(self.initial_weights + self.delta, EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
            self.num_bytes = (len(data), len(session.encode_reply()))
            yield site, session.encode_reply()


def test_client_trains_from_the_decoded_copy_and_the_coordinator_keeps_its_exact_model():
    """Half precision holds 11 bits: 2049 arrives as 2048. The client's delta counts from there and is added to 2049."""
    compression = UpdateCompression(downlink=(Fp16Codec(),), layout=VectorLayout((4,), 1))
    engine = TrainingEngine(compression, vec(1, 0, 0, 0))
    request = make_round_request(engine, compression=compression)
    state = FedAvg().run_round(GlobalModelState(vec(2049, 1, 1, 1), EMPTY), ["a"], request, CONTEXT)
    assert engine.initial_weights.tolist() == [2048, 1, 1, 1]
    assert state.weights.tolist() == [2050, 1, 1, 1]


def test_request_log_counts_bytes():
    engine = TrainingEngine(EIGHT_BITS, vec(1, 0, 0, 0))
    request = make_round_request(engine, compression=EIGHT_BITS)
    request.aggregate({"a": {"weights": vec(1, 2, 3, 4), "stats": EMPTY}})
    assert (request.log.bytes_down, request.log.bytes_up) == engine.num_bytes


def test_round_record_counts_compressed_bytes(moons, run_study):
    """2-64-64-2: P = 4482 numbers. As float32 4 P bytes, in 4 bits P / 2 and a scale for every 256."""
    P, sites = 2 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2, 4
    net = {"model": {"name": "mlp", "hidden": [64, 64]}, "rounds": 2}
    plain, _ = run_study(moons(**net), "plain")
    small, results = run_study(
        moons(compression={"uplink": {"name": "qsgd", "bits": 4}, "downlink": "fp16"}, **net), "small"
    )
    record, other = plain.load_rounds()[1].bytes, small.load_rounds()[1].bytes
    headers = 1000  # at most, a message
    for way, numbers in (("up", P / 2 + 4 * -(-P // 256)), ("down", 2 * P)):
        assert 0 < getattr(record, way) - sites * 4 * P < sites * headers
        assert 0 < getattr(other, way) - sites * numbers < sites * headers
    assert record.up / other.up > 5
    assert results.traffic.up == sum(r.bytes.up for r in small.load_rounds())
    assert other.evaluate_down == record.evaluate_down  # evaluated models are never encoded
    # sums of scores are shorter than this model
    assert record.evaluate_up < sites * 4 * P < record.evaluate_down < sites * (4 * P + headers)
    assert not torch.equal(final_weights(plain), final_weights(small))


def test_empty_codec_chain_equals_the_default(moons, run_study):
    one, _ = run_study(moons(rounds=2, compression={"uplink": [], "downlink": []}), "none")
    other, _ = run_study(moons(rounds=2), "default")
    assert torch.equal(final_weights(one), final_weights(other))


# Site and coordinator with different settings


def make_reply_bytes(compression, n=1000):
    update = ClientUpdate({"delta": torch.linspace(-1, 1, n), "stats": EMPTY})
    encoded, _ = compression.compress_update(update, {}, "a", 1)
    return serialize_reply(Reply("a", "train", 1, 0, update, 1.0), encoded)


FOUR_BITS = UpdateCompression(uplink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 1))


@pytest.mark.parametrize(
    ("site_compression", "coordinator_compression", "text"),
    [
        (FOUR_BITS, NO_COMPRESSION, "came encoded, but this study names no codec"),
        (replace(FOUR_BITS, uplink=(Qsgd(bits=8),)), FOUR_BITS, "'codes', not 500 of torch.uint8"),
        (
            replace(FOUR_BITS, uplink=(Qsgd(levels=7),)),
            replace(FOUR_BITS, uplink=(Qsgd(levels=3, bits=4),)),
            "levels the same",
        ),
        (replace(FOUR_BITS, uplink=(Fp16Codec(),)), FOUR_BITS, "holds nothing as 'codes'"),
        (replace(FOUR_BITS, uplink=(TopK(fraction=0.1),)), FOUR_BITS, "is the other side's [compression] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, uplink=(TopK(fraction=0.1),)), "is the other side's [compression] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, layout=VectorLayout((999,), 1)), "claims 1000 numbers; the model has 999"),
    ],
)
def test_reply_of_another_codec_is_quarantined(site_compression, coordinator_compression, text):
    engine = FakeEngine(("a", make_reply_bytes(site_compression)))
    policy = RoundPolicy(quorum=0)
    request = make_round_request(engine, round_policy=policy, compression=coordinator_compression)
    assert request.collect({"a": {"weights": EMPTY}}) == []
    assert request.log.failures["a"].kind == "quarantined"
    assert text in request.log.failures["a"].text


def test_client_without_the_codec_refuses_the_message():
    data = EIGHT_BITS.serialize_messages({"a": Message("train", 1, {"weights": vec(1, 2, 3, 4), "stats": EMPTY})})["a"]
    with pytest.raises(MessageError, match="this study names no codec for this direction"):
        deserialize_message(data, NO_COMPRESSION.decode_downlink)
    assert deserialize_message(serialize_message(Message("train", 1, {"weights": EMPTY}))).round == 1


def test_unencoded_reply_is_accepted_where_a_codec_is_set():
    """As long as its shape is right: sending more loses nothing."""
    reply = Reply("a", "train", 1, 0, make_update(1, 2, 3, 4), 1.0)
    assert deserialize_reply("a", serialize_reply(reply), TOP_HALF.decode_uplink).update.averaged["delta"].tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_client_declines_to_send_a_non_finite_update():
    state_store = ClientStateStore()
    message = Message("train", 1, {"weights": torch.zeros(4), "stats": EMPTY})
    session = TaskSession("a", message, FedAvg(), CONTEXT, state_store, "examples", 1.0, TOP_HALF)
    session.submit_result(TrainResult(vec(1, float("nan"), 0, 0), EMPTY, LocalWork(1, 1, 8), 0.5, 0.1))
    declined = deserialize_reply("a", session.encode_reply(), TOP_HALF.decode_uplink)
    assert declined.kind == "not_sent"
    assert "not finite cannot be encoded" in declined.text
    assert state_store.pending == {}
