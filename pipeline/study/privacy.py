"""What a study promises its patients: the `[privacy]` section.

at_site          every site clips and noises what it learns of each patient (DP-SGD with Opacus) and keeps a budget
at_coordinator   the coordinator clips and noises the sum of the sites' updates: nobody can tell which sites were in
secure_sum       the coordinator learns the sum of the sites' updates and nothing about a single one
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Noise(Part):
    """A promise (epsilon, delta), for which the noise is solved, or the noise, from which epsilon follows."""

    epsilon: PositiveFloat | tuple[PositiveFloat, ...] | None = None  # one for all sites, or one each
    noise: PositiveFloat | None = None  # standard deviation, in clipping norms
    delta: float = Field(1e-5, gt=0, lt=1)
    clip: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.epsilon is None) == (self.noise is None):
            raise ValueError("give either epsilon or noise")
        return self


class AtSite(Noise):
    unit: str = "auto"  # the data's coarsest key; "example" promises a patient with many cells next to nothing
    participations: PositiveInt | None = None  # turns that a site is in at most; all rounds if not given
    budget: PositiveFloat | tuple[PositiveFloat, ...] | None = None  # of simulated sites; their epsilon if not given
    mode: Literal["auto", "whole", "hooks", "ghost"] = "auto"


class AtCoordinator(Noise):
    epsilon: PositiveFloat | None = None


class SecureSum(Part):
    clip: PositiveFloat = 10.0  # longer updates are scaled down to this 2-norm before they are rounded
    heaviest: PositiveInt = 100_000  # training examples that a site may have, where sites count by them


class Privacy(Part):
    at_site: AtSite | None = None
    at_coordinator: AtCoordinator | None = None
    secure_sum: SecureSum | None = None
