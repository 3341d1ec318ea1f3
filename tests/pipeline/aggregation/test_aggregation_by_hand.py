"""What the coordinator does with answers, on paper: FedOpt, SCAFFOLD, FedNova, q-FedAvg, weights, combines, quarantine."""

import json
import math
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from pipeline.aggregation.requests import RoundRequest
from pipeline.aggregation.rules import (
    WEIGHTED_MEAN,
    CoordinateMedian,
    Krum,
    MultiKrum,
    NormBound,
    TrimmedMean,
    WeightedMean,
)
from pipeline.codecs.base import VectorLayout
from pipeline.codecs.qsgd import Qsgd
from pipeline.core.errors import IncompatibleStudyError, QuorumNotReachedError
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.compression import UpdateCompression
from pipeline.protocol.messages import Aggregate, ClientUpdate, Message, Reply, RoundPolicy
from pipeline.protocol.serialization import deserialize_frame, serialize_frame, serialize_reply
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, LocalWork, TrainResult
from pipeline.strategies.base import StrategyContext
from pipeline.strategies.fedavg import FedAvg
from pipeline.strategies.fednova import FedNova
from pipeline.strategies.fedopt import FedOpt
from pipeline.strategies.fedpaq import FedPaq
from pipeline.strategies.qfedavg import QFedAvg
from pipeline.strategies.scaffold import Scaffold
from pipeline.strategies.scaffold import ScaffoldState as Controlled
from sites.worker.task_session import client_weight

EMPTY = torch.zeros(0)
W = torch.tensor([1.0, -1.0])
SPEC = ParameterSpec(("w",), ((2,),), ("head",))


def plan(sites=2, lr=0.1, steps=None):
    return StrategyContext(SPEC, sites, lambda turn: lr * turn, 0, epochs=None if steps else 5, steps=steps)


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


def answer(site, weight=1.0, stats=EMPTY, sum=None, **mean):
    return Reply(site, "train", 1, 0, ClientUpdate({**mean, "stats": stats}, sum or {}), float(weight))


class Answers:
    """An Ask whose sites answer what the test says."""

    def __init__(self, *replies):
        self.replies = replies

    def total(self, sends):
        return Aggregate.from_replies(r for r in self.replies if r.site in sends)


def finish(flow, result):
    with pytest.raises(StopIteration) as end:
        flow.send(result)
    return end.value.value


def message(turn=1, **vectors):
    return Message("train", turn, {"weights": W, "stats": EMPTY} | vectors)


# FedOpt: the mean move is (6 * 1 + 2 * 3) / 4 = 3 in both coordinates, but for its sign

MOVED = Answers(answer("a", 1, vec(5), delta=vec(6, -6)), answer("b", 3, vec(1), delta=vec(2, -2)))


@pytest.mark.parametrize(
    ("optimiser", "v"),
    [
        ("adagrad", 16 + 9),  # v + delta^2
        ("adam", 0.75 * 16 + 0.25 * 9),  # beta2 v + (1 - beta2) delta^2
        ("yogi", 16 - 0.25 * 9),  # 16 > 9: v falls by (1 - beta2) delta^2
    ],
)
def test_adaptive_steps_divide_by_the_root_of_the_second_moment_and_tau(optimiser, v):
    strategy = FedOpt(optimizer=optimiser, server_lr=6, beta1=0.5, beta2=0.75, tau=4)  # v begins at tau^2 = 16
    state = strategy.init_state(ModelState(W, vec(0)), plan())
    state = strategy.run_round(state, ["a", "b"], MOVED, plan())
    step = 6 * 1.5 / (math.sqrt(v) + 4)  # m = 0.5 * 0 + 0.5 * 3: no bias correction
    torch.testing.assert_close(state.second_moment, torch.full((2,), float(v)))
    torch.testing.assert_close(state.weights, vec(1 + step, -1 - step))
    assert state.norm_stats.tolist() == [2]  # (5 + 3 * 1) / 4: averaged, never stepped


