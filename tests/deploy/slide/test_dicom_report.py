from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import highdicom as hd
import pytest
from pydicom import dcmread, uid
from pydicom.dataset import Dataset

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.operating_points import OperatingPoint
from deploy.imaging.images import read_image_file
from deploy.inference.runtime import ModelInfo
from deploy.slide.dicom_report import write_overlay_capture, write_structured_report
from deploy.slide.slide_result import SlideCounts, SlideResult
from deploy.slide.slide_text import build_rows, format_headline
from deploy.slide.verdict import PrevalenceEstimate
from pipeline.core.errors import DataError
from tests.support.dicom_files import encode_dicom, load_pydicom_file, make_dicom, make_noise

ESTIMATE = PrevalenceEstimate(
    prevalence=0.031,
    prevalence_low=0.0146,
    prevalence_high=0.0443,
    verdict="cannot decide",
    needs_review=False,
    reason="1 % lies within ± 1 %",
)
SLIDE = SlideResult(
    counts=SlideCounts(num_counted=1000, num_flagged=23, num_found=1100, excluded={"platelet": 100}, drift=0.4),
    estimate=ESTIMATE,
    operating_point=OperatingPoint(
        name="safe", log_odds=2.0, tp=36, fn=64, tn=998, fp=2, sensitivity_spread=0.1, specificity_spread=0.002
    ),
    positive_class="schistocyte",
    reliability_warnings=("the light is strange",),
    notes=("b shows the same image as a",),
)
MODEL = ModelInfo(
    name="smear",
    model="global",
    title="smear (global)",
    digest="0123abcd",
    signer="the lead",
    precision="fp32",
    calibrated_on="500 images",
    has_local_calibration=False,
    classes=("other", "schistocyte"),
)
OVERLAY = make_noise(5, 7, 3)


def write_source(folder: Path, name: str = "a.dcm", frames: int = 1, **tags: object) -> Path:
    path = folder / name
    path.write_bytes(encode_dicom(make_dicom(make_noise(frames, 4, 4, 3), **tags)))
    return path


def write_anonymized_source(folder: Path) -> Path:
    """A source without any patient or study attribute."""
    return write_source(
        folder,
        "bare.dcm",
        StudyInstanceUID=None,
        SeriesInstanceUID=None,
        PatientID=None,
        PatientName=None,
        Modality=None,
    )


def find_items(report: Dataset, concept: str) -> list[Dataset]:
    found = (
        [report]
        if "ConceptNameCodeSequence" in report and report.ConceptNameCodeSequence[0].CodeValue == concept
        else []
    )
    return found + [hit for item in report.get("ContentSequence", []) for hit in find_items(item, concept)]


def test_structured_report_values_codes_and_texts(tmp_path: Path) -> None:
    report = dcmread(write_structured_report([write_source(tmp_path)], SLIDE, MODEL, tmp_path / "sr.dcm"))
    values = {}
    for code in ("CELLS", "CALLED", "SHARE_CALLED", "CORRECTED", "CORRECTED_LOW", "CORRECTED_HIGH"):
        [item] = find_items(report, code)
        assert item.ConceptNameCodeSequence[0].CodingSchemeDesignator == "99HEMOFED"
        value = item.MeasuredValueSequence[0]
        unit = value.MeasurementUnitsCodeSequence[0]
        assert unit.CodingSchemeDesignator == "UCUM"
        values[code] = (float(value.NumericValue), unit.CodeValue)
    assert values == {
        "CELLS": (1000, "{cells}"),
        "CALLED": (23, "{cells}"),
        "SHARE_CALLED": (2.3, "%"),
        "CORRECTED": (3.1, "%"),
        "CORRECTED_LOW": (1.46, "%"),
        "CORRECTED_HIGH": (4.43, "%"),
    }
    [kind] = find_items(report, "121071")
    assert (kind.ConceptCodeSequence[0].CodeValue, kind.ConceptCodeSequence[0].CodingSchemeDesignator) == (
        "70310009",
        "SCT",
    )
    texts = {code: find_items(report, code)[0].TextValue for code in ("121077", "121106", "111001", "111002", "111003")}
    assert texts == {
        "121077": format_headline(SLIDE),
        "121106": RESEARCH_USE_NOTICE,
        "111001": "smear (global)",
        "111002": "digest 0123abcd",
        "111003": version("hemofed"),
    }
    assert format_headline(SLIDE) == "cannot decide: 1 % lies within ± 1 %"
    assert [item.TextValue for item in find_items(report, "121106")][1:] == [
        "the light is strange",
        "b shows the same image as a",
        *(f"{label}: {value}" for label, value in build_rows(SLIDE, MODEL)),
    ]
    assert report.CodingSchemeIdentificationSequence[0].CodingSchemeDesignator == "99HEMOFED"
    assert (report.CompletionFlag, report.PreliminaryFlag, report.VerificationFlag) == (
        "COMPLETE",
        "PRELIMINARY",
        "UNVERIFIED",
    )
    assert "research use" in report.SeriesDescription
    assert "PixelData" not in report


