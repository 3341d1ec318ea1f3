"""Per-FedAvg (Fallah et al. 2020, Algorithm 1, first order): MAML, an initialization that adapts in a few local steps.

    client k        w_k <- w_k - beta grad F_k(w_k - alpha grad F_k(w_k; D); D'), over local steps from w_t
    server          as FedAvg
    personal model  `adapt_steps` steps of rate alpha from the global model

D and D' are the halves of a batch, beta is `local.lr`. First order: the Hessian term is left out. With alpha = 0 the
global model is FedAvg's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import ModelTask, Strategy, StrategyContext, make_update, received_model


class PerFedAvg(Strategy):
    description: ClassVar[str] = (
        "the sites train a starting point from which each site gets its own model in a few steps"
    )
    paper: ClassVar[str] = "Fallah et al. 2020, arXiv 2002.07948"
    personalized: ClassVar[bool] = True
    name: Literal["perfedavg"] = "perfedavg"
    alpha: float = Field(0.01, ge=0)  # learning rate of the look-ahead step and of the adaptation
    adapt_steps: NonNegativeInt = 10  # steps from the global to the personalized model

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
