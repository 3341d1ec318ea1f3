"""`hemofed site check` on folders as hospitals might have them."""

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
def site(tmp_path):
    """A home whose site.toml names a folder."""
    home = tmp_path / "clinic"
    home.mkdir()
    (tmp_path / "images").mkdir()
    (home / "site.toml").write_text('data = "../images"\n')
    return home


def look(home, capsys, study=None, data=None, out=None):
    """The JSON and the exit code."""
    code = 0
    try:
        check_command(home, study, data, out, json=True)
    except typer.Exit as left:
        code = left.exit_code
    return json.loads(capsys.readouterr().out), code


def levels(found, about):
    return [finding["level"] for finding in found["findings"] if finding["about"] == about]


def test_good_images(site, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 80)
    found, code = look(site, capsys)
    assert code == 0
    assert found["verdict"] == "look"  # nobody said whose images they are
    assert [finding["what"] for finding in found["findings"]] == ["the data do not say which images are of one patient"]
    assert found["files"] == {
        "files": 80,
        "images": 80,
        "dicom": 0,
        "other": 0,
        "unreadable": 0,
        "hidden": 0,
        "links_out": 0,
    }
    assert found["examples"] == 80
    assert sum(found["counts"]["test"].values()) == 16
    assert (site / "check.html").stat().st_mode & 0o777 == 0o600


