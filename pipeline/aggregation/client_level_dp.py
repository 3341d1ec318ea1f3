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

from pipeline.aggregation.rules import Mean, cut_to
from pipeline.protocol.messages import Reply, Total
from privacy.dpsgd.secure_rng import Entropy

FEW = 50  # sites below which the noise of a useful epsilon drowns the mean


class SiteNoise(Mean):
    """`asked` sites a round; `longest`: 2-norm that an update has at most once it is clipped, and rounded if it was."""

    paper: ClassVar[str] = "McMahan et al. 2018, arXiv 1710.06963"
    name: Literal["site_noise"] = "site_noise"  # type: ignore[assignment]
    absurd: None = None  # whom the median excludes would depend on who is there
    clip: float
    noise: float
    longest: float
    asked: int

    def total(self, replies: Sequence[Reply]) -> Total:
        return self.summed(Total.of([cut_to(reply, self.clip) for reply in replies]))

    def summed(self, total: Total) -> Total:
        entropy, std = Entropy(), self.noise * self.longest
        noised = {k: v + std * entropy.normal(v.shape) if v.numel() else v for k, v in total.weighted.items()}
        fresh = Total.summed(noised, float(self.asked), total.sums, total.sites)
        fresh.works = total.works
        return fresh
