"""Partial sharing, the base of FedPer, FedRep and FedBN: parameters of some roles stay at the site.

The other parameters are averaged. Personal parameters are not sent, and the coordinator's copy of them stays the initial
model's, from which a site starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from pipeline.core.parameters import ModelState, ParameterRole
from pipeline.protocol.messages import ClientState, ClientTask, ClientUpdate, Message, SiteId
from pipeline.protocol.tasks import TrainJob, TrainResult, run_training
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    ModelTask,
    Strategy,
    StrategyContext,
    make_update,
    received_model,
)


class PartialSharingStrategy(Strategy):
    """Client state: `kept`, the personal parameters, and with personal norm layers `stats`, their statistics."""

    personalized: ClassVar[bool] = True
    result_in_client_states: ClassVar[bool] = True
    update_text: ClassVar[str] = "the change of every weight that does not stay at the site"
    personal_roles: tuple[ParameterRole, ...]  # of body, head and norm; the head is the last layer

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        weights = state.weights.clone()
        weights[~context.spec.role_mask(self.personal_roles)] += aggregate.mean("delta")
        return GlobalModelState(weights, state.norm_stats if "norm" in self.personal_roles else aggregate.mean("stats"))

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        personal = self.build_personal_model(message, client_state, context)
        result = yield from run_training(
            TrainJob(personal.weights, personal.norm_stats, steps=context.steps, epochs=context.epochs)
        )
        return self.split_update(personal, result, context)

    def build_personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelState:
        """The received model with the site's personal parameters inserted."""
        global_model = received_model(message)
        if not client_state:
            return global_model
        weights = global_model.weights.clone()
        weights[context.spec.role_mask(self.personal_roles)] = client_state["kept"]
        return ModelState(weights, client_state["stats"] if "norm" in self.personal_roles else global_model.norm_stats)

    def split_update(
        self, initial_model: ModelState, result: TrainResult, context: StrategyContext
    ) -> tuple[ClientUpdate, ClientState]:
        """The update, which has the shared parameters only, and the client state, which has the personal ones."""
        is_personal = context.spec.role_mask(self.personal_roles)
        update = make_update(initial_model.weights, result)
        shared_delta = {"delta": update.averaged["delta"][~is_personal]}
        personal_weights = {"kept": result.weights[is_personal]}
        stats = {"stats": result.norm_stats}
        if "norm" in self.personal_roles:
            averaged, new_state = shared_delta, personal_weights | stats
        else:
            averaged, new_state = shared_delta | stats, personal_weights
        return replace(update, averaged=averaged), new_state if bool(torch.any(is_personal)) else {}

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        return self.build_personal_model(message, client_state, context)
        yield  # makes this a generator; it has no job
