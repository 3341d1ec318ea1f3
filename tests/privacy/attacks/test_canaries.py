"""Canary audits: the bound by hand and by simulation, plain training, and training with DP."""

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

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPE, CLASSES = (1, 12, 12), 3


def make_network():
    return MLP(hidden=(64,)).init_network(SHAPE, CLASSES, 0)


def test_epsilon_lower_bound_with_all_guesses_right_by_hand():
    """q^r = 0.05, epsilon = log(q / (1 - q))"""
    q = 0.05 ** (1 / 40)
    assert epsilon_lower_bound(40, 40, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.floats(0.5, 1), st.sampled_from([0.8, 0.95, 0.99]))
def test_binomial_tail_at_the_bound_is_the_error(guesses, share, confidence):
    correct = round(share * guesses)
    found = epsilon_lower_bound(guesses, correct, 300, 0.0, confidence)
    at = lambda epsilon: stats.binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-epsilon)))  # noqa: E731
    if found:
        assert at(found) == pytest.approx(1 - confidence, rel=1e-4)
    else:
        assert at(0.0) >= (1 - confidence) * (1 - 1e-9)


def test_p_value_with_delta_by_hand():
    """W ~ Binomial(3, 1/2): P[W = 2] = P[W = 1] = 3/8, P[W = 0] = 1/8; best is i = 1 or 2, both 3/8."""
    assert p_value(3, 3, 10, 0.0, 0.01) == pytest.approx(1 / 8 + 2 * 10 * 0.01 * 3 / 8)
    assert p_value(3, 0, 10, 0.0, 0.01) == 1


def test_delta_lowers_the_bound():
    bounds = [epsilon_lower_bound(200, 180, 1000, delta) for delta in (0.0, 1e-5, 1e-3, 0.1)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] - bounds[1] < 0.01
    assert bounds[-1] == 0


@pytest.mark.parametrize(("guesses", "correct", "m"), [(10, 11, 20), (30, 20, 20), (5, -1, 20)])
def test_impossible_guess_counts_are_refused(guesses, correct, m):
    with pytest.raises(DataError, match="is impossible"):
        epsilon_lower_bound(guesses, correct, m, 0.0)


def randomized_response(m, epsilon, seed):
    """Randomized response, which is exactly epsilon-DP: a score of +-1, right with chance e^epsilon / (1 + e^epsilon)."""
    g = torch.Generator().manual_seed(seed)
    included = torch.rand(m, generator=g) < 0.5
    right = torch.rand(m, generator=g) < 1 / (1 + math.exp(-epsilon))
    return torch.where(included == right, 1.0, -1.0), included


@pytest.mark.parametrize("sides", [[100], None])
def test_epsilon_lower_bound_holds_in_95_of_100_audits(sides):
    found = np.array(
        [
            evaluate_guesses(*randomized_response(400, 1.5, seed), 0.0, guesses_per_side=sides).epsilon_lower_bound
            for seed in range(400)
        ]
    )
    assert (found > 1.5).sum() <= stats.binom.ppf(0.99, 400, 0.05)
    assert found.mean() > 0.8


def test_several_numbers_of_guesses_are_corrected():
    """With random scores and no correction, some number of guesses refutes epsilon 0 too often."""
    tried, num_uncorrected, num_corrected = [5, 10, 20, 40, 60, 80, 100], 0, 0
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        scores, included = torch.rand(200, generator=g), torch.rand(200, generator=g) < 0.5
        num_uncorrected += (
            max(evaluate_guesses(scores, included, 0.0, guesses_per_side=[k]).epsilon_lower_bound for k in tried) > 0
        )
        num_corrected += evaluate_guesses(scores, included, 0.0, guesses_per_side=tried).epsilon_lower_bound > 0
    assert num_corrected <= 0.05 * 200
    assert num_uncorrected > 0.1 * 200


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


def test_canary_coins_are_fair_and_new_each_time():
    coins = []
    for secure_random in (None, None, SecureRandom(bytes(32)), SecureRandom(bytes(32))):
        audit_canaries(
            lambda included: coins.append(included) or [],
            lambda rounds: torch.zeros(2000),
            2000,
            secure_random=secure_random,
        )
    for included in coins:
        assert 850 < int(included.sum()) < 1150
    assert not torch.equal(coins[0], coins[1])
    assert torch.equal(coins[2], coins[3])


def test_canaries_are_random_units_with_consecutive_labels():
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


def test_consecutive_labels_separate_unit_gradients():
    module = make_network()
    consecutive = make_canaries(SHAPE, CLASSES, 32)
    first_labels = consecutive.y.view(-1, 2)[:, :1].expand(-1, 2).flatten()
    same = CanaryUnits(consecutive.x, first_labels, consecutive.unit_index, 2)

    def mean_similarity(canaries):
        directions = _gradient_directions(module, canaries, 1.0)
        assert torch.allclose(directions.norm(dim=1), torch.ones(32), atol=1e-5)
        return float((directions @ directions.T - torch.eye(32)).abs().mean())

    assert mean_similarity(consecutive) < 0.7 * mean_similarity(same)


@pytest.fixture(scope="module")
def module():
    return make_network()


@pytest.fixture(scope="module")
def canaries():
    return make_canaries(SHAPE, CLASSES, 128, seed=2)


