"""pFedMe (Dinh et al. 2020, Algorithm 1): personalized models by Moreau envelopes of the local losses.

    client k  R times, from w_k = w_t:  theta_k ~ argmin F_k(theta) + (lambda/2) |theta - w_k|^2, by K steps
                                        w_k <- w_k - eta lambda (w_k - theta_k)
    server    w_{t+1} = (1 - beta) w_t + beta mean of w_k

theta_k is the personalized model. With R = 1 and eta = 1/lambda the global model is FedProx's with mu = lambda. Ours:
every step on theta samples a batch, where the paper uses one batch for all K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId
from pipeline.protocol.tasks import LocalWork, TrainJob, proximal_term, run_training
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    ModelTask,
    Strategy,
    StrategyContext,
    make_update,
    received_model,
    stored_model,
)


class PFedMe(Strategy):
    description: ClassVar[str] = (
        "besides the global model every site trains its own model, which stays close to the global one"
    )
    paper: ClassVar[str] = "Dinh et al. 2020, arXiv 2006.08848"
    personalized: ClassVar[bool] = True
    result_in_client_states: ClassVar[bool] = True
    client_state_text: ClassVar[str] = "its own model"
    name: Literal["pfedme"] = "pfedme"
    lam: float = Field(15.0, gt=0)  # lambda, strength of the proximal term
    eta: PositiveFloat = 0.005  # learning rate of w_k: in a local round it moves by eta * lambda of the way to theta_k
    beta: float = Field(1.0, gt=0)  # share of the way to the clients' mean that the server moves
    local_rounds: PositiveInt = 20  # R
    inner_steps: PositiveInt = 5  # K
    personal_lr: PositiveFloat | None = None  # learning rate of theta_k; None: the round's

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        return GlobalModelState(state.weights + self.beta * aggregate.mean("delta"), aggregate.mean("stats"))

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        received = received_model(message)
        w, theta, norm_stats = received.weights, received.weights, received.norm_stats
        total_work: LocalWork | None = None
        loss, delta = 0.0, w - w
        for _ in range(self.local_rounds):
            job = TrainJob(
                theta, norm_stats, steps=self.inner_steps, regularizer=proximal_term(w, self.lam), lr=self.personal_lr
            )
            result = yield from run_training(job)
            theta, norm_stats = result.weights, result.norm_stats
            total_work = result.work if total_work is None else total_work + result.work
            loss += result.loss / self.local_rounds
            delta = delta + self.eta * self.lam * (theta - w)
            w = received.weights + delta
        update = make_update(received.weights, result, delta=delta, loss=loss, work=total_work)
        return update, {"weights": theta, "stats": norm_stats}

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        return stored_model(client_state, message)
        yield  # makes this a generator; it has no job
