"""What a run tells and is told, through files that survive either side."""

import json
import os

import pytest

from pipeline.coordinator.live_status import LiveStatus, read_live_status, request_state, requested_state


@pytest.mark.parametrize("what", ["run", "pause", "stop", "regroup"])
def test_what_is_wanted_is_heard(tmp_path, what):
    request_state(tmp_path, what)
    assert requested_state(tmp_path) == what


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"want": "dance"}', '{"want": 3}', "{"])
def test_what_cannot_be_understood_means_go_on(tmp_path, text):
    (tmp_path / "control.json").write_text(text)
    assert requested_state(tmp_path) == "run"
    assert requested_state(tmp_path / "nowhere") == "run"


def test_progress_is_not_written_at_every_step(tmp_path):
    live = LiveStatus(tmp_path, rounds=3)
    live.write()
    live.round = 1
    live.write(force=False)
    assert read_live_status(tmp_path)["round"] == 0
    live.write()
    told = read_live_status(tmp_path)
    assert (told["round"], told["rounds"], told["pid"]) == (1, 3, os.getpid())
    (tmp_path / "live.json").write_text(json.dumps([1]))
    assert read_live_status(tmp_path) is None
