"""Personalized strategies by hand: fine-tuning, FedPer, FedRep, FedBN, Per-FedAvg, pFedMe and Ditto."""

import math

import pytest
import torch
from torch import nn

from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.engines.simulated import ClientSpeedModel, SimulatedEngine
from pipeline.protocol.messages import Message
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, LocalWork, TrainJob, TrainResult
from pipeline.strategies.base import GlobalModelState
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
from tests.support.federation import (
    EMPTY,
    FakeRequests,
    finish_task,
    make_context,
    make_message,
    make_reply,
    make_round_request,
    vec,
)

# two numbers of a body, one of a normalisation with its statistic, one of a head
SPEC = ParameterSpec(
    ("body.w", "norm.w", "head.w"), ((2,), (1,), (1,)), ("body", "norm", "head"), ("norm.mean",), ((1,),)
)
CONTEXT = make_context(SPEC, epochs=3)


def make_result(*weights, stats=EMPTY, done=5, loss=0.5):
    return TrainResult(vec(*weights), stats, LocalWork(5, done, 10), loss, None)


def run_task(task, *results):
    """The jobs of a client's task, and what it returns after these results."""
    jobs = [next(task), *map(task.send, results[:-1])]
    return jobs, finish_task(task, results[-1])


# Fine-tuning


def test_finetune_trains_the_global_model_before_evaluation():
    w = vec(1, 2, 3, 4)
    jobs, own = run_task(
        FineTune(epochs=2, personal_lr=0.7).personal_model(make_message(w), {}, CONTEXT), make_result(5, 6, 7, 8)
    )
    assert (jobs[0].epochs, jobs[0].steps, jobs[0].lr) == (2, None, 0.7)
    assert torch.equal(jobs[0].initial_weights, w)
    assert own.weights.tolist() == [5, 6, 7, 8]
    assert torch.equal(finish_task(FineTune(epochs=0).personal_model(make_message(w), {}, CONTEXT)).weights, w)


def test_personalized_client_evaluates_its_own_and_the_global_model():
    w, one, none = vec(1, 2, 3, 4), torch.tensor(1.0), torch.zeros(1)
    task = FineTune().client_evaluate(make_message(w, task="evaluate", splits=("val",)), {}, CONTEXT)
    assert isinstance(next(task), TrainJob)
    first = task.send(make_result(5, 6, 7, 8))
    assert isinstance(first, EvaluateJob)
    assert first.weights.tolist() == [5, 6, 7, 8]
    second = task.send(EvaluationSums(one, 7 * one, none, none, none))
    assert torch.equal(second.weights, w)
    update, _ = finish_task(task, EvaluationSums(one, 9 * one, none, none, none))
    sums = update.summed
    assert (float(sums["own:val/loss"]), float(sums["global:val/loss"])) == (7, 9)


# Partial sharing


def test_fedper_keeps_the_head_and_sends_the_rest():
    message = make_message(vec(1, 2, 3, 4), vec(0))
    jobs, (update, client_state) = run_task(
        FedPer().client_train(message, {}, CONTEXT), make_result(2, 4, 6, 8, stats=vec(7))
    )
    assert jobs[0].trainable_roles is None  # everything is trained together
    assert jobs[0].initial_weights.tolist() == [1, 2, 3, 4]  # no head yet: the received one
    assert update.averaged["delta"].tolist() == [1, 2, 3]
    assert update.averaged["stats"].tolist() == [7]
    assert {key: value.tolist() for key, value in client_state.items()} == {"kept": [8]}
    # a round later: the new body, the old head
    jobs, (update, client_state) = run_task(
        FedPer().client_train(make_message(vec(10, 10, 10, 4), vec(5)), client_state, CONTEXT),
        make_result(11, 10, 10, 9, stats=vec(7)),
    )
    assert jobs[0].initial_weights.tolist() == [10, 10, 10, 8]
    assert jobs[0].norm_stats.tolist() == [5]  # statistics are shared
    assert update.averaged["delta"].tolist() == [1, 0, 0]
    own = finish_task(FedPer().personal_model(make_message(vec(0, 0, 0, 4), vec(6)), client_state, CONTEXT))
    assert (own.weights.tolist(), own.norm_stats.tolist()) == ([0, 0, 0, 9], [6])


