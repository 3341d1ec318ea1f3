"""Sites with models of their own, on paper: finetune, FedPer, FedRep, FedBN, Per-FedAvg, pFedMe and Ditto."""

import math

import pytest
import torch
from torch import nn

from pipeline.aggregation.requests import RoundRequest
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.engines.simulated import ClientSpeedModel, SimulatedEngine
from pipeline.protocol.messages import Aggregate, ClientUpdate, Message, Reply, RoundPolicy
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, LocalWork, TrainJob, TrainResult
from pipeline.strategies.base import GlobalModelState, StrategyContext
from pipeline.strategies.ditto import Ditto
from pipeline.strategies.fedavg import FedAvg
from pipeline.strategies.fedbn import FedBn
from pipeline.strategies.fedper import FedPer
from pipeline.strategies.fedrep import FedRep
from pipeline.strategies.finetune import FineTune
from pipeline.strategies.perfedavg import PerFedAvg
from pipeline.strategies.pfedme import PFedMe
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.base import StepBudget, TrainerContext, TrainingConfig, TrainRequest, iterate_batches
from sites.training.sequential import SequentialTrainer
from sites.training.stacked import StackedTrainer

EMPTY = torch.zeros(0)
# two numbers of a body, one of a normalisation with its statistic, one of a head
SPEC = ParameterSpec(
    ("body.w", "norm.w", "head.w"), ((2,), (1,), (1,)), ("body", "norm", "head"), ("norm.mean",), ((1,),)
)
PLAN = StrategyContext(SPEC, 2, lambda turn: 0.1, 0, epochs=3, steps=None)


def vec(*numbers):
    return torch.tensor([float(n) for n in numbers])


def message(weights, stats=EMPTY, task="train", turn=1, **how):
    return Message(task, turn, {"weights": weights, "stats": stats}, **how)


def fitted(*weights, stats=EMPTY, done=5, loss=0.5):
    return TrainResult(vec(*weights), stats, LocalWork(5, done, 10), loss, None)


def drive(flow, *results):
    """The jobs of a Flow, and what it returns, when they are answered so."""
    jobs = [next(flow), *map(flow.send, results[:-1])]
    with pytest.raises(StopIteration) as end:
        flow.send(results[-1])
    return jobs, end.value.value


def at_once(flow):
    with pytest.raises(StopIteration) as end:
        next(flow)
    return end.value.value


class Answers:
    """An Ask whose sites answer what the test says."""

    def __init__(self, **updates):
        self.updates = updates  # site -> (weight, means)

    def total(self, sends):
        return Aggregate.from_replies(
            Reply(s, "train", 1, 0, ClientUpdate(self.updates[s][1]), self.updates[s][0]) for s in sends
        )


# finetune


def test_finetune_trains_the_common_model_on_when_it_is_judged():
    w = vec(1, 2, 3, 4)
    jobs, own = drive(FineTune(epochs=2, personal_lr=0.7).personal_model(message(w), {}, PLAN), fitted(5, 6, 7, 8))
    assert (jobs[0].epochs, jobs[0].steps, jobs[0].lr) == (2, None, 0.7)
    assert torch.equal(jobs[0].initial_weights, w)
    assert own.weights.tolist() == [5, 6, 7, 8]
    assert torch.equal(at_once(FineTune(epochs=0).personal_model(message(w), {}, PLAN)).weights, w)


def test_a_site_is_judged_with_its_own_model_and_the_common_one():
    w, one, none = vec(1, 2, 3, 4), torch.tensor(1.0), torch.zeros(1)
    flow = FineTune().client_evaluate(message(w, task="evaluate", splits=("val",)), {}, PLAN)
    assert isinstance(next(flow), TrainJob)
    first = flow.send(fitted(5, 6, 7, 8))
    assert isinstance(first, EvaluateJob)
    assert first.weights.tolist() == [5, 6, 7, 8]
    second = flow.send(EvaluationSums(one, 7 * one, none, none, none))
    assert torch.equal(second.weights, w)
    with pytest.raises(StopIteration) as end:
        flow.send(EvaluationSums(one, 9 * one, none, none, none))
    sums = end.value.value[0].sum
    assert (float(sums["own:val/loss"]), float(sums["global:val/loss"])) == (7, 9)


# Parts that stay at the site


