"""Loop, stacked and pool do the same work; the loop does what a hand would."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState
from pipeline.protocol.tasks import EvaluateJob, GradientJob, LocalRegularizer, TrainJob, proximal_term
from sites.training.augmentation import BatchAugmentation
from sites.training.base import StepBudget, TrainRequest, iterate_batches
from sites.training.select_trainer import select_trainer_kind
from sites.training.sequential import SequentialTrainer
from sites.training.stacked import StackedTrainer
from sites.training.threaded import ThreadedTrainer

RAGGED = {"a": 40, "b": 23, "c": 7}


def start_of(bench):
    return bench.spec.read(bench.make()).weights


def fits(bench, trainer, **job):
    w = start_of(bench)
    return trainer.run([TrainRequest(site, 3, 0, TrainJob(w, epochs=2, **job)) for site in bench.examples])


CASES = {
    "even": {},
    "ragged": {"sizes": RAGGED},
    "whole batch": {"sizes": RAGGED, "batch": None},
    "momentum": {"sizes": RAGGED, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"sizes": RAGGED, "optimiser": "adam", "lr": 0.01},
    "adamw": {"sizes": RAGGED, "optimiser": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "augmented": {"sizes": RAGGED, "augment": BatchAugmentation(flip=True, rotate=90, elastic=1.0, light=0.1)},
    "weighted": {"sizes": RAGGED, "balance": "full"},
    "balanced draws": {"sizes": RAGGED, "balance": "sample"},
}


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("case", CASES)
def test_trainers_agree(bench, case, net):
    b = bench(net=net, **CASES[case])
    w = start_of(b)
    pull = proximal_term(torch.zeros_like(w), 0.3) + LocalRegularizer(0.0, 0.001)
    want = fits(b, SequentialTrainer(b), pull=pull)
    for trainer in (StackedTrainer(b), StackedTrainer(b, 2), ThreadedTrainer(b, 2)):
        for mine, theirs in zip(want, fits(b, trainer, pull=pull), strict=True):
            assert not torch.equal(mine.weights, w)
            torch.testing.assert_close(theirs.weights, mine.weights, rtol=1e-4, atol=2e-5)
            assert theirs.work == mine.work
            assert theirs.loss == pytest.approx(mine.loss, rel=1e-4)
            assert theirs.lr_sum == mine.lr_sum


def test_stacked_by_vmap_agrees_with_the_hand_written_chain(bench):
    from sites.training.stacked import make_vmap_gradients

    b = bench(sizes=RAGGED)
    hand, tape = StackedTrainer(b), StackedTrainer(b)
    tape.compute_losses_and_gradients = make_vmap_gradients(tape.sequential_trainer.module, b.spec.names)
    for one, other in zip(fits(b, hand), fits(b, tape), strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)


def test_two_steps_by_hand(bench):
    """w <- w - lr (grad F(w) + mu (w - w_t)), twice."""
    b = bench(sizes={"a": 16})
    w_t = start_of(b)
    mu, lr = 0.5, 0.1
    (fit,) = SequentialTrainer(b).run(
        [TrainRequest("a", 1, 0, TrainJob(w_t, steps=2, regularizer=proximal_term(w_t, mu)))]
    )
    module = b.make()
    w = w_t.clone()
    ticket = TrainRequest("a", 1, 0, TrainJob(w_t, steps=2))
    for index in iterate_batches(b, ticket, StepBudget.from_job(ticket.job, b.examples["a"], b.recipe)):
        b.spec.write(module, ModelState(w, torch.zeros(0)))
        loss = F.cross_entropy(module(b.pool.x[index]), b.pool.y[index])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        w = w - lr * (gradient + mu * (w - w_t))
    torch.testing.assert_close(fit.weights, w, rtol=1e-5, atol=1e-6)
    assert fit.work.steps_done == fit.work.steps_requested == 2
    assert fit.lr_sum == pytest.approx(0.2)


def test_a_strong_pull_without_learning_contracts_geometrically(bench):
    """With lr * slope = 1/2 the distance to the target halves each step, up to the data's gradient."""
    b = bench(sizes={"a": 8}, lr=1e-6)
    w = start_of(b)
    (fit,) = SequentialTrainer(b).run(
        [TrainRequest("a", 1, 0, TrainJob(w, steps=3, regularizer=LocalRegularizer(5e5, 0.0)))]
    )
    torch.testing.assert_close(fit.weights, w / 8, rtol=1e-3, atol=1e-5)


