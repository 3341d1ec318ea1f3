"""Loop, stacked and pool do the same work; the loop does what a hand would."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pipeline.core.errors import Refused
from pipeline.core.parameters import Snapshot
from pipeline.protocol.tasks import Evaluate, Fit, Gradient, Pull, toward
from sites.training.augmentation import Augment
from sites.training.base import Effort, Ticket, batches
from sites.training.select_trainer import choose
from sites.training.sequential import Loop
from sites.training.stacked import Stacked
from sites.training.threaded import ThreadPool

RAGGED = {"a": 40, "b": 23, "c": 7}


def start_of(bench):
    return bench.spec.read(bench.make()).weights


def fits(bench, trainer, **job):
    w = start_of(bench)
    return trainer.run([Ticket(site, 3, 0, Fit(w, epochs=2, **job)) for site in bench.examples])


CASES = {
    "even": {},
    "ragged": {"sizes": RAGGED},
    "whole batch": {"sizes": RAGGED, "batch": None},
    "momentum": {"sizes": RAGGED, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"sizes": RAGGED, "optimiser": "adam", "lr": 0.01},
    "adamw": {"sizes": RAGGED, "optimiser": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "augmented": {"sizes": RAGGED, "augment": Augment(flip=True, rotate=90, elastic=1.0, light=0.1)},
    "weighted": {"sizes": RAGGED, "balance": "full"},
    "balanced draws": {"sizes": RAGGED, "balance": "sample"},
}


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("case", CASES)
def test_trainers_agree(bench, case, net):
    b = bench(net=net, **CASES[case])
    w = start_of(b)
    pull = toward(torch.zeros_like(w), 0.3) + Pull(0.0, 0.001)
    want = fits(b, Loop(b), pull=pull)
    for trainer in (Stacked(b), Stacked(b, 2), ThreadPool(b, 2)):
        for mine, theirs in zip(want, fits(b, trainer, pull=pull), strict=True):
            assert not torch.equal(mine.weights, w)
            torch.testing.assert_close(theirs.weights, mine.weights, rtol=1e-4, atol=2e-5)
            assert theirs.work == mine.work
            assert theirs.loss == pytest.approx(mine.loss, rel=1e-4)
            assert theirs.travel == mine.travel


def test_stacked_by_vmap_agrees_with_the_hand_written_chain(bench):
    from sites.training.stacked import by_vmap

    b = bench(sizes=RAGGED)
    hand, tape = Stacked(b), Stacked(b)
    tape.differentiate = by_vmap(tape.loop.module, b.spec.names)
    for one, other in zip(fits(b, hand), fits(b, tape), strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)


def test_two_steps_by_hand(bench):
    """w <- w - lr (grad F(w) + mu (w - w_t)), twice."""
    b = bench(sizes={"a": 16})
    w_t = start_of(b)
    mu, lr = 0.5, 0.1
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(w_t, steps=2, pull=toward(w_t, mu)))])
    module = b.make()
    w = w_t.clone()
    ticket = Ticket("a", 1, 0, Fit(w_t, steps=2))
    for index in batches(b, ticket, Effort.of(ticket.job, b.examples["a"], b.recipe)):
        b.spec.write(module, Snapshot(w, torch.zeros(0)))
        loss = F.cross_entropy(module(b.pool.x[index]), b.pool.y[index])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        w = w - lr * (gradient + mu * (w - w_t))
    torch.testing.assert_close(fit.weights, w, rtol=1e-5, atol=1e-6)
    assert fit.work.done == fit.work.asked == 2
    assert fit.travel == pytest.approx(0.2)


def test_a_strong_pull_without_learning_contracts_geometrically(bench):
    """With lr * slope = 1/2 the distance to the target halves each step, up to the data's gradient."""
    b = bench(sizes={"a": 8}, lr=1e-6)
    w = start_of(b)
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(w, steps=3, pull=Pull(5e5, 0.0)))])
    torch.testing.assert_close(fit.weights, w / 8, rtol=1e-3, atol=1e-5)


def test_gradient_is_that_of_the_mean_loss(bench):
    b = bench(sizes={"a": 30})
    w = start_of(b)
    (seen,) = Loop(b).run([Ticket("a", 1, 0, Gradient(w))])
    module = b.make()
    loss = F.cross_entropy(module(b.pool.x), b.pool.y)
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(seen.gradient, want, rtol=1e-5, atol=1e-6)
    assert seen.loss == pytest.approx(loss.item(), rel=1e-5)


def test_short_last_batch_counts_as_a_step(bench):
    b = bench(sizes={"a": 17}, batch=8)
    ticket = Ticket("a", 1, 0, Fit(start_of(b), epochs=2))
    seen = list(batches(b, ticket, Effort.of(ticket.job, b.examples["a"], b.recipe)))
    assert [len(i) for i in seen] == [8, 8, 1, 8, 8, 1]
    assert sorted(torch.cat(seen[:3]).tolist()) == list(range(17))
    assert not torch.equal(torch.cat(seen[:3]), torch.cat(seen[3:]))


