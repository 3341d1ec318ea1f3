"""What vectors go through on their way: encoded or not, what is remembered of the loss, and how many bytes it takes."""

from dataclasses import replace

import pytest
import torch

from pipeline.aggregation.requests import Asking
from pipeline.codecs.base import Layout
from pipeline.codecs.fp16 import Fp16
from pipeline.codecs.qsgd import Qsgd
from pipeline.codecs.topk import TopK
from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Spec
from pipeline.protocol.compression import PLAIN, Wire, residuals, without_residuals
from pipeline.protocol.messages import Message, Reply, Update, Wait
from pipeline.protocol.serialization import message_bytes, read_message, read_reply, reply_bytes, unpack
from pipeline.protocol.tasks import Fitted, Work
from pipeline.strategies.base import Global, Plan
from pipeline.strategies.fedavg import FedAvg
from sites.worker.client_state import SiteMemory
from sites.worker.task_session import Visit
from tests.conftest import final_weights

EMPTY = torch.zeros(0)
PLAN = Plan(Spec(("w",), ((4,),), ("head",)), 2, lambda turn: 0.1, 0, epochs=1, steps=None)
HALF = Wire(up=(TopK(share=0.5),), layout=Layout((4,), 2))  # the two largest of four numbers


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


def moved(*delta):
    return Update({"delta": vec(*delta), "stats": EMPTY})


def sent(wire, packed):
    return wire.open_up(packed["delta"]).tolist()


# Error feedback


def test_what_was_lost_is_added_to_the_next_update():
    packed, lost = HALF.seal(moved(4, 3, 2, 1), {}, "a", 1)
    assert sent(HALF, packed) == [4, 3, 0, 0]
    assert lost["residual/delta"].tolist() == [0, 0, 2, 1]
    packed, lost = HALF.seal(moved(1, 0, 0, 2), lost, "a", 2)
    assert sent(HALF, packed) == [0, 0, 2, 3]  # of 1 0 2 3
    assert lost["residual/delta"].tolist() == [1, 0, 0, 0]


def test_without_feedback_what_was_lost_is_gone():
    plain = Wire(up=(TopK(share=0.5, error_feedback=False),), layout=HALF.layout)
    packed, lost = plain.seal(moved(4, 3, 2, 1), {"residual/delta": vec(9, 9, 9, 9)}, "a", 1)
    assert sent(plain, packed) == [4, 3, 0, 0]
    assert lost == {}


def visit(memory, turn, counted, *delta, wire=HALF):
    """One turn of FedAvg at a site that moves by `delta`; what arrives of it."""
    start = torch.zeros(4)
    message = Message("train", turn, {"weights": start, "stats": EMPTY}, counted=counted)
    there = Visit("a", message, FedAvg(), PLAN, memory, "examples", 1.0, wire)
    there.give(Fitted(start + vec(*delta), EMPTY, Work(1, 1, 8), 0.5, 0.1))
    return read_reply("a", there.parcel(), wire.open_up).update.mean["delta"].tolist()


def test_a_residual_is_kept_if_the_reply_counted():
    memory = SiteMemory()
    assert visit(memory, 1, None, 4, 3, 2, 1) == [4, 3, 0, 0]
    assert memory.committed == {}  # nobody has said yet that it counted
    assert residuals(memory.pending)["residual/delta"].tolist() == [0, 0, 2, 1]
    assert visit(memory, 2, (1, 0), 1, 0, 0, 2) == [0, 0, 2, 3]


def test_a_residual_is_dropped_if_the_reply_did_not_count():
    """The update of turn 1 never entered the state, so nothing of it may be added later."""
    memory = SiteMemory()
    visit(memory, 1, None, 4, 3, 2, 1)
    assert visit(memory, 2, None, 1, 0, 0, 2) == [1, 0, 0, 2]
    assert visit(memory, 3, (2, 0), 0, 0, 0, 1) == [0, 0, 0, 1]  # turn 2 lost nothing


def test_a_strategy_never_sees_residuals():
    memory = {"residual/delta": vec(1), "control": vec(2)}
    assert without_residuals(memory).keys() == {"control"}
    assert residuals(memory).keys() == {"residual/delta"}


# What is never encoded

EIGHT = Wire(up=(Qsgd(bits=8),), down=(Qsgd(bits=8),), layout=Layout((4,), 2))


