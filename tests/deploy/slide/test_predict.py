"""The commands `hemofed predict`, `trust`, `edge` and `export`."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.bundle.bundle import ModelBundle
from deploy.inference.local_calibration import MIN_POSITIVE_CELLS, LocalCalibration, load_local_calibration
from deploy.slide.json_format import SlideDocument
from pipeline.core.errors import HemofedError
from sites.data.renderer.field import render_field
from tests.support.browser.axe import find_violations_of_file
from tests.support.markers import REAL_CELLS, needs_real_cells

NOTICE = "research use only, not a medical device"


@pytest.fixture(scope="module")
def slide(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("slide")
    for n in (1, 2):
        Image.fromarray(render_field(n, types=[0] * 30 + [9] * 4, num_unlabeled=0).image).save(out / f"field-{n}.png")
    return out


def test_predict_slide(hemofed, bundle, slide, tmp_path):
    result = json.loads(hemofed("predict", bundle, slide, "--json", "-o", tmp_path / "out"))
    document = SlideDocument.model_validate(result)
    assert (result["format"], document.model_dump(mode="json", by_alias=True)) == (1, result)
    assert result["notice"] == result["slide"]["notice"] == NOTICE
    assert [Path(i["path"]).name for i in result["images"]] == ["field-1.png", "field-2.png"]
    for image in result["images"]:
        assert all(c["class"] in (None, "other", "schistocyte") for c in image["cells"])
    counted = sum(c["is_counted"] for i in result["images"] for c in i["cells"])
    assert result["slide"]["num_counted"] == counted
    assert {"report.html", "cells.csv", "montage.png", "overlay-0001.png", "overlay-0002.png"} == {
        p.name for p in (tmp_path / "out").iterdir()
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert NOTICE.capitalize() in page
    assert page.count("data:image/jpeg") == 3
    rows = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    assert len(rows) == result["slide"]["num_found"]


def test_slide_report_is_accessible(browser, hemofed, bundle, slide, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    hemofed("predict", bundle, slide, tmp_path / "broken.png", "-o", tmp_path / "out", code=1)
    assert find_violations_of_file(browser, tmp_path / "out" / "report.html") == {}


def test_predict_terminal_output(hemofed, bundle, slide):
    output = hemofed("predict", bundle, slide)
    assert NOTICE in output
    assert "slide report" in output
    assert "were not reached" in output


def test_duplicate_images_are_counted_once(hemofed, bundle, slide, tmp_path):
    shutil.copy(slide / "field-1.png", tmp_path / "a.png")
    shutil.copy(slide / "field-1.png", tmp_path / "b.png")
    result = json.loads(hemofed("predict", bundle, tmp_path / "a.png", tmp_path / "b.png", "--json"))
    a, b = result["images"]
    assert a["cells"] == b["cells"]
    assert (a["duplicate_of"], b["duplicate_of"]) == (None, a["path"])
    assert result["slide"]["num_found"] == len(a["cells"])  # not twice
    assert "is not counted again" in hemofed("predict", bundle, tmp_path / "a.png", tmp_path / "b.png")
    Image.open(tmp_path / "a.png").save(tmp_path / "c.bmp")
    result = json.loads(hemofed("predict", bundle, tmp_path / "a.png", tmp_path / "c.bmp", "--json"))
    assert result["images"][1]["duplicate_of"] == a["path"], "by its pixels, not by its bytes"


def test_output_folder_must_be_empty(hemofed, bundle, slide, tmp_path):
    hemofed("predict", bundle, slide, "-o", tmp_path / "out")
    with pytest.raises(Exception, match="not an empty folder"):
        hemofed("predict", bundle, slide / "field-1.png", "-o", tmp_path / "out")


def test_predict_writes_nothing_to_the_home_folder(hemofed, bundle, slide, tmp_path, trusted_env):
    """In particular, onnxruntime stores no device id for its telemetry."""
    home = tmp_path / "home"
    home.mkdir()
    env = trusted_env | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    done = [sys.executable, "-m", "hemofed", "predict", str(bundle), str(slide), "--json"]
    subprocess.run(done, env=env, check=True, capture_output=True)
    assert list(home.iterdir()) == []


def test_cells_csv_and_stdin(hemofed, bundle, images, tmp_path, trusted_env):
    for n in range(3):
        Image.fromarray(images[n]).save(tmp_path / f"{n}.png")
    lines = list(csv.DictReader(io.StringIO(hemofed("predict", bundle, tmp_path, "--csv"))))
    assert len(lines) == 3
    done = subprocess.run(
        [sys.executable, "-m", "hemofed", "predict", str(bundle), "-", "--json"],
        capture_output=True,
        input=(tmp_path / "0.png").read_bytes(),
        env=trusted_env,
        check=True,
    )
    (one,) = json.loads(done.stdout)["images"]
    assert one["path"] == "-"
    assert one["probability"] == pytest.approx(float(lines[0]["probability"]), abs=1e-5)


def test_unreadable_images_do_not_stop_predict(hemofed, bundle, images, tmp_path):
    Image.fromarray(images[0]).save(tmp_path / "good.png")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.dcm").write_text("not an image")
    whole = io.BytesIO()
    Image.fromarray(images[1]).save(whole, "JPEG")
    (tmp_path / "half.jpg").write_bytes(whole.getvalue()[:400])
    result = json.loads(hemofed("predict", bundle, tmp_path, tmp_path / "missing.png", "--json", code=1))
    errors = {Path(i["path"]).name: i["error"] for i in result["images"] if "error" in i}
    assert errors.keys() == {"empty.png", "text.dcm", "half.jpg", "missing.png"}
    assert [Path(i["path"]).name for i in result["images"] if "error" not in i] == ["good.png"]


def test_operating_point_option(hemofed, bundle, slide):
    few, many = (
        json.loads(hemofed("predict", bundle, slide, "--json", "--operating-point", p))["slide"]
        for p in ("safe", "even")
    )
    assert few["num_flagged"] <= many["num_flagged"]
    assert many["operating_point"]["name"] == "even"
    by_value = json.loads(hemofed("predict", bundle, slide, "--json", "--operating-point", "0.5"))["slide"][
        "operating_point"
    ]
    assert by_value["probability"] >= 0.5
    with pytest.raises(Exception, match="no such operating point; valid: safe"):
        hemofed("predict", bundle, slide, "--operating-point", "sure")


def test_csv_escapes_formulas_in_file_names(hemofed, bundle, images, tmp_path):
    Image.fromarray(images[0]).save(tmp_path / "=cmd.png")
    lines = list(csv.DictReader(io.StringIO(hemofed("predict", bundle, "=cmd.png", "--csv"))))
    assert lines[0]["path"] == "'=cmd.png"


def test_unknown_and_tampered_bundles_are_refused(hemofed, bundle, images, tmp_path, monkeypatch):
    shutil.copytree(bundle, tmp_path / "b")
    (tmp_path / "b" / "calibration.json").write_text("{}")
    with pytest.raises(Exception, match="changed after it was signed"):
        hemofed("predict", tmp_path / "b", "x.png")
    monkeypatch.setenv("HEMOFED_TRUST", str(tmp_path / "nobody.json"))
    with pytest.raises(Exception, match="not pinned on this machine"):
        hemofed("predict", bundle, "x.png")


def test_trust_commands(hemofed, exported_run, monkeypatch, tmp_path):
    monkeypatch.setenv("HEMOFED_TRUST", str(tmp_path / "t.json"))
    assert "no key is pinned" in hemofed("trust", "list")
    assert "pinned lead" in hemofed("trust", "add", "lead", exported_run.export.public_key)
    assert json.loads(hemofed("trust", "list", "--json"))[0]["key"] == exported_run.export.public_key
    assert "valid signature by lead" in hemofed("edge", "show", exported_run.export.folder)
    hemofed("trust", "remove", "lead")
    assert json.loads(hemofed("trust", "list", "--json")) == []


def test_export_command(hemofed, exported_run, tmp_path):
    result = json.loads(
        hemofed(
            "export",
            exported_run.run_folder.path,
            "-o",
            tmp_path / "new",
            "--key",
            exported_run.key_path,
            "--license",
            "CC0",
            "--json",
        )
    )
    assert result["key"] == exported_run.export.public_key
    assert result["card"]["license"] == "CC0"
    assert ModelBundle.open(tmp_path / "new.zip", exported_run.trust_store).digest == result["digest"]
    output = hemofed("export", exported_run.run_folder.path, "-o", tmp_path / "other")
    assert "hemofed trust add NAME" in output
    with pytest.raises(Exception, match="--model and --site exclude each other"):
        hemofed("export", exported_run.run_folder.path, "-o", tmp_path / "x", "--model", "global", "--site", "a")


def test_export_creates_no_key_for_a_run_that_cannot_be_exported(hemofed, exported_run, tmp_path, trusted_env):
    (tmp_path / "there").mkdir()
    for options, why in (
        (["-o", tmp_path / "there"], "is not overwritten"),
        (["-o", tmp_path / "b", "--model", "globl"], "no model 'globl'"),
    ):
        with pytest.raises(HemofedError, match=why):
            hemofed("export", exported_run.run_folder.path, *options)
        assert not list(Path(trusted_env["XDG_DATA_HOME"]).rglob("signing.pem"))
    hemofed("export", exported_run.run_folder.path, "-o", tmp_path / "b")
    assert len(list(Path(trusted_env["XDG_DATA_HOME"]).rglob("signing.pem"))) == 1


def write_labeled_cells(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    for n, (image, label) in enumerate(zip(images, labels, strict=True)):
        class_folder = folder / ("schistocyte" if label else "other")
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(class_folder / f"{n:04d}.png")
    return folder


@pytest.fixture(scope="module")
def labeled_cells(tmp_path_factory) -> Path:
    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=900, patients=30, schistocytes=0.25).load(None, 77)
    images = np.ascontiguousarray(data.x.permute(0, 2, 3, 1).numpy())
    return write_labeled_cells(tmp_path_factory.mktemp("lab"), images, data.y.numpy())


def test_local_calibration_sets_operating_points(hemofed, exported_run, bundle, labeled_cells, slide):
    result = json.loads(hemofed("edge", "calibrate", bundle, "--data", labeled_cells, "--json"))
    assert result["cells"] == 900
    assert 0.5 < result["auroc"] <= 1
    assert result["notice"] == NOTICE
    own = load_local_calibration(exported_run.bundle)
    assert own is not None
    safe = own.calibration.operating_points[0]
    assert safe.tp + safe.fn == result["by_class"]["schistocyte"]
    assert safe.specificity >= 0.998
    after = json.loads(hemofed("predict", bundle, slide, "--json"))
    assert after["bundle"]["has_local_calibration"]
    assert "labelled cells of this lab" in after["bundle"]["calibrated_on"]
    assert after["slide"]["operating_point"]["log_odds"] == safe.log_odds
    assert not json.loads(hemofed("predict", bundle, slide, "--json", "--ignore-local-calibration"))["bundle"][
        "has_local_calibration"
    ]


def test_local_calibration_with_few_cells_sets_no_thresholds(hemofed, exported_run, bundle, labeled_cells, tmp_path):
    for name in ("other", "schistocyte"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for file in sorted((labeled_cells / name).iterdir())[: MIN_POSITIVE_CELLS - 5]:
            shutil.copy(file, tmp_path / "few" / name)
    output = hemofed("edge", "calibrate", bundle, "--data", tmp_path / "few")
    assert "too few labelled cells" in output
    assert load_local_calibration(exported_run.bundle) is None


def test_labelled_cells_csv_errors(hemofed, bundle, labeled_cells, tmp_path):
    files = sorted((labeled_cells / "other").iterdir())[:3]
    table = tmp_path / "cells.csv"
    table.write_text("path,label\n" + "".join(f"{f},other\n" for f in files) + "gone.png,other\n")
    result = json.loads(hemofed("edge", "calibrate", bundle, "--data", table, "--json", "--dry-run"))
    assert result["cells"] == 3
    assert "gone.png" in result["skipped"][0]
    table.write_text("path,label\nx.png,broken\n")
    with pytest.raises(Exception, match="'broken' is not a class"):
        hemofed("edge", "calibrate", bundle, "--data", table)
    table.write_text("file,kind\n")
    with pytest.raises(Exception, match="columns path and label"):
        hemofed("edge", "calibrate", bundle, "--data", table)
    (tmp_path / "none").mkdir()
    table.write_text("path,label\n,other\n")
    with pytest.raises(Exception, match="line 2: path or label is missing"):
        hemofed("edge", "calibrate", bundle, "--data", table)
    shutil.copy(files[0], tmp_path / "twin.png")
    table.write_text(f"path,label\n{files[0]},other\ntwin.png,schistocyte\n")
    with pytest.raises(Exception, match="the same image, once other and once schistocyte"):
        hemofed("edge", "calibrate", bundle, "--data", table)
    (tmp_path / "odd" / "schistocytes").mkdir(parents=True)
    with pytest.raises(Exception, match="schistocytes is not a class"):
        hemofed("edge", "calibrate", bundle, "--data", tmp_path / "odd")
    with pytest.raises(Exception, match="no labelled images"):
        hemofed("edge", "calibrate", bundle, "--data", tmp_path / "none")


def test_random_labels_give_an_unfit_local_calibration(hemofed, exported_run, bundle, labeled_cells, tmp_path):
    files = sorted(labeled_cells.rglob("*.png"))
    order = np.random.default_rng(0).permutation(len(files))
    table = tmp_path / "cells.csv"
    rows = [f"{files[n]},{'schistocyte' if position < 100 else 'other'}" for position, n in enumerate(order)]
    table.write_text("path,label\n" + "\n".join(rows) + "\n")
    result = json.loads(hemofed("edge", "calibrate", bundle, "--data", table, "--json"))
    assert "too low for any threshold" in result["why_not"]
    own = load_local_calibration(exported_run.bundle)
    assert own is not None
    assert own.unfit_reason == result["why_not"]
    assert own.calibration == exported_run.bundle.calibration


def test_local_calibration_is_per_precision(hemofed, exported_run, bundle, labeled_cells):
    hemofed("edge", "calibrate", bundle, "--data", labeled_cells, "--precision", "int8")
    assert load_local_calibration(exported_run.bundle) is None
    assert load_local_calibration(exported_run.bundle, "int8") is not None


def test_damaged_local_calibration_is_refused(hemofed, exported_run, bundle, labeled_cells, slide, trusted_env):
    hemofed("edge", "calibrate", bundle, "--data", labeled_cells)
    (file,) = Path(trusted_env["HEMOFED_LOCAL_CALIBRATIONS"]).iterdir()
    own = LocalCalibration.model_validate_json(file.read_bytes())
    file.write_text(own.model_copy(update={"bundle_digest": "0" * 64}).model_dump_json())
    with pytest.raises(Exception, match="another bundle"):
        hemofed("predict", bundle, slide)
    file.write_text("{")
    with pytest.raises(Exception, match="damaged"):
        hemofed("predict", bundle, slide)
    file.write_text(json.dumps(json.loads(own.model_dump_json()) | {"format": 1}))
    with pytest.raises(
        Exception, match="has the format of another hemofed version; remove it and run `hemofed edge calib"
    ):
        hemofed("predict", bundle, slide)


def test_dicom_results(hemofed, bundle, tmp_path):
    import pydicom

    hemofed("demo", "slide", "slide", "--cells", 60, "--schistocytes", 0.2, "--dicom")
    result = json.loads(hemofed("predict", bundle, "slide", "--dicom", "out", "--operating-point", "even", "--json"))
    report = pydicom.dcmread(tmp_path / "out" / "report.dcm")
    source = pydicom.dcmread(tmp_path / "slide" / "field-01.dcm")
    assert report.PatientID == source.PatientID
    assert source.SOPInstanceUID in str(report)
    assert NOTICE in report.to_json()
    assert [Path(w).name for w in result["written"]] == ["report.dcm", "overlay-0001-1.dcm"]
    Image.fromarray(render_field(1).image).save(tmp_path / "f.png")
    with pytest.raises(Exception, match="none was given"):
        hemofed("predict", bundle, "f.png", "--dicom", "out2")


def test_demo_slide_writes_its_truth(hemofed, tmp_path):
    result = json.loads(hemofed("demo", "slide", "s", "--cells", 130, "--schistocytes", 0.1, "--json"))
    rows = list(csv.DictReader((tmp_path / "s" / "truth.csv").read_text().splitlines()))
    assert len(rows) == result["cells"] == 130
    assert sum(r["type"] == "schistocyte" for r in rows) == result["schistocytes"] == 13
    assert len(list((tmp_path / "s").glob("*.png"))) == result["fields"] == 3
    with pytest.raises(Exception, match="not empty"):
        hemofed("demo", "slide", "s")
    with pytest.raises(Exception, match="phone"):
        hemofed("demo", "slide", "t", "--scanner", "phon")


@needs_real_cells
def test_real_fields(hemofed, bundle):
    """Boxes of the command against the points that experts labelled."""
    fields = REAL_CELLS / "chula_fields"
    named = [fields / f"{n}.jpg" for n in (26, 64, 240, 552, 560, 720)]
    result = json.loads(hemofed("predict", bundle, *named, "--json"))
    hits = []
    for image, path in zip(result["images"], named, strict=True):
        points = [tuple(map(int, line.split()[:2])) for line in path.with_suffix(".txt").read_text().splitlines()]
        boxes = [c["box"] for c in image["cells"] if c["kind"] in ("red", "border")]
        hits += [any(x0 <= x < x1 and y0 <= y < y1 for x0, y0, x1, y1 in boxes) for x, y in points]
    assert np.mean(hits) >= 0.9
    twins = json.loads(hemofed("predict", bundle, fields / "560.jpg", fields / "607.jpg", "--json"))["images"]
    assert twins[0]["cells"] == twins[1]["cells"]
