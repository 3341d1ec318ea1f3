"""Groups of sites, on paper: IFCA, CFL, clustering by similarity and DemLearn."""

import math

import pytest
import torch

from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.messages import Aggregate, ClientUpdate, Message, Reply
from pipeline.protocol.tasks import ActivationsResult, EvaluateJob, EvaluationSums, LocalWork, TrainJob, TrainResult
from pipeline.strategies._clustered import compute_linkage, match_cluster_names, pairwise_distances
from pipeline.strategies.base import StrategyContext
from pipeline.strategies.cfl import Cfl
from pipeline.strategies.demlearn import DemLearn, ancestor_paths, cluster_sizes, cut_dendrogram
from pipeline.strategies.fedswap import FedSwap
from pipeline.strategies.ifca import Ifca
from pipeline.strategies.similarity_clustering import SimilarityClustering

EMPTY = torch.zeros(0)
PLAN = StrategyContext(ParameterSpec(("w",), ((2,),), ("head",)), 4, lambda turn: 0.1, 0, epochs=5, steps=None)


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


class Answers:
    """An Ask whose sites answer what the test says; weights are 1 unless it says. Who is asked but not named is silent."""

    def __init__(self, moves, turn=1, weights=None, stats=None, late=None, groups=None, here=None):
        self.moves, self.turn, self.weights, self.late = moves, turn, weights or {}, late or {}
        self.stats, self.of, self.layers = stats or {}, groups or {}, here
        self.sends = {}

    def each(self, sends):
        self.sends = sends
        return [self.reply(s) for s in self.moves if s in sends or s in self.late]

    def reply(self, site):
        update = ClientUpdate(
            {"delta": self.moves[site], "stats": self.stats.get(site, EMPTY)}, cluster=self.of.get(site, 0)
        )
        return Reply(site, "train", self.late.get(site, self.turn), 0, update, float(self.weights.get(site, 1.0)))

    def groups(self, sends, count):
        replies = self.each(sends)
        by = {g: [r for r in replies if r.update.cluster == g] for g in range(count)}
        return {g: Aggregate.from_replies(mine) for g, mine in by.items() if mine}

    def combined(self, replies):
        return Aggregate.from_replies(replies)

    def here(self, jobs):
        return [ActivationsResult(self.layers["inputs"], (self.layers[tuple(j.weights.tolist())],)) for j in jobs]


def begin(strategy, *weights):
    return strategy.start(ModelState(vec(*weights), EMPTY), PLAN)


def after(strategy, state, moves, sites=None, **how):
    return strategy.round(state, sites or sorted(moves), Answers(moves, **how), PLAN)


def models(state):
    return {group: weights.tolist() for group, weights in state.weights.items()}


# IFCA


def loss_of(loss):
    none = torch.zeros(1)
    return EvaluationSums(torch.tensor(10.0), torch.tensor(float(loss)), none, none, none)


def three(task="train"):
    weights = {f"weights/{g}": vec(g, g) for g in range(3)} | {f"stats/{g}": EMPTY for g in range(3)}
    return Message(task, 1, weights)


def test_an_ifca_site_trains_the_model_that_fits_its_training_examples_best():
    flow = Ifca(k=3).client_train(three(), {}, PLAN)
    looked_at = [next(flow), flow.send(loss_of(30)), flow.send(loss_of(10))]
    assert all(isinstance(job, EvaluateJob) and job.split == "train" for job in looked_at)
    assert [job.weights.tolist() for job in looked_at] == [[0, 0], [1, 1], [2, 2]]
    job = flow.send(loss_of(20))
    assert isinstance(job, TrainJob)
    assert job.initial_weights.tolist() == [1, 1]
    with pytest.raises(StopIteration) as end:
        flow.send(TrainResult(vec(4, 5), EMPTY, LocalWork(5, 5, 10), 0.5, None))
    update, _ = end.value.value
    assert update.cluster == 1
    assert update.mean["delta"].tolist() == [3, 4]