def test_yogis_second_moment_rises_where_moves_are_large():
    strategy = FedOpt(optimizer="yogi", beta2=0.75, tau=2)  # v = 4 < 9
    state = strategy.run_round(strategy.init_state(ModelState(W, EMPTY), plan()), ["a", "b"], MOVED, plan())
    assert state.second_moment.tolist() == [4 + 0.25 * 9] * 2


def test_momentum_adds_up():
    strategy = FedOpt(optimizer="momentum", beta1=0.5)
    state = strategy.init_state(ModelState(vec(0, 0), EMPTY), plan())
    state = strategy.run_round(state, ["a", "b"], MOVED, plan())
    assert state.weights.tolist() == [3, -3]
    state = strategy.run_round(state, ["a", "b"], MOVED, plan())
    assert state.weights.tolist() == [7.5, -7.5]  # 3 + (0.5 * 3 + 3)


def test_adams_moments_last_from_round_to_round():
    strategy = FedOpt(optimizer="adam", server_lr=1, beta1=0.5, beta2=0.5, tau=1)
    state = strategy.init_state(ModelState(vec(0), EMPTY), plan())
    for _ in range(2):
        state = strategy.run_round(state, ["a"], Answers(answer("a", delta=vec(3))), plan())
    assert state.first_moment.tolist() == [2.25]  # 1.5, then 0.75 + 1.5
    assert state.second_moment.tolist() == [7]  # 1, 5, 7
    torch.testing.assert_close(state.weights, vec(1.5 / (math.sqrt(5) + 1) + 2.25 / (math.sqrt(7) + 1)))


def test_fedpaq_takes_tau_steps_and_quantises():
    job = next(FedPaq(tau=7).client_train(message(), {}, plan()))
    assert (job.steps, job.epochs) == (7, None)
    assert FedPaq(bits=2).default_codec == (Qsgd(bits=2),)


# SCAFFOLD


def test_scaffold_corrects_every_step_and_learns_its_mean_gradient():
    c, c_k = vec(0.5, 0.5), vec(0.25, 0)
    flow = Scaffold().client_train(message(control=c), {"control": c_k}, plan())
    job = next(flow)
    assert job.regularizer.slope == 0
    assert job.regularizer.offset.tolist() == [0.25, 0.5]  # c - c_k
    update, memory = finish(flow, TrainResult(vec(0, 0), EMPTY, LocalWork(5, 5, 10), 0.1, lr_sum=0.5))
    # c_k - c + (w_t - w) / travel = (0.25 - 0.5 + 1 / 0.5, 0 - 0.5 - 1 / 0.5)
    assert memory["control"].tolist() == [1.75, -2.5]
    assert update.sum["control"].tolist() == [1.5, -2.5]  # what it rose by
    assert update.mean["delta"].tolist() == [-1, 1]


def test_scaffold_without_a_step_learns_nothing():
    flow = Scaffold().client_train(message(control=W), {"control": vec(3, 3)}, plan())
    next(flow)
    update, memory = finish(flow, TrainResult(W, EMPTY, LocalWork(5, 0, 10), 0.0, lr_sum=0.0))
    assert update.sum["control"].tolist() == [0, 0]
    assert memory["control"].tolist() == [3, 3]


def test_scaffolds_common_control_moves_by_its_share_of_all_sites():
    asked = Answers(
        answer("a", 1, delta=vec(4, 0), sum={"control": vec(4, 0)}),
        answer("b", 3, delta=vec(0, 8), sum={"control": vec(0, 8)}),
    )
    state = Scaffold(server_lr=0.5).run_round(Controlled(W, EMPTY, vec(1, 1)), ["a", "b"], asked, plan(sites=4))
    assert state.weights.tolist() == [1 + 0.5 * 1, -1 + 0.5 * 6]  # weighted: (4 + 0) / 4 and 3 * 8 / 4
    assert state.control.tolist() == [1 + 4 / 4, 1 + 8 / 4]  # two of four answered; each counts once


