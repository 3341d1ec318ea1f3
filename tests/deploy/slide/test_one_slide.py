"""What must not be taken for one slide, or for a whole one."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.slide.reader import EXCLUSION_REASONS, SlideCounts, find_reliability_warnings
from pipeline.core.errors import DataError
from sites.data.renderer.field import render_field
from tests.support.dicom_files import file, image

PLAIN = SlideCounts(num_counted=1000, num_flagged=3, num_found=1100, excluded={}, drift=0.2)


def doubts(**changes: object) -> list[str]:
    return list(find_reliability_warnings(SlideCounts(**{**vars(PLAIN), **changes})))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def field() -> np.ndarray:
    return np.ascontiguousarray(render_field(1, types=[0] * 30 + [9] * 4, num_unlabeled=0).image)


def test_what_speaks_against_a_verdict():
    clump = EXCLUSION_REASONS["clump"]
    assert doubts() == doubts(excluded={clump: 100}) == doubts(singles=1000) == []
    assert "too crowded" in doubts(excluded={clump: 400})[0]
    assert "may have been picked" in doubts(singles=120)[0]
    assert doubts(sizes=(41.0, 42.0), measured=(40.0, 47.0)) == []
    assert "about 42 pixels, not 55" in doubts(sizes=(55.0, 55.0), measured=(42.0, 42.0))[0]


@pytest.mark.parametrize(("given", "wrong"), [(38, False), (55, True), (26, True)])
def test_a_wrong_diameter_decides_nothing(hemofed, bundle, field, tmp_path, given, wrong):
    Image.fromarray(field).save(tmp_path / "f.png")
    told = json.loads(hemofed("predict", bundle, "f.png", "--rbc-diameter-px", given, "--json"))["slide"]
    assert any("leave --rbc-diameter-px out" in why for why in told["doubts"]) == wrong


def patients(folder: Path, field: np.ndarray, **each: tuple[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for n in (0, 1):
        tags = {key: values[n] for key, values in each.items()}
        shifted = np.roll(field, 40 * n, 1)
        (folder / f"{n}.dcm").write_bytes(file(image(shifted[None], **tags)))


def test_pictures_of_two_patients_are_no_slide(hemofed, bundle, field, tmp_path):
    patients(tmp_path / "two", field, PatientID=("7", "8"))
    with pytest.raises(DataError, match="several patients; give those of one slide at a time"):
        hemofed("predict", bundle, "two", "-o", "out")
    assert not (tmp_path / "out" / "report.html").exists()
    patients(tmp_path / "one", field, AccessionNumber=("A", "B"), StudyInstanceUID=("1.2.3", "1.2.3"))
    told = json.loads(hemofed("predict", bundle, "one", "--json"))["slide"]
    assert "several studies or accessions" in told["notes"][0]


def test_results_are_not_read_as_fields(hemofed, bundle, field, tmp_path):
    (tmp_path / "s").mkdir()
    Image.fromarray(field).save(tmp_path / "s" / "f.png")
    first = json.loads(hemofed("predict", bundle, "s", "-o", "s/report", "--json"))
    second = json.loads(hemofed("predict", bundle, "s", "-o", "s/again", "--json"))
    assert first["slide"]["found"] == second["slide"]["found"]
    assert len(second["images"]) == 1


def test_table_page_and_slide_tell_the_same_of_copies_and_of_what_is_missing(hemofed, bundle, field, tmp_path):
    Image.fromarray(field).save(tmp_path / "A.png")
    shutil.copy(tmp_path / "A.png", tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no picture")
    told = json.loads(hemofed("predict", bundle, "A.png", "b.png", "c.png", "-o", "out", "--json", code=1))["slide"]
    rows = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    assert sum(int(row["counted"]) for row in rows) == told["counted"]
    assert sum(int(row["flagged"]) for row in rows) == told["flagged"]
    assert {row["repeats"] for row in rows} == {"", "A.png"}
    assert [note.split(":")[0] for note in told["notes"]][-1] == "1 of 3 pictures could not be read"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "b.png shows the same as A.png, and is not counted again" in page.replace("B.png", "b.png")
    assert "1 of 3 pictures could not be read" in page
    assert "by hemofed" in page


def test_a_probability_says_what_it_is_of(hemofed, bundle, images, tmp_path):
    Image.fromarray(images[0]).save(tmp_path / "cell.png")
    (one,) = json.loads(hemofed("predict", bundle, "cell.png", "--json"))["images"]
    assert one["probability_of"] == "schistocyte"
    assert one["probability"] == pytest.approx(one["probabilities"]["schistocyte"])
    assert "p(schistocyte)" in hemofed("predict", bundle, "cell.png")


def test_a_name_in_another_code_is_written_all_the_same(hemofed, bundle, field, tmp_path):
    strange = os.fsencode(tmp_path / "bl") + b"\xfc" + b"t.png"
    Image.fromarray(field).save(tmp_path / "f.png")
    os.rename(os.fsencode(tmp_path / "f.png"), strange)  # noqa: PTH104
    hemofed("predict", bundle, tmp_path, "-o", "out")
    assert "bl\ufffdt.png" in (tmp_path / "out" / "report.html").read_text()


def test_a_whole_field_is_no_labelled_cell(hemofed, bundle, field, images, tmp_path):
    (tmp_path / "mine" / "other").mkdir(parents=True)
    Image.fromarray(field).save(tmp_path / "mine" / "other" / "field.png")
    Image.fromarray(images[0]).save(tmp_path / "mine" / "other" / "cell.png")
    said = hemofed("edge", "calibrate", bundle, "--data", "mine", "--dry-run")
    assert "a whole field; cut single cells out of it" in said.replace("\n", " ")
    assert "cell diameters about its middle" in hemofed("edge", "show", bundle).replace("\n", " ")


def test_what_a_lab_found_against_a_model_is_remembered(hemofed, bundle, field, images, tmp_path):
    """Labels at random: nothing is decided here any more, until it is measured anew."""
    for n, cell in enumerate(images[:200]):
        place = tmp_path / "mine" / ("schistocyte" if n % 4 == 0 else "other")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(cell).save(place / f"{n}.png")
    assert "gives no verdict by it" in hemofed("edge", "calibrate", bundle, "--data", "mine").replace("\n", " ")
    assert "not to be used here" in hemofed("edge", "show", bundle)
    Image.fromarray(field).save(tmp_path / "f.png")
    told = json.loads(hemofed("predict", bundle, "f.png", "--json"))["slide"]
    assert "do not use this model here" in told["doubts"][0]
    assert told["verdict"] == "cannot decide"
    assert (
        json.loads(hemofed("predict", bundle, "f.png", "--json", "--ignore-local-calibration"))["slide"]["doubts"] == []
    )
