"""The `[privacy]` section of a study: what it promises its patients.

dp_sgd               every site clips and noises the gradient of each privacy unit (DP-SGD with Opacus) and keeps a budget
client_level_dp      the coordinator clips and noises the sum of the sites' updates, which hides whole sites
secure_aggregation   the coordinator learns the sum of the sites' updates and nothing about a single one
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class PrivacySection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NoiseConfig(PrivacySection):
    """Either (epsilon, delta), for which the noise multiplier is solved, or the noise multiplier, from which epsilon follows."""

    epsilon: PositiveFloat | tuple[PositiveFloat, ...] | None = None  # one for all sites, or one each
    noise_multiplier: PositiveFloat | None = None  # standard deviation of the noise, in clipping bounds
    delta: float = Field(1e-5, gt=0, lt=1)

    @model_validator(mode="after")
    def _require_epsilon_or_noise(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either epsilon or noise_multiplier")
        return self


class DpSgdConfig(NoiseConfig):
    max_grad_norm: PositiveFloat = 1.0  # clipping bound of a privacy unit's gradient
    privacy_unit: str = "auto"  # the data's coarsest key; "example" promises a patient with many cells next to nothing
    max_participations: PositiveInt | None = None  # rounds that a site takes part in; all rounds if not given
    epsilon_budget: PositiveFloat | tuple[PositiveFloat, ...] | None = (
        None  # of simulated sites; default: their epsilon
    )
    clipping: Literal["auto", "per_unit", "grad_sample", "ghost"] = "auto"


class ClientLevelDpConfig(NoiseConfig):
    epsilon: PositiveFloat | None = None
    max_update_norm: PositiveFloat = 1.0  # clipping bound of a site's update


class SecureAggregationConfig(PrivacySection):
    max_update_norm: PositiveFloat = 10.0  # longer updates are scaled down to this 2-norm before they are rounded
    max_examples: PositiveInt = 100_000  # training examples that a site may have, where sites count by them


class PrivacyConfig(PrivacySection):
    dp_sgd: DpSgdConfig | None = None
    client_level_dp: ClientLevelDpConfig | None = None
    secure_aggregation: SecureAggregationConfig | None = None