class Bowl:
    """A site whose loss is h/2 (w - a)^2: its gradient is h (w - a), so local steps can be taken by hand."""

    def __init__(self, a, h=1.0):
        self.a, self.h = a, h

    def fit(self, job, lr):
        w = job.start.clone()
        for _ in range(job.steps):
            w = w - lr * (self.h * (w - self.a) + job.pull.slope * w + job.pull.offset)
        return TrainResult(w, EMPTY, LocalWork(job.steps, job.steps, 1), 0.0, lr_sum=lr * job.steps)


def descend(strategy, bowls, weights, rounds, lr=0.1, steps=10):
    """The whole algorithm on bowls, with everybody's memory."""
    how = plan(sites=len(bowls), lr=lr, steps=steps)
    state, memories = strategy.start(ModelState(vec(0), EMPTY), how), {site: {} for site in bowls}
    for turn in range(1, rounds + 1):
        replies = []
        for site, bowl in bowls.items():
            flow = strategy.train(Message("train", turn, strategy.train_payload(state, site)), memories[site], how)
            update, memories[site] = finish(flow, bowl.fit(next(flow), lr))
            replies.append(Reply(site, "train", turn, 0, update, weights[site]))
        state = strategy.round(state, list(bowls), Answers(*replies), how)
    return float(state.weights), memories


def test_scaffold_ends_where_the_sum_of_losses_is_least_and_fedavg_does_not():
    """(w - 0)^2 / 2 + 3 (w - 4)^2 / 2 is least at 3; ten steps of FedAvg stop where the two moves are opposite."""
    bowls, even = {"a": Bowl(0.0, 1.0), "b": Bowl(4.0, 3.0)}, {"a": 1.0, "b": 1.0}
    near, far = 1 - 0.9**10, 1 - 0.7**10  # share of the way to its optimum that a site goes
    assert descend(FedAvg(), bowls, even, 60)[0] == pytest.approx(4 * far / (near + far), abs=1e-4)
    assert descend(Scaffold(), bowls, even, 60)[0] == pytest.approx(3.0, abs=1e-4)


def test_scaffold_comes_to_rest_where_sites_count_alike_whatever_they_weigh():
    bowls = {"a": Bowl(0.0), "b": Bowl(4.0)}
    assert descend(FedAvg(), bowls, {"a": 1.0, "b": 3.0}, 60)[0] == pytest.approx(3.0, abs=1e-4)
    assert descend(Scaffold(), bowls, {"a": 1.0, "b": 3.0}, 200)[0] == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_a_control_is_the_gradient_itself_whatever_share_of_it_is_applied(correction):
    """After many rounds at rest: c_k = h (w - a), never more."""
    w, memories = descend(
        Scaffold(correction=correction), {"a": Bowl(0.0), "b": Bowl(4.0)}, {"a": 1, "b": 1}, 80, steps=1
    )
    assert w == pytest.approx(2.0, abs=1e-3)
    assert float(memories["a"]["control"]) == pytest.approx(2.0, abs=1e-2)
    assert float(memories["b"]["control"]) == pytest.approx(-2.0, abs=1e-2)


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
@pytest.mark.parametrize("how", [{"optimiser": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.01}])
def test_who_divides_by_travel_refuses_other_optimisers(moons, go, name, how):
    with pytest.raises(IncompatibleStudyError, match=rf"{name} counts on plain steps; set local\.optimiser = 'sgd'"):
        go(moons(strategy=name, local={"lr": 0.1, "batch_size": 8} | how))


# FedNova


def test_fednova_averages_paces_and_travels():
    asked = Answers(
        answer("a", 1, pace=vec(10, 0), travel=torch.tensor(0.2)),  # two steps of 0.1
        answer("b", 3, pace=vec(0, 10), travel=torch.tensor(0.6)),  # six
    )
    strategy = FedNova()
    state = strategy.run_round(strategy.init_state(ModelState(vec(0, 0), EMPTY), plan()), ["a", "b"], asked, plan())
    # travel (0.2 + 3 * 0.6) / 4 = 0.5, pace (2.5, 7.5); FedAvg would come to (2, 18) / 4 = (0.5, 4.5)
    torch.testing.assert_close(state.weights, vec(1.25, 3.75))


