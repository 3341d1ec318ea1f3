"""A secret cut into n shares: any t rebuild it, t - 1 say nothing (Shamir 1979, doi 10.1145/359168.359176).

The secret is the value at 0 of a random polynomial of degree t - 1 modulo a prime, and share i its value at i. Python's
whole numbers take time that depends on their size; nobody but the dealer's own machine can time it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice

PRIME = 2**256 + 297  # the first above every secret of 32 bytes
SECRET = 32
SHARE = 33  # bytes
TRIES = 2000  # ways to leave out suspects before giving up: 2 liars among 60 shares are found
FEWEST = 3  # of two, each learns the other's secret from the sum

Shares = Mapping[int, int]  # place, from 1 -> value


def threshold(n: int) -> int:
    """More than two thirds. 2t > n + c for any c < n / 3: nobody collects t shares of both of two secrets from n holders
    who give one of them each, even if c holders give both."""
    return max(FEWEST, 2 * n // 3 + 1)


def deal(secret: bytes, t: int, n: int) -> list[int]:
    """The values at 1 .. n."""
    if len(secret) != SECRET or not 1 <= t <= n:
        raise ValueError(f"a secret of {len(secret)} bytes cannot be dealt as {t} of {n} shares")
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    return [value(polynomial, place) for place in range(1, n + 1)]


def value(polynomial: Sequence[int], place: int) -> int:
    """Horner's scheme; the constant coefficient comes first."""
    total = 0
    for coefficient in reversed(polynomial):
        total = (total * place + coefficient) % PRIME
    return total


def through(shares: Shares, place: int = 0) -> int:
    """The value at `place` of the one polynomial of degree len(shares) - 1 through all of them (Lagrange)."""
    return sum(w * y for w, y in zip(_weights(tuple(shares), place), shares.values(), strict=True)) % PRIME


def rebuild(shares: Shares, t: int, fits: Callable[[bytes], bool]) -> tuple[bytes, list[int]] | None:
    """The secret that `fits`, and the places whose shares are not of its polynomial; None if none is found.

    First all are believed, then ever more of them left out, as far as t remain. False shares can be made to cancel out at
    0, so the search ends with a polynomial that most agree on: within half of the spare shares there is only one.
    """
    suspects = (out for r in range(len(shares) - t + 1) for out in combinations(shares, r))
    best: tuple[bytes, list[int]] | None = None
    for out in islice(suspects, TRIES):
        believed = dict(islice(((place, y) for place, y in shares.items() if place not in out), t))
        whole = through(believed)
        if whole < 2 ** (8 * SECRET) and fits(secret := whole.to_bytes(SECRET)):
            wrong = [place for place, y in shares.items() if through(believed, place) != y]
            best = min(best or (secret, wrong), (secret, wrong), key=lambda found: len(found[1]))
            if len(wrong) <= (len(shares) - t) // 2:
                break
    return best


def on_one_polynomial(shares: Shares, t: int) -> bool:
    """Of degree t - 1. Says something if there are more than t."""
    first = dict(islice(shares.items(), t))
    return all(through(first, place) == y for place, y in shares.items())


@lru_cache(maxsize=2 * TRIES)  # the same suspects are tried for every secret of a sum
def _weights(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's, of the value at `at`."""
    weights = []
    for i in places:
        above = below = 1
        for j in places:
            if j != i:
                above, below = above * (at - j) % PRIME, below * (i - j) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