def test_rows_in_words() -> None:
    assert build_rows(SLIDE, MODEL) == [
        ("cells found", "1,100"),
        ("counted", "1,000 (1,000 were reached)"),
        ("not counted: platelet", "100"),
        ("called schistocyte", "23 (2.30 % of those counted)"),
        (
            "operating point",
            "safe: probability 0.8808; sensitivity 0.3600 (±0.1 between sites), specificity 0.9980 (±0.002 between sites)",
        ),
        ("schistocyte corrected for these errors", "3.10 % (95 %: 1.46 % to 4.43 %)"),
        ("drift", "0.40 (limit 1): the cells look like the validation images"),
        ("model", "smear (global), signed by the lead, fp32"),
        ("calibrated on", "500 images"),
    ]


def test_structured_report_read_back_with_highdicom(tmp_path: Path) -> None:
    one, two = write_source(tmp_path, "a.dcm"), write_source(tmp_path, "b.dcm")
    report = hd.sr.srread(write_structured_report([one, two, one], SLIDE, MODEL, tmp_path / "sr.dcm"))
    heads = [dcmread(one), dcmread(two)]
    assert [e[2] for e in report.get_evidence()] == [h.SOPInstanceUID for h in heads]  # each once
    [group] = report.content.get_image_measurement_groups()
    assert [m.value for m in group.get_measurements()] == [1000, 23, 2.3, 3.1, 1.46, 4.43]
    assert report.StudyInstanceUID == heads[0].StudyInstanceUID
    assert report.SeriesInstanceUID not in {h.SeriesInstanceUID for h in heads}
    assert report.SOPInstanceUID not in {h.SOPInstanceUID for h in heads}
    assert (report.PatientID, str(report.PatientName)) == ("7", "A^B")


def test_structured_report_without_cells_omits_fractions(tmp_path: Path) -> None:
    nothing = replace(
        SLIDE,
        counts=replace(SLIDE.counts, num_counted=0, num_flagged=0),
        estimate=replace(ESTIMATE, prevalence=None, prevalence_low=None, prevalence_high=None),
    )
    report = dcmread(write_structured_report([write_source(tmp_path)], nothing, MODEL, tmp_path / "sr.dcm"))
    assert find_items(report, "CELLS")
    assert not find_items(report, "SHARE_CALLED")
    assert not find_items(report, "CORRECTED")


def test_overlay_secondary_capture(tmp_path: Path) -> None:
    path = write_source(tmp_path, frames=3, BurnedInAnnotation="YES")
    out = write_overlay_capture(path, OVERLAY, tmp_path / "sc.dcm", frame_number=2)
    with pytest.raises(DataError, match="not a field; give the images that it was made of"):
        read_image_file(out)  # its boxes must not be counted as cells
    plain = dcmread(out)
    plain.DerivationDescription = ""
    plain.save_as(out)
    [image] = read_image_file(out)
    assert (image.pixels == OVERLAY).all()
    got, head = dcmread(out), dcmread(path)
    [reference] = got.SourceImageSequence
    assert reference.ReferencedSOPInstanceUID == head.SOPInstanceUID
    assert reference.ReferencedSOPClassUID == head.SOPClassUID
    assert reference.ReferencedFrameNumber == 2
    assert got.SOPClassUID == uid.SecondaryCaptureImageStorage
    assert (got.PatientID, got.StudyInstanceUID, got.BurnedInAnnotation) == ("7", head.StudyInstanceUID, "YES")
    assert got.SeriesInstanceUID != head.SeriesInstanceUID
    assert "research use" in got.SeriesDescription


def test_results_of_anonymized_sources_share_one_study(tmp_path: Path) -> None:
    path = write_anonymized_source(tmp_path)
    report = dcmread(write_structured_report([path], SLIDE, MODEL, tmp_path / "sr.dcm"))
    marks = dcmread(write_overlay_capture(path, OVERLAY, tmp_path / "sc.dcm"))
    assert report.StudyInstanceUID == marks.StudyInstanceUID
    assert uid.UID(report.StudyInstanceUID).is_valid
    for result in (report, marks):
        for keyword in ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "AccessionNumber"):
            assert keyword in result
            assert not result[keyword].value


