"""Differential privacy of whole sites, at the coordinator (McMahan et al. 2018, arXiv 1710.06963, fixed clipping).

Every update is cut to the 2-norm C, all count alike, and Gaussian noise is added to their sum, which is divided by the
number of sites that are asked, whoever answers. Whoever sees the models then cannot tell whether a site took part. The
coordinator itself can: it sees the updates before the noise, or, with secure sums, their sum.

Which sites are asked follows from the study's seed, so nothing is gained from chance: a round in which a site is asked
is one Gaussian mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pipeline.aggregation.rules import WeightedMean, clip_update
from pipeline.protocol.messages import Aggregate, Reply
from privacy.dpsgd.secure_rng import SecureRandom

MIN_USEFUL_SITES = 50  # sites below which the noise of a useful epsilon drowns the mean


class ClientLevelDpMean(WeightedMean):
    """`asked` sites a round; `longest`: 2-norm that an update has at most once it is clipped, and rounded if it was."""

    paper: ClassVar[str] = "McMahan et al. 2018, arXiv 1710.06963"
    name: Literal["site_noise"] = "site_noise"  # type: ignore[assignment]
    outlier_factor: None = None  # whom the median excludes would depend on who is there
    max_update_norm: float
    noise_multiplier: float
    sensitivity: float
    num_sampled_clients: int

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        return self.finalize_sum(
            Aggregate.from_replies([clip_update(reply, self.max_update_norm) for reply in replies])
        )

    def finalize_sum(self, aggregate: Aggregate) -> Aggregate:
        secure_random, std = SecureRandom(), self.noise_multiplier * self.sensitivity
        noised_sums = {
            k: v + std * secure_random.normal(v.shape) if v.numel() else v for k, v in aggregate.weighted_sums.items()
        }
        released = Aggregate.from_sums(
            noised_sums, float(self.num_sampled_clients), aggregate.all_sums, aggregate.clients
        )
        released.work_by_client = aggregate.work_by_client
        return released