def test_fedper_coordinator_does_not_change_personal_parameters():
    requests = FakeRequests(
        make_reply("a", 1, vec(1), delta=vec(4, 0, 0)), make_reply("b", 3, vec(5), delta=vec(0, 8, 4))
    )
    state = FedPer().run_round(GlobalModelState(vec(1, 1, 1, 1), vec(0)), ["a", "b"], requests, CONTEXT)
    assert state.weights.tolist() == [2, 7, 4, 1]
    assert state.norm_stats.tolist() == [4]


def test_fedrep_trains_the_head_and_then_the_body():
    message, client_state = make_message(vec(1, 2, 3, 4), vec(0)), {"kept": vec(9)}
    jobs, (update, client_state) = run_task(
        FedRep(head_epochs=7).client_train(message, client_state, CONTEXT),
        make_result(1, 2, 3, 5, stats=vec(0)),  # only the head moved
        make_result(2, 4, 6, 5, stats=vec(7), done=3, loss=0.25),
    )
    assert jobs[0].initial_weights.tolist() == [1, 2, 3, 9]
    assert (jobs[0].epochs, jobs[0].trainable_roles) == (7, {"head"})
    assert jobs[1].initial_weights.tolist() == [1, 2, 3, 5]
    assert (jobs[1].epochs, jobs[1].trainable_roles) == (3, {"body", "norm"})
    assert update.averaged["delta"].tolist() == [1, 2, 3]
    assert client_state["kept"].tolist() == [5]
    assert (update.work.steps_requested, update.work.steps_done, update.work.num_examples) == (
        10,
        8,
        10,
    )  # both, on the same examples


def test_fedrep_keeps_the_statistics_of_personal_norm_layers():
    """With personal norm layers the first job (head and norm) learns the statistics; the second (body) keeps them."""
    strategy = FedRep(personal_roles=("head", "norm"))
    jobs, (update, client_state) = run_task(
        strategy.client_train(make_message(vec(1, 2, 3, 4), vec(0)), {}, CONTEXT),
        make_result(1, 2, 8, 9, stats=vec(6)),
        make_result(2, 2, 8, 9, stats=vec(6)),
    )
    assert jobs[1].norm_stats.tolist() == [6]
    assert client_state["stats"].tolist() == [6]
    assert client_state["kept"].tolist() == [8, 9]
    assert update.averaged.keys() == {"delta"}


def test_fedbn_sends_neither_norm_layers_nor_statistics():
    _, (update, client_state) = run_task(
        FedBn().client_train(make_message(vec(1, 2, 3, 4), vec(0)), {}, CONTEXT), make_result(2, 4, 6, 8, stats=vec(7))
    )
    assert update.averaged.keys() == {"delta"}
    assert update.averaged["delta"].tolist() == [1, 2, 4]
    assert {key: value.tolist() for key, value in client_state.items()} == {"kept": [6], "stats": [7]}
    own = finish_task(FedBn().personal_model(make_message(vec(0, 0, 0, 0), vec(0)), client_state, CONTEXT))
    assert (own.weights.tolist(), own.norm_stats.tolist()) == ([0, 0, 6, 0], [7])
    state = FedBn().run_round(
        GlobalModelState(vec(1, 1, 1, 1), vec(5)),
        ["a"],
        FakeRequests(make_reply("a", stats=None, delta=vec(1, 2, 4))),
        CONTEXT,
    )
    assert (state.weights.tolist(), state.norm_stats.tolist()) == ([2, 3, 1, 5], [5])


def run_rounds(trainer_context, strategy, rounds):
    """A few rounds in this process without a study: the last state, the sites' personal models and the last log."""
    sites, spec = list(trainer_context.split_indices), trainer_context.spec
    context = make_context(
        spec, len(sites), trainer_context.config.lr_schedule, seed=trainer_context.seed, epochs=1, steps=None
    )
    speeds = ClientSpeedModel(dict.fromkeys(sites, 1.0), dict.fromkeys(sites, 0.0), 0.0, 0)
    engine = SimulatedEngine(sites, SequentialTrainer(trainer_context), strategy, context, "examples", speeds)
    state, last_accepted = strategy.init_state(spec.read_state(trainer_context.make_model()), context), {}
    for round_number in range(1, rounds + 1):
        request = make_round_request(engine, round_number=round_number, last_accepted=last_accepted)
        state = strategy.run_round(state, sites, request, context)
        last_accepted = {r.site: (r.round, r.attempt) for r in request.log.accepted}
    personal = {}
    for site in sites:
        payload = strategy.eval_payload(state, site)
        message = Message("evaluate", rounds, payload, last_accepted=last_accepted[site])
        client_state = engine.client_states[site].latest_state(last_accepted[site])
        personal[site] = finish_task(strategy.personal_model(message, client_state, context))
    return state, personal, request.log


