"""Local training without federation: every site trains alone from the initial model. The lower baseline.

No published algorithm and no settings of its own. Nothing but the training loss is aggregated, and there is no global
model: the result is in the client states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import ClientState, ClientTask, ClientUpdate, Message, SiteId
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    ModelTask,
    Strategy,
    StrategyContext,
    make_update,
    stored_model,
)


class LocalOnly(Strategy):
    description: ClassVar[str] = "every site trains alone; its model stays at the site"
    update_text: ClassVar[str] = ""
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    result_in_client_states: ClassVar[bool] = True
    server_state_text: ClassVar[str] = "the initial model"
    client_state_text: ClassVar[str] = "its own model"
    name: Literal["local_only"] = "local_only"

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        requests.aggregate({site: self.train_payload(state, site) for site in clients})
        return state

    def global_models(self, state: Any) -> Mapping[str, ModelState]:
        return {}

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        stored = stored_model(client_state, message)
        result = yield from run_training(
            TrainJob(stored.weights, stored.norm_stats, steps=context.steps, epochs=context.epochs)
        )
        train_loss = make_update(stored.weights, result).summed
        new_state = {"weights": result.weights, "stats": result.norm_stats}
        return ClientUpdate(summed=train_loss, work=result.work), new_state

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        return stored_model(client_state, message)
        yield  # makes this a generator; it has no job