def test_a_fednova_site_sends_its_move_by_unit_of_travel():
    flow = FedNova().client_train(message(), {}, plan())
    next(flow)
    update, _ = finish(flow, TrainResult(vec(2, 1), EMPTY, LocalWork(5, 5, 10), 0.1, lr_sum=0.25))
    torch.testing.assert_close(update.mean["pace"], vec(4, 8))
    assert float(update.mean["travel"]) == 0.25
    flow = FedNova().client_train(message(), {}, plan())
    next(flow)
    update, _ = finish(flow, TrainResult(W, EMPTY, LocalWork(5, 0, 10), 0.0, lr_sum=0.0))
    assert update.mean["pace"].tolist() == [0, 0]


# q-FedAvg


def seen(loss, n):
    none = torch.zeros(1)
    return EvaluationSums(torch.tensor(float(n)), torch.tensor(float(loss)), none, none, none)


def test_a_qfedavg_site_weighs_its_move_by_its_loss():
    flow = QFedAvg(q=0.5).client_train(message(turn=2), {}, plan(lr=0.1))  # the rate is 0.2, so L = 5
    next(flow)
    job = flow.send(TrainResult(W + vec(3, 4), EMPTY, LocalWork(5, 5, 10), 0.1, 0.5))
    assert isinstance(job, EvaluateJob)
    assert job.split == "train"
    assert torch.equal(job.weights, W)  # the loss of the round's model, not of the trained one
    update, _ = finish(flow, seen(40, 10))  # F = 4
    torch.testing.assert_close(update.mean["delta"], vec(6, 8))  # F^q = 2 times the move
    # q F^(q-1) |move|^2 L + F^q = 0.5 * 0.5 * 25 * 5 + 2
    assert float(update.mean["bound"]) == pytest.approx(33.25)


def test_qfedavg_steps_by_the_sum_of_moves_over_the_sum_of_bounds():
    asked = Answers(
        answer("a", 1, delta=vec(6, 8), bound=torch.tensor(33.0)),
        answer("b", 1, delta=vec(2, 0), bound=torch.tensor(7.0)),
    )
    strategy = QFedAvg()
    state = strategy.run_round(strategy.init_state(ModelState(W, EMPTY), plan()), ["a", "b"], asked, plan())
    torch.testing.assert_close(state.weights, vec(1 + 8 / 40, -1 + 8 / 40))


# Weights


@pytest.mark.parametrize(("rule", "mean"), [("examples", 1.0), ("equal", 2.0), ("inverse", 3.0)])
def test_weighting_rules(rule, mean):
    """Moves 4 and 0 of sites with 10 and 30 examples."""
    replies = [
        answer(s, client_weight(rule, LocalWork(1, 1, n)), delta=vec(d)) for s, n, d in (("a", 10, 4), ("b", 30, 0))
    ]
    assert float(Aggregate.from_replies(replies).mean("delta")) == pytest.approx(mean)


def test_sums_are_not_weighted():
    total = Aggregate.from_replies(
        [answer("a", 10, sum={"loss": torch.tensor(2.0)}), answer("b", 30, sum={"loss": torch.tensor(3.0)})]
    )
    assert float(total.sum("loss")) == 5.0


# Combines: five sites, of which e weighs as much as it likes

FIVE = [
    answer(s, w, stats=vec(d), delta=vec(d), sum={"train_loss": torch.tensor(1.0)})
    for s, w, d in (("a", 1, 0), ("b", 1, 1), ("c", 1, 2), ("d", 1, 10), ("e", 1e6, 11))
]


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        (CoordinateMedian(), 2.0),
        (TrimmedMean(trim_fraction=0.2), (1 + 2 + 10) / 3),  # one from either end
        (TrimmedMean(trim_fraction=0.39), (1 + 2 + 10) / 3),  # 1.95 of five is one
        (TrimmedMean(trim_fraction=0.4), 2.0),
        # squared distances to the 5 - 1 - 2 = 2 nearest: a 1 + 4, b 1 + 1, c 1 + 4, d 1 + 64, e 1 + 81
        (Krum(num_byzantine=1), 1.0),
        (MultiKrum(num_byzantine=1, num_selected=3), 1.0),  # a, b, c
        (MultiKrum(num_byzantine=1), (0 + 1 + 2 + 10) / 4),  # all but one
    ],
)
def test_robust_rules_count_every_site_once(rule, want):
    total = rule.total(FIVE)
    assert float(total.mean("delta")) == pytest.approx(want)
    assert float(total.mean("stats")) == pytest.approx(want)
    assert float(total.sum("train_loss")) == 5.0  # of all
    assert total.count == 5
    assert rule.visibility == "each"


