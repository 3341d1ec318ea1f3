"""How alike two networks are, layer by layer: HSIC, CKA, debiased CKA, deconfounded CKA, CCA and sum-diff.

X (n, p1) and Y (n, p2) are the activations of one layer of two networks on the same n probe inputs, K and L their Gram
matrices. Every measure turns what it reads of a site into one vector and compares vectors, so that S sites cost S
embeddings and one product, not S * S comparisons. Larger is more alike, for every measure.

| measure | unchanged by, with the linear kernel | note |
|---|---|---|
| hsic | orthogonal maps | grows with the activations |
| cka, debiased_cka, dcka | orthogonal maps, isotropic scaling | the polynomial kernel loses the scaling |
| cca | any invertible map | 1 for any two layers of rank n - 1: give it many more probes than features |
| sumdiff | nothing | reads weights, not activations |

With the gaussian kernel isotropic scaling changes nothing, not even hsic, as long as sigma follows the median distance.

HSIC: Gretton et al. 2005. Debiased: Song et al. 2012, eq. 5. CKA and CCA: Kornblith et al. 2019. dCKA: Cui et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from pipeline.core.errors import BadReply, BadStrategy, BadStudy
from pipeline.core.registry import near

ROUNDING = 1e-6  # relative size of a difference that float32 activations cannot tell from none
FEWEST = 4  # probe inputs: the debiased estimator divides by n - 3


# Kernels: activations (n, p) -> Gram matrix (n, n)


def linear(x: Tensor) -> Tensor:
    x = _flat(x)
    return x @ x.T


def polynomial(x: Tensor, c: float = 1.0, degree: int = 2) -> Tensor:
    gram: Tensor = (linear(x) + c) ** degree
    return gram


def gaussian(x: Tensor, sigma: float | None = None, fraction: float = 1.0) -> Tensor:
    """sigma, or `fraction` of the median distance of two probes that differ; all ones where none differ."""
    x = _flat(x)
    centred_x = x - x.mean(0)  # distances do not change, their rounding errors shrink
    norms = centred_x.square().sum(1)
    squares = (norms[:, None] + norms - 2 * centred_x @ centred_x.T).fill_diagonal_(0.0)
    squares = torch.where(squares > ROUNDING**2 * x.square().sum(1).mean(), squares, 0.0)
    if sigma is None:
        differing = squares[squares > 0].sqrt()
        sigma = fraction * float(differing.median()) if len(differing) else 1.0
    return torch.exp(-squares / (2 * sigma**2))


# Embeddings: what is compared of one site


def centred(K: Tensor) -> Tensor:
    """H K H, H = I - 11^T/n: linear K becomes the Gram matrix of the column-centred X."""
    K = K.double()
    return K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()


def u_centred(K: Tensor) -> Tensor:
    """K without its diagonal, centred so that <K, L> / (n (n-3)) is the unbiased HSIC_1 (Székely & Rizzo 2014)."""
    n = _enough(len(K))
    K = K.double().clone().fill_diagonal_(0.0)
    rows = K.sum(0) / (n - 2)
    return (K - rows - rows[:, None] + K.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0.0)


def deconfounded(K: Tensor, K0: Tensor) -> Tensor:
    """The centred K less its least-squares fit, over all entries, by the centred K0."""
    K, cause = centred(K), direction(centred(K0), K0)
    return _or_nothing(K - (K * cause).sum() * cause, K, ROUNDING)


def projector(x: Tensor) -> Tensor:
    """The (n, n) projection on the span of the centred columns: of trace rank, the same for every basis of the span."""
    precision = torch.finfo(x.dtype).eps if x.is_floating_point() else torch.finfo(torch.double).eps
    x = _flat(x)
    columns = x - x.mean(0)
    sizes = columns.norm(dim=0)
    alive = sizes > 16 * precision * x.norm(dim=0)  # a constant column leaves rounding errors
    if not bool(alive.any()):
        return x.new_zeros(len(x), len(x))  # rank 0
    columns = columns[:, alive] / sizes[alive]  # else a small feature would look like a missing rank
    U, s, _ = torch.linalg.svd(columns, full_matrices=False)
    basis: Tensor = U[:, s > max(columns.shape) * precision * s[0]]
    return basis @ basis.T


def direction(embedded: Tensor, K: Tensor) -> Tensor:
    """At length 1; 0 where nothing but rounding is left of K: a dead layer is like none, not even itself."""
    kept = _or_nothing(embedded, K, ROUNDING**2)  # activations enter a Gram matrix squared
    return kept / max(float(kept.norm()), torch.finfo(kept.dtype).tiny)


# Measures of two


def hsic(K: Tensor, L: Tensor) -> float:
    """tr(K H L H) / (n-1)^2."""
    return float((centred(K) * centred(L)).sum() / (len(K) - 1) ** 2)


def debiased_hsic(K: Tensor, L: Tensor) -> float:
    """HSIC_1: 0 on average for independent features, however many; may be negative."""
    n = len(K)
    return float((u_centred(K) * u_centred(L)).sum() / (n * (n - 3)))


def cka(K: Tensor, L: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))."""
    return float((direction(centred(K), K) * direction(centred(L), L)).sum())


def debiased_cka(K: Tensor, L: Tensor) -> float:
    """CKA of HSIC_1."""
    return float((direction(u_centred(K), K) * direction(u_centred(L), L)).sum())


def dcka(K: Tensor, L: Tensor, K0: Tensor) -> float:
    """Deconfounded CKA: the inputs' similarity K0 is regressed out of K and of L, then CKA.

    Centred before the regression, so it is the partial correlation of K and L given K0, in -1..1. For the linear kernel
    that is what the authors' code (simtorch) computes: it centres the activations and fits with an intercept, which is
    then 0. Negative eigenvalues of the residue stay, as there by default: cutting them off would bring K0 back in.
    """
    return float((direction(deconfounded(K, K0), K) * direction(deconfounded(L, K0), L)).sum())