def test_statistics_sums_and_single_numbers_travel_as_they_are():
    update = Update(
        {"delta": vec(1, 2, 3, 4), "stats": vec(5, 6), "travel": torch.tensor(0.1), "table": torch.ones(2, 2)},
        {"control": vec(1, 2, 3, 4), "train_loss": torch.tensor(0.3)},
    )
    packed, _ = EIGHT.seal(update, {}, "a", 1)
    assert packed.keys() == {"delta"}
    _, tensors = unpack(reply_bytes(Reply("a", "train", 1, 0, update, 1.0), packed))
    assert {key for key in tensors if "@" in key} == {"mean/delta@0.qsgd.codes", "mean/delta@0.qsgd.scales"}
    for key in ("mean/stats", "mean/travel", "mean/table", "sum/control", "sum/train_loss"):
        kind, _, name = key.partition("/")
        assert torch.equal(tensors[key], getattr(update, kind)[name])


@pytest.mark.parametrize(("task", "encoded"), [("train", {"weights", "anchor"}), ("judge", set()), ("keep", set())])
def test_on_the_way_down_only_what_is_trained_from_is_encoded(task, encoded):
    vectors = {"weights": vec(1, 2, 3, 4), "anchor": vec(4, 3, 2, 1), "stats": vec(5, 6), "slope": torch.tensor(0.5)}
    parcel = EIGHT.parcels({"a": Message(task, 1, vectors)})["a"]
    assert {key.partition("@")[0] for key in unpack(parcel)[1] if "@" in key} == encoded
    got = read_message(parcel, EIGHT.open_down).vectors
    assert torch.equal(got["stats"], vectors["stats"])
    assert torch.equal(got["slope"], vectors["slope"])


def test_what_goes_to_many_is_the_same_for_all():
    """4 bits are drawn at random, but once."""
    wire = Wire(down=(Qsgd(bits=4),), layout=Layout((1000,), 2))
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parcels = wire.parcels({site: Message("train", 1, {"weights": w, "stats": EMPTY}) for site in "ab"})
    a, b = (read_message(parcels[site], wire.open_down).vectors["weights"] for site in "ab")
    assert torch.equal(a, b)
    assert not torch.equal(a, w)


# The way down


class AtSites:
    """An engine of one site, which moves by `delta` from wherever it starts."""

    def __init__(self, wire, delta):
        self.wire, self.delta, self.started = wire, delta, None

    def exchange(self, parcels, wait):
        for site, parcel in parcels.items():
            message = read_message(parcel, self.wire.open_down)
            there = Visit(site, message, FedAvg(), PLAN, SiteMemory(), "examples", 1.0, self.wire)
            self.started = there.job.start
            there.give(Fitted(self.started + self.delta, EMPTY, Work(1, 1, 8), 0.5, 0.1))
            self.length = (len(parcel), len(there.parcel()))
            yield site, there.parcel()


def test_a_site_trains_from_the_decoded_copy_and_the_coordinator_keeps_its_exact_model():
    """Half precision holds 11 bits: 2049 arrives as 2048. The site's move is counted from there, and added to 2049."""
    wire = Wire(down=(Fp16(),), layout=Layout((4,), 1))
    engine = AtSites(wire, vec(1, 0, 0, 0))
    asking = Asking(engine, None, "train", 1, 0, Wait(), {}, wire=wire)
    state = FedAvg().round(Global(vec(2049, 1, 1, 1), EMPTY), ["a"], asking, PLAN)
    assert engine.started.tolist() == [2048, 1, 1, 1]
    assert state.weights.tolist() == [2050, 1, 1, 1]


def test_bytes_are_the_lengths_of_what_travelled():
    engine = AtSites(EIGHT, vec(1, 0, 0, 0))
    asking = Asking(engine, None, "train", 1, 0, Wait(), {}, wire=EIGHT)
    asking.total({"a": {"weights": vec(1, 2, 3, 4), "stats": EMPTY}})
    assert (asking.log.down, asking.log.up) == engine.length


