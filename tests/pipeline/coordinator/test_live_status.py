"""live.json and control.json: the status of a run and the state that its operators request."""

import json
import os

import pytest
from pipeline.coordinator.live_status import LiveStatus, read_live_status, request_state, requested_state


@pytest.mark.parametrize("state", ["run", "pause", "stop", "regroup"])
def test_requested_state_round_trip(tmp_path, state):
    request_state(tmp_path, state)
    assert requested_state(tmp_path) == state


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"want": "dance"}', '{"want": 3}', "{"])
def test_invalid_or_missing_control_file_means_run(tmp_path, text):
    (tmp_path / "control.json").write_text(text)
    assert requested_state(tmp_path) == "run"
    assert requested_state(tmp_path / "nowhere") == "run"


def test_live_status_that_only_reports_progress_is_not_written_every_time(tmp_path):
    live_status = LiveStatus(tmp_path, rounds=3)
    live_status.write()
    live_status.round = 1
    live_status.write(force=False)
    assert read_live_status(tmp_path)["round"] == 0
    live_status.write()
    record = read_live_status(tmp_path)
    assert (record["round"], record["rounds"], record["pid"]) == (1, 3, os.getpid())
    (tmp_path / "live.json").write_text(json.dumps([1]))
    assert read_live_status(tmp_path) is None
