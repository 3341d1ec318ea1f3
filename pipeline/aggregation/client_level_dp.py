"""Client-level differential privacy at the coordinator (McMahan et al. 2018, arXiv 1710.06963, fixed clipping).

Every update is clipped to the 2-norm C and has the same weight. Gaussian noise is added to their sum, which is divided by
the number of sampled clients, whether or not all reply. The released models then hide whether a site took part. The
coordinator is trusted: it sees the updates before the noise, or, with secure aggregation, their sum.

Client sampling follows from the study's seed, which is not secret, so there is no privacy amplification by sampling: a
round that samples a client is one Gaussian mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pipeline.aggregation.rules import WeightedMean, clip_update
from pipeline.protocol.messages import Aggregate, Reply
from privacy.dpsgd.secure_rng import SecureRandom

MIN_USEFUL_SITES = 50  # with fewer sites the noise of a useful epsilon exceeds the mean


class ClientLevelDpMean(WeightedMean):
    """The mean of clipped updates with Gaussian noise.

    sensitivity: bound on the 2-norm of an update after clipping and, with secure aggregation, rounding.
    """

    paper: ClassVar[str] = "McMahan et al. 2018, arXiv 1710.06963"
    name: Literal["site_noise"] = "site_noise"  # type: ignore[assignment]
    outlier_factor: None = None  # quarantine by the median would depend on the other clients
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