def test_the_record_of_a_run_counts_real_bytes(moons, go):
    """2-64-64-2: P = 4482 numbers. As float32 4 P bytes, in 4 bits P / 2 and a scale for every 256."""
    P, sites = 2 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2, 4
    net = {"model": {"name": "mlp", "hidden": [64, 64]}, "rounds": 2}
    plain, _ = go(moons(**net), "plain")
    small, results = go(moons(codec={"up": {"name": "qsgd", "bits": 4}, "down": "fp16"}, **net), "small")
    record, other = plain.rounds()[1]["bytes"], small.rounds()[1]["bytes"]
    headers = 1000  # at most, a parcel
    for way, numbers in (("up", P / 2 + 4 * -(-P // 256)), ("down", 2 * P)):
        assert 0 < record[way] - sites * 4 * P < sites * headers
        assert 0 < other[way] - sites * numbers < sites * headers
    assert record["up"] / other["up"] > 5
    assert results["traffic"]["up"] == sum(r["bytes"]["up"] for r in small.rounds())
    assert other["judge_down"] == record["judge_down"]  # what is judged is never encoded
    assert not torch.equal(final_weights(plain), final_weights(small))


def test_no_codec_at_all_is_the_same_as_none_named(moons, go):
    one, _ = go(moons(rounds=2, codec={"up": [], "down": []}), "none")
    other, _ = go(moons(rounds=2), "default")
    assert torch.equal(final_weights(one), final_weights(other))


# Two sides that do not agree


def reply_in(wire, n=1000):
    update = Update({"delta": torch.linspace(-1, 1, n), "stats": EMPTY})
    packed, _ = wire.seal(update, {}, "a", 1)
    return reply_bytes(Reply("a", "train", 1, 0, update, 1.0), packed)


FOUR_BITS = Wire(up=(Qsgd(bits=4),), layout=Layout((1000,), 1))


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (FOUR_BITS, PLAIN, "came encoded, but this study names no codec"),
        (replace(FOUR_BITS, up=(Qsgd(bits=8),)), FOUR_BITS, "'codes', not 500 of torch.uint8"),
        (replace(FOUR_BITS, up=(Qsgd(levels=7),)), replace(FOUR_BITS, up=(Qsgd(levels=3, bits=4),)), "levels the same"),
        (replace(FOUR_BITS, up=(Fp16(),)), FOUR_BITS, "holds nothing as 'codes'"),
        (replace(FOUR_BITS, up=(TopK(share=0.1),)), FOUR_BITS, "is the other side's [codec] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, up=(TopK(share=0.1),)), "is the other side's [codec] the same?"),
        (FOUR_BITS, replace(FOUR_BITS, layout=Layout((999,), 1)), "claims 1000 numbers; the model has 999"),
    ],
)
def test_another_codec_is_refused_in_words(theirs, ours, says):
    class Posts:
        def exchange(self, parcels, wait):
            yield "a", reply_in(theirs)

    asking = Asking(Posts(), None, "train", 1, 0, Wait(quorum=0), {}, wire=ours)
    assert asking.each({"a": {"weights": EMPTY}}) == []
    assert asking.log.missed["a"].startswith("quarantined")
    assert says in asking.log.missed["a"]


def test_a_site_without_the_codec_refuses_the_model():
    parcel = EIGHT.parcels({"a": Message("train", 1, {"weights": vec(1, 2, 3, 4), "stats": EMPTY})})["a"]
    with pytest.raises(BadMessage, match="this study names no codec for that way"):
        read_message(parcel, PLAIN.open_down)
    assert read_message(message_bytes(Message("train", 1, {"weights": EMPTY}))).turn == 1


def test_an_uncoded_answer_where_a_codec_is_named_is_taken():
    """As long as its shape is right: nothing is lost by sending more."""
    reply = Reply("a", "train", 1, 0, moved(1, 2, 3, 4), 1.0)
    assert read_reply("a", reply_bytes(reply), HALF.open_up).update.mean["delta"].tolist() == [1, 2, 3, 4]


def test_a_site_whose_update_is_not_finite_says_so_instead_of_sending():
    memory = SiteMemory()
    message = Message("train", 1, {"weights": torch.zeros(4), "stats": EMPTY})
    there = Visit("a", message, FedAvg(), PLAN, memory, "examples", 1.0, HALF)
    there.give(Fitted(vec(1, float("nan"), 0, 0), EMPTY, Work(1, 1, 8), 0.5, 0.1))
    assert "not finite cannot be encoded" in read_reply("a", there.parcel(), HALF.open_up).reason
    assert memory.pending == {}
