"""Per-FedAvg (Fallah et al. 2020, Algorithm 1, first order): a common start from which a few local steps lead far.

Every local step takes its gradient a step of rate alpha ahead, on other examples. A site's own model is the
common one after `adapt` steps of rate alpha. With alpha = 0 the common model is FedAvg's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import ModelTask, Strategy, StrategyContext, make_update, received_model


class PerFedAvg(Strategy):
    paper: ClassVar[str] = "Fallah et al. 2020, arXiv 2002.07948"
    personalized: ClassVar[bool] = True
    name: Literal["perfedavg"] = "perfedavg"
    alpha: float = Field(0.01, ge=0)
    adapt_steps: NonNegativeInt = 10  # steps that make a site's own model

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w = message.vectors["weights"]
        job = TrainJob(w, message.vectors["stats"], steps=context.steps, epochs=context.epochs, maml_lr=self.alpha)
        result = yield from run_training(job)
        return make_update(w, result), client_state

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        global_model = received_model(message)
        if not (self.alpha and self.adapt_steps):
            return global_model
        result = yield from run_training(
            TrainJob(global_model.weights, global_model.norm_stats, steps=self.adapt_steps, lr=self.alpha)
        )
        return ModelState(result.weights, result.norm_stats)