def test_fedpers_head_stays_and_only_the_rest_travels():
    common = message(vec(1, 2, 3, 4), vec(0))
    jobs, (update, memory) = drive(FedPer().client_train(common, {}, PLAN), fitted(2, 4, 6, 8, stats=vec(7)))
    assert jobs[0].trainable_roles is None  # everything is trained together
    assert jobs[0].initial_weights.tolist() == [1, 2, 3, 4]  # no head yet: the start's
    assert update.mean["delta"].tolist() == [1, 2, 3]
    assert update.mean["stats"].tolist() == [7]
    assert {key: value.tolist() for key, value in memory.items()} == {"kept": [8]}
    # a round later: the new body, the old head
    jobs, (update, memory) = drive(
        FedPer().client_train(message(vec(10, 10, 10, 4), vec(5)), memory, PLAN), fitted(11, 10, 10, 9, stats=vec(7))
    )
    assert jobs[0].initial_weights.tolist() == [10, 10, 10, 8]
    assert jobs[0].norm_stats.tolist() == [5]  # statistics are common
    assert update.mean["delta"].tolist() == [1, 0, 0]
    own = at_once(FedPer().personal_model(message(vec(0, 0, 0, 4), vec(6)), memory, PLAN))
    assert (own.weights.tolist(), own.stats.tolist()) == ([0, 0, 0, 9], [6])


def test_the_coordinator_never_touches_what_stays():
    asked = Answers(
        a=(1.0, {"delta": vec(4, 0, 0), "stats": vec(1)}), b=(3.0, {"delta": vec(0, 8, 4), "stats": vec(5)})
    )
    state = FedPer().run_round(GlobalModelState(vec(1, 1, 1, 1), vec(0)), ["a", "b"], asked, PLAN)
    assert state.weights.tolist() == [2, 7, 4, 1]
    assert state.norm_stats.tolist() == [4]


def test_fedrep_fits_the_head_to_the_body_and_then_the_body_to_the_head():
    common, memory = message(vec(1, 2, 3, 4), vec(0)), {"kept": vec(9)}
    jobs, (update, memory) = drive(
        FedRep(head_epochs=7).client_train(common, memory, PLAN),
        fitted(1, 2, 3, 5, stats=vec(0)),  # only the head moved
        fitted(2, 4, 6, 5, stats=vec(7), done=3, loss=0.25),
    )
    assert jobs[0].initial_weights.tolist() == [1, 2, 3, 9]
    assert (jobs[0].epochs, jobs[0].trainable_roles) == (7, {"head"})
    assert jobs[1].initial_weights.tolist() == [1, 2, 3, 5]
    assert (jobs[1].epochs, jobs[1].trainable_roles) == (3, {"body", "norm"})
    assert update.mean["delta"].tolist() == [1, 2, 3]
    assert memory["kept"].tolist() == [5]
    assert (update.work.asked, update.work.done, update.work.examples) == (10, 8, 10)  # both, on the same examples


def test_fedrep_keeps_the_statistics_that_its_own_norms_learnt():
    """With the norms at the site it is the head's turn that learns statistics; the body's turn leaves them alone."""
    strategy = FedRep(personal_roles=("head", "norm"))
    jobs, (update, memory) = drive(
        strategy.client_train(message(vec(1, 2, 3, 4), vec(0)), {}, PLAN),
        fitted(1, 2, 8, 9, stats=vec(6)),
        fitted(2, 2, 8, 9, stats=vec(6)),
    )
    assert jobs[1].norm_stats.tolist() == [6]
    assert memory["stats"].tolist() == [6]
    assert memory["kept"].tolist() == [8, 9]
    assert update.mean.keys() == {"delta"}


def test_fedbn_keeps_norms_and_statistics_out_of_the_parcel():
    _, (update, memory) = drive(
        FedBn().client_train(message(vec(1, 2, 3, 4), vec(0)), {}, PLAN), fitted(2, 4, 6, 8, stats=vec(7))
    )
    assert update.mean.keys() == {"delta"}
    assert update.mean["delta"].tolist() == [1, 2, 4]
    assert {key: value.tolist() for key, value in memory.items()} == {"kept": [6], "stats": [7]}
    own = at_once(FedBn().personal_model(message(vec(0, 0, 0, 0), vec(0)), memory, PLAN))
    assert (own.weights.tolist(), own.stats.tolist()) == ([0, 0, 6, 0], [7])
    state = FedBn().run_round(
        GlobalModelState(vec(1, 1, 1, 1), vec(5)), ["a"], Answers(a=(1.0, {"delta": vec(1, 2, 4)})), PLAN
    )
    assert (state.weights.tolist(), state.norm_stats.tolist()) == ([2, 3, 1, 5], [5])


