"""All trainers give the same updates, and those of the sequential trainer agree with updates computed by hand."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState
from pipeline.protocol.tasks import EvaluateJob, GradientJob, LocalRegularizer, TrainJob, proximal_term
from sites.training.augmentation import BatchAugmentation
from sites.training.base import StepBudget, TrainRequest, iterate_batches
from sites.training.select_trainer import make_trainer, select_trainer_kind
from sites.training.sequential import SequentialTrainer
from sites.training.stacked import StackedTrainer

UNEQUAL_SIZES = {"a": 40, "b": 23, "c": 7}


def initial_weights(context):
    return context.spec.read_state(context.make_model()).weights


def train_all_sites(context, trainer, **job):
    w = initial_weights(context)
    return trainer.run([TrainRequest(site, 3, 0, TrainJob(w, epochs=2, **job)) for site in context.split_indices])


CASES = {
    "equal": {},
    "unequal": {"sizes": UNEQUAL_SIZES},
    "full batch": {"sizes": UNEQUAL_SIZES, "batch_size": None},
    "momentum": {"sizes": UNEQUAL_SIZES, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"sizes": UNEQUAL_SIZES, "optimizer": "adam", "lr": 0.01},
    "adamw": {"sizes": UNEQUAL_SIZES, "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "augmented": {
        "sizes": UNEQUAL_SIZES,
        "augmentation": BatchAugmentation(flip=True, rotate=90, elastic=1.0, light=0.1),
    },
    "weighted": {"sizes": UNEQUAL_SIZES, "class_balance": "full"},
    "balanced sampling": {"sizes": UNEQUAL_SIZES, "class_balance": "sample"},
}


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("case", CASES)
def test_trainers_give_the_same_updates(make_trainer_context, case, net):
    context = make_trainer_context(net=net, **CASES[case])
    w = initial_weights(context)
    regularizer = proximal_term(torch.zeros_like(w), 0.3) + LocalRegularizer(0.0, 0.001)
    reference = train_all_sites(context, SequentialTrainer(context), regularizer=regularizer)
    for trainer in (StackedTrainer(context), StackedTrainer(context, 2), make_trainer("threaded", context, 2)):
        for expected, actual in zip(reference, train_all_sites(context, trainer, regularizer=regularizer), strict=True):
            assert not torch.equal(expected.weights, w)
            torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-4, atol=2e-5)
            assert actual.work == expected.work
            assert actual.loss == pytest.approx(expected.loss, rel=1e-4)
            assert actual.lr_sum == expected.lr_sum


def test_stacked_vmap_gradients_agree_with_stacked_mlp_gradients(make_trainer_context):
    from sites.training.stacked import make_vmap_gradients

    context = make_trainer_context(sizes=UNEQUAL_SIZES)
    mlp, vmapped = StackedTrainer(context), StackedTrainer(context)
    vmapped.compute_losses_and_gradients = make_vmap_gradients(vmapped.sequential_trainer.module, context.spec.names)
    for one, other in zip(train_all_sites(context, mlp), train_all_sites(context, vmapped), strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)


def test_sequential_trainer_proximal_steps_by_hand(make_trainer_context):
    """Two steps of FedProx: w <- w - lr (grad F(w) + mu (w - w_t))."""
    context = make_trainer_context(sizes={"a": 16})
    w_t = initial_weights(context)
    mu, lr = 0.5, 0.1
    (result,) = SequentialTrainer(context).run(
        [TrainRequest("a", 1, 0, TrainJob(w_t, steps=2, regularizer=proximal_term(w_t, mu)))]
    )
    module = context.make_model()
    w = w_t.clone()
    request = TrainRequest("a", 1, 0, TrainJob(w_t, steps=2))
    for index in iterate_batches(
        context, request, StepBudget.from_job(request.job, context.split_indices["a"], context.config)
    ):
        context.spec.write_state(module, ModelState(w, torch.zeros(0)))
        loss = F.cross_entropy(module(context.pool.x[index]), context.pool.y[index])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        w = w - lr * (gradient + mu * (w - w_t))
    torch.testing.assert_close(result.weights, w, rtol=1e-5, atol=1e-6)
    assert result.work.steps_done == result.work.steps_requested == 2
    assert result.lr_sum == pytest.approx(0.2)


def test_local_regularizer_contracts_weights_geometrically(make_trainer_context):
    """With lr * slope = 1/2 the distance to the target halves each step, up to the data's gradient."""
    context = make_trainer_context(sizes={"a": 8}, lr=1e-6)
    w = initial_weights(context)
    (result,) = SequentialTrainer(context).run(
        [TrainRequest("a", 1, 0, TrainJob(w, steps=3, regularizer=LocalRegularizer(5e5, 0.0)))]
    )
    torch.testing.assert_close(result.weights, w / 8, rtol=1e-3, atol=1e-5)


