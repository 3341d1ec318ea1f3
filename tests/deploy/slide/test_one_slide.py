"""Inputs that are not one whole slide: reliability warnings, duplicates, several patients, unfit models."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.slide.image_result import EXCLUSION_REASONS
from deploy.slide.reliability import find_reliability_warnings
from deploy.slide.slide_result import SlideCounts
from pipeline.core.errors import DataError
from sites.data.renderer.field import render_field
from tests.support.dicom_files import encode_dicom, make_dicom

BASE_COUNTS = SlideCounts(num_counted=1000, num_flagged=3, num_found=1100, excluded={}, drift=0.2)


def warnings_for(**changes: object) -> list[str]:
    return list(find_reliability_warnings(SlideCounts(**{**vars(BASE_COUNTS), **changes})))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def field() -> np.ndarray:
    return np.ascontiguousarray(render_field(1, types=[0] * 30 + [9] * 4, num_unlabeled=0).image)


def test_reliability_warnings():
    clump = EXCLUSION_REASONS["clump"]
    assert warnings_for() == warnings_for(excluded={clump: 100}) == warnings_for(num_single_cells=1000) == []
    assert "too crowded" in warnings_for(excluded={clump: 400})[0]
    assert "may be a selection" in warnings_for(num_single_cells=120)[0]
    assert warnings_for(rbc_diameters_px=(41.0, 42.0), measured_diameters_px=(40.0, 47.0)) == []
    assert (
        "about 42 pixels, not 55" in warnings_for(rbc_diameters_px=(55.0, 55.0), measured_diameters_px=(42.0, 42.0))[0]
    )


@pytest.mark.parametrize(("given", "wrong"), [(38, False), (55, True), (26, True)])
def test_wrong_rbc_diameter_gives_a_reliability_warning(hemofed, bundle, field, tmp_path, given, wrong):
    Image.fromarray(field).save(tmp_path / "f.png")
    slide = json.loads(hemofed("predict", bundle, "f.png", "--rbc-diameter-px", given, "--json"))["slide"]
    assert any("leave --rbc-diameter-px out" in why for why in slide["reliability_warnings"]) == wrong


def write_dicom_pair(folder: Path, field: np.ndarray, **each: tuple[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for n in (0, 1):
        tags = {key: values[n] for key, values in each.items()}
        shifted = np.roll(field, 40 * n, 1)
        (folder / f"{n}.dcm").write_bytes(encode_dicom(make_dicom(shifted[None], **tags)))


def test_dicom_files_of_two_patients_are_refused(hemofed, bundle, field, tmp_path):
    write_dicom_pair(tmp_path / "two", field, PatientID=("7", "8"))
    with pytest.raises(DataError, match="several patients; give those of one slide at a time"):
        hemofed("predict", bundle, "two", "-o", "out")
    assert not (tmp_path / "out" / "report.html").exists()
    write_dicom_pair(tmp_path / "one", field, AccessionNumber=("A", "B"), StudyInstanceUID=("1.2.3", "1.2.3"))
    slide = json.loads(hemofed("predict", bundle, "one", "--json"))["slide"]
    assert "several studies or accessions" in slide["notes"][0]


def test_own_overlays_are_not_read_as_fields(hemofed, bundle, field, tmp_path):
    (tmp_path / "s").mkdir()
    Image.fromarray(field).save(tmp_path / "s" / "f.png")
    first = json.loads(hemofed("predict", bundle, "s", "-o", "s/report", "--json"))
    second = json.loads(hemofed("predict", bundle, "s", "-o", "s/again", "--json"))
    assert first["slide"]["num_found"] == second["slide"]["num_found"]
    assert len(second["images"]) == 1


def test_csv_html_and_json_agree_about_duplicates_and_failures(hemofed, bundle, field, tmp_path):
    Image.fromarray(field).save(tmp_path / "A.png")
    shutil.copy(tmp_path / "A.png", tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"not an image")
    slide = json.loads(hemofed("predict", bundle, "A.png", "b.png", "c.png", "-o", "out", "--json", code=1))["slide"]
    rows = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    assert sum(int(row["is_counted"]) for row in rows) == slide["num_counted"]
    assert sum(int(row["is_flagged"]) for row in rows) == slide["num_flagged"]
    assert {row["duplicate_of"] for row in rows} == {"", "A.png"}
    assert [note.split(":")[0] for note in slide["notes"]][-1] == "1 of 3 images could not be read"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "b.png shows the same image as A.png and is not counted again" in page.replace("B.png", "b.png")
    assert "1 of 3 images could not be read" in page
    assert "by hemofed" in page


def test_probability_class_is_reported(hemofed, bundle, images, tmp_path):
    Image.fromarray(images[0]).save(tmp_path / "cell.png")
    (one,) = json.loads(hemofed("predict", bundle, "cell.png", "--json"))["images"]
    assert one["probability_class"] == "schistocyte"
    assert one["probability"] == pytest.approx(one["class_probabilities"]["schistocyte"])
    assert "p(schistocyte)" in hemofed("predict", bundle, "cell.png")


def test_file_name_in_another_encoding(hemofed, bundle, field, tmp_path):
    strange = os.fsencode(tmp_path / "bl") + b"\xfc" + b"t.png"
    Image.fromarray(field).save(tmp_path / "f.png")
    os.rename(os.fsencode(tmp_path / "f.png"), strange)  # noqa: PTH104
    hemofed("predict", bundle, tmp_path, "-o", "out")
    assert "bl\ufffdt.png" in (tmp_path / "out" / "report.html").read_text()


def test_calibrate_skips_whole_fields(hemofed, bundle, field, images, tmp_path):
    (tmp_path / "mine" / "other").mkdir(parents=True)
    Image.fromarray(field).save(tmp_path / "mine" / "other" / "field.png")
    Image.fromarray(images[0]).save(tmp_path / "mine" / "other" / "cell.png")
    output = hemofed("edge", "calibrate", bundle, "--data", "mine", "--dry-run")
    assert "a whole field; cut single cells out of it" in output.replace("\n", " ")
    assert "cell diameters around its center" in hemofed("edge", "show", bundle).replace("\n", " ")


def test_unfit_local_calibration_excludes_a_verdict(hemofed, bundle, field, images, tmp_path):
    """Random labels make the model unfit: no verdict until it is calibrated again."""
    for n, cell in enumerate(images[:200]):
        folder = tmp_path / "mine" / ("schistocyte" if n % 4 == 0 else "other")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(cell).save(folder / f"{n}.png")
    assert "gives no verdict with it" in hemofed("edge", "calibrate", bundle, "--data", "mine").replace("\n", " ")
    assert "must not be used here" in hemofed("edge", "show", bundle)
    Image.fromarray(field).save(tmp_path / "f.png")
    slide = json.loads(hemofed("predict", bundle, "f.png", "--json"))["slide"]
    assert "do not use this model here" in slide["reliability_warnings"][0]
    assert slide["verdict"] == "cannot decide"
    assert (
        json.loads(hemofed("predict", bundle, "f.png", "--json", "--ignore-local-calibration"))["slide"][
            "reliability_warnings"
        ]
        == []
    )
