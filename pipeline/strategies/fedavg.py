"""FedAvg (McMahan et al. 2017, Algorithm 1): sites train, the coordinator adds the weighted mean of what moved.

Both halves are the defaults of `Strategy`: `round` is the server's part, `train` is ClientUpdate.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.strategies.base import Strategy


class FedAvg(Strategy):
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    name: Literal["fedavg"] = "fedavg"
