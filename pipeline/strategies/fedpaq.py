"""FedPAQ (Reisizadeh et al. 2020, Algorithm 1): tau local steps, then the quantised difference; some sites a round.

A preset: FedAvg, `tau` steps instead of the study's local work, and the codec `qsgd` on the way up. How many sites take
part is `selection.fraction`; `codec.up` overrides the codec.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from pipeline.codecs.base import Chain
from pipeline.codecs.qsgd import Qsgd
from pipeline.protocol.messages import Flow, Memory, Message
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies.base import Plan, Strategy, moved


class FedPaq(Strategy):
    paper: ClassVar[str] = "Reisizadeh et al. 2020, arXiv 1909.13014"
    name: Literal["fedpaq"] = "fedpaq"
    tau: PositiveInt = 10
    bits: Literal[1, 2, 4, 8] = 4

    @property
    def codec(self) -> Chain:
        return (Qsgd(bits=self.bits),)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w = message.vectors["weights"]
        fit = yield from fitted(Fit(w, message.vectors["stats"], steps=self.tau))
        return moved(w, fit), memory