@pytest.fixture
def one_thread():
    """Several would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def federation(bench, strategy, rounds):
    """A few rounds in process without a study; the last state, the engine and the last log."""
    sites = list(bench.examples)
    plan = StrategyContext(bench.spec, len(sites), bench.config.lr, bench.seed, epochs=1, steps=None)
    profile = ClientSpeedModel(dict.fromkeys(sites, 1.0), dict.fromkeys(sites, 0.0), 0.0, 0)
    engine = SimulatedEngine(sites, SequentialTrainer(bench), strategy, plan, "examples", profile)
    state, counted = strategy.start(bench.spec.read(bench.make()), plan), {}
    for turn in range(1, rounds + 1):
        asking = RoundRequest(engine, None, "train", turn, 0, RoundPolicy(), counted)
        state = strategy.round(state, sites, asking, plan)
        counted = {r.site: (r.round, r.attempt) for r in asking.log.accepted}
    own = {}
    for site in sites:
        brief = Message("evaluate", rounds, strategy.eval_payload(state, site), last_accepted=counted[site])
        own[site] = at_once(strategy.personal(brief, engine.client_states[site].latest_state(counted[site]), plan))
    return state, own, asking.log


@pytest.mark.usefixtures("one_thread")
def test_statistics_stay_where_they_were_learnt(bench):
    """Site b's images are darker. FedBN's sites end with other norms and statistics but one body; FedAvg's with one model."""
    images = bench({"a": 24, "b": 24}, "batch")
    images.pool.x[24:] *= 0.3
    start = images.spec.read(images.make())
    norm = images.spec.mask(("norm",))
    state, own, log = federation(images, FedBn(), 3)
    assert log.vector_shapes == {"delta": (int((~norm).sum()),), "train_loss": ()}  # all that ever left a site
    assert torch.equal(state.norm_stats, start.stats)
    assert torch.equal(state.weights[norm], start.weights[norm])
    assert not torch.equal(state.weights[~norm], start.weights[~norm])
    assert torch.equal(own["a"].weights[~norm], own["b"].weights[~norm])
    assert not torch.equal(own["a"].weights[norm], own["b"].weights[norm])
    assert float((own["a"].stats - own["b"].stats).abs().max()) > 0.1
    dark, light = (images.spec.split_norm_stats(own[site].stats)[1] for site in "ba")
    assert bool((dark < light).all())  # less light, less variance behind every channel of the first convolution

    state, own, _ = federation(images, FedAvg(), 3)
    assert not torch.equal(state.stats, start.stats)
    assert torch.equal(own["a"].stats, own["b"].stats)
    assert torch.equal(own["a"].weights, own["b"].weights)


@pytest.mark.usefixtures("one_thread")
def test_a_fedrep_site_with_its_own_norms_learns_its_statistics(bench):
    images = bench({"a": 24, "b": 24}, "batch")
    start = images.spec.read(images.make())
    _, own, _ = federation(images, FedRep(personal_roles=("head", "norm"), head_epochs=1), 2)
    assert not torch.equal(own["a"].stats, start.stats)
    assert not torch.equal(own["a"].stats, own["b"].stats)


# Per-FedAvg: one dense layer of one input and two classes, two examples, one step


def two_examples(inputs, labels, lr=0.5):
    def build():
        module = nn.Sequential(nn.Linear(1, 2))
        nn.init.zeros_(module[0].weight)
        nn.init.zeros_(module[0].bias_gradient)
        return module

    pool = ExamplePool(torch.tensor(inputs).unsqueeze(1), torch.tensor(labels), torch.device("cpu"))
    everything = torch.arange(2)
    examples = {"a": SplitIndices(everything, everything[:0], everything[:0])}
    return TrainerContext(
        build,
        ParameterSpec.from_module(build()),
        pool,
        examples,
        TrainingConfig(2, "sgd", 0.0, 0.0, lambda turn: lr),
        2,
        0,
    )


def look_ahead(job):
    return next(
        PerFedAvg(alpha=1.0).client_train(message(job), {}, StrategyContext(SPEC, 1, lambda turn: 0.5, 0, None, 1))
    )


