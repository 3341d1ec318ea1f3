"""Ditto (Li et al. 2021, Algorithm 1): beside the common model, which is FedAvg's, every site trains one of its own.

A site's own model v minimises F_k(v) + (lambda/2)|v - w|^2: with lambda = 0 it trains alone, with a large one it
follows the common model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, proximal_term, run_training
from pipeline.strategies.base import ModelTask, Strategy, StrategyContext, make_update, stored_model


class Ditto(Strategy):
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2012.04221"
    personalized: ClassVar[bool] = True
    stateful_clients: ClassVar[bool] = True
    client_state_text: ClassVar[str] = "the site's own model"
    name: Literal["ditto"] = "ditto"
    lam: float = Field(0.1, ge=0)
    epochs: NonNegativeInt = 0  # for the own model; 0: as long as for the common one
    personal_lr: PositiveFloat | None = None  # of the own model; else the round's

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats = message.vectors["weights"], message.vectors["stats"]
        global_result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        v = stored_model(client_state, message)
        steps, epochs = (None, self.epochs) if self.epochs else (context.steps, context.epochs)
        job = TrainJob(
            v.weights,
            v.norm_stats,
            steps=steps,
            epochs=epochs,
            regularizer=proximal_term(w, self.lam),
            lr=self.personal_lr,
        )
        personal_result = yield from run_training(job)
        return make_update(w, global_result, work=global_result.work + personal_result.work), {
            "weights": personal_result.weights,
            "stats": personal_result.norm_stats,
        }

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        return stored_model(client_state, message)
        yield