@pytest.mark.usefixtures("one_torch_thread")
def test_fedbn_norm_layers_and_statistics_stay_at_the_sites(make_trainer_context):
    """Site b's images are darker. With FedBN sites end with their own norms and one body; with FedAvg with one model."""
    trainer_context = make_trainer_context({"a": 24, "b": 24}, "batch")
    trainer_context.pool.x[24:] *= 0.3
    spec = trainer_context.spec
    initial = spec.read_state(trainer_context.make_model())
    norm = spec.role_mask(("norm",))
    state, personal, log = run_rounds(trainer_context, FedBn(), 3)
    assert log.vector_shapes == {"delta": (int((~norm).sum()),), "train_loss": ()}  # all that left a site
    assert torch.equal(state.norm_stats, initial.norm_stats)
    assert torch.equal(state.weights[norm], initial.weights[norm])
    assert not torch.equal(state.weights[~norm], initial.weights[~norm])
    assert torch.equal(personal["a"].weights[~norm], personal["b"].weights[~norm])
    assert not torch.equal(personal["a"].weights[norm], personal["b"].weights[norm])
    assert float((personal["a"].norm_stats - personal["b"].norm_stats).abs().max()) > 0.1
    dark, light = (spec.split_norm_stats(personal[site].norm_stats)[1] for site in "ba")
    assert bool((dark < light).all())  # darker images have less variance in every channel of the first convolution

    state, personal, _ = run_rounds(trainer_context, FedAvg(), 3)
    assert not torch.equal(state.norm_stats, initial.norm_stats)
    assert torch.equal(personal["a"].norm_stats, personal["b"].norm_stats)
    assert torch.equal(personal["a"].weights, personal["b"].weights)


@pytest.mark.usefixtures("one_torch_thread")
def test_fedrep_with_personal_norm_layers_learns_their_statistics(make_trainer_context):
    trainer_context = make_trainer_context({"a": 24, "b": 24}, "batch")
    initial = trainer_context.spec.read_state(trainer_context.make_model())
    _, personal, _ = run_rounds(trainer_context, FedRep(personal_roles=("head", "norm"), head_epochs=1), 2)
    assert not torch.equal(personal["a"].norm_stats, initial.norm_stats)
    assert not torch.equal(personal["a"].norm_stats, personal["b"].norm_stats)


# Per-FedAvg: one dense layer of one input and two classes, two examples, one step


def make_two_example_context(inputs, labels, lr=0.5):
    def build():
        module = nn.Sequential(nn.Linear(1, 2))
        nn.init.zeros_(module[0].weight)
        nn.init.zeros_(module[0].bias)
        return module

    pool = ExamplePool(torch.tensor(inputs).unsqueeze(1), torch.tensor(labels), torch.device("cpu"))
    everything = torch.arange(2)
    examples = {"a": SplitIndices(everything, everything[:0], everything[:0])}
    return TrainerContext(
        build,
        ParameterSpec.from_module(build()),
        pool,
        examples,
        TrainingConfig(2, "sgd", 0.0, 0.0, lambda round_number: lr),
        2,
        0,
    )


def make_maml_job(weights):
    return next(PerFedAvg(alpha=1.0).client_train(make_message(weights), {}, make_context(SPEC, epochs=None, steps=1)))


@pytest.mark.parametrize("trainer", [SequentialTrainer, StackedTrainer])
def test_perfedavg_takes_the_gradient_one_step_ahead(trainer):
    """Two equal examples x = 1 of class 0, from w = 0: the look-ahead takes z to (1, -1), where p_0 = 1 / (1 + e^-2)."""
    trainer_context = make_two_example_context([1.0, 1.0], [0, 0])
    job = make_maml_job(torch.zeros(4))
    assert job.maml_lr == 1.0
    (result,) = trainer(trainer_context).run([TrainRequest("a", 1, 0, job)])
    step = 0.5 * (1 - 1 / (1 + math.exp(-2)))  # at w itself the gradient would be 0.5, and the step 0.25
    torch.testing.assert_close(result.weights, vec(step, -step, step, -step))