def test_gradient_job_returns_the_gradient_of_the_mean_loss(make_trainer_context):
    context = make_trainer_context(sizes={"a": 30})
    w = initial_weights(context)
    (result,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, GradientJob(w))])
    module = context.make_model()
    loss = F.cross_entropy(module(context.pool.x), context.pool.y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(result.gradient, expected, rtol=1e-5, atol=1e-6)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)


def test_iterate_batches_short_last_batch_counts_as_a_step(make_trainer_context):
    context = make_trainer_context(sizes={"a": 17}, batch_size=8)
    request = TrainRequest("a", 1, 0, TrainJob(initial_weights(context), epochs=2))
    batches = list(
        iterate_batches(context, request, StepBudget.from_job(request.job, context.split_indices["a"], context.config))
    )
    assert [len(i) for i in batches] == [8, 8, 1, 8, 8, 1]
    assert sorted(torch.cat(batches[:3]).tolist()) == list(range(17))
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:]))


def test_max_steps_gives_partial_work_and_all_or_nothing_trains_no_step(make_trainer_context):
    context = make_trainer_context(sizes={"a": 40})
    w = initial_weights(context)
    for trainer in (SequentialTrainer(context), StackedTrainer(context)):
        (capped,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, max_steps=3))])
        assert (capped.work.steps_requested, capped.work.steps_done, capped.work.is_partial) == (10, 3, True)
        (skipped,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, max_steps=3, all_or_nothing=True))])
        assert skipped.work.steps_done == 0
        assert torch.equal(skipped.weights, w)


def test_inexactness_stops_once_the_gradient_norm_has_shrunk(make_trainer_context):
    context = make_trainer_context(sizes={"a": 24}, batch_size=None, lr=0.5)
    w = initial_weights(context)
    trainer = SequentialTrainer(context)
    (result,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=500, inexactness=0.5))])
    (first,) = trainer.run([TrainRequest("a", 1, 0, GradientJob(w))])
    (last,) = trainer.run([TrainRequest("a", 1, 0, GradientJob(result.weights))])
    assert 0 < result.work.steps_done < 500
    assert not result.work.is_partial
    assert last.gradient.norm() <= 0.5 * first.gradient.norm()
    (before,) = trainer.run([TrainRequest("a", 1, 0, TrainJob(w, epochs=result.work.steps_done - 1))])
    (earlier,) = trainer.run([TrainRequest("a", 1, 0, GradientJob(before.weights))])
    assert earlier.gradient.norm() > 0.5 * first.gradient.norm()


def test_inexactness_gradient_checks_count_against_max_steps(make_trainer_context):
    context = make_trainer_context(sizes={"a": 40}, batch_size=8)
    (result,) = SequentialTrainer(context).run(
        [TrainRequest("a", 1, 0, TrainJob(initial_weights(context), epochs=4, inexactness=0.0, max_steps=17))]
    )
    # a full gradient costs as much as an epoch, five steps: one before training, one after the first epoch
    assert result.work.steps_done == 17 - 2 * 5


def test_batchnorm_statistics_are_returned_and_stacked_trainer_refuses_them(make_trainer_context):
    context = make_trainer_context(net="batch")
    before = context.spec.read_state(context.make_model())
    (result,) = SequentialTrainer(context).run(
        [TrainRequest("a", 1, 0, TrainJob(before.weights, before.norm_stats, epochs=1))]
    )
    assert context.spec.num_norm_stats > 0
    assert not torch.equal(result.norm_stats, before.norm_stats)
    with pytest.raises(IncompatibleStudyError, match="sequential"):
        StackedTrainer(context)


def test_evaluate_job_on_an_empty_split_counts_no_examples(make_trainer_context):
    context = make_trainer_context(sizes={"a": 3})
    (result,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, EvaluateJob(initial_weights(context), "val"))])
    assert float(result.n) == 0


