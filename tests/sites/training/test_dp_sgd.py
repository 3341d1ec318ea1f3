"""DP-SGD: an update is the noised mean of clipped unit gradients plus the regularizer, equal for all clipping methods."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ParameterRole, ParameterSpec
from pipeline.protocol.tasks import GradientJob, LocalRegularizer, TrainJob, proximal_term
from privacy.dpsgd.secure_rng import SecureRandom
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.augmentation import BatchAugmentation
from sites.training.base import TrainerContext, TrainingConfig, TrainRequest
from sites.training.dp_sgd import DpSgdTrainer, split_by_unit
from sites.training.sequential import SequentialTrainer
from sites.training.unit_clipping import ClippingMode, DpSgdParams, select_clipping

UNIT_IDS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5])


def seeded_random_factory(word: str = "test") -> Callable[[], SecureRandom]:
    return lambda: SecureRandom(hashlib.sha256(word.encode()).digest())


def make_cnn() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))


def make_mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def make_context(
    make_model: Callable[[], nn.Module] = make_cnn,
    batch_size: int | None = None,
    lr: float = 0.5,
    public: Tensor | None = None,
    **config: object,
) -> TrainerContext:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(12, 1, 6, 6, generator=generator), torch.arange(12) % 3
    rows = torch.arange(12)
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0} | config
    return TrainerContext(
        make_model,
        ParameterSpec.from_module(make_model()),
        ExamplePool(x, y, torch.device("cpu"), UNIT_IDS),
        {"a": SplitIndices(rows, rows[:2], rows[:2]), "coordinator": SplitIndices(rows[:0], rows[:0], rows[:0])},
        TrainingConfig(batch_size, lr_schedule=lambda round_number: lr, **settings),
        3,
        0,
        public,
    )


def make_dp_params(
    noise_multiplier: float = 0.0, max_grad_norm: float = 1e9, sampling_rate: float = 1.0, unit: str = "patient"
) -> DpSgdParams:
    units = 12 if unit == "example" else 6
    return DpSgdParams(noise_multiplier, max_grad_norm, unit, units, sampling_rate, units / 12)


def train_privately(trainer: DpSgdTrainer, job: TrainJob) -> Tensor:
    return trainer.run_request(TrainRequest("a", 1, 0, job, is_private=True)).weights  # type: ignore[union-attr]


def initial_weights(make_model: Callable[[], nn.Module] = make_cnn) -> Tensor:
    return ParameterSpec.from_module(make_model()).read_state(make_model()).weights


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_dp_sgd_without_clipping_noise_and_sampling_is_gradient_descent(mode: ClippingMode) -> None:
    context = make_context(batch_size=None)
    job = TrainJob(initial_weights(), steps=3)
    without_dp = SequentialTrainer(context).run_request(TrainRequest("a", 1, 0, job))
    torch.testing.assert_close(
        train_privately(DpSgdTrainer(context, {"a": make_dp_params()}, mode), job),
        without_dp.weights,
        rtol=1e-4,
        atol=1e-5,
    )


def weights_after_clipped_step(
    make_model: Callable[[], nn.Module], max_grad_norm: float, units: list[list[int]], lr: float
) -> Tensor:
    """By hand: the mean of the units' clipped gradients; a unit's loss is units / examples times the sum of its losses."""
    context, module = make_context(make_model), make_model()
    scale, total = len(units) / 12, torch.zeros(context.spec.num_parameters)
    for rows in units:
        module.zero_grad()
        index = torch.tensor(rows)
        losses = nn.functional.cross_entropy(module(context.pool.inputs(index)), context.pool.y[index], reduction="sum")
        (losses * scale).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
        total += gradient * min(1.0, max_grad_norm / float(gradient.norm()))
    return context.spec.read_state(module).weights - lr * total / len(units)


PATIENTS = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11]]


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_dp_sgd_sums_a_units_gradients_before_clipping(mode: ClippingMode) -> None:
    trainer = DpSgdTrainer(make_context(), {"a": make_dp_params(max_grad_norm=0.3)}, mode)
    by_hand = weights_after_clipped_step(make_cnn, 0.3, PATIENTS, lr=0.5)
    torch.testing.assert_close(
        train_privately(trainer, TrainJob(initial_weights(), steps=1)), by_hand, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_dp_sgd_example_level_clipping_by_hand(mode: ClippingMode) -> None:
    trainer = DpSgdTrainer(make_context(make_mlp), {"a": make_dp_params(max_grad_norm=0.2, unit="example")}, mode)
    by_hand = weights_after_clipped_step(make_mlp, 0.2, [[n] for n in range(12)], 0.5)
    torch.testing.assert_close(
        train_privately(trainer, TrainJob(initial_weights(make_mlp), steps=1)), by_hand, rtol=1e-4, atol=1e-6
    )


def test_grad_sample_batches_never_split_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = DpSgdTrainer(make_context(), {"a": make_dp_params(max_grad_norm=0.3)}, "grad_sample")
    trainer.clipping.max_examples = 3  # type: ignore[union-attr]
    assert [
        [len(rows) for rows in batch]
        for batch in trainer.clipping.split_batches(split_by_unit(torch.arange(12), UNIT_IDS))
    ] == [[3], [1, 2], [4], [1, 1]]
    torch.testing.assert_close(
        train_privately(trainer, TrainJob(initial_weights(), steps=1)),
        weights_after_clipped_step(make_cnn, 0.3, PATIENTS, lr=0.5),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_dp_sgd_adds_the_fedprox_proximal_term_after_the_noise(mode: ClippingMode) -> None:
    """w1 = w0 - lr g1; w2 = w1 - lr (g2 + mu (w1 - w0)): the second step shows the term."""
    w, mu, lr = initial_weights(), 2.0, 0.5
    dp_params = make_dp_params(noise_multiplier=0.7, max_grad_norm=0.3, sampling_rate=0.5)

    def steps(regularizer: LocalRegularizer, count: int) -> Tensor:
        return train_privately(
            DpSgdTrainer(make_context(batch_size=6), {"a": dp_params}, mode, seeded_random_factory()),
            TrainJob(w, steps=count, regularizer=regularizer),
        )

    w1, w1_proximal = steps(LocalRegularizer(), 1), steps(proximal_term(w, mu), 1)
    torch.testing.assert_close(w1, w1_proximal, rtol=0, atol=1e-7)  # at w the proximal term is zero
    w2 = steps(LocalRegularizer(), 2)
    torch.testing.assert_close(steps(proximal_term(w, mu), 2), w2 - lr * mu * (w1 - w), rtol=1e-5, atol=1e-6)
    assert float((lr * mu * (w1 - w)).norm()) > 0.1


def test_dp_sgd_adds_the_scaffold_correction_after_clipping_and_noise() -> None:
    """An offset of norm 60 is not clipped to max_grad_norm 0.3."""
    w, offset = initial_weights(), torch.linspace(-3, 3, len(initial_weights()))
    dp_params = make_dp_params(noise_multiplier=0.7, max_grad_norm=0.3, sampling_rate=0.5)
    trainers = [
        DpSgdTrainer(make_context(batch_size=6), {"a": dp_params}, "per_unit", seeded_random_factory())
        for _ in range(2)
    ]
    uncorrected = train_privately(trainers[0], TrainJob(w, steps=1))
    corrected = train_privately(trainers[1], TrainJob(w, steps=1, regularizer=LocalRegularizer(offset=offset)))
    torch.testing.assert_close(corrected, uncorrected - 0.5 * offset, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_dp_sgd_step_with_an_empty_poisson_sample_is_noise(mode: ClippingMode) -> None:
    """The noise of a step has standard deviation lr * noise_multiplier * max_grad_norm / (sampling_rate * num_units)."""
    unit = "example" if mode == "ghost" else "patient"
    # the expected number of sampled units is 1, but the site has only a few units, so none is sampled
    dp_params = DpSgdParams(2.0, 0.5, unit, num_units=10**12, sampling_rate=1e-12)
    weight_change = train_privately(
        DpSgdTrainer(make_context(make_mlp), {"a": dp_params}, mode), TrainJob(initial_weights(make_mlp), steps=4)
    ) - initial_weights(make_mlp)
    assert float(weight_change.std()) == pytest.approx(2.0 * 0.5 * 0.5 * math.sqrt(4), rel=0.15)


def test_dp_sgd_randomness_does_not_follow_the_study_seed() -> None:
    job = TrainJob(initial_weights(), steps=1)
    first, second = (
        train_privately(
            DpSgdTrainer(make_context(), {"a": make_dp_params(noise_multiplier=1.0, max_grad_norm=1.0)}, "per_unit"),
            job,
        )
        for _ in range(2)
    )
    assert not torch.equal(first, second)
    with_fixed_key = [
        train_privately(
            DpSgdTrainer(
                make_context(),
                {"a": make_dp_params(noise_multiplier=1.0, max_grad_norm=1.0)},
                "per_unit",
                seeded_random_factory(),
            ),
            job,
        )
        for _ in range(2)
    ]
    assert torch.equal(*with_fixed_key)


@pytest.mark.parametrize("role", ["head", "body"])
@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_dp_sgd_frozen_parameters_are_neither_clipped_nor_noised(mode: ClippingMode, role: ParameterRole) -> None:
    """Nor do they count in the gradient norm: the trainable parameters alone reach max_grad_norm."""
    context, w = make_context(make_mlp, lr=1.0), initial_weights(make_mlp)
    dp_params = DpSgdParams(0.0, 1e-3, "example", 12, 1.0)
    trainer = DpSgdTrainer(context, {"a": dp_params}, mode)
    weight_change = train_privately(trainer, TrainJob(w, steps=1, trainable_roles=frozenset({role}))) - w
    mask = context.spec.role_mask((role,))
    assert not weight_change[~mask].any()
    module, clipped_gradients = make_mlp(), []
    for n in range(12):
        module.zero_grad()
        nn.functional.cross_entropy(module(context.pool.inputs(torch.tensor([n]))), context.pool.y[[n]]).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])[mask]  # type: ignore[union-attr]
        clipped_gradients.append(1e-3 * gradient / gradient.norm())
    torch.testing.assert_close(weight_change[mask], -torch.stack(clipped_gradients).mean(0), rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_dp_sgd_trainer_keeps_no_state_between_jobs(mode: ClippingMode) -> None:
    reused = DpSgdTrainer(make_context(), {"a": make_dp_params(max_grad_norm=0.3)}, mode)
    train_privately(reused, TrainJob(initial_weights(), steps=2, trainable_roles=frozenset({"head"})))
    new = DpSgdTrainer(make_context(), {"a": make_dp_params(max_grad_norm=0.3)}, mode)
    torch.testing.assert_close(
        train_privately(reused, TrainJob(initial_weights(), steps=2)),
        train_privately(new, TrainJob(initial_weights(), steps=2)),
    )


def test_dp_sgd_refuses_jobs_without_a_privacy_mechanism() -> None:
    trainer = DpSgdTrainer(make_context(), {"a": make_dp_params(noise_multiplier=1.0)}, "per_unit")
    for job in (
        GradientJob(initial_weights()),
        TrainJob(initial_weights(), steps=1, inexactness=0.5),
        TrainJob(initial_weights(), steps=1, maml_lr=0.1),
    ):
        with pytest.raises(IncompatibleStudyError, match="no privacy mechanism"):
            trainer.run_request(TrainRequest("a", 1, 0, job, is_private=True))


def test_dp_sgd_trains_non_private_requests_sequentially() -> None:
    context = make_context(batch_size=4)
    request = TrainRequest("a", 1, 0, TrainJob(initial_weights(), steps=3))
    trainer = DpSgdTrainer(context, {"a": make_dp_params(noise_multiplier=5.0)}, "per_unit")
    assert torch.equal(trainer.run_request(request).weights, SequentialTrainer(context).run_request(request).weights)  # type: ignore[union-attr]


def test_dp_sgd_augmentation_of_a_unit_does_not_depend_on_other_units() -> None:
    """Augmentation uses SecureRandom; with the study's seeds it would depend on the order of the units."""
    context = make_context(augmentation=BatchAugmentation(light=0.5))
    job = TrainJob(initial_weights(), steps=1)
    first, second = (train_privately(DpSgdTrainer(context, {"a": make_dp_params()}, "per_unit"), job) for _ in range(2))
    assert not torch.equal(first, second)