def test_ifca_averages_who_chose_the_same_and_leaves_what_nobody_chose():
    strategy = Ifca(k=3)
    state = begin(strategy, 1, 1)
    untouched = state.weights["2"].clone()
    moves = {"a": vec(4, 0), "b": vec(0, 8), "c": vec(5, 5)}
    chosen, weights = {"a": 0, "b": 0, "c": 1}, {"a": 1, "b": 3, "c": 7}
    second = state.weights["1"] + vec(5, 5)
    state = after(strategy, state, moves, groups=chosen, weights=weights)
    assert state.weights["0"].tolist() == [1 + 1, 1 + 6]
    assert torch.equal(state.weights["1"], second)
    assert torch.equal(state.weights["2"], untouched)
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1"}
    assert strategy.train_payload(state, "new").keys() == {
        f"{part}/{g}" for part in ("weights", "stats") for g in range(3)
    }


def test_ifcas_models_differ_at_the_start_but_for_their_biases():
    spec = ParameterSpec(("one.weight", "one.bias"), ((50, 40), (50,)), ("head", "head"))
    plan = StrategyContext(spec, 4, lambda turn: 0.1, 7, epochs=1, steps=None)
    start = torch.cat([0.3 * torch.randn(2000, generator=torch.Generator().manual_seed(1)), torch.arange(50.0)])
    state = Ifca(k=3).init_state(ModelState(start, EMPTY), plan)
    drawn = [state.weights[g] for g in "012"]
    assert torch.equal(drawn[0], start)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((drawn[one][:2000] - drawn[other][:2000]).abs().mean()) > 0.2
        assert torch.equal(drawn[one][2000:], drawn[other][2000:])
    assert [float(w[:2000].std()) for w in drawn[1:]] == pytest.approx([0.3, 0.3], rel=0.1)
    again = Ifca(k=3).init_state(ModelState(start, EMPTY), plan)
    assert all(torch.equal(again.weights[g], state.weights[g]) for g in "012")


def test_ifca_may_begin_with_one_model_and_part_it_later():
    """Two rounds of FedAvg, then three models around the common one."""
    strategy = Ifca(k=3, warmup_rounds=2, spread=0.5)
    spec = ParameterSpec(("one.weight", "one.bias"), ((1, 2), (1,)), ("head", "head"))
    plan = StrategyContext(spec, 4, lambda turn: 0.1, 7, epochs=1, steps=None)
    state = strategy.init_state(ModelState(vec(1, 5, 9), EMPTY), plan)
    for turn in (1, 2):
        assert strategy.train_payload(state, "a").keys() == {"weights/0", "stats/0"}
        assert isinstance(
            next(strategy.client_train(Message("train", turn, strategy.train_payload(state, "a")), {}, plan)), TrainJob
        )
        moves = {"a": vec(2, 0, 0), "b": vec(0, 2, 0)}
        total = Answers(moves)
        total.total = lambda sends, ask=total: Aggregate.from_replies(ask.each(sends))
        state = strategy.run_round(state, ["a", "b"], total, plan)
    assert state.weights.keys() == {"0", "1", "2"}
    torch.testing.assert_close(torch.stack(list(state.weights.values())).mean(0), vec(3, 7, 9))
    assert len({w[0].item() for w in state.weights.values()}) == 3
    assert [w[2].item() for w in state.weights.values()] == [9, 9, 9]  # biases stay


# CFL: four sites, a and b to the right, c and d to the left, a little apart from each other

PULLING = {"a": vec(1, 0.1), "b": vec(1, -0.1), "c": vec(-1, 0.1), "d": vec(-1, -0.1)}
CFL = Cfl(eps1=0.4, eps2=0.2, gap=0.5)


