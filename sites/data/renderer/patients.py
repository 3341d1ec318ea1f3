"""Patients: the disease determines the mix of cell types; cell size and staining differ between patients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from sites.data.renderer.cell_outlines import CELL_TYPES
from sites.data.renderer.stain_optics import StainOptics, sample_stain

SCHISTOCYTE = CELL_TYPES.index("schistocyte")


@dataclass(frozen=True)
class DiseaseProfile:
    weight: float  # relative frequency among patients
    schistocyte_weight: float  # relative frequency of schistocytes
    type_mix: dict[str, float]  # relative frequencies of the other types; those not listed have RARE_TYPE_WEIGHT


DISEASES = {
    "healthy": DiseaseProfile(
        0.18, 0.05, {"normal": 75, "ovalocyte": 6, "microcyte": 5, "macrocyte": 4, "spherocyte": 4}
    ),
    "ttp": DiseaseProfile(
        0.28,
        1.0,
        {"normal": 45, "spherocyte": 14, "microcyte": 10, "ovalocyte": 9, "burr": 7, "target": 6, "macrocyte": 5},
    ),
    "thalassaemia": DiseaseProfile(
        0.14,
        0.45,
        {"target": 30, "hypochromia": 20, "microcyte": 12, "normal": 12, "teardrop": 8, "ovalocyte": 10, "burr": 3},
    ),
    "spherocytosis": DiseaseProfile(0.10, 0.15, {"spherocyte": 60, "normal": 22, "microcyte": 8, "macrocyte": 3}),
    "burr artefact": DiseaseProfile(0.06, 0.15, {"burr": 55, "normal": 25, "spherocyte": 8, "hypochromia": 4}),
    "stomatocytosis": DiseaseProfile(0.09, 0.15, {"stomatocyte": 55, "normal": 25, "ovalocyte": 8, "target": 4}),
    "ovalocytosis": DiseaseProfile(0.06, 0.15, {"ovalocyte": 45, "elliptocyte": 15, "normal": 25, "stomatocyte": 5}),
    "iron deficiency": DiseaseProfile(
        0.05, 0.25, {"hypochromia": 40, "microcyte": 22, "elliptocyte": 10, "normal": 12, "teardrop": 5, "target": 5}
    ),
    "myelofibrosis": DiseaseProfile(
        0.04, 0.4, {"teardrop": 40, "normal": 22, "macrocyte": 12, "ovalocyte": 12, "target": 4}
    ),
}
RARE_TYPE_WEIGHT = 0.7  # of a type that a disease does not list


@dataclass(frozen=True)
class PatientProfile:
    disease: str
    type_mix: np.ndarray  # (12,) fractions of the types; 0 for schistocytes
    schistocyte_weight: float  # relative share of the schistocytes of all patients
    cell_size_factor: float  # compared with the average patient
    stain: StainOptics


def sample_patient(rng: Generator) -> PatientProfile:
    names = list(DISEASES)
    weights = np.array([d.weight for d in DISEASES.values()])
    name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    disease = DISEASES[name]
    type_mix = np.array([disease.type_mix.get(cell_type, RARE_TYPE_WEIGHT) for cell_type in CELL_TYPES])
    type_mix[SCHISTOCYTE] = 0
    type_mix = type_mix * rng.lognormal(0, 0.35, len(CELL_TYPES))
    schistocyte_weight = disease.schistocyte_weight * float(rng.lognormal(0, 0.4))
    return PatientProfile(
        name, type_mix / type_mix.sum(), schistocyte_weight, float(rng.lognormal(0, 0.05)), sample_stain(rng)
    )
