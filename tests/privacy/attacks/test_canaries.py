"""One-run audits: the bound by hand and by simulation; canaries are found in plain training, and not beyond epsilon in DP."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch.nn import functional as F

from models.networks.mlp import MLP
from pipeline.core.errors import DataError
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.tasks import TrainJob, TrainResult
from privacy.attacks.canaries import (
    CanaryUnits,
    _gradient_directions,
    audit_canaries,
    combine_scores,
    epsilon_lower_bound,
    evaluate_guesses,
    gradient_score,
    loss_score,
    make_canaries,
    p_value,
)
from privacy.dpsgd.secure_rng import SecureRandom
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.base import TrainerContext, TrainingConfig, TrainRequest
from sites.training.sequential import SequentialTrainer

SHAPE, CLASSES = (1, 12, 12), 3


@pytest.fixture(autouse=True)
def one_thread():
    """Many small backward passes: two threads that wait for each other are a hundred times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network():
    return MLP(hidden=(64,)).init_network(SHAPE, CLASSES, 0)


def test_all_right_without_delta_by_hand():
    """q^r = 0.05, epsilon = log(q / (1 - q))"""
    q = 0.05 ** (1 / 40)
    assert epsilon_lower_bound(40, 40, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.floats(0.5, 1), st.sampled_from([0.8, 0.95, 0.99]))
def test_without_delta_the_tail_at_the_bound_is_the_error(guesses, share, confidence):
    correct = round(share * guesses)
    found = epsilon_lower_bound(guesses, correct, 300, 0.0, confidence)
    at = lambda epsilon: stats.binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-epsilon)))  # noqa: E731
    if found:
        assert at(found) == pytest.approx(1 - confidence, rel=1e-4)
    else:
        assert at(0.0) >= (1 - confidence) * (1 - 1e-9)


def test_the_part_of_delta_by_hand():
    """W ~ Binomial(3, 1/2): P[W = 2] = P[W = 1] = 3/8, P[W = 0] = 1/8; best is i = 1 or 2, both 3/8."""
    assert p_value(3, 3, 10, 0.0, 0.01) == pytest.approx(1 / 8 + 2 * 10 * 0.01 * 3 / 8)
    assert p_value(3, 0, 10, 0.0, 0.01) == 1


def test_delta_lowers_the_bound():
    bounds = [epsilon_lower_bound(200, 180, 1000, delta) for delta in (0.0, 1e-5, 1e-3, 0.1)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] - bounds[1] < 0.01
    assert bounds[-1] == 0


@pytest.mark.parametrize(("guesses", "correct", "m"), [(10, 11, 20), (30, 20, 20), (5, -1, 20)])
def test_impossible_counts_are_refused(guesses, correct, m):
    with pytest.raises(DataError, match="cannot be"):
        epsilon_lower_bound(guesses, correct, m, 0.0)


def answered(m, epsilon, seed):
    """Randomised response, which is exactly epsilon-DP: a score of +-1, right with chance e^epsilon / (1 + e^epsilon)."""
    g = torch.Generator().manual_seed(seed)
    included = torch.rand(m, generator=g) < 0.5
    right = torch.rand(m, generator=g) < 1 / (1 + math.exp(-epsilon))
    return torch.where(included == right, 1.0, -1.0), included


@pytest.mark.parametrize("sides", [[100], None])
def test_the_bound_holds_in_95_of_100_audits_and_says_something(sides):
    found = np.array(
        [
            evaluate_guesses(*answered(400, 1.5, seed), 0.0, guesses_per_side=sides).epsilon_lower_bound
            for seed in range(400)
        ]
    )
    assert (found > 1.5).sum() <= stats.binom.ppf(0.99, 400, 0.05)
    assert found.mean() > 0.8


def test_the_best_of_many_numbers_of_guesses_has_to_be_paid_for():
    """Scores that know nothing: tried one by one without correction, some number of guesses looks good too often."""
    tried, naive, honest = [5, 10, 20, 40, 60, 80, 100], 0, 0
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        scores, included = torch.rand(200, generator=g), torch.rand(200, generator=g) < 0.5
        naive += (
            max(evaluate_guesses(scores, included, 0.0, guesses_per_side=[k]).epsilon_lower_bound for k in tried) > 0
        )
        honest += evaluate_guesses(scores, included, 0.0, guesses_per_side=tried).epsilon_lower_bound > 0
    assert honest <= 0.05 * 200
    assert naive > 0.1 * 200


