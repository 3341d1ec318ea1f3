"""Half precision: two bytes per number, 11 significant bits; magnitudes below about 6e-8 become zero."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from pipeline.codecs.base import Codec, EncodedParts, VectorLayout, require_part
from pipeline.core.errors import MessageError
from pipeline.core.parameters import ParamVector

_MAX_FP16 = torch.finfo(torch.float16).max


class Fp16Codec(Codec):
    description: ClassVar[str] = "half precision, two bytes a number"
    supports_downlink: ClassVar[bool] = True
    name: Literal["fp16"] = "fp16"

    def encode(self, x: ParamVector, layout: VectorLayout, generator: torch.Generator) -> tuple[EncodedParts, None]:
        if len(x) and max(map(abs, torch.stack(x.aminmax()).tolist())) > _MAX_FP16:
            raise MessageError(f"fp16 cannot hold magnitudes above {_MAX_FP16:.0f}; use qsgd, or lower local.lr")
        return {"halves": x.half()}, None

    def remaining_length(self, n: int, layout: VectorLayout) -> None:
        return None

    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        return require_part(parts, "halves", torch.float16, n).float()