def test_nothing_that_identifies_leaves_the_tags(site, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    write_dicom(images / "Mueller Anna" / "scan.dcm", PatientName=PATIENT_NAME, PatientID=PATIENT_ID, private="hush")
    write_image(images / "normal" / f"{PATIENT_ID}.png", make_textures(1, seed=5)[0])
    (images / "normal" / "anna_mueller.png").write_bytes(b"")
    (images / "normal" / "out_mueller.png").symlink_to("/etc/hostname")
    with pytest.raises(typer.Exit):
        check_command(site, None, None, None, json=False)
    shown = "".join(capsys.readouterr()) + (site / "check.html").read_text("utf-8")
    found, code = look(site, capsys)
    assert code == 1
    for secret in ("ueller", "üller", "anna", "4711", "0815", "hush"):
        assert not re.search(secret, json.dumps(found), re.IGNORECASE), secret
        # in the page, base64 may hold anything
        assert not re.search(secret, re.sub(r"base64,[^\"]+", "", shown), re.IGNORECASE), secret
    assert "normal/***.png" in shown
    assert "PatientName" in shown
    assert found["identity"]["paths_that_name_somebody"] == 3
    assert "stop" in levels(found, "identity")


def test_leaks_conflicts_and_odd_images(site, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 60)
    pixels = make_textures(60)
    write_image(images / "schistocyte" / "copy.png", pixels[0])
    write_image(images / "normal" / "blank.png", np.full_like(pixels[0], 200))
    write_image(images / "normal" / "named.jpg", make_textures(1, seed=3)[0], format="PNG")
    found, code = look(site, capsys)
    assert code == 1
    assert found["copies"]["equal"] == [["normal/000.png", "schistocyte/copy.png"]]
    assert found["copies"]["label_conflicts"] == 1
    assert [(odd["kind"], [one["image"] for one in odd["images"]]) for odd in found["odd"]] == [
        ("blank", ["normal/blank.png"])
    ]
    page = HtmlReader((site / "check.html").read_text("utf-8"))
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
    assert len(page.all("img")) == 1 + 2 + 32 + 31  # odd, the two copies, and the sheets of both classes
    assert "http" not in re.sub(r"base64,[^\"]+", "", (site / "check.html").read_text())


def test_the_sheet_of_a_class_is_drawn_with_a_seed(site, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 140)
    look(site, capsys, out=tmp_path / "a.html")
    look(site, capsys, out=tmp_path / "b.html")
    first = (tmp_path / "a.html").read_text()
    assert first.count("<img") == 2 * 60
    assert first == (tmp_path / "b.html").read_text()


def test_damaged_files_and_a_study_that_takes_them(site, tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    (images / "normal" / "000.png").write_bytes(b"")
    (images / "normal" / "002.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    (images / "stray.jpg").write_bytes(b"rubbish")
    found, code = look(site, capsys)
    assert code == 1
    assert [line.partition(":")[0] for line in found["skipped"]] == ["normal/000.png", "normal/002.png"]
    assert ["stray.jpg"] in [finding["where"] for finding in found["findings"]]
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "s"\n[data]\nname = "folder"\ncorrupt = "skip"\n[sites]\ncount = 2\n[model]\nname = "cnn28"\n'
    )
    found, code = look(site, capsys, str(study))
    assert code == 0
    assert found["read_as"] == "read as the study study says"


def test_empty_missing_and_unsaid_folders(site, tmp_path, capsys):
    found, code = look(site, capsys)
    assert (code, [f["what"] for f in found["findings"]]) == (1, ["the folder is empty"])
    with pytest.raises(MissingDataError, match=r"nowhere does not exist; correct `data` in site.toml, or --data"):
        check_command(site, None, tmp_path / "nowhere", None, json=True)
    (site / "site.toml").unlink()
    with pytest.raises(MissingDataError, match=r"write `data = .*site.toml"):
        check_command(site, None, None, None, json=True)
    with pytest.raises(RunFolderError, match="hemofed site init"):
        check_command(tmp_path / "none", None, None, None, json=True)


def offered(home, run, age, **data):
    raw = {"name": "s", "data": {"name": "folder"} | data, "model": "cnn28", "sites": {"count": 2}}
    made = create_offer(run, Study.model_validate(raw), {"a": "00" * 32, "b": "11" * 32}, "22" * 32)
    file = home / "offers" / f"{made.digest}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(made.model_dump_json())
    os.utime(file, (1e9 - age, 1e9 - age))


def test_the_newest_offer_says_how_to_read_unless_another_is_named(site, tmp_path, capsys):
    write_smear_folder(tmp_path / "images", 40)
    offered(site, "old", 9, size=32)
    offered(site, "new", 1, size=24, test=0.5)
    found, _ = look(site, capsys)
    assert found["read_as"] == "read as the offered run new says"
    assert sum(found["counts"]["test"].values()) == 20
    found, _ = look(site, capsys, "old")
    assert found["read_as"] == "read as the offered run old says"
    with pytest.raises(StudyError, match="offered runs: old, new"):
        check_command(site, "neww", None, None, json=True)
    (site / "offers" / "x.json").write_text("{}")
    with pytest.raises(MessageError, match=r"x\.json"):
        check_command(site, None, None, None, json=True)


def test_who_withdrew_is_not_looked_at(tmp_path, capsys):
    images = write_smear_folder(tmp_path / "images", 40)
    lines = [f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{n % 2},p{n // 4}" for n in range(40)]
    (images / "list.csv").write_text("path,label,patient\n" + "\n".join(lines))
    home = SiteHome.create(tmp_path / "clinic", "clinic", "d", "patient", LedgerBudget(epsilon=1, delta=1e-5))
    SiteSettings(data=images, layout={"manifest": "list.csv"}).save(home.path)
    assert look(home.path, capsys)[0]["examples"] == 40
    home.withdraw_unit("p3")
    found, _ = look(home.path, capsys)
    assert found["examples"] == 36
    assert "4 examples left out: their patient withdrew" in [f["what"] for f in found["findings"]]


def test_data_without_files_or_images(site, capsys):
    (site / "site.toml").unlink()
    found, code = look(site, capsys, "moons-demo")
    assert code == 0
    assert found["odd"] == []
    assert found["data"] == ""


@needs_real_cells
def test_real_cells(site, tmp_path, capsys):
    found, code = look(site, capsys, "schistocytes", REAL_CELLS / "chula_rbc12.npz")
    assert code == 0
    assert found["classes"] == ["other", "schistocyte"]
    assert found["counts"]["test"] == {"other": 3858, "schistocyte": 178}
    assert found["copies"]["leaks"] == 0
    assert found["unit"] == "group"
