"""Ditto (Li et al. 2021, Algorithm 1): next to FedAvg's global model, every site trains a regularized model of its own.

    client k  w_k as in FedAvg
              v_k: from its last v_k, local steps on F_k(v) + (lambda/2) |v - w_t|^2
    server    as FedAvg, over the w_k

With lambda = 0 a site's own model v_k is trained alone; with a large lambda it follows the global model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, proximal_term, run_training
from pipeline.strategies.base import ModelTask, Strategy, StrategyContext, make_update, stored_model


class Ditto(Strategy):
    description: ClassVar[str] = "besides the global model every site trains its own model, which stays at the site"
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2012.04221"
    personalized: ClassVar[bool] = True
    result_in_client_states: ClassVar[bool] = True
    client_state_text: ClassVar[str] = "its own model"
    name: Literal["ditto"] = "ditto"
    lam: float = Field(0.1, ge=0)  # lambda, strength of the proximal term
    epochs: NonNegativeInt = 0  # for v_k; 0: the study's local work
    personal_lr: PositiveFloat | None = None  # learning rate of v_k; None: the round's

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
        update = make_update(w, global_result, work=global_result.work + personal_result.work)
        return update, {"weights": personal_result.weights, "stats": personal_result.norm_stats}

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        return stored_model(client_state, message)
        yield  # makes this a generator; it has no job
