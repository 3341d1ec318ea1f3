"""`hemofed site check` on image folders as hospitals may have them."""

import json
import os
import re

import numpy as np
import pytest
import typer

from pipeline.cli.commands.site.check import check_command
from pipeline.core.errors import MessageError, MissingDataError, RunFolderError, StudyError
from pipeline.study.offer import create_offer
from pipeline.study.schema import Study
from privacy.ledger.records import LedgerBudget
from sites.governance.home import SiteHome
from sites.governance.settings import SiteSettings
from tests.support.browser.axe import find_violations_of_file
from tests.support.html_reader import HtmlReader
from tests.support.image_files import (
    PATIENT_ID,
    PATIENT_NAME,
    make_textures,
    write_dicom,
    write_image,
    write_smear_folder,
)
from tests.support.markers import REAL_CELLS, needs_real_cells


@pytest.fixture
def site_home(tmp_path):
    """A home whose site.toml names a folder of images."""
    home = tmp_path / "clinic"
    home.mkdir()
    (tmp_path / "images").mkdir()
    (home / "site.toml").write_text('data = "../images"\n')
    return home


def run_check(home, capsys, study=None, data=None, out=None):
    """Returns the JSON output and the exit code."""
    exit_code = 0
    try:
        check_command(home, study, data, out, json=True)
    except typer.Exit as raised:
        exit_code = raised.exit_code
    return json.loads(capsys.readouterr().out), exit_code


def levels(result, category):
    return [finding["level"] for finding in result["findings"] if finding["category"] == category]


def test_good_images_pass(site_home, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 80)
    result, exit_code = run_check(site_home, capsys)
    assert exit_code == 0
    assert result["verdict"] == "look"  # no patients are named
    assert [finding["what"] for finding in result["findings"]] == [
        "the data do not state which images belong to the same patient"
    ]
    assert result["files"] == {
        "files": 80,
        "images": 80,
        "dicom": 0,
        "other": 0,
        "unreadable": 0,
        "hidden": 0,
        "links_out": 0,
    }
    assert result["examples"] == 80
    assert sum(result["counts"]["test"].values()) == 16
    assert (site_home / "check.html").stat().st_mode & 0o777 == 0o600


