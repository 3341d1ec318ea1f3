"""FedRep (Collins et al. 2021, Algorithm 1): each site fits its own head to the shared body, then the body to the head.

    client k  trains the head h_k for `head_epochs`, the body phi fixed; then phi for the study's local work, h_k fixed
    server    phi <- weighted mean of the clients' phi

With personal_roles = [] and head_epochs = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from pipeline.core.parameters import ParameterRole, ParameterSpec
from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies._partial_sharing import PartialSharingStrategy
from pipeline.strategies.base import LocalTrainingConfig, StrategyContext

ALL_ROLES: frozenset[ParameterRole] = frozenset(("body", "head", "norm"))


class FedRep(PartialSharingStrategy):
    description: ClassVar[str] = "the global model is averaged, except for its last layer, which stays at the site"
    paper: ClassVar[str] = "Collins et al. 2021, arXiv 2102.07078"
    client_state_text: ClassVar[str] = "its head"
    name: Literal["fedrep"] = "fedrep"
    personal_roles: tuple[ParameterRole, ...] = ("head",)  # h: roles that stay at the site and are trained first
    head_epochs: NonNegativeInt = 5  # epochs for h; 0: h stays as it is

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        if self.head_epochs and not self.personal_roles:
            yield "fedrep trains the personal parameters first, but there are none; set strategy.personal_roles, or strategy.head_epochs = 0"

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        personal = self.build_personal_model(message, client_state, context)
        weights, norm_stats, head_work = personal.weights, personal.norm_stats, None
        if self.head_epochs:
            head_result = yield from run_training(
                TrainJob(weights, norm_stats, epochs=self.head_epochs, trainable_roles=frozenset(self.personal_roles))
            )
            weights, norm_stats, head_work = head_result.weights, head_result.norm_stats, head_result.work
        trainable_roles = ALL_ROLES - set(self.personal_roles) if self.personal_roles else None
        result = yield from run_training(
            TrainJob(weights, norm_stats, steps=context.steps, epochs=context.epochs, trainable_roles=trainable_roles)
        )
        update, new_state = self.split_update(personal, result, context)
        return (update if head_work is None else replace(update, work=head_work + result.work)), new_state
