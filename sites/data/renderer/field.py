"""A whole field of view: cells are scattered, drawn into layers of dye and seen through the microscope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.artefacts import clutter
from sites.data.renderer.cell_appearance import RADIUS, look
from sites.data.renderer.cell_outlines import TYPES, outline
from sites.data.renderer.patients import SCHISTOCYTE, Patient, draw_patient
from sites.data.renderer.polygons import Outline
from sites.data.renderer.rasterize import AZURE, HAEMOGLOBIN, cell_patch, stamp
from sites.data.renderer.stain_optics import develop, nudged

WIDTH, HEIGHT = 640, 480
PAD = 72  # drawn beyond the border, so that cells may cross it
WINDOW = 72  # pixels about a label point that make a cell's picture
INSET = 13  # labelled cells have their middle so far inside


@dataclass(frozen=True)
class Field:
    """What one photograph shows. The first `len(points)` cells are labelled; others may lie about, as in real ones."""

    image: np.ndarray  # (480, 640, 3) uint8 RGB
    points: np.ndarray  # (n, 2) int: x, y as an annotator set them, some pixels off the middle
    types: np.ndarray  # (n,) int: index into TYPES
    boxes: np.ndarray  # (n, 4) float: x0, y0, x1, y1 of the outlines
    outlines: np.ndarray  # (n, vertices, 2) float: x, y


def render_field(
    seed: int | Generator,
    patient: Patient | None = None,
    types: Sequence[int] | np.ndarray | None = None,
    others: int = 12,
) -> Field:
    """A field with labelled cells of these `types` (default: 40 to 98 of the patient's) and some unlabelled `others`."""
    rng = np.random.default_rng(seed)
    patient = patient or draw_patient(rng)
    if types is None:
        types = draw_types(patient, int(rng.integers(40, 99)), rng)
    labelled = len(types)
    kinds = np.concatenate([np.asarray(types, int), draw_types(patient, others, rng)])
    outlines = np.stack([_outline(TYPES[kind], patient, rng) for kind in kinds])  # (cells, vertices, 2)
    places = scatter(np.abs(outlines).max(1).mean(1), labelled, rng)
    layers = np.zeros((3, HEIGHT + 2 * PAD, WIDTH + 2 * PAD), np.float32)
    stain = nudged(patient.stain, rng)
    for kind, shape, place in zip(kinds, outlines, places, strict=True):
        _draw(layers, TYPES[kind], shape, place, rng)
    clutter(layers, rng)
    image = develop(layers[:, PAD:-PAD, PAD:-PAD], stain, rng)
    placed = outlines[:labelled] + places[:labelled, None]
    boxes = np.concatenate([placed.min(1), placed.max(1)], 1)
    points = np.round((boxes[:, :2] + boxes[:, 2:]) / 2 + rng.normal(0, 2.7, (labelled, 2))).astype(int)
    points = np.clip(points, 0, (WIDTH - 1, HEIGHT - 1))
    return Field(image, points, kinds[:labelled], boxes, placed)


def crops(field: Field, size: int = WINDOW) -> np.ndarray:
    """(n, size, size, 3) uint8: windows about the label points, mirrored at the border."""
    half = WINDOW // 2
    padded = cv2.copyMakeBorder(field.image, half, half, half, half, cv2.BORDER_REFLECT_101)
    cut = np.empty((len(field.points), size, size, 3), np.uint8)
    for i, (x, y) in enumerate(field.points):
        cell = padded[y : y + WINDOW, x : x + WINDOW]
        cut[i] = cell if size == WINDOW else cv2.resize(cell, (size, size), interpolation=cv2.INTER_AREA)
    return cut


def draw_types(patient: Patient, count: int, rng: Generator) -> np.ndarray:
    """As the patient's blood has them: schistocytes too, up to 15 in 100."""
    mix = patient.mix.copy()
    mix[SCHISTOCYTE] = min(0.1 * patient.fragments, 0.15)
    return rng.choice(len(TYPES), count, p=mix / mix.sum())


def scatter(reach: np.ndarray, inside: int, rng: Generator) -> np.ndarray:
    """(n, 2) places: cells push each other away, but some pairs stick or overlap; the first `inside` stay in view."""
    count = len(reach)
    beyond = np.where(np.arange(count) < inside, -float(INSET), 18.0)
    wide, high = WIDTH + beyond, HEIGHT + beyond
    (a, b), (c, d) = rng.uniform(1.0, 2.1, (2, 2))  # denser at some place, as films are
    place = -beyond + rng.beta(a, b, count) * (wide + beyond) + 1j * (-beyond + rng.beta(c, d, count) * (high + beyond))
    loose = np.where(rng.random((count, count)) < 0.11, rng.uniform(0.5, 0.95, (count, count)), 1.05)
    wanted = (reach[:, None] + reach) * np.minimum(loose, loose.T)
    np.fill_diagonal(wanted, 0)
    for _ in range(12):
        apart = place[:, None] - place
        distance = np.abs(apart) + 1e-3
        place = place + (apart * (np.maximum(wanted - distance, 0) * 0.4 / distance)).sum(1)
        place = np.clip(place.real, -beyond, wide) + 1j * np.clip(place.imag, -beyond, high)
    return np.stack([place.real, place.imag], 1)


def _outline(kind: str, patient: Patient, rng: Generator) -> Outline:
    median, spread = RADIUS[kind]
    return outline(kind, rng) * (median * patient.size * math.exp(spread * rng.standard_normal()))


def _draw(layers: np.ndarray, kind: str, shape: Outline, place: np.ndarray, rng: Generator) -> None:
    x, y = place.tolist()
    left, top = math.floor(x), math.floor(y)
    thick = cell_patch(shape, look(kind, rng), (x - left, y - top), rng)
    thick *= math.exp(0.09 * rng.standard_normal())
    stamp(layers, thick, left + PAD, top + PAD, HAEMOGLOBIN)
    if rng.random() < 0.2:  # young cells take up some blue
        stamp(layers, thick * (0.08 * rng.random()), left + PAD, top + PAD, AZURE)
