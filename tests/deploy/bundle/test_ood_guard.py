"""The out-of-distribution guard on images like the validation images, and on others."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.bundle.ood_guard import OUT_OF_DISTRIBUTION, build_ood_reference
from deploy.export.corruptions import CORRUPTIONS
from models.probe.feature_names import QUALITY_MEASURES
from pipeline.protocol.tasks import DISTANCE_BINS, IMAGE_MEASURE_BINS


def make_reference():
    far = np.zeros((2, DISTANCE_BINS), np.int64)
    far[0, 80:90] = 97  # nearer than the rare class
    far[1, 90:100] = 3  # distances from 0.88 to 1.09
    measured = np.zeros((len(QUALITY_MEASURES), IMAGE_MEASURE_BINS), np.int64)
    measured[:, 100:120] = 50
    return build_ood_reference(1000, np.array([[0.0] * 8, [1.0] * 8]), far, measured)


def test_ood_limits_from_counts():
    ref = make_reference()
    top = 2 ** (-3 + 100 / 256 * 8)
    assert ref.max_distance == pytest.approx(top / (1 - top**2 * 8 / 1000))  # leave-one-out correction
    assert ref.quality_limits["brightness"] == pytest.approx((0.75 * 100 / 256, 4 / 3 * 120 / 256))
    low, high = ref.quality_limits["center_darkness"]  # 0.39 to 0.47: both below the neutral 0.5
    assert low == pytest.approx(0.5 - 4 / 3 * (0.5 - 100 / 256))
    assert high == pytest.approx(0.5 - 0.75 * (0.5 - 120 / 256))
    assert ref.false_alarm_rate == 0


def test_rejection_reasons():
    ref = make_reference()
    good = np.full((4, len(QUALITY_MEASURES)), 0.45, np.float32)
    good[1, list(QUALITY_MEASURES).index("brightness")] = 0.1
    good[2, list(QUALITY_MEASURES).index("sharpness")] = 0.9
    features = np.ones((4, 8), np.float32)
    features[3] = 9
    reasons = ref.rejection_reasons(features, good)
    assert reasons == [
        None,
        f"{OUT_OF_DISTRIBUTION}: too dark",
        f"{OUT_OF_DISTRIBUTION}: noisy",
        f"{OUT_OF_DISTRIBUTION}: its features are foreign",
    ]


def test_nan_features_and_measures_are_rejected():
    ref = make_reference()
    measures = np.full((2, len(QUALITY_MEASURES)), 0.45, np.float32)
    measures[0, 0] = np.nan
    features = np.ones((2, 8), np.float32)
    features[1, 0] = np.nan
    assert all(ref.rejection_reasons(features, measures))


def test_nearest_center_distance():
    ref = make_reference()  # centers at 0 and at 1
    far = ref.nearest_center_distances(np.array([[2.0] * 8, [-1.0] * 8, [1.0] * 8], np.float32))
    assert far.tolist() == [1, 1, 0]


def test_ood_guard_of_a_trained_model_rejects_corruptions(runtime, images):
    """Cells like the training cells are accepted, corrupted ones are rejected."""
    passed = [why is None for why in runtime.predict(images).rejection_reasons]
    assert np.mean(passed) > 0.9
    for what in ("far out of focus", "nearly dark", "over-exposed", "empty glass", "noise alone", "stripes"):
        refused = [why is not None for why in runtime.predict(CORRUPTIONS[what](images[:60])).rejection_reasons]
        assert np.mean(refused) > 0.9, what


def test_drift_grows_with_a_shift_of_all_features(runtime):
    rng = np.random.default_rng(0)
    features = rng.normal(0, 1, (500, 32)).astype(np.float32)
    assert runtime.ood_reference.compute_drift(features) < 0.2
    assert runtime.ood_reference.compute_drift(features + 2) > 1.5
    assert runtime.ood_reference.compute_drift(features[:5] + 2) is None  # too few cells
