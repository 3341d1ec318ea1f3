"""Seeds for shuffling and augmentation: a hash of (study seed, site, round, job, ...), equal for every trainer.

Never use them where a privacy proof needs secret randomness: everyone who has the study can derive them.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: object) -> int:
    """63 bits of a hash of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seeded_generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))


def seeded_uniform(*parts: object) -> float:
    """One number in [0, 1)."""
    return derive_seed(*parts) / 2**63