@pytest.mark.parametrize("trainer", [SequentialTrainer, StackedTrainer])
def test_perfedavg_looks_ahead_on_one_half_of_the_batch_and_steps_on_the_other(trainer):
    trainer_context = make_two_example_context([1.0, 2.0], [0, 1])
    request = TrainRequest("a", 1, 0, make_maml_job(torch.zeros(4)))
    budget = StepBudget.from_job(request.job, trainer_context.split_indices["a"], trainer_context.config)
    (batch,) = iterate_batches(trainer_context, request, budget)
    (x1, y1), (x2, y2) = ((float(trainer_context.pool.x[i]), int(trainer_context.pool.y[i])) for i in batch)
    sign = {0: 1.0, 1: -1.0}
    ahead = 0.5 * sign[y1]  # w = 0: p = 1/2, so the step of rate 1 is +-1/2 in the bias and x1 times that in the weight
    z = ahead * (x1 * x2 + 1)  # of class 0 at the second example; class 1 has -z
    error = 1 - 1 / (1 + math.exp(-2 * sign[y2] * z))  # 1 - p of its own class
    (result,) = trainer(trainer_context).run([request])
    step = 0.5 * error * sign[y2]
    torch.testing.assert_close(result.weights, vec(step * x2, -step * x2, step, -step))


def test_perfedavg_personal_model_takes_steps_of_alpha():
    jobs, own = run_task(
        PerFedAvg(alpha=0.3, adapt_steps=4).personal_model(make_message(vec(1, 1, 1, 1)), {}, CONTEXT),
        make_result(2, 2, 2, 2),
    )
    assert (jobs[0].steps, jobs[0].lr, jobs[0].maml_lr) == (4, 0.3, 0.0)
    assert own.weights.tolist() == [2, 2, 2, 2]


# pFedMe


def test_pfedme_moves_w_towards_theta():
    """eta * lambda = 1/2: w moves half the way to theta, twice."""
    strategy = PFedMe(lam=2, eta=0.25, local_rounds=2, inner_steps=3, personal_lr=0.7)
    jobs, (update, client_state) = run_task(
        strategy.client_train(make_message(vec(0, 0), vec(1)), {"weights": vec(9, 9), "stats": vec(9)}, CONTEXT),
        make_result(4, 0, stats=vec(2)),
        make_result(4, 4, stats=vec(3), loss=1.5),
    )
    assert [(job.steps, job.lr, job.regularizer.slope) for job in jobs] == [(3, 0.7, 2.0)] * 2
    assert jobs[0].initial_weights.tolist() == [0, 0]  # from the global model, not from the old theta
    assert jobs[0].regularizer.offset.tolist() == [0, 0]
    assert jobs[1].initial_weights.tolist() == [4, 0]  # theta continues
    assert jobs[1].regularizer.offset.tolist() == [-4, 0]  # towards w, which is now (2, 0)
    assert update.averaged["delta"].tolist() == [3, 2]  # (2, 0) + ((4, 4) - (2, 0)) / 2
    assert update.averaged["stats"].tolist() == [3]
    assert client_state["weights"].tolist() == [4, 4]  # theta is the personal model
    assert (update.work.steps_requested, update.work.steps_done) == (10, 10)
    assert float(update.summed["train_loss"]) == 10 * (0.5 + 1.5) / 2


def test_pfedme_coordinator_moves_by_beta():
    requests = FakeRequests(make_reply("a", 1, delta=vec(4)), make_reply("b", 3, delta=vec(0)))
    state = PFedMe(beta=2).run_round(GlobalModelState(vec(1), EMPTY), ["a", "b"], requests, CONTEXT)
    assert state.weights.tolist() == [3]  # 1 + 2 * 1