def test_guesses_are_the_two_ends_of_the_ranking():
    scores = torch.tensor([9.0, 1.0, 8.0, 2.0, 5.0, 5.0, 5.0, 5.0])
    included = torch.tensor([True, False, False, False, True, True, False, False])
    found = evaluate_guesses(scores, included, 0.0, guesses_per_side=[2])
    assert (found.num_canaries, found.num_guesses, found.num_correct, found.tried_num_guesses) == (8, 4, 3, (4,))
    assert found.max_epsilon_lower_bound == epsilon_lower_bound(4, 4, 8, 0.0)


def test_numbers_of_guesses_beyond_the_canaries_are_refused():
    for sides in ([5], [0], []):
        with pytest.raises(DataError, match="from 1 to 4"):
            evaluate_guesses(torch.rand(8), torch.ones(8).bool(), 0.0, guesses_per_side=sides)
    with pytest.raises(DataError, match="one finite number each"):
        evaluate_guesses(torch.rand(7), torch.ones(8).bool(), 0.0)


def test_coins_are_fair_secret_and_new_every_time():
    thrown = []
    for entropy in (None, None, SecureRandom(bytes(32)), SecureRandom(bytes(32))):
        audit_canaries(
            lambda included: thrown.append(included) or [], lambda turns: torch.zeros(2000), 2000, secure_random=entropy
        )
    for included in thrown:
        assert 850 < int(included.sum()) < 1150
    assert not torch.equal(thrown[0], thrown[1])
    assert torch.equal(thrown[2], thrown[3])


def test_canaries_are_units_of_noise_with_labels_in_turn():
    found = make_canaries((3, 12, 20), 4, 50, examples_per_unit=3, seed=1)
    assert found.x.shape == (150, 3, 12, 20)
    assert (found.num_units, found.unit_index.tolist()[:4]) == (50, [0, 0, 0, 1])
    assert found.x.min() >= 0
    assert found.x.max() <= 1
    steps = found.y.view(50, 3).diff(dim=1).remainder(4)
    assert (steps == 1).all()
    assert set(found.y.view(50, 3)[:, 0].tolist()) == {0, 1, 2, 3}
    included = torch.zeros(50).bool()
    included[[1, 3]] = True
    assert found.included_rows(included).tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(found.x, make_canaries((3, 12, 20), 4, 50, examples_per_unit=3, seed=1).x)
    assert make_canaries((2,), 2, 5).x.shape == (10, 2)  # no images


def test_labels_in_turn_keep_the_units_gradients_apart():
    module = network()
    turns = make_canaries(SHAPE, CLASSES, 32)
    same = CanaryUnits(turns.x, turns.y.view(-1, 2)[:, :1].expand(-1, 2).flatten(), turns.unit_index, 2)

    def alike(canaries):
        directions = _gradient_directions(module, canaries, 1.0)
        assert torch.allclose(directions.norm(dim=1), torch.ones(32), atol=1e-5)
        return float((directions @ directions.T - torch.eye(32)).abs().mean())

    assert alike(turns) < 0.7 * alike(same)


@pytest.fixture(scope="module")
def module():
    return network()


@pytest.fixture(scope="module")
def canaries():
    return make_canaries(SHAPE, CLASSES, 128, seed=2)


def trained(module, canaries, lr, optimiser="sgd", turns=4, batch=16):
    """The plain loop at one site with fifty images of its own."""
    g = torch.Generator().manual_seed(4)
    x = torch.cat([canaries.x, torch.rand(50, *SHAPE, generator=g)])
    y = torch.cat([canaries.y, torch.randint(0, CLASSES, (50,), generator=g)])
    spec = ParameterSpec.from_module(module)
    start = spec.read_state(network()).weights

    def train(included):
        rows = torch.cat([canaries.rows(included), torch.arange(len(canaries.y), len(y))])
        recipe = TrainingConfig(batch, optimiser, 0.0, 0.0, lambda turn: lr)
        build = lambda: network()  # noqa: E731
        loop = SequentialTrainer(
            TrainerContext(
                build, spec, ExamplePool(x, y, x.device), {"a": SplitIndices(rows, rows, rows)}, recipe, CLASSES, 0
            )
        )
        seen, weights = [], start
        for turn in range(turns):
            fitted = loop.run([TrainRequest("a", turn, 0, TrainJob(weights, epochs=1))])[0]
            assert isinstance(fitted, TrainResult)
            seen.append((weights, fitted.weights))
            weights = fitted.weights
        return seen

    return train


