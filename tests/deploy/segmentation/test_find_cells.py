"""Segmentation of drawn fields with known counts, rendered fields with outlines, and real fields with label points."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.segmentation.classify import classify_regions, measure_region
from deploy.segmentation.find_cells import SegmentationResult, find_cells, find_regions
from sites.data.renderer.field import render_field
from sites.data.renderer.patients import sample_patient
from tests.support.markers import REAL_CELLS, needs_real_cells

BACKGROUND, RED, PURPLE = (200, 205, 200), (180, 120, 150), (110, 70, 160)
LABELLED = (26, 64, 240, 552, 560, 607, 720)


def draw_discs(*discs: tuple[int, int, int, tuple[int, int, int]], size: tuple[int, int] = (300, 400)) -> np.ndarray:
    image = np.full((*size, 3), BACKGROUND, np.uint8)
    for x, y, radius, colour in discs:
        cv2.circle(image, (x, y), radius, colour, -1, cv2.LINE_AA)
    return image


def count_kinds(found: SegmentationResult) -> dict[str, int]:
    names = [region.kind for region in found.regions]
    return {name: names.count(name) for name in sorted(set(names))}


ROW = tuple((60 * i + 50, 60 * j + 50, 20, RED) for i in range(5) for j in range(3))


def test_find_cells_counts_sizes_and_positions_of_drawn_discs() -> None:
    found = find_cells(draw_discs(*ROW))
    assert count_kinds(found) == {"red": 15}
    assert found.rbc_diameter_px == pytest.approx(41, abs=2)
    assert found.background_rgb == pytest.approx(BACKGROUND, abs=2)
    assert np.array([b.box for b in found.regions[:5]]) == pytest.approx(
        np.array([(x - 20, y - 20, x + 21, y + 21) for x, y, _, _ in ROW[::3]]), abs=2
    )
    assert found.regions[0].center == pytest.approx((50.5, 50.5), abs=1)
    assert found.regions[0].area_px == pytest.approx(np.pi * 20.5**2, rel=0.08)


def test_central_pallor_is_filled() -> None:
    image = draw_discs(*ROW)
    for x, y, _, _ in ROW:
        cv2.circle(image, (x, y), 11, BACKGROUND, -1, cv2.LINE_AA)
        cv2.circle(image, (x, y), 4, RED, -1, cv2.LINE_AA)  # a target cell
    found = find_cells(image)
    assert count_kinds(found) == {"red": 15}
    assert found.regions[0].area_px == pytest.approx(np.pi * 20.5**2, rel=0.12)


def test_touching_cells_are_split_and_gaps_are_not_cells() -> None:
    pair = ((120, 250, 20, RED), (150, 250, 20, RED))
    four = tuple((x, y, 20, RED) for x in (250, 289) for y in (240, 279))
    assert count_kinds(find_cells(draw_discs(*ROW, *pair, *four, size=(320, 400)))) == {"red": 21}


def test_classify_fragments_platelets_white_and_border_cells() -> None:
    others = ((60, 250, 11, RED), (130, 250, 5, PURPLE), (220, 250, 34, PURPLE), (399, 250, 20, RED))
    assert count_kinds(find_cells(draw_discs(*ROW, *others, size=(320, 400)))) == {
        "red": 16,
        "platelet": 1,
        "white": 1,
        "border": 1,
    }


def test_clump_of_platelets_is_not_a_fragment() -> None:
    """Platelets that together are as large as half a cell."""
    clump = tuple((120 + dx, 250 + dy, 6, (160, 110, 190)) for dx, dy in ((0, 0), (10, 2), (4, 11), (13, 12), (-6, 8)))
    assert count_kinds(find_cells(draw_discs(*ROW, *clump, size=(320, 400)))) == {"platelet": 1, "red": 15}


@pytest.mark.parametrize("factor", [0.4, 1, 2, 4])
def test_magnification_and_given_rbc_diameter(factor: float) -> None:
    image = cv2.resize(draw_discs(*ROW), None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
    assert count_kinds(find_cells(image)) == {"red": 15}
    given = find_cells(image, rbc_diameter_px=41 * factor)
    assert (count_kinds(given), given.rbc_diameter_px) == ({"red": 15}, 41 * factor)


def test_uneven_illumination_and_gray_image() -> None:
    illumination = np.linspace(0.5, 1.2, 400)[None, :, None] * np.linspace(1, 0.8, 300)[:, None, None]
    image = draw_discs(*ROW)
    assert count_kinds(find_cells((image * illumination).astype(np.uint8))) == {"red": 15}
    assert count_kinds(find_cells(np.repeat(image[..., 1:2], 3, 2))) == {"red": 15}


def test_sharpness_falls_with_blur() -> None:
    image = draw_discs(*ROW)
    assert find_cells(image).sharpness > 1.3 * find_cells(cv2.GaussianBlur(image, (0, 0), 4)).sharpness > 0


@pytest.mark.parametrize("shape", [(480, 640), (1, 1), (3, 200), (11, 11), (40, 40)])
def test_no_cells_in_empty_images(shape: tuple[int, int]) -> None:
    noise = np.random.default_rng(1).normal(170, 6, (*shape, 3)).astype(np.uint8)
    for image in (*(np.full((*shape, 3), level, np.uint8) for level in (0, 128, 255)), noise):
        assert count_kinds(find_cells(image)).get("red", 0) == 0


def test_noise_images_give_valid_boxes() -> None:
    rng = np.random.default_rng(2)
    for image in (rng.integers(0, 256, (200, 300, 3)), rng.integers(0, 256, (25, 25, 1)).repeat(3, 2)):
        for diameter in (None, 20.0):
            found = find_cells(image.astype(np.uint8), diameter)
            high, wide = image.shape[:2]
            assert all(0 <= b.box[0] < b.box[2] <= wide and 0 <= b.box[1] < b.box[3] <= high for b in found.regions)


def test_other_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8, red first"):
        find_cells(np.zeros((40, 40), np.uint8))


def label_cells(image: np.ndarray) -> np.ndarray:
    """(H, W): 0, or the label of the red or border cell there."""
    parts = find_regions(image)
    names, _ = classify_regions([measure_region(region, parts.od_image) for region in parts.regions], 36.0)
    labels = np.zeros(parts.od_image.signal.shape, np.int16)
    for number, (region, name) in enumerate(zip(parts.regions, names, strict=True), 1):
        h, w = region.mask.shape
        if name in ("red", "border"):
            labels[region.y : region.y + h, region.x : region.x + w][region.mask > 0] = number
    return np.asarray(cv2.resize(labels, image.shape[1::-1], interpolation=cv2.INTER_NEAREST))


def test_recall_and_overlap_on_rendered_fields() -> None:
    found = cells = 0
    overlaps = []
    for seed in range(4):
        field = render_field(seed)
        labels = label_cells(field.image)
        boxes = np.array([b.box for b in find_cells(field.image).regions if b.kind in ("red", "border")], float)
        limit = np.array([640, 480, 640, 480])
        for outline, box in zip(field.outlines, np.clip(field.boxes, 0, limit), strict=True):
            inside = cv2.fillPoly(np.zeros((480, 640), np.uint8), [np.round(outline).astype(np.int32)], 1) > 0
            counts = np.bincount(labels[inside], minlength=2)
            found += counts[1:].max() > 0.5 * inside.sum()
            sides = np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])
            both = np.clip(sides, 0, None).prod(1)
            either = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - both
            overlaps.append((both / either).max())
        cells += len(field.outlines)
    assert found >= 0.93 * cells
    assert np.median(overlaps) > 0.85


def tile_images(images: list[np.ndarray], wide: int) -> np.ndarray:
    """Tiles the images, `wide` per row."""
    return np.concatenate([np.concatenate(images[i : i + wide], 1) for i in range(0, len(images), wide)])


@pytest.mark.parametrize(("patient", "wide"), [(0, 2), (1, 3), (2, 4)])
def test_recall_on_large_rendered_fields(patient: int, wide: int) -> None:
    one = sample_patient(np.random.default_rng(patient))
    fields = [render_field(100 * patient + n, one) for n in range(wide * wide)]
    where = label_cells(tile_images([field.image for field in fields], wide))
    starts = [(640 * (n % wide), 480 * (n // wide)) for n in range(wide * wide)]
    points = np.concatenate([field.points + start for field, start in zip(fields, starts, strict=True)])
    assert np.count_nonzero(where[points[:, 1], points[:, 0]]) >= 0.9 * len(points)


def test_half_empty_large_field() -> None:
    image = np.concatenate([draw_discs(*ROW, size=(240, 320))] * 5, 1)
    illumination = np.linspace(1.1, 0.8, 1600)[None, :, None] + np.random.default_rng(3).normal(
        0, 0.01, (1200, 1600, 1)
    )
    field = np.concatenate([image, image, np.full((720, 1600, 3), BACKGROUND, np.uint8)]) * illumination
    found = find_cells(field.astype(np.uint8))
    assert count_kinds(found) == {"red": 150}
    assert found.rbc_diameter_px == pytest.approx(41, abs=2)


@pytest.mark.parametrize("diameter", [None, 30.0])
def test_no_cells_in_empty_large_fields(diameter: float | None) -> None:
    noise = np.random.default_rng(1).normal(170, 6, (900, 1200, 3)).astype(np.uint8)
    for image in (np.full((900, 1200, 3), 128, np.uint8), noise):
        assert count_kinds(find_cells(image, diameter)).get("red", 0) == 0


def load_real_field(number: int) -> tuple[np.ndarray, np.ndarray]:
    folder = Path(str(REAL_CELLS)) / "chula_fields"
    image = cv2.imdecode(np.fromfile(folder / f"{number}.jpg", np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1].copy()
    notes = folder / f"{number}.txt"
    lines = notes.read_text().split("\n") if notes.exists() else []
    points = [[int(word) for word in line.split()[:2]] for line in lines if line.strip()]
    return image, np.array(points, int).reshape(-1, 2)


@needs_real_cells
def test_real_label_points_are_in_cells_and_single_cells_stay_whole() -> None:
    hits = labels = lone = wrong = 0
    for number in LABELLED:
        image, points = load_real_field(number)
        where, found = label_cells(image), find_cells(image)
        hits += np.count_nonzero(where[points[:, 1], points[:, 0]])
        labels += len(points)
        cells = [b for b in found.regions if b.kind in ("red", "border", "clump")]
        middles = np.array([b.center for b in cells])
        for point in points:
            if np.sort(np.hypot(*(points - point).T))[1] < 1.3 * found.rbc_diameter_px:
                continue
            here = np.flatnonzero(np.hypot(*(middles - point).T) < 0.6 * found.rbc_diameter_px)
            lone += 1
            large = any(cells[i].area_px > 1.6 * np.pi / 4 * found.rbc_diameter_px**2 for i in here)
            wrong += len(here) > 1 or large
    assert hits >= 0.95 * labels
    assert wrong <= 0.05 * lone


@needs_real_cells
def test_count_is_invariant_to_rotation_and_scale() -> None:
    def count(image: np.ndarray) -> int:
        return count_kinds(find_cells(np.ascontiguousarray(image)))["red"]

    images = [load_real_field(number)[0] for number in (*LABELLED, 53, 108)]
    plain = [count(image) for image in images]
    assert find_cells(images[0]) == find_cells(images[0])
    for turns in (1, 2, 3):
        turned = [count(np.rot90(image, turns)) for image in images]
        assert sum(abs(a - b) for a, b in zip(plain, turned, strict=True)) <= 0.03 * sum(plain)
    for factor, way in ((0.5, cv2.INTER_AREA), (2.0, cv2.INTER_LINEAR)):
        scaled = [count(cv2.resize(image, None, fx=factor, fy=factor, interpolation=way)) for image in images]
        assert sum(abs(a - b) for a, b in zip(plain, scaled, strict=True)) <= 0.05 * sum(plain)


@needs_real_cells
@pytest.mark.parametrize(("number", "factor"), [(26, 2.5), (240, 2.5), (240, 4.0), (552, 3.0)])
def test_compression_blocks_are_not_cells(number: int, factor: float) -> None:
    """In an enlarged JPEG, its blocks of 8 x 8 pixels look like small cells."""
    image = load_real_field(number)[0]
    larger = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    assert find_cells(larger).rbc_diameter_px == pytest.approx(factor * find_cells(image).rbc_diameter_px, rel=0.1)


STITCHED = [(n, wide, mirror, given) for n in (240, 64, 26) for wide in (2, 4) for mirror in (0, 1) for given in (0, 1)]


def test_parts_of_overlapping_cells_are_not_fragments():
    """The visible part of a disc under another disc is not a fragment; a small separate disc is."""
    image = np.full((200, 260, 3), 215, np.uint8)
    for x, y, radius in ((60, 60, 20), (60, 140, 20), (140, 60, 20), (140, 140, 20), (200, 100, 20)):
        cv2.circle(image, (x, y), radius, (150, 90, 100), -1, cv2.LINE_AA)
    cv2.circle(image, (222, 100), 20, (110, 50, 60), -1, cv2.LINE_AA)
    cv2.circle(image, (100, 100), 12, (150, 90, 100), -1, cv2.LINE_AA)
    found = find_cells(image, 40)
    small = [b for b in found.regions if b.kind == "red" and b.area_px < 0.6 * np.pi * 20**2]
    assert [abs(b.center[0] - 100) < 3 for b in small] == [True]


@needs_real_cells
@pytest.mark.parametrize(
    ("number", "wide", "mirror", "given"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[1] == 4 else case for case in STITCHED],
)
def test_count_of_tiled_real_fields(number: int, wide: int, mirror: int, given: int) -> None:
    def count(found: SegmentationResult) -> float:
        """A border cell counts half: at an inner seam two halves meet."""
        return count_kinds(found)["red"] + count_kinds(found)["clump"] + count_kinds(found)["border"] / 2

    image = load_real_field(number)[0]
    one = find_cells(image)
    turns = [(1 - 2 * mirror * (i % 2), 1 - 2 * mirror * (j % 2)) for i in range(wide) for j in range(wide)]
    found = find_cells(tile_images([image[::y, ::x] for y, x in turns], wide), one.rbc_diameter_px if given else None)
    assert found.rbc_diameter_px == pytest.approx(one.rbc_diameter_px, rel=0.1)
    # 26 is pale and crowded: its diameter is estimated about 5 % too small, so cells split into more parts
    most = 1.15 if number == 26 and not given else 1.1
    assert 0.9 < count(found) / (wide**2 * count(one)) < most
