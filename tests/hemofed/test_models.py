"""What follows a run: evaluate, compare, audit, export, trust and predict."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from PIL import Image

import hemofed
from deploy.export.export import ExportResult

ROOT = Path(__file__).parents[2]
STUDY = {
    "name": "cells",
    "rounds": 2,
    "seed": 5,
    "data": {"name": "synthetic_smear", "cells": 600, "patients": 30, "size": 40, "schistocytes": 0.3, "val": 0.3},
    "sites": {"count": 2},
    "model": "cnn72",
    "local": {"lr": 0.002, "batch_size": 16, "epochs": 1, "optimizer": "adamw"},
    "evaluation": {"evaluate_at": "sites", "positive_class": "schistocyte"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> hemofed.Run:
    return hemofed.run(STUDY, out=tmp_path_factory.mktemp("runs") / "cells")


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Iterator[Path]:
    """The home of a user without keys and pinned signers."""
    home = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEMOFED_TRUST", str(home / "trust.json"))
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        yield home


@pytest.fixture(scope="module")
def exported(run, user) -> ExportResult:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        exported = hemofed.export(run, user / "bundle", license_text="for tests")
    assert out.getvalue() + err.getvalue() == ""  # nothing is printed unless asked
    return exported


@pytest.fixture
def cell(tmp_path) -> Path:
    Image.new("RGB", (40, 40), (200, 120, 130)).save(tmp_path / "cell.png")
    return tmp_path / "cell.png"


def test_evaluate_reads_the_test_examples_or_all_of_other_data(run):
    own = hemofed.evaluate(run)
    assert (own.split, own.data, own.model) == ("test", "synthetic_smear", "global")
    other = hemofed.evaluate(run.path, split="all", overrides={"cells": 90, "patients": 9})
    assert other.metrics.n == sum(map(sum, other.metrics.confusion)) == 90
    with pytest.raises(hemofed.RunFolderError, match="no model 'nobody'"):
        hemofed.evaluate(run, model="nobody")


def test_a_site_whose_name_is_no_file_name_is_given_as_it_is(run, tmp_path):
    copied = hemofed.load_run(shutil.copytree(run.path, tmp_path / "copy"))
    (copied.path / "models" / "site").mkdir()
    shutil.copy(copied.path / "models" / "global.safetensors", copied.path / "models" / "site" / "a%2Fb.safetensors")
    assert copied.models == ("global", "site/a/b")
    assert list(copied.personal_models) == ["a/b"]
    assert hemofed.evaluate(copied, model="site/a/b").metrics == hemofed.evaluate(run).metrics


def test_compare_returns_a_row_per_run_and_writes_the_page(run, tmp_path):
    rows = hemofed.compare([run, str(run.path)], tmp_path / "page.html", metric="loss")
    assert [row["strategy"] for row in rows] == ["fedavg", "fedavg"]
    assert "loss" in rows[0]
    assert "cells" in (tmp_path / "page.html").read_text()


def test_report_is_written_again(run):
    (run.path / "report.html").unlink()
    assert run.report() == run.path / "report.html"
    assert (run.path / "report.html").exists()


def test_audit_returns_what_it_writes(run, tmp_path):
    facts = hemofed.audit(run, out=tmp_path / "audit")
    assert facts.ok
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["run"] == facts.run == "cells"


def test_export_signs_with_a_new_key_of_the_user(exported, user):
    assert exported.model_card["license"] == "for tests"
    assert exported.zip_path == user / "bundle.zip"
    assert len(list((user / "data").rglob("signing.pem"))) == 1


def test_a_signer_must_be_trusted_before_predict_reads_the_bundle(exported, cell, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HEMOFED_TRUST", str(tmp_path / "trust.json"))
    with pytest.raises(hemofed.BundleError, match="not pinned on this machine"):
        hemofed.predict(exported.folder, cell)
    hemofed.trust("me", exported.public_key)
    gone, report = tmp_path / "gone.png", tmp_path / "report"
    prediction = hemofed.predict(exported.zip_path, [cell, gone], input_type="cell", out=report)
    assert [image.name for image in prediction.images] == [str(cell)]
    failures = [(failure.name, failure.reason) for failure in prediction.failures]
    assert failures == [(str(gone), f"{gone}: no such file; check its name")]
    assert prediction.bundle["signer"] == "me"
    assert report / "cells.csv" in prediction.written_files
    assert prediction.slide.positive_class == "schistocyte"
    assert capfd.readouterr() == ("", "")


def test_predict_needs_no_torch(exported, cell):
    hemofed.trust("me", exported.folder)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import hemofed\n"
        f"print(hemofed.predict({str(exported.folder)!r}, {str(cell)!r}, input_type='cell').images[0].kind)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert completed.stdout == "cell\n", completed.stderr
