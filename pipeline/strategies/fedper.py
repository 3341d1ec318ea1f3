"""FedPer (Arivazhagan et al. 2019, Algorithms 1 and 2): the last layer stays at the site, the body is averaged.

With keeps = [] it is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.core.parameters import ParameterRole
from pipeline.strategies._partial_sharing import PartialSharingStrategy


class FedPer(PartialSharingStrategy):
    paper: ClassVar[str] = "Arivazhagan et al. 2019, arXiv 1912.00818"
    client_state_text: ClassVar[str] = "its head"
    name: Literal["fedper"] = "fedper"
    personal_roles: tuple[ParameterRole, ...] = ("head",)
