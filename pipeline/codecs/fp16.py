"""Half precision: two bytes a number, 11 significant bits; magnitudes below about 6e-8 become zero. Of no paper."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from pipeline.codecs.base import Codec, Layout, Parts, part
from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Vec

_LARGEST = torch.finfo(torch.float16).max


class Fp16(Codec):
    about: ClassVar[str] = "half precision, two bytes a number"
    downward: ClassVar[bool] = True
    name: Literal["fp16"] = "fp16"

    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, None]:
        if len(x) and max(map(abs, torch.stack(x.aminmax()).tolist())) > _LARGEST:
            raise BadMessage(f"fp16 holds no magnitude beyond {_LARGEST:.0f}; use qsgd, or lower local.lr")
        return {"halves": x.half()}, None

    def left(self, n: int, layout: Layout) -> None:
        return None

    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        return part(parts, "halves", torch.float16, n).float()
