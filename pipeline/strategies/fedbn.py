"""FedBN (Li et al. 2021, Algorithm 1): normalization layers and their statistics stay at the site.

    client k  trains the full model, sends all but its normalization layers
    server    weighted mean of all but the normalization layers

For feature skew: another stain, lamp or camera shifts and scales the features, which normalization undoes. With
personal_roles = [] it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pipeline.core.parameters import ParameterRole, ParameterSpec
from pipeline.strategies._partial_sharing import PartialSharingStrategy
from pipeline.strategies.base import LocalTrainingConfig


class FedBn(PartialSharingStrategy):
    description: ClassVar[str] = (
        "the global model is averaged, except for the layers that adapt to a site's images, which stay at the site"
    )
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2102.07623"
    client_state_text: ClassVar[str] = "its normalization layers and their statistics"
    name: Literal["fedbn"] = "fedbn"
    personal_roles: tuple[ParameterRole, ...] = ("norm",)  # roles that stay at the site

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        if "norm" in self.personal_roles and "norm" not in spec.roles:
            yield "fedbn keeps normalization layers at the sites, but this model has none; use cnn28 or cnn72, or fedavg"
