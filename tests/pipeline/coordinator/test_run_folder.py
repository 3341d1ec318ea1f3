"""Run folders: what is refused, with the cure."""

from __future__ import annotations

import json

import pytest

from pipeline.coordinator.run_folder import RUN_FORMAT, RunFolder
from pipeline.core.errors import RunFolderError
from tests.support.studies import moons_study


def test_the_folder_of_a_new_run_opens(tmp_path):
    folder = RunFolder.create(tmp_path / "run", moons_study())
    assert json.loads((folder.path / "run.json").read_text()) == {"format": RUN_FORMAT}
    assert RunFolder.open(folder.path).load_study() == moons_study()


def test_a_folder_of_run_format_1_is_refused(tmp_path):
    (tmp_path / "study.toml").write_text('name = "old"\n[codec]\nup = ["fp16"]\n')
    with pytest.raises(RunFolderError, match=r"has run format 1, .* run the study again"):
        RunFolder.open(tmp_path)


def test_a_folder_of_a_later_run_format_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", moons_study())
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": RUN_FORMAT + 3}))
    with pytest.raises(RunFolderError, match=f"run format {RUN_FORMAT + 3}"):
        RunFolder.open(tmp_path / "run")


def test_a_folder_without_a_study_is_not_a_run_folder(tmp_path):
    with pytest.raises(RunFolderError, match=r"not a run folder: it has no study\.toml"):
        RunFolder.open(tmp_path)
