"""Who is asked in a round: m = max(int(C * K), 1) random sites (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.messages import SiteId


def select(sites: Sequence[SiteId], fraction: float, seed: int, round: int) -> list[SiteId]:
    """In the order of `sites`, so that sums are taken in site order."""
    m = max(int(fraction * len(sites) + 1e-9), 1)  # 0.07 * 100 is 7.000000000000001 or 6.99...: it means 7
    drawn = np.random.default_rng([seed, 0x5E1EC7, round]).permutation(len(sites))[:m]
    return [sites[i] for i in sorted(drawn)]