def test_patient_names_in_other_character_sets(tmp_path: Path) -> None:
    cases = [
        ("ISO_IR 100", "Müller^Zoë"),
        ("ISO_IR 144", "Люкceмбypг"),
        (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎"),
    ]
    for charset, name in cases:
        data = make_dicom(make_noise(1, 4, 4, 3))
        data.SpecificCharacterSet = charset
        data.PatientName = name
        (tmp_path / "a.dcm").write_bytes(encode_dicom(data))
        for out in (
            write_structured_report([tmp_path / "a.dcm"], SLIDE, MODEL, tmp_path / "sr.dcm"),
            write_overlay_capture(tmp_path / "a.dcm", OVERLAY, tmp_path / "sc.dcm"),
        ):
            got = dcmread(out)
            assert got.SpecificCharacterSet == "ISO_IR 192"
            assert str(got.PatientName) == name


def test_invalid_patient_attributes_become_empty(tmp_path: Path) -> None:
    head = encode_dicom(
        make_dicom(make_noise(1, 4, 4, 3), PatientBirthDate="19700101", PatientSex="F", StudyTime="101112")
    )
    odd = head.replace(b"19700101", b"1970XXXX").replace(b"CS\x02\0F ", b"CS\x02\0W ").replace(b"101112", b"10h12 ")
    (tmp_path / "a.dcm").write_bytes(odd)
    report = dcmread(write_structured_report([tmp_path / "a.dcm"], SLIDE, MODEL, tmp_path / "sr.dcm"))
    assert (report.PatientBirthDate, report.PatientSex, report.StudyTime) == ("", "", "")
    write_overlay_capture(tmp_path / "a.dcm", OVERLAY, tmp_path / "sc.dcm")


def test_dicom_results_refuse_invalid_sources(tmp_path: Path) -> None:
    good, out = write_source(tmp_path), tmp_path / "out.dcm"
    (tmp_path / "text.dcm").write_text("no DICOM")
    nameless = encode_dicom(make_dicom(make_noise(1, 4, 4, 3))).replace(b"\x08\0\x18\0UI", b"\x09\0\x18\0UI")
    (tmp_path / "nameless.dcm").write_bytes(nameless)
    for name, match in (
        ("absent.dcm", "export it again"),
        ("text.dcm", "export"),
        ("nameless.dcm", "no SOP Instance UID"),
    ):
        with pytest.raises(DataError, match=match):
            write_structured_report([good, tmp_path / name], SLIDE, MODEL, out)
        with pytest.raises(DataError, match=match):
            write_overlay_capture(tmp_path / name, OVERLAY, out)
    with pytest.raises(DataError, match="several patients"):
        write_structured_report([good, write_source(tmp_path, "b.dcm", PatientID="8")], SLIDE, MODEL, out)
    with pytest.raises(DataError, match="several patients"):
        write_structured_report([good, write_anonymized_source(tmp_path)], SLIDE, MODEL, out)
    with pytest.raises(DataError, match="no DICOM source"):
        write_structured_report([], SLIDE, MODEL, out)
    for wrong in (OVERLAY[..., 0], OVERLAY.astype(float), OVERLAY[:0]):
        with pytest.raises(DataError, match=r"give .H, W, 3. uint8"):
            write_overlay_capture(good, wrong, out)
    with pytest.raises(DataError, match="no frame 2"):
        write_overlay_capture(good, OVERLAY, out, frame_number=2)
    assert not out.exists()


@pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="needs dciodvfy; apt-get install dicom3tools")
@pytest.mark.parametrize("which", ["plain", "bare", "frames", "shipped"])
def test_dciodvfy_finds_no_error(tmp_path: Path, which: str) -> None:
    if which == "plain":
        paths = [write_source(tmp_path), write_source(tmp_path, "b.dcm")]
    elif which == "bare":
        paths = [write_anonymized_source(tmp_path)]
    elif which == "frames":
        paths = [write_source(tmp_path, frames=3, SOPClassUID=uid.VLWholeSlideMicroscopyImageStorage, Modality="SM")]
    else:
        (tmp_path / "a.dcm").write_bytes(load_pydicom_file("examples_rgb_color.dcm"))
        paths = [tmp_path / "a.dcm"]
    results = [
        write_structured_report(paths, SLIDE, MODEL, tmp_path / "sr.dcm"),
        write_overlay_capture(paths[0], OVERLAY, tmp_path / "sc.dcm"),
    ]
    for result in results:
        process = subprocess.run(["dciodvfy", str(result)], capture_output=True, text=True, check=False)
        output = process.stdout + process.stderr
        assert "ComprehensiveSR" in output or "SCImage" in output  # it recognized the file
        assert [line for line in output.splitlines() if line.startswith("Error")] == []
