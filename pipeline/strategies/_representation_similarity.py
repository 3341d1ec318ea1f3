"""Similarity of networks, layer by layer: HSIC, CKA, debiased CKA, deconfounded CKA, CCA and sum-diff.

X (n, p1) and Y (n, p2) are the activations of one layer of two networks on the same n probe inputs, K and L their Gram
matrices. Every measure embeds the layer of a site as one vector and compares vectors, so that S sites need S embeddings
and one product, not S * S comparisons. For every measure a larger value means more similar.

| measure | invariant to (linear kernel) | note |
|---|---|---|
| hsic | orthogonal maps | grows with the activations |
| cka, debiased_cka, dcka | orthogonal maps, isotropic scaling | the polynomial kernel is not invariant to scaling |
| cca | any invertible map | 1 for any two layers of rank n - 1: use many more probes than features |
| sumdiff | nothing | compares weights, not activations |

With the gaussian kernel hsic, too, is invariant to isotropic scaling, if sigma follows the median distance.

HSIC: Gretton et al. 2005. Debiased: Song et al. 2012, eq. 5. CKA and CCA: Kornblith et al. 2019. dCKA: Cui et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from pipeline.core.errors import ReplyError, StrategyContractError, StudyError
from pipeline.core.registry import suggest_names

ROUNDING_TOLERANCE = 1e-6  # relative size of a difference that may be a rounding error of float32 activations
MIN_PROBES = 4  # probe inputs: the debiased estimator divides by n - 3


# Kernels: activations (n, p) -> Gram matrix (n, n)


def linear_kernel(x: Tensor) -> Tensor:
    x = _flatten_features(x)
    return x @ x.T


def polynomial_kernel(x: Tensor, c: float = 1.0, degree: int = 2) -> Tensor:
    gram: Tensor = (linear_kernel(x) + c) ** degree
    return gram


def gaussian_kernel(x: Tensor, sigma: float | None = None, fraction: float = 1.0) -> Tensor:
    """exp(-|x_i - x_j|^2 / (2 sigma^2)). sigma: None for `fraction` of the median distance of probes that differ; if
    none differ, all entries are 1."""
    x = _flatten_features(x)
    centered_x = x - x.mean(0)  # the same distances with smaller rounding errors
    norms = centered_x.square().sum(1)
    squares = (norms[:, None] + norms - 2 * centered_x @ centered_x.T).fill_diagonal_(0.0)
    squares = torch.where(squares > ROUNDING_TOLERANCE**2 * x.square().sum(1).mean(), squares, 0.0)
    if sigma is None:
        nonzero_distances = squares[squares > 0].sqrt()
        sigma = fraction * float(nonzero_distances.median()) if len(nonzero_distances) else 1.0
    return torch.exp(-squares / (2 * sigma**2))


# Embeddings: what is compared of one layer of one site


def center_gram(K: Tensor) -> Tensor:
    """H K H with H = I - 11^T/n; of a linear K, the Gram matrix of the column-centred X."""
    K = K.double()
    return K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()


def u_center_gram(K: Tensor) -> Tensor:
    """K without its diagonal, centred so that <K, L> / (n (n-3)) is the unbiased HSIC_1 (Székely & Rizzo 2014)."""
    n = _require_min_probes(len(K))
    K = K.double().clone().fill_diagonal_(0.0)
    rows = K.sum(0) / (n - 2)
    return (K - rows - rows[:, None] + K.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0.0)


def deconfound_gram(K: Tensor, K0: Tensor) -> Tensor:
    """The centred K minus its least-squares fit, over all entries, by the centred K0."""
    K, confound = center_gram(K), normalize_gram(center_gram(K0), K0)
    return _zero_if_negligible(K - (K * confound).sum() * confound, K, ROUNDING_TOLERANCE)


def column_space_projector(x: Tensor) -> Tensor:
    """(n, n) projector onto the span of the centred columns, independent of the basis. Its trace is their rank."""
    precision = torch.finfo(x.dtype).eps if x.is_floating_point() else torch.finfo(torch.double).eps
    x = _flatten_features(x)
    columns = x - x.mean(0)
    norms = columns.norm(dim=0)
    is_varying = norms > 16 * precision * x.norm(dim=0)  # a constant column has rounding errors only
    if not bool(is_varying.any()):
        return x.new_zeros(len(x), len(x))  # rank 0
    columns = (
        columns[:, is_varying] / norms[is_varying]
    )  # without scaling a small feature would seem linearly dependent
    U, s, _ = torch.linalg.svd(columns, full_matrices=False)
    basis: Tensor = U[:, s > max(columns.shape) * precision * s[0]]
    return basis @ basis.T


def normalize_gram(embedded: Tensor, K: Tensor) -> Tensor:
    """Scaled to norm 1; 0 if only rounding errors of K are left: a dead layer is similar to none, not even itself."""
    significant = _zero_if_negligible(embedded, K, ROUNDING_TOLERANCE**2)  # activations enter a Gram matrix squared
    return significant / max(float(significant.norm()), torch.finfo(significant.dtype).tiny)


# Measures for a pair


def hsic(K: Tensor, L: Tensor) -> float:
    """tr(K H L H) / (n-1)^2."""
    return float((center_gram(K) * center_gram(L)).sum() / (len(K) - 1) ** 2)


def debiased_hsic(K: Tensor, L: Tensor) -> float:
    """HSIC_1, unbiased: 0 on average for independent features, however many they are; may be negative."""
    n = len(K)
    return float((u_center_gram(K) * u_center_gram(L)).sum() / (n * (n - 3)))


def cka(K: Tensor, L: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))."""
    return float((normalize_gram(center_gram(K), K) * normalize_gram(center_gram(L), L)).sum())


