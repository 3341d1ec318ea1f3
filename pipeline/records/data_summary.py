"""A site's description of its data, sent to the coordinator before the first round."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from pipeline.protocol.serialization import MAX_CLIENT_WEIGHT
from pipeline.protocol.tasks import Split
from pipeline.records.base import FrozenRecord
from pipeline.records.privacy_record import PrivacyPlanRecord, ShortText


class SiteDataSummary(FrozenRecord):
    """Bounded, because a model is built from it. Fields of a later version are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    shape: list[Annotated[int, Field(gt=0, le=4096)]] = Field(min_length=1, max_length=4)
    classes: list[Annotated[str, Field(max_length=100)]] = Field(min_length=2, max_length=1000)
    examples: dict[Split, Annotated[int, Field(ge=0, le=int(MAX_CLIENT_WEIGHT))]]
    privacy_unit: ShortText | None = None  # the coarsest that the data name
    privacy_plan: PrivacyPlanRecord | None = None  # of a study with DP-SGD
