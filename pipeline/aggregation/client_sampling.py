"""Client sampling: m = max(int(C * K), 1) random sites per round (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.protocol.messages import SiteId


def sample_clients(sites: Sequence[SiteId], fraction: float, seed: int, round_number: int) -> list[SiteId]:
    """The sampled sites in the order of `sites`, so that sums are reproducible."""
    m = num_sampled_clients(len(sites), fraction)
    sampled = np.random.default_rng([seed, 0x5E1EC7, round_number]).permutation(len(sites))[:m]
    return [sites[i] for i in sorted(sampled)]


def num_sampled_clients(num_sites: int, fraction: float) -> int:
    return max(int(fraction * num_sites + 1e-9), 1)  # 0.29 * 100 is 28.999999999999996