def make_training(module, canaries, lr, optimizer="sgd", num_rounds=4, batch_size=16):
    """Sequential training of one site with fifty images of its own."""
    g = torch.Generator().manual_seed(4)
    x = torch.cat([canaries.x, torch.rand(50, *SHAPE, generator=g)])
    y = torch.cat([canaries.y, torch.randint(0, CLASSES, (50,), generator=g)])
    spec = ParameterSpec.from_module(module)
    initial_weights = spec.read_state(make_network()).weights

    def train(included):
        rows = torch.cat([canaries.included_rows(included), torch.arange(len(canaries.y), len(y))])
        training_config = TrainingConfig(batch_size, optimizer, 0.0, 0.0, lambda round_number: lr)
        context = TrainerContext(
            make_network,
            spec,
            ExamplePool(x, y, x.device),
            {"a": SplitIndices(rows, rows, rows)},
            training_config,
            CLASSES,
            0,
        )
        trainer = SequentialTrainer(context)
        rounds, weights = [], initial_weights
        for round_number in range(num_rounds):
            result = trainer.run([TrainRequest("a", round_number, 0, TrainJob(weights, epochs=1))])[0]
            assert isinstance(result, TrainResult)
            rounds.append((weights, result.weights))
            weights = result.weights
        return rounds

    return train


def test_canaries_refute_privacy_of_plain_training(module, canaries):
    train = make_training(module, canaries, 0.5, batch_size=None)
    found = audit_canaries(train, gradient_score(module, canaries), 128, 1e-5, secure_random=SecureRandom(bytes(32)))
    assert found.epsilon_lower_bound > 2
    assert found.num_correct > 0.95 * found.num_guesses
    assert found.epsilon_lower_bound <= found.max_epsilon_lower_bound


def test_canary_scores_with_adam_and_by_loss_alone(module, canaries):
    included = torch.rand(128, generator=torch.Generator().manual_seed(1)) < 0.5
    rounds = make_training(module, canaries, 0.001, "adam", num_rounds=15)(included)
    by_loss, by_gradient = loss_score(module, canaries), gradient_score(module, canaries)
    loss_bound, combined_bound = (
        evaluate_guesses(score(rounds), included, 1e-5).epsilon_lower_bound
        for score in (by_loss, combine_scores(by_loss, by_gradient))
    )
    assert combined_bound > 2 > loss_bound > 0.5


def test_untrained_canaries_are_not_found(module, canaries):
    """The coins decide nothing here."""
    rounds = make_training(module, canaries, 0.5, batch_size=None)(torch.zeros(128).bool())
    for score in (gradient_score(module, canaries), loss_score(module, canaries)):
        scores = score(rounds)
        audits = [
            audit_canaries(lambda _: rounds, lambda _, s=scores: s, 128, secure_random=SecureRandom(bytes([n]) * 32))
            for n in range(40)
        ]
        assert sum(found.epsilon_lower_bound > 0 for found in audits) <= 4  # two are expected


def gaussian_epsilon(mu, delta):
    """Epsilon of mu-Gaussian DP (Balle & Wang 2018, theorem 8)."""
    cdf = stats.norm.cdf
    spent = lambda e: cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu)  # noqa: E731
    return optimize.brentq(lambda e: spent(e) - delta, 0, 100)


def make_noisy_training(module, canaries, noise_multiplier, num_rounds, seed):
    """Full-batch descent on clipped unit gradients with noise: `num_rounds` Gaussian mechanisms."""
    spec = ParameterSpec.from_module(module)

    def train(included):
        g = torch.Generator().manual_seed(seed)
        weights, rounds = spec.read_state(make_network()).weights, []
        for _ in range(num_rounds):
            spec.write_state(module, ModelState(weights, torch.zeros(0)))
            unit = _gradient_directions(module, canaries, 1.0)  # of length 1: clipped to 1
            total = unit[included].sum(0) + noise_multiplier * torch.randn(spec.num_parameters, generator=g)
            rounds.append((weights, weights - 0.01 * total))
            weights = rounds[-1][1]
        return rounds

    return train


def audit_noisy_training(module, canaries, noise_multiplier, num_rounds, delta, audits):
    score = gradient_score(module, canaries)
    return [
        audit_canaries(
            make_noisy_training(module, canaries, noise_multiplier, num_rounds, n),
            score,
            128,
            delta,
            secure_random=SecureRandom(bytes([n]) * 32),
        ).epsilon_lower_bound
        for n in range(audits)
    ]


def test_canary_bound_stays_below_epsilon_of_noisy_training(module, canaries):
    """Six audits stay below epsilon, and their mean shows that the attack works."""
    epsilon = gaussian_epsilon(math.sqrt(3), 1e-5)
    assert 8 < epsilon < 9
    found = audit_noisy_training(module, canaries, 1.0, 3, 1e-5, 6)
    assert max(found) <= epsilon
    assert np.mean(found) > 0.3


def test_canary_bound_grows_with_less_noise(module, canaries):
    low_noise, high_noise = (np.mean(audit_noisy_training(module, canaries, noise, 2, 0.0, 2)) for noise in (0.2, 5.0))
    assert low_noise > 1.5
    assert high_noise < 0.2


def test_round_without_a_step_does_not_change_the_score(module, canaries):
    spec = ParameterSpec.from_module(module)
    w = spec.read_state(module).weights
    step = F.normalize(torch.randn(spec.num_parameters, generator=torch.Generator().manual_seed(0)), dim=0)
    score = gradient_score(module, canaries)
    assert torch.equal(score([(w, w), (w, w + step)]), score([(w, w + step)]))
    assert not score([(w, w)]).any()


def test_gradient_score_is_the_canarys_part_of_the_update(module, canaries):
    """The sum of three canaries' gradients scores these three highest."""
    spec = ParameterSpec.from_module(module)
    w = spec.read_state(module).weights
    step = _gradient_directions(module, canaries, 1.0)[[3, 50, 99]].sum(0)
    scores = gradient_score(module, canaries)([(w, w - step)])
    assert sorted(scores.topk(3).indices.tolist()) == [3, 50, 99]
    assert scores.topk(4).values[2] > 3 * scores.topk(4).values[3]