def test_a_cap_cuts_work_short_and_whole_work_is_not_begun(bench):
    b = bench(sizes={"a": 40})
    w = start_of(b)
    for trainer in (Loop(b), Stacked(b)):
        (cut,) = trainer.run([Ticket("a", 1, 0, Fit(w, epochs=2, cap=3))])
        assert (cut.work.asked, cut.work.done, cut.work.partial) == (10, 3, True)
        (none,) = trainer.run([Ticket("a", 1, 0, Fit(w, epochs=2, cap=3, whole=True))])
        assert none.work.done == 0
        assert torch.equal(none.weights, w)


def test_gamma_stops_once_the_gradient_has_shrunk(bench):
    b = bench(sizes={"a": 24}, batch=None, lr=0.5)
    w = start_of(b)
    loop = Loop(b)
    (fit,) = loop.run([Ticket("a", 1, 0, Fit(w, epochs=500, gamma=0.5))])
    (first,) = loop.run([Ticket("a", 1, 0, Gradient(w))])
    (last,) = loop.run([Ticket("a", 1, 0, Gradient(fit.weights))])
    assert 0 < fit.work.done < 500
    assert not fit.work.partial
    assert last.gradient.norm() <= 0.5 * first.gradient.norm()
    (before,) = loop.run([Ticket("a", 1, 0, Fit(w, epochs=fit.work.done - 1))])
    (earlier,) = loop.run([Ticket("a", 1, 0, Gradient(before.weights))])
    assert earlier.gradient.norm() > 0.5 * first.gradient.norm()


def test_looking_at_all_data_is_work_that_a_deadline_counts(bench):
    b = bench(sizes={"a": 40}, batch=8)
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(start_of(b), epochs=4, gamma=0.0, cap=17))])
    assert (
        fit.work.done == 17 - 2 * 5
    )  # an epoch is five steps, and so is each look: one before, one after the first epoch


def test_batchnorm_statistics_travel(bench):
    b = bench(net="batch")
    before = b.spec.read(b.make())
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(before.weights, before.stats, epochs=1))])
    assert b.spec.stat_size > 0
    assert not torch.equal(fit.stats, before.stats)
    with pytest.raises(Refused, match="loop"):
        Stacked(b)


def test_evaluate_of_an_empty_split_is_nothing(bench):
    b = bench(sizes={"a": 3})
    (seen,) = Loop(b).run([Ticket("a", 1, 0, Evaluate(start_of(b), "val"))])
    assert float(seen.n) == 0


def test_the_rule_that_picks_a_trainer(bench):
    assert choose("auto", bench(), 2) == "stacked"
    assert choose("auto", bench(net="cnn"), 2) == "pool"
    assert choose("auto", bench(net="cnn"), 1) == "loop"
    assert choose("loop", bench(), 2) == "loop"
    assert choose("auto", bench(net="cnn", sizes={"a": 9}), 2) == "loop"


def test_training_on_nothing_is_refused(bench):
    b = bench(sizes={"a": 8, "coordinator": 0})
    with pytest.raises(Refused, match=r"public\.share"):
        Loop(b).run([Ticket("coordinator", 1, 0, Gradient(start_of(b)))])


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
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(w, steps=1))])
    (seen,) = Loop(b).run([Ticket("a", 1, 0, Gradient(w))])
    module = b.make()
    losses = F.cross_entropy(module(b.pool.x), b.pool.y, reduction="none")
    loss = sum(losses[b.pool.y == c].mean() for c in range(3)) / 3  # full balance: every class counts alike
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(fit.weights, w - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.gradient, gradient, rtol=1e-4, atol=1e-6)


def test_balanced_draws_show_every_class_alike(bench):
    b = rare(bench, balance="sample")
    ticket = Ticket("a", 1, 0, Fit(start_of(b), epochs=100))
    effort = Effort.of(ticket.job, b.examples["a"], b.recipe)
    drawn = torch.cat(list(batches(b, ticket, effort)))
    assert len(drawn) == 4000
    shares = torch.bincount(b.pool.y[drawn]) / len(drawn)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_a_class_that_a_site_lacks_counts_nothing_and_breaks_nothing(bench):
    b = bench(sizes={"a": 20, "coordinator": 0}, balance="full")
    b.pool.y[:] = 1
    assert float(b.weights(b.examples["a"].train)[1]) == pytest.approx(1)
    (fit,) = Loop(b).run([Ticket("a", 1, 0, Fit(start_of(b), epochs=1))])
    assert torch.isfinite(fit.weights).all()


def test_public_examples_are_trained_on_by_name(bench):
    b = replace(bench(sizes={"a": 16, "b": 24}), public=torch.arange(16, 40))
    w = start_of(b)
    (public,) = Loop(b).run([Ticket("a", 1, 0, Fit(w, epochs=2, data="public"))])
    assert public.work.examples == 24
    seen = batches(b, Ticket("a", 1, 0, Fit(w, epochs=1, data="public")), Effort(24, 8, 3, 3))
    assert sorted(torch.cat(list(seen)).tolist()) == list(range(16, 40))
    (stacked,) = Stacked(b).run([Ticket("a", 1, 0, Fit(w, epochs=2, data="public"))])
    torch.testing.assert_close(stacked.weights, public.weights, rtol=1e-4, atol=2e-5)
    with pytest.raises(Refused, match=r"public\.data"):
        Loop(bench(sizes={"a": 16})).run([Ticket("a", 1, 0, Fit(w, epochs=2, data="public"))])
