"""Patients: a disease is a mix of cell types; size and staining differ from one patient to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from sites.data.renderer.cell_outlines import TYPES
from sites.data.renderer.stain_optics import Stain, draw_stain

SCHISTOCYTE = TYPES.index("schistocyte")


@dataclass(frozen=True)
class Disease:
    weight: float  # of its patients among all
    fragments: float  # schistocytes, compared with other diseases
    mix: dict[str, float]  # of all other types; what is not named is rare


DISEASES = {
    "healthy": Disease(0.18, 0.05, {"normal": 75, "ovalocyte": 6, "microcyte": 5, "macrocyte": 4, "spherocyte": 4}),
    "ttp": Disease(
        0.28,
        1.0,
        {"normal": 45, "spherocyte": 14, "microcyte": 10, "ovalocyte": 9, "burr": 7, "target": 6, "macrocyte": 5},
    ),
    "thalassaemia": Disease(
        0.14,
        0.45,
        {"target": 30, "hypochromia": 20, "microcyte": 12, "normal": 12, "teardrop": 8, "ovalocyte": 10, "burr": 3},
    ),
    "spherocytosis": Disease(0.10, 0.15, {"spherocyte": 60, "normal": 22, "microcyte": 8, "macrocyte": 3}),
    "burr artefact": Disease(0.06, 0.15, {"burr": 55, "normal": 25, "spherocyte": 8, "hypochromia": 4}),
    "stomatocytosis": Disease(0.09, 0.15, {"stomatocyte": 55, "normal": 25, "ovalocyte": 8, "target": 4}),
    "ovalocytosis": Disease(0.06, 0.15, {"ovalocyte": 45, "elliptocyte": 15, "normal": 25, "stomatocyte": 5}),
    "iron deficiency": Disease(
        0.05, 0.25, {"hypochromia": 40, "microcyte": 22, "elliptocyte": 10, "normal": 12, "teardrop": 5, "target": 5}
    ),
    "myelofibrosis": Disease(0.04, 0.4, {"teardrop": 40, "normal": 22, "macrocyte": 12, "ovalocyte": 12, "target": 4}),
}
RARE = 0.7  # weight of a type that a disease does not name


@dataclass(frozen=True)
class Patient:
    disease: str
    mix: np.ndarray  # (12,) shares of the types; without schistocytes
    fragments: float  # weight when schistocytes are shared out
    size: float  # of the cells, compared with the average
    stain: Stain


def draw_patient(rng: Generator) -> Patient:
    names = list(DISEASES)
    weights = np.array([d.weight for d in DISEASES.values()])
    name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    disease = DISEASES[name]
    mix = np.array([disease.mix.get(kind, RARE) for kind in TYPES])
    mix[SCHISTOCYTE] = 0
    mix = mix * rng.lognormal(0, 0.35, len(TYPES))
    fragments = disease.fragments * float(rng.lognormal(0, 0.4))
    return Patient(name, mix / mix.sum(), fragments, float(rng.lognormal(0, 0.05)), draw_stain(rng))