def test_output_redacts_identifying_information(site_home, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    write_dicom(images / "Mueller Anna" / "scan.dcm", PatientName=PATIENT_NAME, PatientID=PATIENT_ID, private="hush")
    write_image(images / "normal" / f"{PATIENT_ID}.png", make_textures(1, seed=5)[0])
    (images / "normal" / "anna_mueller.png").write_bytes(b"")
    (images / "normal" / "out_mueller.png").symlink_to("/etc/hostname")
    with pytest.raises(typer.Exit):
        check_command(site_home, None, None, None, json=False)
    output_and_page = "".join(capsys.readouterr()) + (site_home / "check.html").read_text("utf-8")
    result, exit_code = run_check(site_home, capsys)
    assert exit_code == 1
    for secret in ("ueller", "üller", "anna", "4711", "0815", "hush"):
        assert not re.search(secret, json.dumps(result), re.IGNORECASE), secret
        # base64 in the page can contain any sequence of letters
        assert not re.search(secret, re.sub(r"base64,[^\"]+", "", output_and_page), re.IGNORECASE), secret
    assert "normal/***.png" in output_and_page
    assert "PatientName" in output_and_page
    assert result["identity"]["paths_that_name_somebody"] == 3
    assert "stop" in levels(result, "identity")


def test_duplicates_label_conflicts_and_unusual_images(site_home, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 60)
    pixels = make_textures(60)
    write_image(images / "schistocyte" / "copy.png", pixels[0])
    write_image(images / "normal" / "blank.png", np.full_like(pixels[0], 200))
    write_image(images / "normal" / "named.jpg", make_textures(1, seed=3)[0], format="PNG")
    result, exit_code = run_check(site_home, capsys)
    assert exit_code == 1
    assert result["copies"]["equal"] == [["normal/000.png", "schistocyte/copy.png"]]
    assert result["copies"]["label_conflicts"] == 1
    assert [(odd["kind"], [one["image"] for one in odd["images"]]) for odd in result["odd"]] == [
        ("blank", ["normal/blank.png"])
    ]
    page = HtmlReader((site_home / "check.html").read_text("utf-8"))
    assert "must not leave the hospital" in page.texts("header")[0]
    assert page.texts("h2") == [
        "Findings",
        "Class counts",
        "Unusual images",
        "Duplicate images",
        "Identifying information in metadata",
        "Images of each class",
    ]
    names = [tag.attributes.get("title") for tag in page.all("span")]
    assert "normal/blank.png" in names
    assert "normal/000.png = schistocyte/copy.png" in names
    # one unusual image, two duplicates, and the contact sheets of both classes
    assert len(page.all("img")) == 1 + 2 + 32 + 31
    assert "http" not in re.sub(r"base64,[^\"]+", "", (site_home / "check.html").read_text())


def test_page_is_accessible(browser, site_home, tmp_path):
    images = write_smear_folder(tmp_path / "images", 60)
    pixels = make_textures(60)
    write_image(images / "schistocyte" / "copy.png", pixels[0])
    write_image(images / "normal" / "blank.png", np.full_like(pixels[0], 200))
    write_dicom(images / "normal" / "scan.dcm", PatientName=PATIENT_NAME, PatientID=PATIENT_ID, private="hush")
    (images / "normal" / "empty.png").write_bytes(b"")
    with pytest.raises(typer.Exit):
        check_command(site_home, None, None, None, json=True)
    assert find_violations_of_file(browser, site_home / "check.html") == {}


def test_contact_sheets_are_reproducible(site_home, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 140)
    run_check(site_home, capsys, out=tmp_path / "a.html")
    run_check(site_home, capsys, out=tmp_path / "b.html")
    first = (tmp_path / "a.html").read_text()
    assert first.count("<img") == 2 * 60
    assert first == (tmp_path / "b.html").read_text()


def test_corrupt_files_stop_unless_the_study_skips_them(site_home, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    (images / "normal" / "000.png").write_bytes(b"")
    (images / "normal" / "002.png").write_bytes(b"\x89PNG\r\n\x1a\ncorrupt")
    (images / "stray.jpg").write_bytes(b"corrupt")
    result, exit_code = run_check(site_home, capsys)
    assert exit_code == 1
    assert [line.partition(":")[0] for line in result["skipped"]] == ["normal/000.png", "normal/002.png"]
    assert ["stray.jpg"] in [finding["where"] for finding in result["findings"]]
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "s"\n[data]\nname = "folder"\ncorrupt = "skip"\n[sites]\ncount = 2\n[model]\nname = "cnn28"\n'
    )
    result, exit_code = run_check(site_home, capsys, str(study))
    assert exit_code == 0
    assert result["read_as"] == "read as the study study defines"


def test_empty_missing_and_unknown_folders(site_home, tmp_path, capsys):
    result, exit_code = run_check(site_home, capsys)
    assert (exit_code, [f["what"] for f in result["findings"]]) == (1, ["the data folder contains no files"])
    with pytest.raises(
        MissingDataError, match=r"nowhere does not exist; correct `data` in site.toml, or the option --data"
    ):
        check_command(site_home, None, tmp_path / "nowhere", None, json=True)
    (site_home / "site.toml").unlink()
    with pytest.raises(MissingDataError, match=r"write `data = .*site.toml"):
        check_command(site_home, None, None, None, json=True)
    with pytest.raises(RunFolderError, match="hemofed site init"):
        check_command(tmp_path / "none", None, None, None, json=True)


def write_offer(home, run, age_seconds, **data):
    raw_study = {"name": "s", "data": {"name": "folder"} | data, "model": "cnn28", "sites": {"count": 2}}
    offer = create_offer(run, Study.model_validate(raw_study), {"a": "00" * 32, "b": "11" * 32}, "22" * 32)
    file = home / "offers" / f"{offer.digest}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(offer.model_dump_json())
    os.utime(file, (1e9 - age_seconds, 1e9 - age_seconds))


def test_data_are_read_as_in_the_newest_offer_unless_another_is_named(site_home, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 40)
    write_offer(site_home, "old", 9, size=32)
    write_offer(site_home, "new", 1, size=24, test=0.5)
    result, _ = run_check(site_home, capsys)
    assert result["read_as"] == "read as the offered run new defines"
    assert sum(result["counts"]["test"].values()) == 20
    result, _ = run_check(site_home, capsys, "old")
    assert result["read_as"] == "read as the offered run old defines"
    with pytest.raises(StudyError, match="offered runs: old, new"):
        check_command(site_home, "neww", None, None, json=True)
    (site_home / "offers" / "x.json").write_text("{}")
    with pytest.raises(MessageError, match=r"x\.json"):
        check_command(site_home, None, None, None, json=True)


def test_withdrawn_patients_are_not_checked(tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    lines = [f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{n % 2},p{n // 4}" for n in range(40)]
    (images / "list.csv").write_text("path,label,patient\n" + "\n".join(lines))
    home = SiteHome.create(tmp_path / "clinic", "clinic", "d", "patient", LedgerBudget(epsilon=1, delta=1e-5))
    SiteSettings(data=images, layout={"manifest": "list.csv"}).save(home.path)
    assert run_check(home.path, capsys)[0]["examples"] == 40
    home.withdraw_unit("p3")
    result, _ = run_check(home.path, capsys)
    assert result["examples"] == 36
    assert "4 examples were excluded from this check, because the patient withdrew" in [
        f["what"] for f in result["findings"]
    ]


def test_data_source_without_files(site_home, capsys):
    (site_home / "site.toml").unlink()
    result, exit_code = run_check(site_home, capsys, "moons-demo")
    assert exit_code == 0
    assert result["odd"] == []
    assert result["data"] == ""


@needs_real_cells
def test_real_cells(site_home, tmp_path, capsys):
    result, exit_code = run_check(site_home, capsys, "schistocytes", REAL_CELLS / "chula_rbc12.npz")
    assert exit_code == 0
    assert result["classes"] == ["other", "schistocyte"]
    assert result["counts"]["test"] == {"other": 3858, "schistocyte": 178}
    assert result["copies"]["leaks"] == 0
    assert result["unit"] == "group"