def test_sites_that_pull_apart_are_cut_exactly_along_the_plant():
    state = after(CFL, begin(CFL, 5, 5), PULLING)
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1", "d": "1"}
    assert models(state) == {"0": [5, 5], "1": [5, 5]}  # the mean move was none; the new group begins there too
    assert CFL.dendrogram(state).leaves == ("a", "b", "c", "d")
    assert CFL.dendrogram(state).merges == ((0, 1, 0.0, 2), (2, 3, 0.0, 2), (4, 5, 1.0, 4))
    state = after(CFL, state, PULLING, turn=2)  # from now on each half has its own model
    assert models(state) == {"0": [6, 5], "1": [4, 5]}
    assert CFL.train_payload(state, "c")["weights"].tolist() == [4, 5]
    assert CFL.train_payload(state, "new")["weights"].tolist() == [6, 5]  # who is not known is in the first


def test_nothing_is_cut_while_the_whole_still_moves():
    """The same pull apart, while everybody goes up by 1: |mean| = 1 is not below 0.4 * 1.5."""
    state = after(CFL, begin(CFL, 0, 0), {site: move + vec(0, 1) for site, move in PULLING.items()})
    assert models(state) == {"0": [0, 1]}


def test_nothing_is_cut_where_all_go_the_same_way():
    """Slowly enough to stand still, but alike: the cosine is 1 within and across, so there is no gap."""
    state = after(CFL, begin(CFL, 0, 0), {"a": vec(0, 10), "b": vec(0, 9), "c": vec(0, 10), "d": vec(0, 9)})
    assert state.norm_unit == 10
    state = after(CFL, state, {site: vec(0, 3) for site in "abcd"}, turn=2)  # 3 < 4 and 3 > 2
    assert set(state.cluster_of.values()) == {"0"}


@pytest.mark.parametrize("alike", [vec(0.1, 0.3), vec(0, 0)])
def test_moves_of_which_no_two_can_be_told_apart_are_survived(alike):
    """Rounding takes the cosine of (0.1, 0.3) with itself beyond 1; no move at all has none."""
    strategy = Cfl(eps1=2.0, eps2=0.0, gap=0.0)
    state = after(strategy, begin(strategy, 0, 0), {"a": vec(1, 3), "b": alike, "c": alike, "d": alike})
    state = after(strategy, state, dict.fromkeys("abcd", alike), turn=2)
    assert state.splits == ()


@pytest.mark.parametrize(("length", "cuts"), [(1.9, 0), (2.1, 1)])
def test_the_longest_move_must_exceed_eps2_of_the_first_rounds(length, cuts):
    state = after(CFL, begin(CFL, 0, 0), dict.fromkeys("abcd", vec(10, 0)))  # sets the unit; moving, so no cut
    state = after(
        CFL, state, {"a": vec(length, 0), "b": vec(length, 0), "c": vec(-length, 0), "d": vec(-length, 0)}, turn=2
    )
    assert len(state.splits) == cuts


@pytest.mark.parametrize(("eps1", "cuts"), [(0.29, 0), (0.31, 1)])
def test_the_mean_must_stay_below_eps1_of_the_first_rounds(eps1, cuts):
    moves = {"a": vec(10, 3), "b": vec(10, 3), "c": vec(-10, 3), "d": vec(-10, 3)}
    unit = 109**0.5  # the mean is (0, 3): 0.287 of it
    strategy = Cfl(eps1=eps1 * 10 / unit, eps2=0.2, gap=0.5)
    assert len(after(strategy, begin(strategy, 0, 0), moves).splits) == cuts


@pytest.mark.parametrize(("gap", "cuts"), [(1.07, 1), (1.09, 0)])
def test_halves_must_be_a_gap_apart(gap, cuts):
    """Within a half the cosine is 0.8; across it is -1, -0.8 and, of b and d, -0.64 + 0.36: 0.8 + 0.28 apart."""
    strategy = Cfl(eps1=1.0, eps2=0.0, gap=gap)
    moves = {"a": vec(1, 0), "b": vec(0.8, 0.6), "c": vec(-1, 0), "d": vec(-0.8, 0.6)}
    assert len(after(strategy, begin(strategy, 0, 0), moves).splits) == cuts


