"""Fine-tuning (Wang et al. 2019): FedAvg, then every site trains the global model further on its own examples.

    server, client k  as FedAvg
    personal model    w_k = w after `epochs` local epochs of SGD from the global model w

The simplest personalization, and a strong baseline. With epochs = 0 it is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import ClientState, Message
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import ModelTask, Strategy, StrategyContext, received_model


class FineTune(Strategy):
    description: ClassVar[str] = "the global model is averaged; at the end every site continues its training for itself"
    paper: ClassVar[str] = "Wang et al. 2019, arXiv 1910.10252"
    personalized: ClassVar[bool] = True
    name: Literal["finetune"] = "finetune"
    epochs: NonNegativeInt = 1  # of fine-tuning
    personal_lr: PositiveFloat | None = None  # learning rate of fine-tuning; None: the round's

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        global_model = received_model(message)
        if not self.epochs:
            return global_model
        result = yield from run_training(
            TrainJob(global_model.weights, global_model.norm_stats, epochs=self.epochs, lr=self.personal_lr)
        )
        return ModelState(result.weights, result.norm_stats)