def test_plain_training_is_found_out(module, canaries):
    train = trained(module, canaries, 0.5, batch=None)
    found = audit_canaries(train, gradient_score(module, canaries), 128, 1e-5, secure_random=SecureRandom(bytes(32)))
    assert found.epsilon_lower_bound > 2
    assert found.num_correct > 0.95 * found.num_guesses
    assert found.epsilon_lower_bound <= found.max_epsilon_lower_bound


def test_also_with_adam_and_less_by_the_loss_alone(module, canaries):
    included = torch.rand(128, generator=torch.Generator().manual_seed(1)) < 0.5
    turns = trained(module, canaries, 0.001, "adam", turns=15)(included)
    black, white = loss_score(module, canaries), gradient_score(module, canaries)
    alone, both = (
        evaluate_guesses(score(turns), included, 1e-5).epsilon_lower_bound
        for score in (black, combine_scores(black, white))
    )
    assert both > 2 > alone > 0.5


def test_canaries_that_nobody_trained_on_are_not_found(module, canaries):
    """The coins fall, and nobody heeds them."""
    turns = trained(module, canaries, 0.5, batch=None)(torch.zeros(128).bool())
    for score in (gradient_score(module, canaries), loss_score(module, canaries)):
        scores = score(turns)
        audits = [
            audit_canaries(lambda _: turns, lambda _, s=scores: s, 128, secure_random=SecureRandom(bytes([n]) * 32))
            for n in range(40)
        ]
        assert sum(found.epsilon_lower_bound > 0 for found in audits) <= 4  # two are to be expected


def gaussian_epsilon(mu, delta):
    """Of mu-Gaussian DP (Balle & Wang 2018, theorem 8)."""
    cdf = stats.norm.cdf
    spent = lambda e: cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu)  # noqa: E731
    return optimize.brentq(lambda e: spent(e) - delta, 0, 100)


def noisy(module, canaries, noise, turns, seed):
    """Full-batch descent on clipped unit gradients with noise: `turns` Gaussian mechanisms."""
    spec = ParameterSpec.from_module(module)

    def train(included):
        g = torch.Generator().manual_seed(seed)
        weights, seen = spec.read_state(network()).weights, []
        for _ in range(turns):
            spec.write_state(module, ModelState(weights, torch.zeros(0)))
            unit = _gradient_directions(module, canaries, 1.0)  # of length 1: clipped to 1
            total = unit[included].sum(0) + noise * torch.randn(spec.num_parameters, generator=g)
            seen.append((weights, weights - 0.01 * total))
            weights = seen[-1][1]
        return seen

    return train


def bounds(module, canaries, noise, turns, delta, audits):
    score = gradient_score(module, canaries)
    return [
        audit_canaries(
            noisy(module, canaries, noise, turns, n), score, 128, delta, secure_random=SecureRandom(bytes([n]) * 32)
        ).epsilon_lower_bound
        for n in range(audits)
    ]


def test_a_noisy_sum_is_not_found_out_beyond_its_epsilon(module, canaries):
    """Six audits stay below epsilon, and together show that the attack sees something."""
    epsilon = gaussian_epsilon(math.sqrt(3), 1e-5)
    assert 8 < epsilon < 9
    found = bounds(module, canaries, 1.0, 3, 1e-5, 6)
    assert max(found) <= epsilon
    assert np.mean(found) > 0.3


def test_less_noise_is_found_out_more(module, canaries):
    little, much = (np.mean(bounds(module, canaries, noise, 2, 0.0, 2)) for noise in (0.2, 5.0))
    assert little > 1.5
    assert much < 0.2


def test_a_turn_without_a_step_counts_nothing(module, canaries):
    spec = ParameterSpec.from_module(module)
    w = spec.read_state(module).weights
    step = F.normalize(torch.randn(spec.num_parameters, generator=torch.Generator().manual_seed(0)), dim=0)
    score = gradient_score(module, canaries)
    assert torch.equal(score([(w, w), (w, w + step)]), score([(w, w + step)]))
    assert not score([(w, w)]).any()


def test_a_score_is_the_canarys_own_part_of_the_update(module, canaries):
    """An update made of three canaries' gradients alone points to these three."""
    spec = ParameterSpec.from_module(module)
    w = spec.read_state(module).weights
    step = _gradient_directions(module, canaries, 1.0)[[3, 50, 99]].sum(0)
    scores = gradient_score(module, canaries)([(w, w - step)])
    assert sorted(scores.topk(3).indices.tolist()) == [3, 50, 99]
    assert scores.topk(4).values[2] > 3 * scores.topk(4).values[3]
