"""One slide from the summaries of its images: repeats, patients, counts and notes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageFailure
from deploy.slide.session import SlideSession
from pipeline.core.errors import DataError
from tests.support.edge.slides import make_summary

ALICE, BOB, STUDY, OTHER_STUDY = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)


@pytest.fixture
def session(runtime: BundleRuntime) -> SlideSession:
    return SlideSession(runtime, runtime.calibration.find_point())


def test_equal_pixels_count_once(session: SlideSession) -> None:
    names = [
        session.add_image(make_summary(digest, name=name)) for name, digest in (("a", 1), ("b", 2), ("c", 1), ("d", 1))
    ]
    assert names == [None, None, "a", "a"]
    counts = session.result().counts
    assert (counts.num_found, counts.num_counted, counts.num_flagged) == (454, 420, 20)
    assert counts.excluded == {"platelet": 24, "not a cell": 10}
    assert counts.rbc_diameters_px == (41.0, 41.0)


def test_counts_are_sums_over_fields_and_single_cells(session: SlideSession) -> None:
    session.add_image(make_summary(1, rbc_diameter_px=55.0, measured_diameter_px=42.0))
    cell = {"kind": "cell", "num_found": 1, "num_counted": 0, "num_flagged": 0, "rbc_diameter_px": None}
    session.add_image(make_summary(2, **cell, excluded={"not a cell": 1}))
    session.add_image(make_summary(3, num_found=8, num_counted=3, num_flagged=2, excluded={"not a cell": 5}))
    session.add_image(make_summary(4, num_found=0, num_counted=0, num_flagged=0, excluded={}))  # an empty field
    counts = session.result().counts
    assert (counts.num_found, counts.num_counted, counts.num_flagged, counts.num_single_cells) == (236, 213, 12, 1)
    assert (counts.rbc_diameters_px, counts.measured_diameters_px) == ((55.0, 41.0), (42.0,))
    assert list(counts.excluded.items()) == [("platelet", 12), ("not a cell", 11)]


def test_drift_is_of_the_mean_over_cells(session: SlideSession, runtime: BundleRuntime) -> None:
    """10 cells of mean 1 and 30 of mean 3: the mean is 2.5, and images of equal pixels count once."""
    assert runtime.ood_reference is not None
    num_features = len(runtime.ood_reference.feature_mean)
    center = runtime.ood_reference.feature_mean
    for digest, n, offset in ((1, 10, 1.0), (2, 30, 3.0), (1, 10, 1.0)):
        sums = tuple(n * (mean + offset) for mean in center)
        session.add_image(
            make_summary(
                digest, num_found=n + 7, num_counted=n, num_flagged=1, excluded={"platelet": 7}, feature_sums=sums
            )
        )
    assert session.result().counts.drift == pytest.approx(2.5)
    session.add_image(make_summary(3, feature_sums=(0.5,) * (num_features + 1)))
    with pytest.raises(DataError, match=f"must have {num_features} numbers each"):
        session.result()


def test_images_of_another_patient_are_refused(session: SlideSession) -> None:
    session.add_image(make_summary(1, name="plain.png"))  # names no patient
    session.add_image(make_summary(2, name="a.dcm", patient=ALICE, study=STUDY))
    with pytest.raises(DataError, match=r"several patients; .*\(b\.dcm is not of the patient of a\.dcm\)"):
        session.add_image(make_summary(3, name="b.dcm", patient=BOB, study=STUDY))
    with pytest.raises(DataError, match="several patients"):  # also one that would not count
        session.add_image(make_summary(2, patient=BOB, study=STUDY))
    assert session.result().notes == ()
    session.add_image(make_summary(4, patient=ALICE, study=OTHER_STUDY))
    assert "several studies or accessions" in session.result().notes[0]


def test_notes_name_at_most_three_duplicates(session: SlideSession) -> None:
    for name in "abcd":
        session.add_image(make_summary(1, name=name))
    assert [note.split()[0] for note in session.result().notes] == ["b", "c", "d"]
    session.add_image(make_summary(1, name="e"))
    session.add_failure(ImageFailure(name="f", reason="damaged"))
    assert session.result().notes == (
        "b shows the same image as a and is not counted again",
        "c shows the same image as a and is not counted again",
        "2 more images are duplicates",
        "1 of 6 images could not be read: the result does not include it",
    )


@pytest.mark.parametrize("change", [{"num_flagged": 211}, {"num_found": 226}, {"excluded": {"platelet": 16}}])
def test_a_summarys_counts_must_add_up(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"flagged cells must be among|but 22"):
        make_summary(1, **change)
