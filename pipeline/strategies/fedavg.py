"""FedAvg (McMahan et al. 2017, Algorithm 1): clients train locally, the coordinator averages their models.

    client k  w_k = w_t after E local epochs of SGD;  delta_k = w_k - w_t
    server    w_{t+1} = w_t + sum_k (n_k / n) delta_k  over the sampled clients

Both halves are the defaults of `Strategy`: `run_round` is the server's loop, `client_train` is ClientUpdate. It has no
settings of its own: E, B and eta are `[local]`, C is `client_sampling.fraction`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.strategies.base import Strategy


class FedAvg(Strategy):
    description: ClassVar[str] = (
        "every site trains the global model on its own images, and the coordinator averages the changes"
    )
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    name: Literal["fedavg"] = "fedavg"
