"""FedPAQ (Reisizadeh et al. 2020, Algorithm 1): tau local steps, then the quantised difference; some sites a round.

A preset: FedAvg, `tau` steps instead of the study's local work, and the codec `qsgd` on the way up. How many sites take
part is `client_sampling.fraction`; `compression.uplink` overrides the codec.
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
    paper: ClassVar[str] = "Reisizadeh et al. 2020, arXiv 1909.13014"
    name: Literal["fedpaq"] = "fedpaq"
    tau: PositiveInt = 10
    bits: Literal[1, 2, 4, 8] = 4

    @property
    def default_codec(self) -> CodecChain:
        return (Qsgd(bits=self.bits),)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w = message.vectors["weights"]
        result = yield from run_training(TrainJob(w, message.vectors["stats"], steps=self.tau))
        return make_update(w, result), client_state