def test_gradient_is_that_of_the_mean_loss(bench):
    b = bench(sizes={"a": 30})
    w = start_of(b)
    (seen,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, GradientJob(w))])
    module = b.make()
    loss = F.cross_entropy(module(b.pool.x), b.pool.y)
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(seen.gradient, want, rtol=1e-5, atol=1e-6)
    assert seen.loss == pytest.approx(loss.item(), rel=1e-5)


def test_short_last_batch_counts_as_a_step(bench):
    b = bench(sizes={"a": 17}, batch=8)
    ticket = TrainRequest("a", 1, 0, TrainJob(start_of(b), epochs=2))
    seen = list(iterate_batches(b, ticket, StepBudget.from_job(ticket.job, b.examples["a"], b.recipe)))
    assert [len(i) for i in seen] == [8, 8, 1, 8, 8, 1]
    assert sorted(torch.cat(seen[:3]).tolist()) == list(range(17))
    assert not torch.equal(torch.cat(seen[:3]), torch.cat(seen[3:]))


def test_a_cap_cuts_work_short_and_whole_work_is_not_begun(bench):
    b = bench(sizes={"a": 40})
    w = start_of(b)
    for trainer in (SequentialTrainer(b), StackedTrainer(b)):
        (cut,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, max_steps=3))])
        assert (cut.work.steps_requested, cut.work.steps_done, cut.work.is_partial) == (10, 3, True)
        (none,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, max_steps=3, all_or_nothing=True))])
        assert none.work.steps_done == 0
        assert torch.equal(none.weights, w)


def test_gamma_stops_once_the_gradient_has_shrunk(bench):
    b = bench(sizes={"a": 24}, batch=None, lr=0.5)
    w = start_of(b)
    loop = SequentialTrainer(b)
    (fit,) = loop.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=500, inexactness=0.5))])
    (first,) = loop.run([TrainRequest("a", 1, 0, GradientJob(w))])
    (last,) = loop.run([TrainRequest("a", 1, 0, GradientJob(fit.weights))])
    assert 0 < fit.work.steps_done < 500
    assert not fit.work.is_partial
    assert last.gradient.norm() <= 0.5 * first.gradient.norm()
    (before,) = loop.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=fit.work.steps_done - 1))])
    (earlier,) = loop.run([TrainRequest("a", 1, 0, GradientJob(before.weights))])
    assert earlier.gradient.norm() > 0.5 * first.gradient.norm()


def test_looking_at_all_data_is_work_that_a_deadline_counts(bench):
    b = bench(sizes={"a": 40}, batch=8)
    (fit,) = SequentialTrainer(b).run(
        [TrainRequest("a", 1, 0, TrainJob(start_of(b), epochs=4, inexactness=0.0, max_steps=17))]
    )
    assert (
        fit.work.steps_done == 17 - 2 * 5
    )  # an epoch is five steps, and so is each look: one before, one after the first epoch


def test_batchnorm_statistics_travel(bench):
    b = bench(net="batch")
    before = b.spec.read(b.make())
    (fit,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, TrainJob(before.weights, before.stats, epochs=1))])
    assert b.spec.num_norm_stats > 0
    assert not torch.equal(fit.norm_stats, before.stats)
    with pytest.raises(IncompatibleStudyError, match="sequential"):
        StackedTrainer(b)


def test_evaluate_of_an_empty_split_is_nothing(bench):
    b = bench(sizes={"a": 3})
    (seen,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, EvaluateJob(start_of(b), "val"))])
    assert float(seen.n) == 0


