"""What a run tells and is told, through files that survive either side."""

import json
import os

import pytest

from pipeline.coordinator.live_status import Live, read_live, want, wanted


@pytest.mark.parametrize("what", ["run", "pause", "stop", "regroup"])
def test_what_is_wanted_is_heard(tmp_path, what):
    want(tmp_path, what)
    assert wanted(tmp_path) == what


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"want": "dance"}', '{"want": 3}', "{"])
def test_what_cannot_be_understood_means_go_on(tmp_path, text):
    (tmp_path / "control.json").write_text(text)
    assert wanted(tmp_path) == "run"
    assert wanted(tmp_path / "nowhere") == "run"


def test_progress_is_not_written_at_every_step(tmp_path):
    live = Live(tmp_path, rounds=3)
    live.tell()
    live.round = 1
    live.tell(at_once=False)
    assert read_live(tmp_path)["round"] == 0
    live.tell()
    told = read_live(tmp_path)
    assert (told["round"], told["rounds"], told["pid"]) == (1, 3, os.getpid())
    (tmp_path / "live.json").write_text(json.dumps([1]))
    assert read_live(tmp_path) is None