def test_sites_that_go_every_way_are_no_two_populations():
    """Six ways, 60 degrees apart: within any half some are 120 degrees apart, across it some are only 60."""
    moves = {site: vec(math.cos(n * math.pi / 3), math.sin(n * math.pi / 3)) for n, site in enumerate("abcdef")}
    assert after(CFL, begin(CFL, 0, 0), moves).splits == ()
    forced = Cfl(gap=-1.6)
    assert len(after(forced, begin(forced, 0, 0), moves).splits) == 1


@pytest.mark.parametrize(("smallest", "cuts"), [(1, 1), (2, 0)])
def test_no_group_is_smaller_than_allowed(smallest, cuts):
    strategy = Cfl(eps1=0.6, min_cluster_size=smallest)  # the mean is 1/2
    moves = {"a": vec(1, 0), "b": vec(1, 0), "c": vec(1, 0), "d": vec(-1, 0)}
    assert len(after(strategy, begin(strategy, 0, 0), moves).splits) == cuts


def test_whether_a_group_stands_still_is_weighed_like_its_step():
    """Two large sites go 1 to the right, two small ones 9 to the left: the step is 0, so the group stands still."""
    moves = {"a": vec(1, 0), "b": vec(1, 0), "c": vec(-9, 0), "d": vec(-9, 0)}
    weights = {"a": 9, "b": 9, "c": 1, "d": 1}
    state = after(CFL, begin(CFL, 0, 0), moves, weights=weights)
    assert models(state) == {"0": [0, 0], "1": [0, 0]}
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1", "d": "1"}
    assert after(CFL, begin(CFL, 0, 0), moves).splits == ()  # alike, the mean is -4, not below 0.4 * 9


def test_moves_are_remembered_until_everybody_has_answered():
    state = after(CFL, begin(CFL, 0, 0), {"a": PULLING["a"], "c": PULLING["c"]})
    assert state.splits == ()  # two sites are no two groups of two
    state = after(CFL, state, {"b": PULLING["b"], "d": PULLING["d"]}, turn=2)
    assert state.cluster_of == {"a": "0", "c": "1", "b": "0", "d": "1"}


EIGHT = {f"{site}{n}": PULLING[site] for site in "abcd" for n in "12"}
LEFT = {"c1": vec(0, 1), "c2": vec(0, 1), "d1": vec(0, -1), "d2": vec(0, -1)}  # the left half pulls apart in its turn


def test_members_that_have_not_answered_since_the_last_cut_block_a_cut():
    state = after(CFL, begin(CFL, 0, 0), EIGHT)
    assert state.splits == (("0", "1"),)
    some = {site: LEFT[site] for site in ("c1", "c2", "d1")}
    state = after(CFL, state, some, turn=2)
    assert state.splits == (("0", "1"),)  # d2's last move is of before the cut
    state = after(CFL, state, {"d2": LEFT["d2"]}, turn=3)
    assert state.splits == (("0", "1"), ("1", "2"))
    assert {site for site, group in state.cluster_of.items() if group == "2"} == {"d1", "d2"}


def test_a_late_answer_from_before_the_cut_is_none_since():
    state = after(CFL, begin(CFL, 0, 0), EIGHT)
    state = after(CFL, state, LEFT, turn=2, late={"d2": 1})
    assert state.splits == (("0", "1"),)
    assert "d2" not in state.deltas
    state = after(CFL, state, {"d2": LEFT["d2"]}, turn=3)
    assert state.splits == (("0", "1"), ("1", "2"))


# Clustering by similarity

SIMILARITY = SimilarityClustering(k=2, cluster_every=2)
PLANTED = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(1, 0), "d": vec(12, 0)}


