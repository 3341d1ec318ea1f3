"""DP-SGD: what leaves the site is a clipped, noised sum over units, the pull comes after, and all three ways agree."""

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

UNIT = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5])


def fixed(word: str = "test") -> Callable[[], SecureRandom]:
    return lambda: SecureRandom(hashlib.sha256(word.encode()).digest())


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))


def dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def bench(
    make: Callable[[], nn.Module] = network,
    batch: int | None = None,
    lr: float = 0.5,
    public: Tensor | None = None,
    **recipe: object,
) -> TrainerContext:
    dice = torch.Generator().manual_seed(1)
    x, y = torch.rand(12, 1, 6, 6, generator=dice), torch.arange(12) % 3
    rows = torch.arange(12)
    settings = {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0} | recipe
    return TrainerContext(
        make,
        ParameterSpec.from_module(make()),
        ExamplePool(x, y, torch.device("cpu"), UNIT),
        {"a": SplitIndices(rows, rows[:2], rows[:2]), "coordinator": SplitIndices(rows[:0], rows[:0], rows[:0])},
        TrainingConfig(batch, lr_schedule=lambda turn: lr, **settings),
        3,
        0,
        public,
    )


def terms(noise: float = 0.0, clip: float = 1e9, rate: float = 1.0, unit: str = "patient") -> DpSgdParams:
    units = 12 if unit == "example" else 6
    return DpSgdParams(noise, clip, unit, units, rate, units / 12)


def fit(private: DpSgdTrainer, job: TrainJob) -> Tensor:
    return private.run_request(TrainRequest("a", 1, 0, job, is_private=True)).weights  # type: ignore[union-attr]


def start(make: Callable[[], nn.Module] = network) -> Tensor:
    return ParameterSpec.from_module(make()).read_state(make()).weights


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_without_clipping_noise_and_chance_it_is_gradient_descent(mode: ClippingMode) -> None:
    work = bench(batch=None)
    job = TrainJob(start(), steps=3)
    plain = SequentialTrainer(work).run_request(TrainRequest("a", 1, 0, job))
    torch.testing.assert_close(fit(DpSgdTrainer(work, {"a": terms()}, mode), job), plain.weights, rtol=1e-4, atol=1e-5)


def clipped_step(make: Callable[[], nn.Module], clip: float, units: list[list[int]], lr: float) -> Tensor:
    """By hand: every unit's gradient (of the sum of its losses, times units / examples), cut to length, then the mean."""
    work, module = bench(make), make()
    scale, total = len(units) / 12, torch.zeros(work.spec.num_parameters)
    for rows in units:
        module.zero_grad()
        index = torch.tensor(rows)
        losses = nn.functional.cross_entropy(module(work.pool.inputs(index)), work.pool.y[index], reduction="sum")
        (losses * scale).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return work.spec.read_state(module).weights - lr * total / len(units)


