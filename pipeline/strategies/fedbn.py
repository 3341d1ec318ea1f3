"""FedBN (Li et al. 2021, Algorithm 1): normalisation layers, with their statistics, stay at the site.

For sites that see differently: another stain, lamp or camera moves what normalisation undoes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pipeline.core.parameters import ParameterRole, ParameterSpec
from pipeline.strategies._partial_sharing import PartialSharingStrategy
from pipeline.strategies.base import LocalTrainingConfig


class FedBn(PartialSharingStrategy):
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2102.07623"
    client_state_text: ClassVar[str] = "its normalisation layers and statistics"
    name: Literal["fedbn"] = "fedbn"
    personal_roles: tuple[ParameterRole, ...] = ("norm",)

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        if "norm" in self.personal_roles and "norm" not in spec.roles:
            yield "fedbn keeps normalisation layers at the sites, but this model has none; use cnn28 or cnn72, or fedavg"
