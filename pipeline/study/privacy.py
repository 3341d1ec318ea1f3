"""The `[privacy]` section of a study.

dp_sgd               each site clips the gradient of every privacy unit and adds noise (DP-SGD with Opacus), within a budget
client_level_dp      the coordinator clips the sites' updates and adds noise to their sum, which hides a site's participation
secure_aggregation   the coordinator learns the sum of the sites' updates and no single update
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class PrivacySection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NoiseConfig(PrivacySection):
    """Either (epsilon, delta), from which the noise multiplier is solved, or the noise multiplier, from which epsilon follows."""

    epsilon: PositiveFloat | tuple[PositiveFloat, ...] | None = None  # one for all sites, or one each
    noise_multiplier: PositiveFloat | None = None  # standard deviation of the noise / clipping bound
    delta: float = Field(1e-5, gt=0, lt=1)

    @model_validator(mode="after")
    def _require_epsilon_or_noise(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either epsilon or noise_multiplier")
        return self


class DpSgdConfig(NoiseConfig):
    max_grad_norm: PositiveFloat = 1.0  # clipping bound of a privacy unit's gradient
    privacy_unit: str = "auto"  # "auto": the data's coarsest key; "example" hardly protects a patient with many cells
    max_participations: PositiveInt | None = None  # rounds in which a site takes part; None: all rounds
    # of the simulated sites' ledgers; None: epsilon
    epsilon_budget: PositiveFloat | tuple[PositiveFloat, ...] | None = None
    clipping: Literal["auto", "per_unit", "grad_sample", "ghost"] = "auto"


class ClientLevelDpConfig(NoiseConfig):
    epsilon: PositiveFloat | None = None
    max_update_norm: PositiveFloat = 1.0  # clipping bound of a site's update


class SecureAggregationConfig(PrivacySection):
    max_update_norm: PositiveFloat = 10.0  # updates are scaled down to this 2-norm, then rounded
    max_examples: PositiveInt = 100_000  # bound on a site's training examples, if they are its weight


class PrivacyConfig(PrivacySection):
    dp_sgd: DpSgdConfig | None = None
    client_level_dp: ClientLevelDpConfig | None = None
    secure_aggregation: SecureAggregationConfig | None = None
