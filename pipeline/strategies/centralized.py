"""Centralized training on the pooled examples of all sites: the upper baseline, in simulation only.

No published algorithm and no settings of its own. A round is the study's local work on the pooled examples; no client
trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob, TrainResult
from pipeline.strategies.base import ClientRequests, GlobalModelState, Strategy, StrategyContext


class CentralizedTraining(Strategy):
    description: ClassVar[str] = "pools the images of all sites: in simulations only, never in hospitals"
    update_text: ClassVar[str] = ""
    requires_pooled_data: ClassVar[bool] = True
    tasks: ClassVar[frozenset[str]] = frozenset({"evaluate", "profile", "profile_personal"})
    name: Literal["centralized"] = "centralized"

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        job = TrainJob(state.weights, state.norm_stats, steps=context.steps, epochs=context.epochs)
        (result,) = requests.run_on_coordinator([job])
        assert isinstance(result, TrainResult)
        return GlobalModelState(result.weights, result.norm_stats)
