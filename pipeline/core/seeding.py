"""Seeds for shuffling and augmentation: a hash of (study, site, turn, nth job, ...), so every trainer agrees.

Nothing that a privacy proof treats as secret may come from here: anyone who holds the study can derive it.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts))


def uniform(*parts: object) -> float:
    return seed_of(*parts) / 2**63
