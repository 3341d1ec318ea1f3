"""Renders a field of view: cells are scattered, drawn into layers of dye, and imaged by a simulated microscope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.artefacts import draw_artifacts
from sites.data.renderer.cell_appearance import RADIUS_PIXELS, sample_appearance
from sites.data.renderer.cell_outlines import CELL_TYPES, sample_outline
from sites.data.renderer.patients import SCHISTOCYTE, PatientProfile, sample_patient
from sites.data.renderer.polygons import CellOutline
from sites.data.renderer.rasterize import AZURE_LAYER, HEMOGLOBIN_LAYER, add_patch, render_cell
from sites.data.renderer.stain_optics import develop_image, perturb_stain

FIELD_WIDTH, FIELD_HEIGHT = 640, 480
BORDER_PIXELS = 72  # rendered beyond the border, so that cells may cross it
CROP_PIXELS = 72  # side of the crop around a label point
CENTER_INSET_PIXELS = 13  # the centres of labelled cells are at least this far inside


@dataclass(frozen=True)
class RenderedField:
    """A rendered image and its n labelled cells. The image also shows unlabelled ones, as real fields do."""

    image: np.ndarray  # (480, 640, 3) uint8 RGB
    points: np.ndarray  # (n, 2) int: x, y as an annotator would click, some pixels off the centre
    types: np.ndarray  # (n,) int: index into CELL_TYPES
    boxes: np.ndarray  # (n, 4) float: x0, y0, x1, y1 of the outlines
    outlines: np.ndarray  # (n, vertices, 2) float: x, y


def render_field(
    seed: int | Generator,
    patient: PatientProfile | None = None,
    types: Sequence[int] | np.ndarray | None = None,
    num_unlabeled: int = 12,
) -> RenderedField:
    """A field with labelled cells of these `types` (indices into CELL_TYPES; default: 40 to 98 cells sampled from the
    patient's types), and `num_unlabeled` unlabelled cells."""
    rng = np.random.default_rng(seed)
    patient = patient or sample_patient(rng)
    if types is None:
        types = sample_types(patient, int(rng.integers(40, 99)), rng)
    num_labeled = len(types)
    cell_types = np.concatenate([np.asarray(types, int), sample_types(patient, num_unlabeled, rng)])
    outlines = np.stack(
        [_sample_cell_outline(CELL_TYPES[cell_type], patient, rng) for cell_type in cell_types]
    )  # (cells, vertices, 2)
    positions = scatter_cells(np.abs(outlines).max(1).mean(1), num_labeled, rng)
    layers = np.zeros((3, FIELD_HEIGHT + 2 * BORDER_PIXELS, FIELD_WIDTH + 2 * BORDER_PIXELS), np.float32)
    stain = perturb_stain(patient.stain, rng)
    for cell_type, shape, position in zip(cell_types, outlines, positions, strict=True):
        _draw_cell(layers, CELL_TYPES[cell_type], shape, position, rng)
    draw_artifacts(layers, rng)
    image = develop_image(layers[:, BORDER_PIXELS:-BORDER_PIXELS, BORDER_PIXELS:-BORDER_PIXELS], stain, rng)
    placed_outlines = outlines[:num_labeled] + positions[:num_labeled, None]
    boxes = np.concatenate([placed_outlines.min(1), placed_outlines.max(1)], 1)
    points = np.round((boxes[:, :2] + boxes[:, 2:]) / 2 + rng.normal(0, 2.7, (num_labeled, 2))).astype(int)
    points = np.clip(points, 0, (FIELD_WIDTH - 1, FIELD_HEIGHT - 1))
    return RenderedField(image, points, cell_types[:num_labeled], boxes, placed_outlines)


def crop_rendered_cells(field: RenderedField, size: int = CROP_PIXELS) -> np.ndarray:
    """(n, size, size, 3) uint8: crops around the label points, mirrored at the border of the image."""
    half = CROP_PIXELS // 2
    padded = cv2.copyMakeBorder(field.image, half, half, half, half, cv2.BORDER_REFLECT_101)
    crops = np.empty((len(field.points), size, size, 3), np.uint8)
    for i, (x, y) in enumerate(field.points):
        cell = padded[y : y + CROP_PIXELS, x : x + CROP_PIXELS]
        crops[i] = cell if size == CROP_PIXELS else cv2.resize(cell, (size, size), interpolation=cv2.INTER_AREA)
    return crops


def sample_types(patient: PatientProfile, count: int, rng: Generator) -> np.ndarray:
    """(count,) types in the proportions of the patient's blood; schistocytes have a weight of at most 0.15."""
    mix = patient.type_mix.copy()
    mix[SCHISTOCYTE] = min(0.1 * patient.schistocyte_weight, 0.15)
    return rng.choice(len(CELL_TYPES), count, p=mix / mix.sum())


def scatter_cells(radii: np.ndarray, num_inside: int, rng: Generator) -> np.ndarray:
    """(n, 2) positions: cells push each other apart, but some pairs touch or overlap. The centres of the first
    `num_inside` cells are inside the image, those of the others at most 18 pixels outside."""
    count = len(radii)
    margin = np.where(np.arange(count) < num_inside, -float(CENTER_INSET_PIXELS), 18.0)
    max_x, max_y = FIELD_WIDTH + margin, FIELD_HEIGHT + margin
    # beta distributions: denser in one region, as films are
    (x_alpha, x_beta), (y_alpha, y_beta) = rng.uniform(1.0, 2.1, (2, 2))
    x = -margin + rng.beta(x_alpha, x_beta, count) * (max_x + margin)
    y = -margin + rng.beta(y_alpha, y_beta, count) * (max_y + margin)
    positions = x + 1j * y
    spacing = np.where(rng.random((count, count)) < 0.11, rng.uniform(0.5, 0.95, (count, count)), 1.05)
    min_distance = (radii[:, None] + radii) * np.minimum(spacing, spacing.T)
    np.fill_diagonal(min_distance, 0)
    for _ in range(12):
        separation = positions[:, None] - positions
        distance = np.abs(separation) + 1e-3
        positions = positions + (separation * (np.maximum(min_distance - distance, 0) * 0.4 / distance)).sum(1)
        positions = np.clip(positions.real, -margin, max_x) + 1j * np.clip(positions.imag, -margin, max_y)
    return np.stack([positions.real, positions.imag], 1)


def _sample_cell_outline(cell_type: str, patient: PatientProfile, rng: Generator) -> CellOutline:
    median, spread = RADIUS_PIXELS[cell_type]
    return sample_outline(cell_type, rng) * (
        median * patient.cell_size_factor * math.exp(spread * rng.standard_normal())
    )


def _draw_cell(layers: np.ndarray, cell_type: str, shape: CellOutline, position: np.ndarray, rng: Generator) -> None:
    x, y = position.tolist()
    left, top = math.floor(x), math.floor(y)
    thickness = render_cell(shape, sample_appearance(cell_type, rng), (x - left, y - top), rng)
    thickness *= math.exp(0.09 * rng.standard_normal())
    add_patch(layers, thickness, left + BORDER_PIXELS, top + BORDER_PIXELS, HEMOGLOBIN_LAYER)
    if rng.random() < 0.2:  # polychromasia: young cells also take up azure dye
        add_patch(layers, thickness * (0.08 * rng.random()), left + BORDER_PIXELS, top + BORDER_PIXELS, AZURE_LAYER)