def test_pfedme_converges_to_the_minimum_of_the_moreau_envelopes():
    """F = (w - a)^2 / 2: theta = (a + lambda w) / (1 + lambda), so the sites' thetas lie between w and their own a."""
    strategy, lr, w = PFedMe(lam=3, eta=0.1, local_rounds=4, inner_steps=60), 0.1, vec(0)
    for _ in range(40):
        deltas, thetas = [], []
        for a in (0.0, 4.0):
            task = strategy.client_train(make_message(w), {}, CONTEXT)
            job = next(task)
            try:
                while True:
                    theta = job.initial_weights
                    for _ in range(job.steps):
                        theta = theta - lr * (theta - a + job.regularizer.slope * theta + job.regularizer.offset)
                    job = task.send(TrainResult(theta, EMPTY, LocalWork(60, 60, 1), 0.0, None))
            except StopIteration as end:
                update, client_state = end.value
            deltas.append(update.averaged["delta"])
            thetas.append(float(client_state["weights"]))
        w = w + torch.stack(deltas).mean(0)
    assert float(w) == pytest.approx(2.0, abs=1e-2)
    # theta follows the local w, which moved eta * lambda of the way to it four times; so it is beyond (a + 3 * 2) / 4
    assert thetas[0] < (0 + 3 * 2) / 4 < 2 < (4 + 3 * 2) / 4 < thetas[1]
    assert thetas[0] + thetas[1] == pytest.approx(4.0, abs=1e-2)


# Ditto


def test_ditto_regularizes_only_its_personal_model():
    w, v = vec(1, -1), {"weights": vec(5, 5), "stats": vec(8)}
    jobs, (update, client_state) = run_task(
        Ditto(lam=0.5, epochs=4, personal_lr=0.7).client_train(make_message(w, vec(1)), v, CONTEXT),
        make_result(2, 0, stats=vec(2)),
        make_result(6, 6, stats=vec(9), done=4, loss=9.0),
    )
    assert jobs[0].regularizer.is_zero
    assert (jobs[0].initial_weights.tolist(), jobs[0].epochs, jobs[0].lr) == ([1, -1], 3, None)
    assert (jobs[1].initial_weights.tolist(), jobs[1].norm_stats.tolist()) == ([5, 5], [8])
    assert (jobs[1].epochs, jobs[1].lr) == (4, 0.7)
    assert (jobs[1].regularizer.slope, jobs[1].regularizer.offset.tolist()) == (
        0.5,
        [-0.5, 0.5],
    )  # towards the received model
    assert update.averaged["delta"].tolist() == [1, 1]  # of the global model
    assert update.averaged["stats"].tolist() == [2]
    assert float(update.summed["train_loss"]) == 5.0
    assert (update.work.steps_requested, update.work.steps_done) == (10, 9)
    assert (client_state["weights"].tolist(), client_state["stats"].tolist()) == ([6, 6], [9])
    assert finish_task(Ditto().personal_model(make_message(w), client_state, CONTEXT)).weights.tolist() == [6, 6]


def test_ditto_personal_model_starts_from_the_global_model():
    jobs, _ = run_task(
        Ditto().client_train(make_message(vec(1, -1)), {}, CONTEXT), make_result(2, 0), make_result(6, 6)
    )
    assert jobs[1].initial_weights.tolist() == [1, -1]
    assert jobs[1].epochs == 3  # as long as the global one
    jobs, _ = run_task(
        Ditto(lam=0).client_train(make_message(vec(1, -1)), {}, CONTEXT), make_result(2, 0), make_result(6, 6)
    )
    assert jobs[1].regularizer.is_zero  # alone


def test_ditto_personal_model_converges_between_its_optimum_and_the_global_model():
    """F = (v - 4)^2 / 2 and lambda = 3 towards w = 0: v = 4 / (1 + 3)."""
    v = {"weights": vec(0), "stats": EMPTY}
    for _ in range(50):
        task = Ditto(lam=3).client_train(make_message(vec(0)), v, CONTEXT)
        next(task)
        job = task.send(make_result(0))
        own = job.initial_weights - 0.1 * (
            job.initial_weights - 4 + job.regularizer.slope * job.initial_weights + job.regularizer.offset
        )
        _, v = finish_task(task, TrainResult(own, EMPTY, LocalWork(1, 1, 1), 0.0, None))
    assert float(v["weights"]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("strategy", [FineTune(), FedPer(), FedRep(), FedBn(), PerFedAvg(), PFedMe(), Ditto()])
def test_personalized_strategies_compare_with_the_global_model(strategy):
    assert strategy.personalized
    views = strategy.comparison_models(make_message(vec(1, 2, 3, 4), vec(5)))
    assert views == {"global": ModelState(views["global"].weights, views["global"].norm_stats)}
    assert views["global"].weights.tolist() == [1, 2, 3, 4]