def test_the_median_of_an_even_number_is_between():
    assert float(CoordinateMedian().aggregate(FIVE[:4]).mean("delta")) == 1.5


@pytest.mark.parametrize(
    "rule",
    [WeightedMean(), CoordinateMedian(), TrimmedMean(), Krum(num_byzantine=0), MultiKrum(num_byzantine=0), NormBound()],
)
def test_rules_take_models_without_statistics(rule):
    """`stats` are of length 0 without BatchNorm."""
    total = rule.total([answer(s, 1, EMPTY, delta=vec(1, 1)) for s in "abc"])
    assert total.mean("delta").tolist() == [1, 1]
    assert total.mean("stats").tolist() == []


@pytest.mark.parametrize("rule", [Krum(num_byzantine=1), MultiKrum(num_byzantine=1)])
def test_krum_needs_two_and_three_for_every_bad_one(rule):
    with pytest.raises(QuorumNotReachedError, match=r"combine\.bad = 1 needs 5 answers, 4 came"):
        rule.total(FIVE[:4])


LENGTHS = [answer("a", delta=vec(3, 4)), answer("b", delta=vec(6, 8)), answer("c", delta=vec(0.6, 0.8))]  # 5, 10 and 1


def test_norm_bound_cuts_long_moves_and_leaves_statistics():
    total = NormBound().aggregate(
        [replace(r, update=ClientUpdate({**r.update.averaged, "stats": vec(9)})) for r in LENGTHS]
    )
    torch.testing.assert_close(total.mean("delta"), vec((3 + 3 + 0.6) / 3, (4 + 4 + 0.8) / 3))  # to the median length
    assert total.mean("stats").tolist() == [9]
    torch.testing.assert_close(NormBound(max_norm=1).aggregate(LENGTHS).mean("delta"), vec(0.6, 0.8))
    torch.testing.assert_close(NormBound(max_norm=50).aggregate(LENGTHS).mean("delta"), vec(3.2, 12.8 / 3))


def test_the_plain_mean_is_weighted():
    assert float(WeightedMean().aggregate(FIVE[:2]).mean("delta")) == 0.5
    assert float(WeightedMean().aggregate([FIVE[0], FIVE[4]]).mean("delta")) == pytest.approx(11, rel=1e-4)


# Quarantine: everything an engine may deliver goes through Asking

SENDS = {site: {"weights": torch.zeros(2)} for site in "abcd"}
GOOD = [answer(s, delta=vec(1, 0), sum={"train_loss": torch.tensor(1.0)}) for s in "abc"]
WORK = LocalWork(4, 4, 10)


def bad(**change):
    """Site d's answer, alike but for ..."""
    reply = answer("d", delta=vec(1, 0), sum={"train_loss": torch.tensor(1.0)})
    return replace(reply, **({"update": replace(reply.update, work=WORK)} | change))


def moved_by(*delta):
    return bad(update=ClientUpdate({"delta": vec(*delta), "stats": EMPTY}, {"train_loss": torch.tensor(1.0)}, WORK))


class Posts:
    """An engine that delivers what the test says: replies or bytes."""

    def __init__(self, *parcels):
        self.parcels = parcels

    def exchange(self, parcels, wait):
        yield from ((p.site, serialize_reply(p)) if isinstance(p, Reply) else p for p in self.parcels)


def asked(*parcels, combine=WEIGHTED_MEAN, wire=None, method="total", **how):
    asking = RoundRequest(
        Posts(*parcels),
        None,
        "train",
        1,
        0,
        RoundPolicy(**how),
        {},
        compression=wire or UpdateCompression(),
        aggregation_rule=combine,
    )
    return asking, getattr(asking, method)(SENDS, **({"count": 2} if method == "groups" else {}))


