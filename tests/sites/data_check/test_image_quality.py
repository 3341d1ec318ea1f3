import itertools

import cv2
import numpy as np
import pytest

from sites.data_check.duplicates import (
    MAX_HASH_DISTANCE,
    ExampleOrigin,
    _iter_equal_pairs,
    duplicate_findings,
    find_duplicates,
    find_leaking_pairs,
)
from sites.data_check.image_quality import (
    ImageMeasures,
    find_outliers,
    measure_images,
    quality_findings,
    robust_z_scores,
)
from tests.support.image_files import make_textures

NO_ROWS = np.zeros(0, np.int64)


def make_images(*replacements):
    """200 textures (N, 3, H, W), of which the last ones are replaced."""
    x = make_textures(200)
    x = np.concatenate([x[: len(x) - len(replacements)], *(image[None] for image in replacements)])
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def outlier_rows(x):
    return {group.kind: group.rows.tolist() for group in find_outliers(measure_images(x))}


def test_similar_images_have_no_outliers():
    assert outlier_rows(make_images()) == {}


def test_each_kind_of_outlier_is_found():
    texture = make_textures(1, seed=9)[0]
    found = outlier_rows(
        make_images(
            np.zeros_like(texture),
            np.full_like(texture, 140),
            np.clip(texture.astype(int) + 150, 0, 255).astype(np.uint8),
            cv2.GaussianBlur(texture, (0, 0), 6),
            np.random.default_rng(0).integers(0, 256, texture.shape, np.uint8),
            texture // np.array([1, 3, 3], np.uint8),
        )
    )
    assert found == {
        "black": [194],
        "blank": [195],
        "over-exposed": [196],
        "blurred": [197],
        "noisy": [198],
        "odd-coloured": [199],
    }