def debiased_cka(K: Tensor, L: Tensor) -> float:
    """CKA with HSIC_1 instead of HSIC."""
    return float((normalize_gram(u_center_gram(K), K) * normalize_gram(u_center_gram(L), L)).sum())


def dcka(K: Tensor, L: Tensor, K0: Tensor) -> float:
    """Deconfounded CKA: CKA after the similarity K0 of the inputs has been regressed out of K and of L.

    Both are centred before the regression, so this is the partial correlation of K and L given K0, in -1..1. For the
    linear kernel the authors' code (simtorch) computes the same: it centres the activations and fits with an intercept,
    which is then 0. Negative eigenvalues of the residual are not removed, as in that code by default: without them the
    residual would correlate with K0 again.
    """
    return float((normalize_gram(deconfound_gram(K, K0), K) * normalize_gram(deconfound_gram(L, K0), L)).sum())


def cca(X: Tensor, Y: Tensor) -> float:
    """Mean squared canonical correlation, over the smaller of the two ranks."""
    return float(
        _divide_by_smaller_rank(
            torch.stack([column_space_projector(X).flatten(), column_space_projector(Y).flatten()])
        )[0, 1]
    )


def sumdiff(v: Tensor, w: Tensor) -> float:
    """Minus the sum of absolute differences of two weight vectors."""
    return float(-(v.double() - w.double()).abs().sum())


# All pairs of sites: (S, m) embeddings -> (S, S)


def _inner_products(vectors: Tensor) -> Tensor:
    return vectors @ vectors.T


def _divide_by_smaller_rank(vectors: Tensor) -> Tensor:
    shared = vectors @ vectors.T  # sums of squared canonical correlations; the diagonal holds the ranks
    ranks = shared.diagonal().round()
    return shared / torch.minimum(ranks[:, None], ranks).clamp_min(1.0)


def _negative_l1_distances(vectors: Tensor) -> Tensor:
    return -torch.cdist(vectors, vectors, p=1.0)


@dataclass(frozen=True)
class SimilarityMeasure:
    description: str
    reads: Literal["grams", "activations", "weights"]  # a kernel is chosen for grams only
    embed: Callable[[Tensor, Tensor], Tensor]  # (what is read of a site's layer, the same of the inputs) -> embedding
    compare: Callable[[Tensor], Tensor]  # (S, m) -> (S, S)


KERNEL_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": linear_kernel,
    "polynomial": polynomial_kernel,
    "gaussian": gaussian_kernel,
}