def test_select_trainer_kind(make_trainer_context):
    assert select_trainer_kind("auto", make_trainer_context(), 2) == "stacked"
    assert select_trainer_kind("auto", make_trainer_context(net="cnn"), 2) == "threaded"
    assert select_trainer_kind("auto", make_trainer_context(net="cnn"), 1) == "sequential"
    assert select_trainer_kind("sequential", make_trainer_context(), 2) == "sequential"
    assert select_trainer_kind("auto", make_trainer_context(net="cnn", sizes={"a": 9}), 2) == "sequential"


def test_training_without_examples_is_refused(make_trainer_context):
    context = make_trainer_context(sizes={"a": 8, "coordinator": 0})
    with pytest.raises(IncompatibleStudyError, match=r"public\.fraction"):
        SequentialTrainer(context).run([TrainRequest("coordinator", 1, 0, GradientJob(initial_weights(context)))])


def make_imbalanced_context(make_trainer_context, **settings):
    """A site with 36 examples of class 0, 3 of class 1 and 1 of class 2."""
    context = make_trainer_context(sizes={"a": 40}, **settings)
    context.pool.y[:] = torch.tensor([0] * 36 + [1] * 3 + [2])
    return context


@pytest.mark.parametrize(("balance", "power"), [("root", 0.5), ("full", 1.0)])
def test_class_weights_grow_with_rarity_and_average_to_one(make_trainer_context, balance, power):
    context = make_imbalanced_context(make_trainer_context, class_balance=balance)
    weights = context.class_weights(context.split_indices["a"].train)
    assert float(weights[context.pool.y].mean()) == pytest.approx(1)
    assert float(weights[1] / weights[0]) == pytest.approx((36 / 3) ** power)
    assert float(weights[2] / weights[0]) == pytest.approx(36**power)


def test_class_balance_full_step_by_hand(make_trainer_context):
    context = make_imbalanced_context(make_trainer_context, class_balance="full", batch_size=None)
    w = initial_weights(context)
    (trained,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, TrainJob(w, steps=1))])
    (full_gradient,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, GradientJob(w))])
    module = context.make_model()
    losses = F.cross_entropy(module(context.pool.x), context.pool.y, reduction="none")
    loss = sum(losses[context.pool.y == c].mean() for c in range(3)) / 3  # all classes have equal weight
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(trained.weights, w - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(full_gradient.gradient, gradient, rtol=1e-4, atol=1e-6)


def test_class_balance_sample_samples_all_classes_equally(make_trainer_context):
    context = make_imbalanced_context(make_trainer_context, class_balance="sample")
    request = TrainRequest("a", 1, 0, TrainJob(initial_weights(context), epochs=100))
    budget = StepBudget.from_job(request.job, context.split_indices["a"], context.config)
    sampled = torch.cat(list(iterate_batches(context, request, budget)))
    assert len(sampled) == 4000
    shares = torch.bincount(context.pool.y[sampled]) / len(sampled)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_class_weights_with_a_missing_class_stay_finite(make_trainer_context):
    context = make_trainer_context(sizes={"a": 20, "coordinator": 0}, class_balance="full")
    context.pool.y[:] = 1
    assert float(context.class_weights(context.split_indices["a"].train)[1]) == pytest.approx(1)
    (result,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, TrainJob(initial_weights(context), epochs=1))])
    assert torch.isfinite(result.weights).all()


def test_train_job_on_public_data(make_trainer_context):
    context = replace(make_trainer_context(sizes={"a": 16, "b": 24}), public_indices=torch.arange(16, 40))
    w = initial_weights(context)
    (public,) = SequentialTrainer(context).run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))])
    assert public.work.num_examples == 24
    batches = iterate_batches(
        context, TrainRequest("a", 1, 0, TrainJob(w, epochs=1, dataset="public")), StepBudget(24, 8, 3, 3)
    )
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(16, 40))
    (stacked,) = StackedTrainer(context).run([TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))])
    torch.testing.assert_close(stacked.weights, public.weights, rtol=1e-4, atol=2e-5)
    with pytest.raises(IncompatibleStudyError, match=r"public\.data"):
        SequentialTrainer(make_trainer_context(sizes={"a": 16})).run(
            [TrainRequest("a", 1, 0, TrainJob(w, epochs=2, dataset="public"))]
        )