def test_planted_groups_are_found_when_they_are_due():
    state = after(SIMILARITY, begin(SIMILARITY, 0, 0), PLANTED, weights={"d": 3})
    torch.testing.assert_close(state.weights, {"0": vec((10 + 1 + 36) / 6, 0)})  # not due: FedAvg
    common = state.weights["0"]
    state = after(SIMILARITY, state, PLANTED, weights={"d": 3})
    groups = {
        frozenset(s for s in state.cluster_of if state.cluster_of[s] == g) for g in set(state.cluster_of.values())
    }
    assert groups == {frozenset("ac"), frozenset("bd")}
    means = {state.cluster_of["a"]: vec(0.5, 0), state.cluster_of["b"]: vec((10 + 36) / 4, 0)}
    for group, move in means.items():  # of the members' last models, weighted
        torch.testing.assert_close(state.weights[group], common + move)
    # Ward: pairs at their distance, two pairs at sqrt(2 * 2 * 2 / (2 + 2)) times that of their middles
    assert [round(h, 4) for _, _, h, _ in state.merges] == [1.0, 2.0, round(2**0.5 * 10.5, 4)]


def test_average_linkage_is_the_mean_over_pairs():
    strategy = SIMILARITY.model_copy(update={"linkage": "average"})
    state = after(strategy, begin(strategy, 0, 0), PLANTED)
    state = after(strategy, state, PLANTED)
    assert [round(h, 4) for _, _, h, _ in state.merges] == [1.0, 2.0, (10 + 12 + 9 + 11) / 4]


def test_a_group_whose_members_stay_keeps_its_model():
    state = after(SIMILARITY, begin(SIMILARITY, 0, 0), PLANTED)
    state = after(SIMILARITY, state, PLANTED)
    was, names = state.weights, dict(state.cluster_of)
    for _ in range(2):
        state = after(SIMILARITY, state, {"a": vec(1, 0), "b": vec(0, 0), "c": vec(1, 0), "d": vec(0, 0)})
    assert state.cluster_of == names
    torch.testing.assert_close(state.weights[names["a"]], was[names["a"]] + vec(2, 0))
    torch.testing.assert_close(state.weights[names["b"]], was[names["b"]])


def test_with_one_group_nobody_is_compared():
    strategy = SimilarityClustering(k=1, cluster_every=1)
    assert set(after(strategy, begin(strategy, 0, 0), PLANTED).cluster_of.values()) == {"0"}


def test_networks_can_be_compared_by_what_they_do():
    """Weights say a-b and c-d, answers to public examples say a-c and b-d."""
    dice = torch.Generator().manual_seed(0)
    one, other, inputs = (torch.randn(8, 3, generator=dice) for _ in range(3))
    moves = {"a": vec(0, 0), "b": vec(1, 0), "c": vec(10, 0), "d": vec(11, 0)}
    layers = {"inputs": inputs, (0, 0): one, (10, 0): 3 * one, (1, 0): other, (11, 0): -other}
    for by, group in (("weights", "ab"), ("cka", "ac")):
        strategy = SimilarityClustering(k=2, cluster_every=1, cluster_by=by, num_probes=8)
        state = after(strategy, begin(strategy, 0, 0), moves, here=layers)
        assert {s for s in "abcd" if state.cluster_of[s] == state.cluster_of["a"]} == set(group)


@pytest.mark.parametrize("sites", [20, 40])
def test_distances_between_models_that_hardly_differ_are_right(sites):
    """Beyond 25 rows torch computes |a|^2 + |b|^2 - 2ab: here the rounding would be larger than what is left."""
    dice = torch.Generator().manual_seed(0)
    common, shift = torch.randn(5000, generator=dice), 1e-5 * torch.randn(5000, generator=dice)
    flat = [common + shift * (n % 2) + 1e-6 * torch.randn(5000, generator=dice) for n in range(sites)]
    apart = pairwise_distances(flat)
    for n in range(1, sites):
        assert float(apart[0, n]) == pytest.approx(float((flat[0].double() - flat[n].double()).norm()), rel=1e-3)
    moves = {f"{n:02}": move for n, move in enumerate(flat)}
    strategy = SimilarityClustering(k=2, cluster_every=1)
    state = strategy.init_state(ModelState(torch.zeros(5000), EMPTY), PLAN)
    state = after(strategy, state, moves)
    assert len({group for site, group in state.cluster_of.items() if int(site) % 2}) == 1
    assert len(set(state.cluster_of.values())) == 2


