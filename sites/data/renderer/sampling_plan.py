"""Who gets which cells: patients, their fields and the types in each, before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sites.data.renderer.cell_outlines import TYPES
from sites.data.renderer.patients import SCHISTOCYTE, Patient, draw_patient

SALT = 0x5EA2
FULL = 60  # labelled cells in a field, about


@dataclass(frozen=True)
class Sitting:
    """One field to be rendered."""

    patient: int
    who: Patient
    types: np.ndarray  # (n,) of the labelled cells
    others: int  # unlabelled cells
    seed: tuple[int, ...]


def plan(cells: int, patients: int, schistocytes: float, seed: int) -> list[Sitting]:
    people = [draw_patient(np.random.default_rng([seed, SALT, p])) for p in range(patients)]
    counts = np.full(patients, cells // patients) + (np.arange(patients) < cells % patients)
    fragments = shared_out(round(schistocytes * cells), np.array([p.fragments for p in people]), counts)
    sittings = []
    for p, who in enumerate(people):
        rng = np.random.default_rng([seed, SALT, p, 0])
        types = rng.choice(len(TYPES), counts[p], p=who.mix)
        types[rng.permutation(counts[p])[: fragments[p]]] = SCHISTOCYTE
        fields = np.array_split(types, max(1, round(counts[p] / FULL)))
        for f, part in enumerate(fields):
            others = int(rng.integers(6, 16)) + max(0, int(rng.integers(25, 60)) - len(part))
            sittings.append(Sitting(p, who, part, others, (seed, SALT, p, 1 + f)))
    return sittings


def shared_out(total: int, weights: np.ndarray, most: np.ndarray) -> np.ndarray:
    """(n,) whole numbers whose sum is `total`, as good as in proportion to weights * most, none above `most`."""
    low, high = 0.0, float(1 / weights.min())
    for _ in range(60):  # the share at which the sum is right
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * weights, 1) @ most < total else (low, scale)
    wanted = np.minimum(high * weights, 1) * most
    given: np.ndarray = np.floor(wanted + 1e-9).astype(int)
    order = np.argsort(given - wanted, kind="stable")  # largest remainder first
    given[order[: total - given.sum()]] += 1
    return given
