"""Representation similarity against the definitions, invariances of the measures, and matching of sites."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cross_decomposition import CCA

from pipeline.core.errors import ReplyError, StrategyContractError, StudyError
from pipeline.strategies import _representation_similarity as sim
from pipeline.strategies._pairing import greedy_matching, optimal_matching

CHOICES = [(m, k) for m in ("hsic", "cka", "dcka", "debiased_cka") for k in sim.KERNEL_FUNCTIONS] + [("cca", "linear")]


def sample_normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def make_column(*values):
    return torch.tensor(values, dtype=torch.double)[:, None]


# Identities and definitions


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_linear_hsic_equals_the_squared_cross_covariance(n, p1, p2, seed):
    X, Y = sample_normal(n, p1, seed=seed), sample_normal(n, p2, seed=seed + 1)
    K, L = sim.linear_kernel(X), sim.linear_kernel(Y)
    product = float(K.flatten() @ L.flatten())
    assert float(torch.trace(K @ L)) == pytest.approx(product)
    assert float((Y.T @ X).square().sum()) == pytest.approx(product)

    X, Y = X - X.mean(0), Y - Y.mean(0)
    covariance = np.cov(X.T.numpy(), Y.T.numpy())[:p1, p1:]
    product = float(torch.trace(sim.linear_kernel(X) @ sim.linear_kernel(Y))) / (n - 1) ** 2
    assert product == pytest.approx((covariance**2).sum())
    assert sim.hsic(sim.linear_kernel(X + 5), sim.linear_kernel(Y)) == pytest.approx((covariance**2).sum())


def test_hsic_equals_its_definition():
    K, L, n = sim.gaussian_kernel(sample_normal(7, 3)), sim.polynomial_kernel(sample_normal(7, 2, seed=1)), 7
    H = torch.eye(n).double() - 1 / n
    assert sim.hsic(K, L) == pytest.approx(float(torch.trace(K @ H @ L @ H)) / (n - 1) ** 2)


def test_debiased_hsic_equals_its_definition():
    K, L, n = sim.linear_kernel(sample_normal(6, 3)), sim.linear_kernel(sample_normal(6, 2, seed=1)), 6
    assert sim.debiased_hsic(K, L) == pytest.approx(hsic_1_by_definition(K, L, n))
    assert sim.debiased_cka(K, L) == pytest.approx(
        hsic_1_by_definition(K, L, n) / (hsic_1_by_definition(K, K, n) * hsic_1_by_definition(L, L, n)) ** 0.5
    )


def hsic_1_by_definition(K, L, n):
    K, L, one = K - K.diag().diag(), L - L.diag().diag(), torch.ones(n).double()
    middle = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return float(torch.trace(K @ L) + middle - 2 / (n - 2) * (one @ K @ L @ one)) / (n * (n - 3))


def test_measures_by_hand():
    # one feature: x = (-1, 0, 1) and y = (-1, -1, 2) have x.y = 3, |x|^2 = 2, |y|^2 = 6
    K, L = sim.linear_kernel(make_column(-1, 0, 1)), sim.linear_kernel(make_column(-1, -1, 2))
    assert sim.hsic(K, L) == pytest.approx(3**2 / 2**2)
    assert sim.cka(K, L) == pytest.approx(3**2 / (2 * 6))
    assert sim.cca(make_column(-1, 0, 1), make_column(-1, -1, 2)) == pytest.approx(3**2 / (2 * 6))
    assert sim.cka(K, sim.linear_kernel(make_column(1, -2, 1))) == pytest.approx(0)
    assert sim.sumdiff(torch.tensor([1.0, -2.0]), torch.tensor([0.0, 1.0])) == -4


def test_kernels_by_hand():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])  # distances 5, 5, 10
    assert sim.linear_kernel(x).tolist() == [[0, 0, 0], [0, 25, 50], [0, 50, 100]]
    assert sim.polynomial_kernel(x, c=2, degree=3)[1].tolist() == [2**3, 27**3, 52**3]
    given = sim.gaussian_kernel(x, sigma=2)[0]
    assert given.tolist() == pytest.approx([1, np.exp(-25 / 8), np.exp(-100 / 8)])
    followed = sim.gaussian_kernel(x, fraction=0.4)[0]  # 0.4 * 5 = 2
    assert followed.tolist() == pytest.approx(given.tolist())


def test_cca_equals_its_definition_and_scikit_learn():
    X = sample_normal(60, 3)
    Y = X @ sample_normal(3, 4, seed=1) + 2 * sample_normal(60, 4, seed=2)
    x, y = (X - X.mean(0)).numpy(), (Y - Y.mean(0)).numpy()
    squared = np.linalg.eigvals(np.linalg.solve(x.T @ x, x.T @ y) @ np.linalg.solve(y.T @ y, y.T @ x)).real
    assert sim.cca(X, Y) == pytest.approx(squared.mean())
    u, v = CCA(n_components=3, max_iter=5000, tol=1e-10).fit_transform(x, y)
    assert sim.cca(X, Y) == pytest.approx(
        np.mean([np.corrcoef(u[:, i], v[:, i])[0, 1] ** 2 for i in range(3)]), abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cca_ignores_dependent_and_constant_features(dtype):
    X, Y = sample_normal(40, 3), sample_normal(40, 4, seed=1)
    expected = sim.cca(X, Y)
    repeated = torch.cat([X, X @ sample_normal(3, 2, seed=2), torch.full((40, 1), 1e4)], dim=1)
    assert sim.cca(repeated.to(dtype), Y.to(dtype)) == pytest.approx(expected, rel=1e-4)
    assert sim.cca(torch.full((40, 2), 0.1, dtype=dtype), Y) == 0


def test_cca_is_one_if_there_are_as_many_features_as_probes():
    assert sim.cca(sample_normal(20, 19), sample_normal(20, 30, seed=1)) == pytest.approx(1)


# Invariances


def orthogonal(x, seed):
    return x @ torch.linalg.qr(sample_normal(x.shape[1], x.shape[1], seed=seed))[0]


def scaling(x, seed):
    return x * (3.0 + seed)


def single_features(x, seed):
    return x * torch.linspace(0.2, 3.0 + seed, x.shape[1])


def invertible(x, seed):
    return x @ (sample_normal(x.shape[1], x.shape[1], seed=seed) + 2 * torch.eye(x.shape[1]))


FEATURE_MAPS = {f.__name__: f for f in (orthogonal, scaling, single_features, invertible)}
ORTHOGONAL_AND_SCALING = {"orthogonal", "scaling"}
INVARIANT = {
    ("hsic", "linear"): {"orthogonal"},
    ("hsic", "polynomial"): {"orthogonal"},
    ("hsic", "gaussian"): ORTHOGONAL_AND_SCALING,
    ("cca", "linear"): set(FEATURE_MAPS),
    ("sumdiff", "linear"): set(),
} | {
    (measure, kernel): {"orthogonal"} if kernel == "polynomial" else ORTHOGONAL_AND_SCALING
    for measure in ("cka", "dcka", "debiased_cka")
    for kernel in sim.KERNEL_FUNCTIONS
}


def test_invariances_cover_every_measure_and_kernel():
    assert {measure for measure, _ in INVARIANT} == set(sim.SIMILARITY_MEASURES)
    assert set(CHOICES) | {("sumdiff", "linear")} == set(INVARIANT)


@pytest.mark.parametrize("change", FEATURE_MAPS)
@pytest.mark.parametrize(("measure", "kernel"), INVARIANT)
def test_invariances(measure, kernel, change):
    inputs = sample_normal(30, 5)
    X = torch.tanh(inputs @ sample_normal(5, 4, seed=1)) + 0.3 * sample_normal(30, 4, seed=2)
    Y = torch.tanh(inputs @ sample_normal(5, 6, seed=3)) + 0.3 * sample_normal(30, 6, seed=4)
    if measure == "sumdiff":
        Y = Y[:, :4]

    def value(x, y):
        if measure == "sumdiff":
            return float(sim.weight_similarity([[x.flatten()], [y.flatten()]])[0, 0, 1])
        return float(sim.pairwise_similarity([[x], [y]], inputs, measure, kernel)[0, 0, 1])

    before, after = value(X, Y), value(FEATURE_MAPS[change](X, 5), FEATURE_MAPS[change](Y, 6))
    if change in INVARIANT[measure, kernel]:
        assert after == pytest.approx(before, rel=1e-8)
    else:
        assert abs(after - before) > 0.005 * abs(before)


def test_gaussian_cka_with_fixed_sigma_is_not_invariant_to_scaling():
    X, Y = sample_normal(30, 4), sample_normal(30, 6, seed=1)
    fixed = sim.cka(sim.gaussian_kernel(X, sigma=2), sim.gaussian_kernel(Y, sigma=2))
    assert abs(sim.cka(sim.gaussian_kernel(3 * X, sigma=2), sim.gaussian_kernel(3 * Y, sigma=2)) - fixed) > 0.01
    followed = sim.cka(sim.gaussian_kernel(X), sim.gaussian_kernel(Y))
    assert sim.cka(sim.gaussian_kernel(3 * X), sim.gaussian_kernel(0.1 * Y)) == pytest.approx(followed)


# Variants of CKA


def test_debiased_cka_of_independent_wide_layers_is_about_zero():
    K, L = sim.linear_kernel(sample_normal(40, 4000)), sim.linear_kernel(sample_normal(40, 4000, seed=1))
    assert sim.cka(K, L) > 0.9
    assert abs(sim.debiased_cka(K, L)) < 0.1
    assert sim.debiased_cka(K, K) == pytest.approx(1)


def test_debiased_hsic_of_independent_features_is_zero_on_average():
    result = [
        [
            f(
                sim.linear_kernel(sample_normal(8, 30, seed=2 * i)),
                sim.linear_kernel(sample_normal(8, 30, seed=2 * i + 1)),
            )
            for i in range(200)
        ]
        for f in (sim.debiased_hsic, sim.hsic)
    ]
    assert abs(np.mean(result[0])) < 4 * np.std(result[0]) / 200**0.5
    assert np.mean(result[1]) > 20 * np.std(result[1]) / 200**0.5


# linear Gram matrices of parts add up, so K0 is removed exactly; gaussian ones multiply, and the regression is linear
@pytest.mark.parametrize(("kernel", "rest"), [("linear", 0.03), ("gaussian", 0.1)])
def test_dcka_removes_only_the_similarity_due_to_the_inputs(kernel, rest):
    inputs = sample_normal(300, 3)
    own = [0.5 * sample_normal(300, 2, seed=s) for s in (1, 2)]
    X, Y = (torch.cat([orthogonal(inputs, 3), z], dim=1) for z in own)
    K, L, K0 = (sim.KERNEL_FUNCTIONS[kernel](x) for x in (X, Y, inputs))
    assert sim.cka(K, L) > 0.85
    assert abs(sim.dcka(K, L, K0)) < rest

    shared = torch.cat([inputs, orthogonal(own[0], 4)], dim=1)  # similarity that is not due to the inputs remains
    assert sim.dcka(K, sim.KERNEL_FUNCTIONS[kernel](shared), K0) == pytest.approx(1)


def test_dcka_is_the_partial_correlation_of_centred_gram_matrices():
    K, L, K0 = (sim.center_gram(sim.linear_kernel(sample_normal(9, p, seed=p))) for p in (2, 3, 4))
    r = np.corrcoef(torch.stack([K.flatten(), L.flatten(), K0.flatten()]).numpy())
    partial = (r[0, 1] - r[0, 2] * r[1, 2]) / ((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2)) ** 0.5
    assert sim.dcka(K + 3, L, K0) == pytest.approx(partial)


def test_dcka_of_layers_explained_by_the_inputs_is_zero():
    inputs = sample_normal(20, 3).float()
    K0, K = sim.linear_kernel(inputs), sim.linear_kernel(orthogonal(inputs.double(), 1).float())  # equal up to float32
    assert sim.dcka(K, K, K0) == 0
    assert sim.dcka(K0, K0, torch.ones(20, 20)) == pytest.approx(1)  # equal inputs explain nothing


# All pairs


def make_layers(sites=4, n=12):
    """Two layers per site; the width of the second differs between sites."""
    return [[sample_normal(n, 3, seed=s), torch.relu(sample_normal(n, 4 + s, seed=s + 50))] for s in range(sites)]


def similarity_of_pair(measure, kernel, x, y, inputs):
    if measure == "cca":
        return sim.cca(x, y)
    gram = sim.KERNEL_FUNCTIONS[kernel]
    rest = [gram(inputs)] if measure == "dcka" else []
    return getattr(sim, measure)(gram(x), gram(y), *rest)


@pytest.mark.parametrize(("measure", "kernel"), CHOICES)
def test_pairwise_similarity_equals_the_similarity_of_each_pair(measure, kernel):
    features, inputs = make_layers(), sample_normal(12, 5, seed=9)
    result = sim.pairwise_similarity(features, inputs, measure, kernel)
    assert result.shape == (2, 4, 4)
    assert result.dtype == torch.double
    assert torch.equal(result, result.mT)
    for layer, i, j in itertools.product(range(2), range(4), range(4)):
        expected = similarity_of_pair(measure, kernel, features[i][layer], features[j][layer], inputs)
        assert float(result[layer, i, j]) == pytest.approx(expected, abs=1e-12)
    if measure != "hsic":
        torch.testing.assert_close(result.diagonal(dim1=1, dim2=2), torch.ones(2, 4).double())
        assert float(result.abs().max()) <= 1 + 1e-12


def test_weight_similarity_by_hand():
    weights = [[torch.tensor([1.0, 2.0]), torch.tensor([0.0])], [torch.tensor([0.0, 4.0]), torch.tensor([5.0])]]
    assert sim.weight_similarity(weights).tolist() == [[[0, -3], [-3, 0]], [[0, -5], [-5, 0]]]


@pytest.mark.parametrize(("measure", "kernel"), [choice for choice in CHOICES if choice[0] != "hsic"])
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e4])
def test_dead_layer_is_similar_to_none(measure, kernel, constant):
    dead = torch.full((12, 3), constant)
    rounded = (dead * (1 + 1e-7 * sample_normal(12, 3))).float()
    result = sim.pairwise_similarity(
        [[dead], [rounded], [sample_normal(12, 3)]], sample_normal(12, 2, seed=1), measure, kernel
    )[0]
    assert result[:2].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_inputs_may_be_images_and_activations_may_require_gradients():
    images = sample_normal(6, 1, 4, 4).float()
    x = sample_normal(6, 2, 3, seed=1).requires_grad_()
    result = sim.pairwise_similarity([[x], [2 * x]], images, "dcka")
    assert not result.requires_grad
    assert float(result[0, 0, 1]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("features", "inputs", "measure", "kernel", "error", "message"),
    [
        (make_layers(), sample_normal(12, 2), "ckaa", "linear", StudyError, "did you mean 'cka'"),
        (make_layers(), sample_normal(12, 2), "cka", "gausian", StudyError, "did you mean 'gaussian'"),
        (make_layers(), sample_normal(12, 2), "sumdiff", "linear", StudyError, "weight_similarity"),
        (make_layers(n=3), sample_normal(3, 2), "cka", "linear", StudyError, "at least 4"),
        (make_layers(), sample_normal(13, 2), "cka", "linear", StrategyContractError, "12 activations for 13"),
        ([], sample_normal(12, 2), "cka", "linear", StrategyContractError, "no sites"),
        (
            [*make_layers(), make_layers()[0][:1]],
            sample_normal(12, 2),
            "cka",
            "linear",
            StrategyContractError,
            "numbers of layers",
        ),
        (
            [[sample_normal(12, 2).log()]],
            sample_normal(12, 2),
            "cka",
            "linear",
            ReplyError,
            "site 0, layer 0: activations or weights are not finite",
        ),
    ],
)
def test_pairwise_similarity_refusals(features, inputs, measure, kernel, error, message):
    with pytest.raises(error, match=message):
        sim.pairwise_similarity(features, inputs, measure, kernel)


def test_weight_similarity_refuses_different_architectures():
    with pytest.raises(StrategyContractError, match="different sizes"):
        sim.weight_similarity([[torch.zeros(3)], [torch.zeros(4)]])


# Matching


def make_symmetric(sites, seed):
    x = sample_normal(sites, sites, seed=seed)
    return x + x.T


def all_matchings(sites):
    """Every matching that leaves out at most one site."""
    if len(sites) < 2:
        yield []
        return
    first, *rest = sites
    for other in rest:
        for pairs in all_matchings([s for s in rest if s != other]):
            yield [(first, other), *pairs]
    if len(sites) % 2:
        yield from all_matchings(rest)


def total_similarity(similarity, pairs):
    return sum(float(similarity[pair]) for pair in pairs)


def test_all_matchings_finds_as_many_as_there_are():
    assert [sum(1 for _ in all_matchings(list(range(s)))) for s in range(9)] == [1, 1, 1, 3, 3, 15, 15, 105, 105]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.integers(0, 10_000), st.booleans())
def test_optimal_matching_is_optimal_and_greedy_takes_the_least_first(sites, seed, ties):
    similarity = make_symmetric(sites, seed).round() if ties else make_symmetric(sites, seed)
    for match in (greedy_matching, optimal_matching):
        pairs = match(similarity)
        assert len(pairs) == sites // 2
        assert len({s for pair in pairs for s in pair}) == 2 * len(pairs)
        assert all(i < j for i, j in pairs)
        assert pairs == sorted(pairs) == match(similarity.clone())
    best = min(total_similarity(similarity, pairs) for pairs in all_matchings(list(range(sites))))
    assert total_similarity(similarity, optimal_matching(similarity)) == pytest.approx(best, abs=1e-9)
    if sites > 1:
        least = min(float(similarity[i, j]) for j in range(sites) for i in range(j))
        assert least in {float(similarity[pair]) for pair in greedy_matching(similarity)}


def test_greedy_matching_can_be_worse():
    similarity = torch.full((4, 4), 0.1)
    similarity[0, 1] = similarity[1, 0] = 0.0
    similarity[2, 3] = similarity[3, 2] = 0.9
    assert greedy_matching(similarity) == [(0, 1), (2, 3)]  # total 0.9
    assert total_similarity(similarity, optimal_matching(similarity)) == pytest.approx(0.2)


def test_matching_leaves_out_the_odd_site():
    similarity = torch.tensor([[1.0, 0.9, 0.8], [0.9, 1.0, 0.1], [0.8, 0.1, 1.0]])
    assert greedy_matching(similarity) == optimal_matching(similarity) == [(1, 2)]


@pytest.mark.parametrize("match", [greedy_matching, optimal_matching])
def test_matching_of_few_and_of_equally_similar_sites(match):
    assert match(torch.zeros(0, 0)) == []
    assert match(torch.ones(1, 1)) == []
    assert match(torch.ones(2, 2)) == [(0, 1)]
    assert len(match(torch.ones(6, 6))) == 3
    assert greedy_matching(torch.ones(6, 6)) == [(0, 1), (2, 3), (4, 5)]


def test_optimal_matching_is_invariant_to_the_scale():
    similarity = make_symmetric(8, 3)
    assert (
        optimal_matching(similarity) == optimal_matching(1e9 * similarity - 1e10) == optimal_matching(1e-9 * similarity)
    )


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 3), torch.full((2, 2), torch.nan), torch.tensor([[0.0, 1.0], [2.0, 0.0]])]
)
def test_matching_refuses_invalid_similarities(bad):
    for match in (greedy_matching, optimal_matching):
        with pytest.raises(StrategyContractError, match="matched"):
            match(bad)
