"""Plans the patients, their fields and the cell types in each field, before anything is rendered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sites.data.renderer.cell_outlines import CELL_TYPES
from sites.data.renderer.patients import SCHISTOCYTE, PatientProfile, sample_patient

PLAN_SEED_SALT = 0x5EA2
CELLS_PER_FIELD = 60  # labelled cells, approximately


@dataclass(frozen=True)
class FieldPlan:
    """One field to be rendered."""

    patient_index: int
    profile: PatientProfile
    types: np.ndarray  # (n,) types of the labelled cells
    num_unlabeled: int
    seed: tuple[int, ...]


def plan_fields(num_cells: int, num_patients: int, schistocyte_fraction: float, seed: int) -> list[FieldPlan]:
    """Labelled cells are spread evenly over patients, schistocytes according to the patients' diseases."""
    profiles = [sample_patient(np.random.default_rng([seed, PLAN_SEED_SALT, p])) for p in range(num_patients)]
    counts = np.full(num_patients, num_cells // num_patients) + (np.arange(num_patients) < num_cells % num_patients)
    schistocyte_counts = apportion_total(
        round(schistocyte_fraction * num_cells), np.array([p.schistocyte_weight for p in profiles]), counts
    )
    field_plans = []
    for patient_index, profile in enumerate(profiles):
        rng = np.random.default_rng([seed, PLAN_SEED_SALT, patient_index, 0])
        count = counts[patient_index]
        types = rng.choice(len(CELL_TYPES), count, p=profile.type_mix)
        types[rng.permutation(count)[: schistocyte_counts[patient_index]]] = SCHISTOCYTE
        fields = np.array_split(types, max(1, round(count / CELLS_PER_FIELD)))
        for field_index, field_types in enumerate(fields):
            num_unlabeled = int(rng.integers(6, 16)) + max(0, int(rng.integers(25, 60)) - len(field_types))
            field_seed = (seed, PLAN_SEED_SALT, patient_index, 1 + field_index)
            field_plans.append(FieldPlan(patient_index, profile, field_types, num_unlabeled, field_seed))
    return field_plans


def apportion_total(total: int, weights: np.ndarray, max_counts: np.ndarray) -> np.ndarray:
    """(n,) integers that sum to `total`, none above its maximum, nearly in proportion to weights * max_counts."""
    low, high = 0.0, float(1 / weights.min())
    for _ in range(60):  # bisection for the scale at which the sum is right
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * weights, 1) @ max_counts < total else (low, scale)
    quotas = np.minimum(high * weights, 1) * max_counts
    counts: np.ndarray = np.floor(quotas + 1e-9).astype(int)
    order = np.argsort(counts - quotas, kind="stable")  # largest remainder first
    counts[order[: total - counts.sum()]] += 1
    return counts