def test_the_rule_that_picks_a_trainer(bench):
    assert select_trainer_kind("auto", bench(), 2) == "stacked"
    assert select_trainer_kind("auto", bench(net="cnn"), 2) == "threaded"
    assert select_trainer_kind("auto", bench(net="cnn"), 1) == "sequential"
    assert select_trainer_kind("sequential", bench(), 2) == "sequential"
    assert select_trainer_kind("auto", bench(net="cnn", sizes={"a": 9}), 2) == "sequential"


def test_training_on_nothing_is_refused(bench):
    b = bench(sizes={"a": 8, "coordinator": 0})
    with pytest.raises(IncompatibleStudyError, match=r"public\.share"):
        SequentialTrainer(b).run([TrainRequest("coordinator", 1, 0, GradientJob(start_of(b)))])


def rare(bench, **how):
    """A site with 36 examples of class 0, 3 of class 1 and 1 of class 2."""
    b = bench(sizes={"a": 40}, **how)
    b.pool.y[:] = torch.tensor([0] * 36 + [1] * 3 + [2])
    return b


@pytest.mark.parametrize(("balance", "power"), [("root", 0.5), ("full", 1.0)])
def test_weights_grow_with_rarity_and_their_mean_is_one(bench, balance, power):
    b = rare(bench, balance=balance)
    weights = b.weights(b.examples["a"].train)
    assert float(weights[b.pool.y].mean()) == pytest.approx(1)
    assert float(weights[1] / weights[0]) == pytest.approx((36 / 3) ** power)
    assert float(weights[2] / weights[0]) == pytest.approx(36**power)


def test_a_weighted_step_by_hand(bench):
    b = rare(bench, balance="full", batch=None)
    w = start_of(b)
    (fit,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, TrainJob(w, steps=1))])
    (seen,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, GradientJob(w))])
    module = b.make()
    losses = F.cross_entropy(module(b.pool.x), b.pool.y, reduction="none")
    loss = sum(losses[b.pool.y == c].mean() for c in range(3)) / 3  # full balance: every class counts alike
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(fit.weights, w - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.gradient, gradient, rtol=1e-4, atol=1e-6)


def test_balanced_draws_show_every_class_alike(bench):
    b = rare(bench, balance="sample")
    ticket = TrainRequest("a", 1, 0, TrainJob(start_of(b), epochs=100))
    effort = StepBudget.from_job(ticket.job, b.examples["a"], b.config)
    drawn = torch.cat(list(iterate_batches(b, ticket, effort)))
    assert len(drawn) == 4000
    shares = torch.bincount(b.pool.y[drawn]) / len(drawn)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_a_class_that_a_site_lacks_counts_nothing_and_breaks_nothing(bench):
    b = bench(sizes={"a": 20, "coordinator": 0}, balance="full")
    b.pool.y[:] = 1
    assert float(b.weights(b.examples["a"].train)[1]) == pytest.approx(1)
    (fit,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, TrainJob(start_of(b), epochs=1))])
    assert torch.isfinite(fit.weights).all()


def test_public_examples_are_trained_on_by_name(bench):
    b = replace(bench(sizes={"a": 16, "b": 24}), public=torch.arange(16, 40))
    w = start_of(b)
    (public,) = SequentialTrainer(b).run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))])
    assert public.work.num_examples == 24
    seen = iterate_batches(b, TrainRequest("a", 1, 0, TrainJob(w, epochs=1, dataset="public")), StepBudget(24, 8, 3, 3))
    assert sorted(torch.cat(list(seen)).tolist()) == list(range(16, 40))
    (stacked,) = StackedTrainer(b).run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))])
    torch.testing.assert_close(stacked.weights, public.weights, rtol=1e-4, atol=2e-5)
    with pytest.raises(IncompatibleStudyError, match=r"public\.data"):
        SequentialTrainer(bench(sizes={"a": 16})).run(
            [TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))]
        )