@pytest.mark.parametrize("length", [101.0, 1e20, 1e30, 3e38])
def test_an_absurd_update_is_named_and_never_averaged(length):
    asking, total = asked(*GOOD, moved_by(0, length))
    assert total.mean("delta").tolist() == [1, 0]
    assert "times as long as the median one" in asking.log.failures["d"]
    assert asking.log.failures["d"].startswith("quarantined")
    assert [r.site for r in asking.log.accepted] == ["a", "b", "c"]  # d's memory will not be kept


def test_an_absurd_update_is_not_shown_to_who_sees_each():
    asking, replies = asked(*GOOD, moved_by(0, 1e30), method="each")
    assert [r.site for r in replies] == ["a", "b", "c"]
    assert "d" in asking.log.failures


def test_long_is_not_absurd():
    asking, total = asked(*GOOD, moved_by(0, 99))
    assert total.count == 4
    assert asking.log.failures == {}


@pytest.mark.parametrize("absurd", [None, 1e9])
def test_the_bound_of_absurdity_is_the_studys(absurd):
    assert asked(*GOOD, moved_by(0, 101), combine=WeightedMean(outlier_factor=absurd))[1].count == 4


def test_of_two_nobody_can_say_who_is_absurd():
    assert asked(GOOD[0], moved_by(0, 1e9))[1].count == 2


def test_a_quarantine_below_the_quorum_voids_the_round():
    with pytest.raises(QuorumNotReachedError, match="3 of 4 sites answered"):
        asked(*GOOD, moved_by(0, 1e30), quorum=4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["delta", "stats", "train_loss"])
def test_what_is_not_finite_is_quarantined(poison, part):
    means = {"delta": vec(1, 0), "stats": EMPTY}
    sums = {"train_loss": torch.tensor(1.0)}
    if part == "train_loss":
        sums[part] = torch.tensor(poison)
    else:
        means[part] = vec(poison, 0)
    asking, total = asked(*GOOD, bad(update=ClientUpdate(means, sums, WORK)))
    assert total.mean("delta").tolist() == [1, 0]
    assert f"d: {part} is not finite" in asking.log.failures["d"]


@pytest.mark.parametrize("group", [-1, 2, 7])
def test_a_group_that_is_not_there_is_quarantined(group):
    chosen = [replace(r, update=replace(r.update, group=n % 2)) for n, r in enumerate(GOOD)]
    asking, totals = asked(*chosen, bad(update=replace(bad().update, group=group)), method="groups")
    assert {g: total.sites for g, total in totals.items()} == {0: ["a", "c"], 1: ["b"]}
    assert asking.log.failures["d"] == f"quarantined: d: chose group {group}, but there are 2"


def test_where_there_are_no_groups_only_the_first_is_one():
    asking, total = asked(*GOOD, bad(update=replace(bad().update, group=1)))
    assert total.count == 3
    assert "chose group 1, but there are 1" in asking.log.failures["d"]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_quarantined(weight):
    asking, total = asked(*GOOD, bad(weight=weight))
    assert total.count == 3
    assert "must be > 0" in asking.log.failures["d"]


QSGD = UpdateCompression(uplink=(Qsgd(bits=4),), layout=VectorLayout((1000,), 4))


def encoded(site, spoil=lambda parts: parts, n=1000):
    """A reply of 1000 numbers in qsgd, its parts spoilt on the way."""
    reply = answer(site, delta=torch.ones(1000), sum={"train_loss": torch.tensor(1.0)})
    packed, _ = QSGD.compress_update(reply.update, {}, site, 1)
    return site, serialize_reply(
        reply, {"delta": replace(packed["delta"], n=n, parts=spoil(dict(packed["delta"].parts)))}
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda parts: parts | {"0.qsgd.codes": parts["0.qsgd.codes"][:-1]}, "not 500 of torch.uint8"),
        (lambda parts: parts | {"0.qsgd.scales": parts["0.qsgd.scales"][:0]}, "not 4 of torch.float32"),
        (lambda parts: parts | {"0.qsgd.scales": -parts["0.qsgd.scales"]}, "negative or not finite"),
        (lambda parts: {}, "holds nothing as 'codes'"),
    ],
)
def test_a_truncated_encoded_vector_is_quarantined(spoil, says):
    asking, total = asked(*(encoded(s) for s in "abc"), encoded("d", spoil), wire=QSGD)
    assert total.count == 3
    assert asking.log.failures["d"].startswith("quarantined")
    assert says in asking.log.failures["d"]


