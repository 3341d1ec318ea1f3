"""The guard on images that are as those measured, and on images that are not."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.bundle.ood_guard import OUT_OF_DISTRIBUTION, build_ood_reference
from deploy.export.corruptions import CORRUPTIONS
from models.probe.feature_names import QUALITY_MEASURES
from pipeline.protocol.tasks import DISTANCE_BINS, IMAGE_MEASURE_BINS


def flat_reference():
    far = np.zeros((2, DISTANCE_BINS), np.int64)
    far[0, 80:90] = 97  # nearer than the rare class
    far[1, 90:100] = 3  # distances from 0.88 to 1.09
    measured = np.zeros((len(QUALITY_MEASURES), IMAGE_MEASURE_BINS), np.int64)
    measured[:, 100:120] = 50
    return build_ood_reference(1000, np.array([[0.0] * 8, [1.0] * 8]), far, measured)


def test_limits_follow_from_counts():
    ref = flat_reference()
    top = 2 ** (-3 + 100 / 256 * 8)
    assert ref.max_distance == pytest.approx(
        top / (1 - top**2 * 8 / 1000)
    )  # farther, for others lie farther than those measured
    assert ref.quality_limits["brightness"] == pytest.approx((0.75 * 100 / 256, 4 / 3 * 120 / 256))
    low, high = ref.quality_limits["middle"]  # 0.39 to 0.47: both below the neutral 0.5
    assert low == pytest.approx(0.5 - 4 / 3 * (0.5 - 100 / 256))
    assert high == pytest.approx(0.5 - 0.75 * (0.5 - 120 / 256))
    assert ref.false_alarm_rate == 0


def test_each_reason_is_told():
    ref = flat_reference()
    good = np.full((4, len(QUALITY_MEASURES)), 0.45, np.float32)
    good[1, list(QUALITY_MEASURES).index("brightness")] = 0.1
    good[2, list(QUALITY_MEASURES).index("sharpness")] = 0.9
    traits = np.ones((4, 8), np.float32)
    traits[3] = 9
    reasons = ref.rejection_reasons(traits, good)
    assert reasons == [
        None,
        f"{OUT_OF_DISTRIBUTION}: too dark",
        f"{OUT_OF_DISTRIBUTION}: noisy",
        f"{OUT_OF_DISTRIBUTION}: its features are foreign",
    ]


def test_what_is_no_number_is_refused():
    ref = flat_reference()
    measures = np.full((2, len(QUALITY_MEASURES)), 0.45, np.float32)
    measures[0, 0] = np.nan
    traits = np.ones((2, 8), np.float32)
    traits[1, 0] = np.nan
    assert all(ref.rejection_reasons(traits, measures))


def test_distance_is_from_the_nearest_centre():
    ref = flat_reference()  # centres at 0 and at 1
    far = ref.nearest_center_distances(np.array([[2.0] * 8, [-1.0] * 8, [1.0] * 8], np.float32))
    assert far.tolist() == [1, 1, 0]


def test_of_a_trained_model(runtime, images):
    """Cells as those it learnt from pass; spoiled ones do not."""
    passed = [why is None for why in runtime.answer(images).refused]
    assert np.mean(passed) > 0.9
    for what in ("far out of focus", "nearly dark", "over-exposed", "empty glass", "noise alone", "stripes"):
        refused = [why is not None for why in runtime.answer(CORRUPTIONS[what](images[:60])).refused]
        assert np.mean(refused) > 0.9, what


def test_drift_grows_with_a_common_shift(runtime):
    rng = np.random.default_rng(0)
    traits = rng.normal(0, 1, (500, 32)).astype(np.float32)
    assert runtime.ood_reference.drift(traits) < 0.2
    assert runtime.ood_reference.drift(traits + 2) > 1.5
    assert runtime.ood_reference.drift(traits[:5] + 2) is None  # five cells tell nothing