@pytest.mark.parametrize("trainer", [SequentialTrainer, StackedTrainer])
def test_the_gradient_is_taken_a_step_ahead(trainer):
    """Two equal examples x = 1 of class 0, from w = 0: the look-ahead takes z to (1, -1), where p_0 = 1 / (1 + e^-2)."""
    bench = two_examples([1.0, 1.0], [0, 0])
    job = look_ahead(torch.zeros(4))
    assert job.maml_lr == 1.0
    (fit,) = trainer(bench).run([TrainRequest("a", 1, 0, job)])
    step = 0.5 * (1 - 1 / (1 + math.exp(-2)))  # at w itself the gradient would be 0.5, and the step 0.25
    torch.testing.assert_close(fit.weights, vec(step, -step, step, -step))


@pytest.mark.parametrize("trainer", [SequentialTrainer, StackedTrainer])
def test_it_looks_ahead_on_one_half_and_steps_on_the_other(trainer):
    bench = two_examples([1.0, 2.0], [0, 1])
    ticket = TrainRequest("a", 1, 0, look_ahead(torch.zeros(4)))
    (drawn,) = iterate_batches(bench, ticket, StepBudget.from_job(ticket.job, bench.split_indices["a"], bench.config))
    (x1, y1), (x2, y2) = ((float(bench.pool.x[i]), int(bench.pool.y[i])) for i in drawn)
    sign = {0: 1.0, 1: -1.0}
    ahead = 0.5 * sign[y1]  # w = 0: p = 1/2, so the step of rate 1 is +-1/2 in the bias and x1 times that in the weight
    z = ahead * (x1 * x2 + 1)  # of class 0 at the second example; class 1 has -z
    wrong = 1 - 1 / (1 + math.exp(-2 * sign[y2] * z))  # 1 - p of its own class
    (fit,) = trainer(bench).run([ticket])
    step = 0.5 * wrong * sign[y2]
    torch.testing.assert_close(fit.weights, vec(step * x2, -step * x2, step, -step))


def test_a_site_adapts_by_steps_of_alpha():
    jobs, own = drive(
        PerFedAvg(alpha=0.3, adapt_steps=4).personal_model(message(vec(1, 1, 1, 1)), {}, PLAN), fitted(2, 2, 2, 2)
    )
    assert (jobs[0].steps, jobs[0].lr, jobs[0].maml_lr) == (4, 0.3, 0.0)
    assert own.weights.tolist() == [2, 2, 2, 2]


# pFedMe


def test_pfedme_walks_towards_theta():
    """eta * lambda = 1/2: w goes half the way to theta, twice."""
    strategy = PFedMe(lam=2, eta=0.25, local_rounds=2, inner_steps=3, personal_lr=0.7)
    jobs, (update, memory) = drive(
        strategy.client_train(message(vec(0, 0), vec(1)), {"weights": vec(9, 9), "stats": vec(9)}, PLAN),
        fitted(4, 0, stats=vec(2)),
        fitted(4, 4, stats=vec(3), loss=1.5),
    )
    assert [(job.steps, job.lr, job.regularizer.slope) for job in jobs] == [(3, 0.7, 2.0)] * 2
    assert jobs[0].initial_weights.tolist() == [0, 0]  # from the common model, not from the old theta
    assert jobs[0].regularizer.offset.tolist() == [0, 0]
    assert jobs[1].initial_weights.tolist() == [4, 0]  # theta goes on
    assert jobs[1].regularizer.offset.tolist() == [-4, 0]  # towards w, which is (2, 0) by now
    assert update.mean["delta"].tolist() == [3, 2]  # (2, 0) + ((4, 4) - (2, 0)) / 2
    assert update.mean["stats"].tolist() == [3]
    assert memory["weights"].tolist() == [4, 4]  # theta is the site's model
    assert (update.work.asked, update.work.done) == (10, 10)
    assert float(update.sum["train_loss"]) == 10 * (0.5 + 1.5) / 2


def test_pfedmes_coordinator_goes_beta_of_the_way():
    asked = Answers(a=(1.0, {"delta": vec(4), "stats": EMPTY}), b=(3.0, {"delta": vec(0), "stats": EMPTY}))
    assert PFedMe(beta=2).run_round(GlobalModelState(vec(1), EMPTY), ["a", "b"], asked, PLAN).weights.tolist() == [
        3
    ]  # 1 + 2 * 1