@pytest.mark.parametrize("n", [-1, 2**40])
def test_an_encoded_vector_of_an_impossible_length_is_quarantined_before_it_is_made(n):
    asking, total = asked(*(encoded(s) for s in "abc"), encoded("d", n=n), wire=QSGD)
    assert total.count == 3
    assert f"claims {n} numbers" in asking.log.failures["d"]


def test_bytes_cut_short_are_quarantined():
    asking, total = asked(*GOOD, ("d", serialize_reply(bad())[:-5]))
    assert total.count == 3
    assert "damaged or cut short" in asking.log.failures["d"]


# What still gets through: a site that can end a run, or take it over


def edited(**header):
    """Site d's answer with other fields in its header, and a checksum that fits."""
    fields, tensors = deserialize_frame(serialize_reply(bad()))
    return "d", serialize_frame(fields | header, tensors)


def with_tensor(key, value):
    fields, tensors = deserialize_frame(serialize_reply(bad()))
    return "d", serialize_frame(fields, tensors | {key: value})


def with_header(value):
    body = save({"mean/delta": vec(1, 0)}, metadata={"hemofed": json.dumps(value)})
    return "d", b"HF2\0" + struct.pack("<I", zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(moved_by(9), id="of another length"),
        pytest.param(moved_by(), id="of no length"),
        pytest.param(with_tensor("mean/more", vec(1)), id="with a key too many"),
        pytest.param(with_tensor("mean/delta", torch.ones(2, dtype=torch.int64)), id="whole numbers"),
        pytest.param(with_tensor("mean/delta", torch.ones(2, dtype=torch.float64)), id="double"),
        pytest.param(edited(turn=float("inf")), id="a turn without end"),
        pytest.param(edited(packed={"mean/more": float("inf")}), id="a length without end"),
        pytest.param(edited(work={"asked": "x", "done": 1, "examples": 1, "seconds": "1"}), id="work in words"),
        pytest.param(edited(work={"asked": 1, "done": 1, "examples": 0, "seconds": "1"}), id="work on nothing"),
        pytest.param(edited(weight=1e300), id="a weight beyond float32"),
        pytest.param(with_header([1]), id="a header that is a list"),
    ],
)
def test_whoever_is_odd_is_left_out_even_if_the_first_to_answer(odd):
    asking, total = asked(odd, *GOOD)
    assert total.sites == ["a", "b", "c"]
    assert total.mean("delta").tolist() == [1, 0]
    assert total.mean("delta").dtype == torch.float32
    assert asking.log.failures["d"].startswith("quarantined")


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(ClientUpdate({"delta": vec(1, 0), "stats": vec(-1e30)}, {"control": vec(1, 0)}), id="statistics"),
        pytest.param(
            ClientUpdate({"delta": vec(1, 0), "stats": vec(1)}, {"control": vec(1e30, 0)}), id="scaffold's control"
        ),
    ],
)
def test_statistics_and_vector_sums_can_be_absurd_too(update):
    """They enter the state like moves do: a variance below zero ends every judgement, a control of 1e30 every step."""
    fair = [
        bad(site=s, update=ClientUpdate({"delta": vec(1, 0), "stats": vec(1)}, {"control": vec(1, 0)})) for s in "abc"
    ]
    asking, total = asked(*fair, bad(update=update))
    assert total.mean("stats").tolist() == [1]
    assert total.sum("control").tolist() == [3, 0]
    assert asking.log.failures["d"].startswith("quarantined")