def cca(X: Tensor, Y: Tensor) -> float:
    """Mean squared canonical correlation, over the smaller of the two ranks."""
    return float(_over_smaller_rank(torch.stack([projector(X).flatten(), projector(Y).flatten()]))[0, 1])


def sumdiff(v: Tensor, w: Tensor) -> float:
    """Minus the sum of absolute differences of two weight vectors."""
    return float(-(v.double() - w.double()).abs().sum())


# All pairs of sites: (S, m) embeddings -> (S, S)


def _products(vectors: Tensor) -> Tensor:
    return vectors @ vectors.T


def _over_smaller_rank(vectors: Tensor) -> Tensor:
    shared = vectors @ vectors.T  # sums of squared canonical correlations; the diagonal holds the ranks
    ranks = shared.diagonal().round()
    return shared / torch.minimum(ranks[:, None], ranks).clamp_min(1.0)


def _minus_distances(vectors: Tensor) -> Tensor:
    return -torch.cdist(vectors, vectors, p=1.0)


@dataclass(frozen=True)
class Measure:
    about: str
    reads: Literal["grams", "activations", "weights"]  # a kernel is chosen for grams only
    embed: Callable[[Tensor, Tensor], Tensor]  # (what it reads of a site, the same of the inputs) -> what is compared
    between: Callable[[Tensor], Tensor]  # (S, m) -> (S, S)


KERNELS: Mapping[str, Callable[[Tensor], Tensor]] = {"linear": linear, "polynomial": polynomial, "gaussian": gaussian}

MEASURES: Mapping[str, Measure] = {
    "cka": Measure("centred kernel alignment", "grams", lambda K, _: direction(centred(K), K), _products),
    "dcka": Measure(
        "CKA without what the inputs explain", "grams", lambda K, K0: direction(deconfounded(K, K0), K), _products
    ),
    "debiased_cka": Measure(
        "CKA that is about 0 for unrelated wide layers", "grams", lambda K, _: direction(u_centred(K), K), _products
    ),
    "cca": Measure("mean squared canonical correlation", "activations", lambda X, _: projector(X), _over_smaller_rank),
    "hsic": Measure("CKA before it is normalised", "grams", lambda K, _: centred(K) / (len(K) - 1), _products),
    "sumdiff": Measure("minus the sum of absolute weight differences", "weights", lambda w, _: w, _minus_distances),
}


def pairwise(features: Sequence[Sequence[Tensor]], inputs: Tensor, measure: str, kernel: str = "linear") -> Tensor:
    """(L, S, S) similarities from features[site][layer] of shape (n, p_layer), on the probe inputs (n, d)."""
    chosen = _known(MEASURES, measure, "measure")
    if chosen.reads == "weights":
        raise BadStudy(f"the measure {measure!r} compares weights, not activations; use weight_similarity")
    read = _known(KERNELS, kernel, "kernel") if chosen.reads == "grams" else _as_it_is
    n = _enough(len(inputs))
    for site, layers in enumerate(features):
        for layer, x in enumerate(layers):
            if len(x) != n:
                raise BadStrategy(
                    f"site {site}, layer {layer}: {len(x)} activations for {n} probe inputs; run all of them"
                )
    confound = read(inputs)
    return _all_pairs(chosen, features, lambda x: chosen.embed(read(x), confound))


def weight_similarity(weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """(L, S, S) of minus the sum of absolute differences, from weights[site][layer], flat vectors."""
    return _all_pairs(MEASURES["sumdiff"], weights, lambda w: w.double())


def _all_pairs(measure: Measure, seen: Sequence[Sequence[Tensor]], embed: Callable[[Tensor], Tensor]) -> Tensor:
    """One layer at a time: S matrices of (n, n) are in memory, not L * S."""
    if not seen or not seen[0]:
        raise BadStrategy("no sites or no layers to compare; ask at least one site for at least one layer")
    if len({len(layers) for layers in seen}) > 1:
        raise BadStrategy("the sites have different numbers of layers; compare networks of one architecture")
    found = []
    for layer, of_sites in enumerate(zip(*seen, strict=True)):
        for site, x in enumerate(of_sites):
            if not bool(torch.isfinite(x).all()):
                raise BadReply(f"site {site}, layer {layer}: not finite, so like nothing; lower local.lr")
        vectors = [embed(x.detach()).flatten() for x in of_sites]
        if len({len(vector) for vector in vectors}) > 1:
            raise BadStrategy(f"layer {layer} has different sizes at the sites; compare networks of one architecture")
        matrix = measure.between(torch.stack(vectors))
        found.append((matrix + matrix.T) / 2)  # a matrix product is symmetric up to rounding only
    return torch.stack(found)


Known = TypeVar("Known")


def _known(table: Mapping[str, Known], name: str, what: str) -> Known:
    if name not in table:
        raise BadStudy(f"the {what} {name!r} is not known; {near(name, table)}")
    return table[name]


def _enough(n: int) -> int:
    if n < FEWEST:
        raise BadStudy(f"{n} probe inputs are too few to compare networks on; give at least {FEWEST}")
    return n


def _flat(x: Tensor) -> Tensor:
    return x.double().reshape(len(x), -1)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _or_nothing(left: Tensor, of: Tensor, share: float) -> Tensor:
    """`left`, or zeros where it is no more than this share of what it is left of."""
    return left if float(left.norm()) > share * float(of.norm()) else torch.zeros_like(left)