PATIENTS = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11]]


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_a_units_examples_are_added_up_before_they_are_clipped(mode: ClippingMode) -> None:
    private = DpSgdTrainer(bench(), {"a": terms(clip=0.3)}, mode)
    by_hand = clipped_step(network, 0.3, PATIENTS, 0.5)
    torch.testing.assert_close(fit(private, TrainJob(start(), steps=1)), by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_examples_as_units(mode: ClippingMode) -> None:
    private = DpSgdTrainer(bench(dense), {"a": terms(clip=0.2, unit="example")}, mode)
    by_hand = clipped_step(dense, 0.2, [[n] for n in range(12)], 0.5)
    torch.testing.assert_close(fit(private, TrainJob(start(dense), steps=1)), by_hand, rtol=1e-4, atol=1e-6)


def test_physical_batches_never_split_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    private = DpSgdTrainer(bench(), {"a": terms(clip=0.3)}, "grad_sample")
    private.clipping.max_examples = 3  # type: ignore[union-attr]
    assert [
        [len(u) for u in piece] for piece in private.clipping.split_batches(split_by_unit(torch.arange(12), UNIT))
    ] == [[3], [1, 2], [4], [1, 1]]
    torch.testing.assert_close(
        fit(private, TrainJob(start(), steps=1)), clipped_step(network, 0.3, PATIENTS, 0.5), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_the_pull_of_fedprox_comes_after_noise_and_is_not_lost(mode: ClippingMode) -> None:
    """w1 = w0 - lr g1; w2 = w1 - lr (g2 + mu (w1 - w0)): the second step tells whether the term is there."""
    w, mu, lr = start(), 2.0, 0.5
    kind = terms(noise=0.7, clip=0.3, rate=0.5)

    def steps(pull: LocalRegularizer, count: int) -> Tensor:
        return fit(DpSgdTrainer(bench(batch=6), {"a": kind}, mode, fixed()), TrainJob(w, steps=count, regularizer=pull))

    free, pulled = steps(LocalRegularizer(), 1), steps(proximal_term(w, mu), 1)
    torch.testing.assert_close(free, pulled, rtol=0, atol=1e-7)  # at w itself the pull is nothing
    second = steps(LocalRegularizer(), 2)
    torch.testing.assert_close(steps(proximal_term(w, mu), 2), second - lr * mu * (free - w), rtol=1e-5, atol=1e-6)
    assert float((lr * mu * (free - w)).norm()) > 0.1


def test_scaffolds_correction_is_added_unclipped_and_without_noise() -> None:
    """An offset of length 60 passes a clipping norm of 0.3 whole."""
    w, offset = start(), torch.linspace(-3, 3, len(start()))
    kind = terms(noise=0.7, clip=0.3, rate=0.5)
    private = [DpSgdTrainer(bench(batch=6), {"a": kind}, "per_unit", fixed()) for _ in range(2)]
    without, corrected = (
        fit(private[0], TrainJob(w, steps=1)),
        fit(private[1], TrainJob(w, steps=1, regularizer=LocalRegularizer(offset=offset))),
    )
    torch.testing.assert_close(corrected, without - 0.5 * offset, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_an_empty_draw_is_a_step_of_noise(mode: ClippingMode) -> None:
    """noise * clip / (rate * units) is the deviation of the mean, lr that of the weights."""
    unit = "example" if mode == "ghost" else "patient"
    rate = 1e-12
    kind = DpSgdParams(2.0, 0.5, unit, 10**12, rate)  # one unit expected, none ever drawn
    moved = fit(DpSgdTrainer(bench(dense), {"a": kind}, mode), TrainJob(start(dense), steps=4)) - start(dense)
    assert float(moved.std()) == pytest.approx(2.0 * 0.5 * 0.5 * math.sqrt(4), rel=0.15)


def test_noise_and_draws_are_not_the_studys() -> None:
    job = TrainJob(start(), steps=1)
    first, second = (fit(DpSgdTrainer(bench(), {"a": terms(noise=1.0, clip=1.0)}, "per_unit"), job) for _ in range(2))
    assert not torch.equal(first, second)
    again = [fit(DpSgdTrainer(bench(), {"a": terms(noise=1.0, clip=1.0)}, "per_unit", fixed()), job) for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize("role", ["head", "body"])
@pytest.mark.parametrize("mode", ["per_unit", "grad_sample", "ghost"])
def test_what_does_not_move_is_neither_clipped_nor_noised(mode: ClippingMode, role: ParameterRole) -> None:
    """Nor does it count for the others' clipping: what moves, moves by the whole clip."""
    work, w = bench(dense, lr=1.0), start(dense)
    kind = DpSgdParams(0.0, 1e-3, "example", 12, 1.0)
    moved = fit(DpSgdTrainer(work, {"a": kind}, mode), TrainJob(w, steps=1, trainable_roles=frozenset({role}))) - w
    mask = work.spec.role_mask((role,))
    assert not moved[~mask].any()
    module, gradients = dense(), []
    for n in range(12):
        module.zero_grad()
        nn.functional.cross_entropy(module(work.pool.inputs(torch.tensor([n]))), work.pool.y[[n]]).backward()
        own = torch.cat([p.grad.flatten() for p in module.parameters()])[mask]  # type: ignore[union-attr]
        gradients.append(1e-3 * own / own.norm())
    torch.testing.assert_close(moved[mask], -torch.stack(gradients).mean(0), rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
def test_nothing_of_one_fit_is_left_in_the_next(mode: ClippingMode) -> None:
    used = DpSgdTrainer(bench(), {"a": terms(clip=0.3)}, mode)
    fit(used, TrainJob(start(), steps=2, trainable_roles=frozenset({"head"})))
    fresh = DpSgdTrainer(bench(), {"a": terms(clip=0.3)}, mode)
    torch.testing.assert_close(fit(used, TrainJob(start(), steps=2)), fit(fresh, TrainJob(start(), steps=2)))


def test_jobs_without_a_mechanism_are_refused() -> None:
    private = DpSgdTrainer(bench(), {"a": terms(noise=1.0)}, "per_unit")
    for job in (
        GradientJob(start()),
        TrainJob(start(), steps=1, inexactness=0.5),
        TrainJob(start(), steps=1, maml_lr=0.1),
    ):
        with pytest.raises(IncompatibleStudyError, match="no privacy mechanism"):
            private.run_request(TrainRequest("a", 1, 0, job, is_private=True))


def test_what_stays_at_the_site_is_trained_plainly() -> None:
    work = bench(batch=4)
    ticket = TrainRequest("a", 1, 0, TrainJob(start(), steps=3))
    private = DpSgdTrainer(work, {"a": terms(noise=5.0)}, "per_unit")
    assert torch.equal(private.run_request(ticket).weights, SequentialTrainer(work).run_request(ticket).weights)  # type: ignore[union-attr]


def test_augmentation_of_a_unit_does_not_depend_on_who_is_drawn_with_it() -> None:
    """With the study's seeds it would: here each pass throws new dice."""
    work = bench(augment=BatchAugmentation(light=0.5))
    job = TrainJob(start(), steps=1)
    first, second = (fit(DpSgdTrainer(work, {"a": terms()}, "per_unit"), job) for _ in range(2))
    assert not torch.equal(first, second)


def test_steps_are_ceil_n_over_batch_times_epochs_and_the_cap_holds() -> None:
    private = DpSgdTrainer(bench(batch=5), {"a": terms(noise=1.0, rate=5 / 12)}, "per_unit")
    done = private.run_request(TrainRequest("a", 1, 0, TrainJob(start(), epochs=2), is_private=True)).work  # type: ignore[union-attr]
    assert (done.steps_requested, done.steps_done) == (6, 6)
    done = private.run_request(TrainRequest("a", 1, 0, TrainJob(start(), epochs=2, max_steps=4), is_private=True)).work  # type: ignore[union-attr]
    assert (done.steps_requested, done.steps_done) == (6, 4)


def test_the_way_follows_the_units_and_the_layers() -> None:
    assert select_clipping(network(), 24) == "per_unit"
    assert select_clipping(network(), 1) == select_clipping(network(), 3) == "grad_sample"
    assert select_clipping(dense(), 1) == "ghost"


def test_entropy_is_uniform_and_normal() -> None:
    source = SecureRandom()
    z = source.normal(torch.Size((200_001,))).double()
    assert abs(float(z.mean())) < 0.012
    assert float(z.std()) == pytest.approx(1, abs=0.01)
    assert float((z.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.003)
    assert float((z**4).mean()) == pytest.approx(3, abs=0.12)
    picked = sum(len(source.poisson_sample(1000, 0.1)) for _ in range(100))
    assert picked == pytest.approx(10_000, abs=500)
    assert len(source.poisson_sample(1000, 1.0)) == 1000


@pytest.mark.parametrize("mode", ["per_unit", "grad_sample"])
@pytest.mark.parametrize("clip", [0.05, 0.3, 1.0])
def test_one_patient_more_moves_the_sum_by_no_more_than_the_clip(mode: ClippingMode, clip: float) -> None:
    """A large one among small ones, under the same terms: nothing of the others may change."""
    work = bench(lr=1.0)
    kind = terms(clip=clip)
    fewer = replace(work, examples={"a": replace(work.split_indices["a"], train=torch.arange(12)[UNIT != 3])})
    with_it = fit(DpSgdTrainer(work, {"a": kind}, mode), TrainJob(start(), steps=1))
    without = fit(DpSgdTrainer(fewer, {"a": kind}, mode), TrainJob(start(), steps=1))
    moved = float((with_it - without).norm()) * kind.sampling_rate * kind.num_units
    assert 0 < moved <= clip * (1 + 1e-4)