SIMILARITY_MEASURES: Mapping[str, SimilarityMeasure] = {
    "cka": SimilarityMeasure(
        "centred kernel alignment", "grams", lambda K, _: normalize_gram(center_gram(K), K), _inner_products
    ),
    "dcka": SimilarityMeasure(
        "CKA after the similarity of the inputs is regressed out",
        "grams",
        lambda K, K0: normalize_gram(deconfound_gram(K, K0), K),
        _inner_products,
    ),
    "debiased_cka": SimilarityMeasure(
        "CKA that is unbiased for wide layers",
        "grams",
        lambda K, _: normalize_gram(u_center_gram(K), K),
        _inner_products,
    ),
    "cca": SimilarityMeasure(
        "mean squared canonical correlation",
        "activations",
        lambda X, _: column_space_projector(X),
        _divide_by_smaller_rank,
    ),
    "hsic": SimilarityMeasure(
        "CKA without normalization", "grams", lambda K, _: center_gram(K) / (len(K) - 1), _inner_products
    ),
    "sumdiff": SimilarityMeasure(
        "minus the sum of absolute weight differences", "weights", lambda w, _: w, _negative_l1_distances
    ),
}


def pairwise_similarity(
    features: Sequence[Sequence[Tensor]], inputs: Tensor, measure: str, kernel: str = "linear"
) -> Tensor:
    """Similarities (L, S, S) from features[site][layer] of shape (n, p_layer) and the probe inputs (n, d)."""
    similarity_measure = _look_up(SIMILARITY_MEASURES, measure, "measure")
    if similarity_measure.reads == "weights":
        raise StudyError(f"the measure {measure!r} compares weights, not activations; use weight_similarity")
    read_features = _look_up(KERNEL_FUNCTIONS, kernel, "kernel") if similarity_measure.reads == "grams" else _identity
    n = _require_min_probes(len(inputs))
    for site, layers in enumerate(features):
        for layer, x in enumerate(layers):
            if len(x) != n:
                raise StrategyContractError(
                    f"site {site}, layer {layer}: {len(x)} activations for {n} probe inputs; run the network on all of them"
                )
    confound = read_features(inputs)
    return _compare_all_pairs(
        similarity_measure, features, lambda x: similarity_measure.embed(read_features(x), confound)
    )


def weight_similarity(weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """Negative L1 distances (L, S, S), from weights[site][layer], which are flat vectors."""
    return _compare_all_pairs(SIMILARITY_MEASURES["sumdiff"], weights, lambda w: w.double())


def _compare_all_pairs(
    measure: SimilarityMeasure, site_layers: Sequence[Sequence[Tensor]], embed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Layer by layer, so that only S matrices of (n, n) are in memory, not L * S."""
    if not site_layers or not site_layers[0]:
        raise StrategyContractError("there are no sites or no layers to compare; at least one of each is needed")
    if len({len(layers) for layers in site_layers}) > 1:
        raise StrategyContractError("the sites have different numbers of layers; compare networks of one architecture")
    matrices = []
    for layer, layer_inputs in enumerate(zip(*site_layers, strict=True)):
        for site, x in enumerate(layer_inputs):
            if not bool(torch.isfinite(x).all()):
                raise ReplyError(f"site {site}, layer {layer}: activations or weights are not finite; lower local.lr")
        vectors = [embed(x.detach()).flatten() for x in layer_inputs]
        if len({len(vector) for vector in vectors}) > 1:
            raise StrategyContractError(
                f"layer {layer} has different sizes at the sites; compare networks of one architecture"
            )
        matrix = measure.compare(torch.stack(vectors))
        matrices.append((matrix + matrix.T) / 2)  # a matrix product is symmetric up to rounding only
    return torch.stack(matrices)


EntryT = TypeVar("EntryT")


def _look_up(table: Mapping[str, EntryT], name: str, what: str) -> EntryT:
    if name not in table:
        raise StudyError(f"the {what} {name!r} is not known; {suggest_names(name, table)}")
    return table[name]


def _require_min_probes(n: int) -> int:
    if n < MIN_PROBES:
        raise StudyError(f"{n} probe inputs are too few to compare networks on; give at least {MIN_PROBES}")
    return n


def _flatten_features(x: Tensor) -> Tensor:
    return x.double().reshape(len(x), -1)


def _identity(x: Tensor) -> Tensor:
    return x


def _zero_if_negligible(residual: Tensor, reference: Tensor, tolerance: float) -> Tensor:
    """`residual`, or zeros if its norm is at most `tolerance` times the norm of `reference`: a rounding error."""
    return residual if float(residual.norm()) > tolerance * float(reference.norm()) else torch.zeros_like(residual)