def test_new_clusters_take_the_names_of_those_they_share_most_with():
    before = {"a": "0", "b": "0", "c": "1", "d": "1", "e": "3"}
    assert match_cluster_names({"a": 7, "b": 7, "c": 4, "d": 4, "e": 4}, before) == dict(
        zip("abcde", "00111", strict=True)
    )
    # b moves, the names stay; e's group is gone and a new one takes the first free name
    assert match_cluster_names({"a": 1, "b": 2, "c": 2, "d": 2, "new": 3}, before) == {
        "a": "0",
        "b": "1",
        "c": "1",
        "d": "1",
        "new": "2",
    }
    assert match_cluster_names({"a": 5, "b": 6}, {}) == {"a": "0", "b": "1"}


# DemLearn: four sites on a line, 0 2 . . 10 . . 16

LINE = {"a": vec(0, 0), "b": vec(2, 0), "c": vec(10, 0), "d": vec(16, 0)}


def first(state):
    return {path: float(weights[0]) for path, weights in state.weights.items()}


def test_a_tree_of_three_levels():
    strategy = DemLearn(levels=3, alpha=0.5, amplify=1.5)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    assert state.cluster_of == {"a": "0.0.0", "b": "0.0.1", "c": "0.1.0", "d": "0.1.1"}
    # up: 0 3 15 24 (amplified once), 1.5 and 19.5, 10.5; down: each half its parent's
    assert first(state) == {
        "0": 10.5,
        "0.0": (10.5 + 1.5) / 2,
        "0.1": (10.5 + 19.5) / 2,
        "0.0.0": (6 + 0) / 2,
        "0.0.1": (6 + 3) / 2,
        "0.1.0": (15 + 15) / 2,
        "0.1.1": (15 + 24) / 2,
    }
    assert {s: float(w[0]) for s, w in state.latest_weights.items()} == {
        "a": 0,
        "b": 2,
        "c": 10,
        "d": 16,
    }  # not amplified
    assert [round(h, 6) for _, _, h, _ in strategy.dendrogram(state).merges] == [2, 6, 12]  # to the means: 13 - 1
    assert float(strategy.train_payload(state, "a")["weights"][0]) == 3
    assert float(strategy.train_payload(state, "new")["weights"][0]) == 10.5  # who is not known starts from the top


def test_groups_count_by_their_sites_and_never_by_their_examples():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0)
    moves = {"a": vec(0, 0), "b": vec(10, 0), "c": vec(11, 0), "d": vec(12, 0)}
    state = after(strategy, begin(strategy, 0, 0), moves, weights={"a": 1000})
    assert state.cluster_of == {"a": "0.0", "b": "0.1", "c": "0.1", "d": "0.1"}
    assert first(state) == {"0": (0 + 3 * 11) / 4, "0.0": 0, "0.1": 11}


def test_statistics_are_averaged_but_neither_amplified_nor_mixed():
    strategy = DemLearn(levels=2, alpha=0.5, amplify=1.5)
    stats = {"a": vec(1), "b": vec(3), "c": vec(5), "d": vec(7)}
    state = strategy.init_state(ModelState(vec(0, 0), vec(0)), PLAN)
    state = after(strategy, state, LINE, stats=stats)
    assert {path: float(v) for path, v in state.norm_stats.items()} == {"0": 4, "0.0": 2, "0.1": 6}


def test_the_next_models_are_what_sites_made_of_their_groups():
    strategy = DemLearn(levels=2, alpha=0.5, amplify=1.0)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    assert first(state) == {"0": 7, "0.0": 4, "0.1": 10}  # means 1, 13 and 7
    state = after(strategy, state, {"a": vec(1, 0), "b": vec(1, 0), "c": vec(1, 0), "d": vec(1, 0)})
    assert {s: float(w[0]) for s, w in state.latest_weights.items()} == {"a": 5, "b": 5, "c": 11, "d": 11}


