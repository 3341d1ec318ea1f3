"""privacy.json: what a study promises, fixed before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from pipeline.protocol.messages import SiteId
from pipeline.records.base import FileRecord, FrozenRecord

# a plan may come from a site, so every value is bounded
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**12)]
ShortText = Annotated[str, Field(max_length=100)]


class PrivacyPlanRecord(FrozenRecord):
    """What DP-SGD costs one site."""

    model_config = ConfigDict(strict=True)

    noise_multiplier: NonNegativeFloat
    max_grad_norm: PositiveFloat
    privacy_unit: ShortText
    num_units: Count
    sampling_rate: Annotated[float, Field(ge=0, le=1)]  # chance of a unit to be in a step
    loss_scale: PositiveFloat  # units / examples
    delta: Annotated[float, Field(gt=0, lt=1)]
    steps_per_round: Count
    max_rounds: Count
    epsilon: NonNegativeFloat  # after all of these rounds
    accountant: ShortText  # that computed epsilon
    num_examples: Count


class ClientLevelDpRecord(FrozenRecord):
    noise_multiplier: float
    max_update_norm: float
    sensitivity: float  # the longest update after rounding
    delta: float
    epsilon: float
    accountant: str
    rounds: int
    sites: int
    num_sampled_clients: int


class SecureAggregationRecord(FrozenRecord):
    num_sampled_clients: int
    threshold: int  # of the sampled sites
    max_update_norm: float
    bits: int
    step: float
    fingerprints: Mapping[SiteId, str]  # of the sites' keys, to compare by telephone


class PrivacyRecord(FileRecord):
    """Empty without protection."""

    FILE_NAME: ClassVar[str] = "privacy.json"

    dp_sgd: Mapping[SiteId, PrivacyPlanRecord] = {}
    client_level_dp: ClientLevelDpRecord | None = None
    secure_aggregation: SecureAggregationRecord | None = None
