"""FedPAQ (Reisizadeh et al. 2020, Algorithm 1): periodic averaging, partial participation, quantized deltas.

    client k  w_k = w_t after tau local steps;  sends Q(w_k - w_t)
    server    w_{t+1} = w_t + mean of Q(w_k - w_t)  over the sampled clients

A preset: FedAvg with `tau` steps as local work, and the codec `qsgd` as Q. Partial participation is
`client_sampling.fraction`; `compression.uplink` replaces the codec.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from pipeline.codecs.base import CodecChain
from pipeline.codecs.qsgd import Qsgd
from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import Strategy, StrategyContext, make_update


class FedPaq(Strategy):
    description: ClassVar[str] = "like plain averaging, but the changes are rounded before they are sent"
    paper: ClassVar[str] = "Reisizadeh et al. 2020, arXiv 1909.13014"
    name: Literal["fedpaq"] = "fedpaq"
    tau: PositiveInt = 10  # local steps a round, instead of local.epochs or local.steps
    bits: Literal[1, 2, 4, 8] = 4  # of the quantizer Q, per number

    @property
    def default_codec(self) -> CodecChain:
        return (Qsgd(bits=self.bits),)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w = message.vectors["weights"]
        result = yield from run_training(TrainJob(w, message.vectors["stats"], steps=self.tau))
        return make_update(w, result), client_state
