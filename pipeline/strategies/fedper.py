"""FedPer (Arivazhagan et al. 2019, Algorithms 1 and 2): the head stays at the site, the body is averaged.

    client k  trains (W_B, W_P_k) together, sends W_B
    server    W_B <- weighted mean of the clients' W_B

W_B are the base layers, W_P_k the client's own personalization layers. With personal_roles = [] it is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.core.parameters import ParameterRole
from pipeline.strategies._partial_sharing import PartialSharingStrategy


class FedPer(PartialSharingStrategy):
    description: ClassVar[str] = "the global model is averaged, except for its last layer, which stays at the site"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, arXiv 1912.00818"
    client_state_text: ClassVar[str] = "its head"
    name: Literal["fedper"] = "fedper"
    personal_roles: tuple[ParameterRole, ...] = ("head",)  # W_P: roles that stay at the site