def test_dark_and_flat_images_are_outliers_of_their_site():
    texture = make_textures(1, seed=9)[0]
    assert outlier_rows(make_images(texture // 3))["dark"] == [199]
    found = outlier_rows(make_images((40 + texture // 8).astype(np.uint8)))
    assert 199 in [row for rows in found.values() for row in rows]


def test_site_with_dark_images_only():
    x = make_images() // 16  # as 12-bit values in 16-bit files
    measures = measure_images(x)
    assert "most images are nearly black" in next(quality_findings(find_outliers(measures), measures, str)).message
    bright = measure_images(make_images())
    assert [*quality_findings([], bright, str)] == []


def test_many_outliers_suggest_another_stain():
    x = make_images()
    x[:20, 1:] //= 3
    measures = measure_images(x)
    (finding,) = quality_findings(find_outliers(measures), measures, "image {}".format)
    assert finding.message.startswith("20 images are odd-coloured")
    assert "another stain" in finding.remedy
    assert set(finding.locations) == {f"image {row}" for row in range(20)}


def test_robust_z_scores_by_hand():
    # median 3, absolute deviations 2 1 0 1 97: median 1
    assert robust_z_scores(np.array([1.0, 2, 3, 4, 100]), 0.1) == pytest.approx(np.array([-2, -1, 0, 1, 97]) / 1.4826)
    assert robust_z_scores(np.array([3.0, 3, 3, 4]), 0.5)[3] == pytest.approx(2)  # the minimum spread


def test_measure_images_grey_large_and_none():
    grey = np.full((2, 1, 30, 40), 100, np.uint8)
    grey[1, 0, :15] = 200
    found = measure_images(grey)
    assert found.column("brightness") == pytest.approx([100, 150])
    assert found.column("contrast") == pytest.approx([0, 50])
    assert found.column("saturation").tolist() == [0, 0]
    assert measure_images(np.zeros((1, 1, 8, 3000), np.uint8)).column("dark") == [1]
    assert len(measure_images(np.zeros((0, 3, 8, 8), np.uint8)).digest) == 0


def make_origin(x, y=None, split=None, unit=None):
    zeros = np.zeros(len(x), np.int64)
    return ExampleOrigin(
        *(zeros if values is None else np.array(values) for values in (y, split)),
        zeros - 1 if unit is None else np.array(unit),
    )


def test_identical_images_leak_conflict_or_only_repeat():
    x = make_images()[:8]
    x[1], x[3], x[5], x[6] = x[0], x[2], x[4], x[4]
    duplicates = find_duplicates(measure_images(x), NO_ROWS)
    assert duplicates.identical_groups == ((0, 1), (2, 3), (4, 5, 6))
    assert len(duplicates.near_pairs) == 0
    found = [
        *duplicate_findings(duplicates, make_origin(x, y=[0, 0, 0, 1, 0, 0, 0, 0], split=[0, 2, 0, 0, 0, 0, 0, 0]), str)
    ]
    assert [(f.severity, f.locations) for f in found] == [
        ("stop", ("0 = 1",)),
        ("stop", ("2 = 3",)),
        ("look", ("4 = 5 = 6",)),
    ]
    assert duplicates.to_dict("abcdefgh", make_origin(x, split=[0, 2, 0, 0, 0, 0, 0, 0]))["leaks"] == 1


def test_blank_images_are_not_duplicates():
    x = make_images()[:6]
    x[:2] = 128
    assert find_duplicates(measure_images(x), np.array([0, 1])).identical_groups == ()


def test_image_saved_again_is_a_near_duplicate():
    x = make_images()
    encoded = cv2.imencode(".jpg", x[7].transpose(1, 2, 0), [cv2.IMWRITE_JPEG_QUALITY, 60])[1]
    x[100] = cv2.imdecode(encoded, cv2.IMREAD_COLOR).transpose(2, 0, 1)
    x[101] = np.clip(x[8].astype(int) + 12, 0, 255)
    duplicates = find_duplicates(measure_images(x), NO_ROWS)
    assert duplicates.near_pairs.tolist() == [[7, 100], [8, 101]]
    other_unit = make_origin(x, unit=[1 if row == 100 else 0 for row in range(len(x))])
    assert find_leaking_pairs(duplicates, other_unit).tolist() == [[7, 100]]  # the other pair is of one patient
    other_split = make_origin(x, split=[1 if row == 101 else 0 for row in range(len(x))])
    assert find_leaking_pairs(duplicates, other_split).tolist() == [[8, 101]]
    (finding,) = duplicate_findings(duplicates, other_unit, str)
    assert (finding.severity, finding.locations) == ("look", ("7 = 100",))


def test_near_duplicates_equal_those_of_all_pairs():
    rng = np.random.default_rng(1)
    bits = rng.random((300, 128)) < 0.5
    for row in range(0, 100, 2):  # a neighbour that differs in 1 to 12 bits
        bits[row + 1] = bits[row]
        flipped = rng.choice(128, 1 + row % 12, replace=False)
        bits[row + 1, flipped] ^= True
    sketch = np.tile(rng.integers(0, 255, 256, np.uint8), (300, 1))
    hashes = np.packbits(bits, axis=1).view(np.uint16)
    digest = np.array([np.void(row.tobytes()) for row in np.packbits(bits, axis=1)], "V16")
    found = find_duplicates(ImageMeasures(np.zeros((300, 8)), digest, hashes, sketch), NO_ROWS)
    expected = [
        [a, b] for a, b in itertools.combinations(range(300), 2) if (bits[a] != bits[b]).sum() <= MAX_HASH_DISTANCE
    ]
    assert found.near_pairs.tolist() == expected
    assert len(expected) > 20


def test_iter_equal_pairs_in_batches(monkeypatch):
    monkeypatch.setattr("sites.data_check.duplicates.PAIRS_PER_BATCH", 7)
    values = np.random.default_rng(0).integers(0, 5, 40)
    batches = [*_iter_equal_pairs(values)]
    found = sorted((int(a), int(b)) for first, second in batches for a, b in zip(first, second, strict=True))
    assert found == [(a, b) for a, b in itertools.combinations(range(40), 2) if values[a] == values[b]]
    assert len(batches) > 5