def test_amplification_ends():
    strategy = DemLearn(levels=1, amplify=2.0, amplify_rounds=1)
    state = after(strategy, begin(strategy, 0, 0), {"a": vec(4, 0)})
    assert first(state) == {"0": 8}
    assert first(after(strategy, state, {"a": vec(1, 0)})) == {"0": 9}


def test_alpha_falls_with_the_rounds():
    strategy = DemLearn(levels=2, alpha=0.5, alpha_decay=0.5, amplify=1.0, tau=9)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    back = {site: move - strategy.train_payload(state, site)["weights"] for site, move in LINE.items()}
    assert first(after(strategy, state, back)) == {"0": 7, "0.0": 0.25 * 7 + 0.75 * 1, "0.1": 0.25 * 7 + 0.75 * 13}


def test_clusterings_become_rarer():
    strategy = DemLearn(tau=2, tau_growth=2.0)
    state, due = begin(strategy, 0, 0), []
    for _ in range(8):
        state = after(strategy, state, LINE)
        due.append(state.next_clustering_round)
    assert due == [3, 3, 7, 7, 7, 7, 15, 15]  # after rounds 1, 3 and 7


def test_between_clusterings_groups_stay_and_a_new_site_hangs_on_the_top():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0, tau=2)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    assert first(state) == {"0": 7, "0.0": 1, "0.1": 13}
    state = after(strategy, state, {"new": vec(3, 0)})  # from the top's 7 to 10
    assert state.cluster_of == {"a": "0.0", "b": "0.0", "c": "0.1", "d": "0.1", "new": "0"}
    # silent groups are still there
    assert first(state) == pytest.approx({"0": (2 * 1 + 2 * 13 + 10) / 5, "0.0": 1, "0.1": 13})
    state = after(strategy, state, {"a": vec(0, 0)})
    assert state.cluster_of["new"] == state.cluster_of["c"]  # 10 is nearer to 13 than to 1


def test_a_site_is_pulled_towards_its_group():
    strategy = DemLearn(mu=0.5, mu_decay=0.5)
    message = Message("train", 2, {"weights": vec(4, 6), "stats": EMPTY})
    pull = next(strategy.client_train(message, {}, PLAN)).regularizer
    assert pull.slope == 0.25  # halved in the second round
    assert pull.offset.tolist() == [-1, -1.5]
    assert next(DemLearn(mu=0).client_train(message, {}, PLAN)).regularizer.is_zero


def test_a_site_may_be_pulled_towards_all_groups_above_it_each_by_its_size():
    strategy = DemLearn(levels=3, alpha=0.5, amplify=1.5, proximal_to="all", mu=0.5)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    brief = strategy.train_payload(state, "a")
    assert float(brief["slope"]) == 1 / 1 + 1 / 2 + 1 / 4
    assert float(brief["anchor"][0]) == 3 / 1 + 6 / 2 + 10.5 / 4
    job = next(strategy.client_train(Message("train", 1, brief), {}, PLAN))
    assert job.initial_weights.tolist() == [3, 0]
    assert job.regularizer.slope == 0.5 * 1.75
    assert job.regularizer.offset.tolist() == [-0.5 * 8.625, 0]
    assert float(strategy.train_payload(begin(strategy, 2, 2), "a")["slope"]) == 1  # before anybody answered


def test_a_site_is_judged_with_its_own_model_its_groups_and_the_top():
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0)
    state = after(strategy, begin(strategy, 0, 0), LINE)
    exam = strategy.eval_payload(state, "d")
    assert [float(exam[key][0]) for key in ("weights", "group/weights", "global/weights")] == [16, 13, 7]
    views = strategy.comparison_models(Message("evaluate", 1, exam))
    assert {name: float(model.weights[0]) for name, model in views.items()} == {"group": 13, "global": 7}
    named = {name: float(model.weights[0]) for name, model in strategy.global_models(state).items()}
    assert named == {"global": 7, "group/0.0": 1, "group/0.1": 13, "site/a": 0, "site/b": 2, "site/c": 10, "site/d": 16}