def test_dp_sgd_number_of_steps_and_max_steps() -> None:
    trainer = DpSgdTrainer(
        make_context(batch_size=5), {"a": make_dp_params(noise_multiplier=1.0, sampling_rate=5 / 12)}, "per_unit"
    )
    for max_steps, steps_done in ((None, 6), (4, 4)):
        job = TrainJob(initial_weights(), epochs=2, max_steps=max_steps)
        work = trainer.run_request(TrainRequest("a", 1, 0, job, is_private=True)).work  # type: ignore[union-attr]
        assert (work.steps_requested, work.steps_done) == (6, steps_done)


def test_select_clipping_follows_unit_size_and_layers() -> None:
    assert select_clipping(make_cnn(), 24) == "per_unit"
    assert select_clipping(make_cnn(), 1) == select_clipping(make_cnn(), 3) == "grad_sample"
    assert select_clipping(make_mlp(), 1) == "ghost"


def test_secure_random_is_uniform_and_normal() -> None:
    source = SecureRandom()
    z = source.normal(torch.Size((200_001,))).double()
    assert abs(float(z.mean())) < 0.012
    assert float(z.std()) == pytest.approx(1, abs=0.01)
    assert float((z.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.003)
    assert float((z**4).mean()) == pytest.approx(3, abs=0.12)
    num_sampled = sum(len(source.poisson_sample(1000, 0.1)) for _ in range(100))
    assert num_sampled == pytest.approx(10_000, abs=500)
    assert len(source.poisson_sample(1000, 1.0)) == 1000


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
@pytest.mark.parametrize("max_grad_norm", [0.05, 0.3, 1.0])
def test_dp_sgd_sensitivity_to_one_patient_is_at_most_max_grad_norm(mode: ClippingMode, max_grad_norm: float) -> None:
    """Removes the patient with the most cells and keeps the DpSgdParams: no other part of the sum may change."""
    context = make_context(lr=1.0)
    dp_params = make_dp_params(max_grad_norm=max_grad_norm)
    context_without_patient = replace(
        context, split_indices={"a": replace(context.split_indices["a"], train=torch.arange(12)[UNIT_IDS != 3])}
    )
    with_patient = train_privately(DpSgdTrainer(context, {"a": dp_params}, mode), TrainJob(initial_weights(), steps=1))
    without_patient = train_privately(
        DpSgdTrainer(context_without_patient, {"a": dp_params}, mode), TrainJob(initial_weights(), steps=1)
    )
    sensitivity = float((with_patient - without_patient).norm()) * dp_params.sampling_rate * dp_params.num_units
    assert 0 < sensitivity <= max_grad_norm * (1 + 1e-4)
