"""Who is asked in a round: m = max(int(C * K), 1) random sites (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.protocol.messages import SiteId


def select(sites: Sequence[SiteId], fraction: float, seed: int, round: int) -> list[SiteId]:
    """In the order of `sites`, so that sums are taken in site order."""
    m = how_many(len(sites), fraction)
    drawn = np.random.default_rng([seed, 0x5E1EC7, round]).permutation(len(sites))[:m]
    return [sites[i] for i in sorted(drawn)]


def how_many(sites: int, fraction: float) -> int:
    return max(int(fraction * sites + 1e-9), 1)  # 0.29 * 100 is 28.999999999999996: it means 29