def test_pfedme_on_a_bowl_ends_at_the_minimum_of_the_envelopes():
    """F = (w - a)^2 / 2: theta = (a + lambda w) / (1 + lambda), so the sites' thetas lie between w and their own a."""
    strategy, lr, w = PFedMe(lam=3, eta=0.1, local_rounds=4, inner_steps=60), 0.1, vec(0)
    for _ in range(40):
        deltas, thetas = [], []
        for a in (0.0, 4.0):
            flow = strategy.client_train(message(w), {}, PLAN)
            job = next(flow)
            try:
                while True:
                    theta = job.initial_weights
                    for _ in range(job.steps):
                        theta = theta - lr * (theta - a + job.regularizer.slope * theta + job.regularizer.offset)
                    job = flow.send(TrainResult(theta, EMPTY, LocalWork(60, 60, 1), 0.0, None))
            except StopIteration as end:
                update, memory = end.value
            deltas.append(update.mean["delta"])
            thetas.append(float(memory["weights"]))
        w = w + torch.stack(deltas).mean(0)
    assert float(w) == pytest.approx(2.0, abs=1e-2)
    # theta answers to the local w, which four times went eta * lambda of the way to it; so it is beyond (a + 3 * 2) / 4
    assert thetas[0] < (0 + 3 * 2) / 4 < 2 < (4 + 3 * 2) / 4 < thetas[1]
    assert thetas[0] + thetas[1] == pytest.approx(4.0, abs=1e-2)


# Ditto


def test_ditto_trains_the_common_model_freely_and_its_own_with_a_pull():
    w, v = vec(1, -1), {"weights": vec(5, 5), "stats": vec(8)}
    jobs, (update, memory) = drive(
        Ditto(lam=0.5, epochs=4, personal_lr=0.7).client_train(message(w, vec(1)), v, PLAN),
        fitted(2, 0, stats=vec(2)),
        fitted(6, 6, stats=vec(9), done=4, loss=9.0),
    )
    assert jobs[0].regularizer.is_zero
    assert (jobs[0].initial_weights.tolist(), jobs[0].epochs, jobs[0].lr) == ([1, -1], 3, None)
    assert (jobs[1].initial_weights.tolist(), jobs[1].norm_stats.tolist()) == ([5, 5], [8])
    assert (jobs[1].epochs, jobs[1].lr) == (4, 0.7)
    assert (jobs[1].regularizer.slope, jobs[1].regularizer.offset.tolist()) == (
        0.5,
        [-0.5, 0.5],
    )  # towards what was sent
    assert update.mean["delta"].tolist() == [1, 1]  # the common one's
    assert update.mean["stats"].tolist() == [2]
    assert float(update.sum["train_loss"]) == 5.0
    assert (update.work.asked, update.work.done) == (10, 9)
    assert (memory["weights"].tolist(), memory["stats"].tolist()) == ([6, 6], [9])
    assert at_once(Ditto().personal_model(message(w), memory, PLAN)).weights.tolist() == [6, 6]


def test_dittos_own_model_begins_with_the_common_one():
    jobs, _ = drive(Ditto().client_train(message(vec(1, -1)), {}, PLAN), fitted(2, 0), fitted(6, 6))
    assert jobs[1].initial_weights.tolist() == [1, -1]
    assert jobs[1].epochs == 3  # as long as the common one
    jobs, _ = drive(Ditto(lam=0).client_train(message(vec(1, -1)), {}, PLAN), fitted(2, 0), fitted(6, 6))
    assert jobs[1].regularizer.is_zero  # alone


def test_dittos_own_model_rests_between_its_own_optimum_and_the_common_model():
    """F = (v - 4)^2 / 2 and lambda = 3 towards w = 0: v = 4 / (1 + 3)."""
    v = {"weights": vec(0), "stats": EMPTY}
    for _ in range(50):
        flow = Ditto(lam=3).client_train(message(vec(0)), v, PLAN)
        next(flow)
        job = flow.send(fitted(0))
        own = job.initial_weights - 0.1 * (
            job.initial_weights - 4 + job.regularizer.slope * job.initial_weights + job.regularizer.offset
        )
        with pytest.raises(StopIteration) as end:
            flow.send(TrainResult(own, EMPTY, LocalWork(1, 1, 1), 0.0, None))
        v = end.value.value[1]
    assert float(v["weights"]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("strategy", [FineTune(), FedPer(), FedRep(), FedBn(), PerFedAvg(), PFedMe(), Ditto()])
def test_all_of_them_are_judged_beside_the_common_model(strategy):
    assert strategy.personalized
    views = strategy.views(message(vec(1, 2, 3, 4), vec(5)))
    assert views == {"global": ModelState(views["global"].weights, views["global"].stats)}
    assert views["global"].weights.tolist() == [1, 2, 3, 4]