@pytest.mark.parametrize(("by", "member"), [("weights", "0011"), ("moves", "0101")])
def test_sites_are_grouped_by_where_they_are_or_where_they_go(by, member):
    strategy = DemLearn(levels=2, alpha=0.0, amplify=1.0, cluster_by=by)
    state = after(strategy, begin(strategy, 0, 0), LINE)  # both: a b | c d
    state = after(strategy, state, {"a": vec(0, 1), "b": vec(0, -1), "c": vec(0, 1), "d": vec(0, -1)})
    assert [state.cluster_of[s] for s in "abcd"] == [f"0.{g}" for g in member]


def test_centroid_and_average_linkage_differ():
    """An equilateral triangle's third corner is 0.87 of a side from the middle of the other two, but a side from both."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])
    assert compute_linkage(torch.cdist(corners, corners), "centroid")[1][2] == pytest.approx(0.75**0.5, rel=1e-5)
    assert compute_linkage(torch.cdist(corners, corners), "average")[1][2] == pytest.approx(1.0, rel=1e-5)


def test_the_tree_is_cut_below_its_top_levels():
    spots = torch.tensor([[0.0], [1.0], [10.0], [30.0]])
    merges = compute_linkage(torch.cdist(spots, spots), "centroid")
    assert cut_dendrogram("abcd", merges, 1) == dict.fromkeys("abcd", "0")
    assert cut_dendrogram("abcd", merges, 2) == {"a": "0.0", "b": "0.0", "c": "0.0", "d": "0.1"}
    deep = cut_dendrogram("abcd", merges, 3)
    assert deep == {"a": "0.0.0", "b": "0.0.0", "c": "0.0.1", "d": "0.1"}  # d hangs where it is alone
    assert cluster_sizes(deep) == {"0": 4, "0.0": 3, "0.0.0": 2, "0.0.1": 1, "0.1": 1}
    assert ancestor_paths("0.0.1") == ["0.0.1", "0.0", "0"]


# A site that first appears in round 4, and late answers


@pytest.mark.parametrize("strategy", [Ifca(k=2), CFL, SIMILARITY, DemLearn(tau=2), FedSwap(h2=5)], ids=lambda s: s.name)
def test_a_site_may_first_appear_in_round_four(strategy):
    state = begin(strategy, 0, 0)
    for turn in range(1, 4):
        state = after(strategy, state, PULLING, turn=turn)
    brief = strategy.train_payload(state, "new")
    assert all(bool(torch.isfinite(v).all()) for v in brief.values())
    for turn in range(4, 8):
        state = after(strategy, state, PULLING | {"new": PULLING["c"]}, turn=turn)
        assert all(bool(torch.isfinite(m.weights).all()) for m in strategy.models(state).values())
    if strategy.name != "fedswap":
        assert "new" in strategy.groups(state)


@pytest.mark.parametrize("strategy", [CFL, SIMILARITY, DemLearn(tau=2), FedSwap(h2=3)], ids=lambda s: s.name)
def test_a_late_answer_of_a_site_that_was_not_asked_joins(strategy):
    """Its start is gone: the move counts from the model that the site would be sent now."""
    state = begin(strategy, 0, 0)
    for turn in range(1, 7):
        late = {"d": turn - 1} if turn % 2 else {}
        asked = ["a", "b", "c"] if late else ["a", "b", "c", "d"]
        state = after(strategy, state, PULLING, sites=asked, turn=turn, late=late)
        assert all(bool(torch.isfinite(m.weights).all()) for m in strategy.models(state).values())
    assert strategy.name == "fedswap" or "d" in strategy.groups(state)
