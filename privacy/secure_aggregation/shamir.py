"""Shamir's secret sharing: any t of n shares reconstruct a secret, t - 1 reveal nothing (1979, doi 10.1145/359168.359176).

The secret is the value at 0 of a random polynomial of degree t - 1 modulo a prime, and share i is its value at i.
Python's integer arithmetic is not constant-time, but only the site's own machine can measure it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice

PRIME = 2**256 + 297  # the first above every secret of 32 bytes
SECRET_BYTES = 32
SHARE_BYTES = 33
MAX_REBUILD_TRIES = 2000  # subsets of shares to omit: enough to find 2 wrong shares of 60
MIN_PARTICIPANTS = 3  # with two, each learns the other's vector from the sum

SharesByPosition = Mapping[int, int]  # position, from 1 -> value


def reconstruction_threshold(n: int) -> int:
    """More than two thirds of n.

    2t > n + c for any c < n / 3, so t shares of each of two secrets cannot be collected from n holders that reveal one
    share each, even if c holders reveal both.
    """
    return max(MIN_PARTICIPANTS, 2 * n // 3 + 1)


def split_secret(secret: bytes, t: int, n: int) -> list[int]:
    """The values at 1 .. n."""
    if len(secret) != SECRET_BYTES or not 1 <= t <= n:
        raise ValueError(f"a secret of {len(secret)} bytes cannot be split into {t} of {n} shares")
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    return [evaluate_polynomial(polynomial, position) for position in range(1, n + 1)]


def evaluate_polynomial(polynomial: Sequence[int], position: int) -> int:
    """Horner's scheme; the constant coefficient comes first."""
    total = 0
    for coefficient in reversed(polynomial):
        total = (total * position + coefficient) % PRIME
    return total


def interpolate(shares: SharesByPosition, position: int = 0) -> int:
    """The value at `position` of the polynomial of degree len(shares) - 1 through all shares (Lagrange)."""
    return sum(w * y for w, y in zip(_lagrange_weights(tuple(shares), position), shares.values(), strict=True)) % PRIME


def candidate_secrets(shares: SharesByPosition, t: int) -> Iterator[tuple[bytes, SharesByPosition]]:
    """Secrets that t of the shares reconstruct, with those shares; the caller knows which secret is right.

    Tries the first t shares, and then omits more and more of them while t remain.
    """
    subsets_to_omit = (omitted for r in range(len(shares) - t + 1) for omitted in combinations(shares, r))
    for omitted in islice(subsets_to_omit, MAX_REBUILD_TRIES):
        trusted_shares = dict(islice(((position, y) for position, y in shares.items() if position not in omitted), t))
        secret_number = interpolate(trusted_shares)
        if secret_number < 2 ** (8 * SECRET_BYTES):
            yield secret_number.to_bytes(SECRET_BYTES), trusted_shares


def wrong_positions(shares: SharesByPosition, trusted_shares: SharesByPosition) -> list[int]:
    """Positions of the shares that are off the polynomial of the trusted ones."""
    return [position for position, y in shares.items() if interpolate(trusted_shares, position) != y]


def are_on_one_polynomial(shares: SharesByPosition, t: int) -> bool:
    """Whether all shares are on one polynomial of degree t - 1; always true for up to t shares."""
    first_shares = dict(islice(shares.items(), t))
    return all(interpolate(first_shares, position) == y for position, y in shares.items())


@lru_cache(maxsize=2 * MAX_REBUILD_TRIES)  # the same subsets are tried for every secret of an aggregation
def _lagrange_weights(positions: tuple[int, ...], target: int) -> tuple[int, ...]:
    """Lagrange weights of the value at `target`."""
    weights = []
    for i in positions:
        numerator = denominator = 1
        for j in positions:
            if j != i:
                numerator, denominator = numerator * (target - j) % PRIME, denominator * (i - j) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)
