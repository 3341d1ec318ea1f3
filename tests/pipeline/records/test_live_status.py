"""live.json and control.json: the status of a run and the state that its operators request."""

import json
import os

import pytest

from pipeline.protocol.messages import ClientFailure
from pipeline.records.live_status import LiveStatus, LiveStatusWriter
from pipeline.records.run_control import request_state, requested_state


@pytest.mark.parametrize("state", ["run", "pause", "stop", "regroup"])
def test_requested_state_round_trip(tmp_path, state):
    request_state(tmp_path, state)
    assert requested_state(tmp_path) == state


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"desired_state": "dance"}', '{"desired_state": 3}', '{"want": "stop"}', "{"]
)
def test_invalid_or_missing_control_file_means_run(tmp_path, text):
    (tmp_path / "control.json").write_text(text)
    assert requested_state(tmp_path) == "run"
    assert requested_state(tmp_path / "nowhere") == "run"


def test_live_status_that_only_reports_progress_is_not_written_every_time(tmp_path):
    live_status = LiveStatusWriter(tmp_path, rounds=3)
    live_status.write()
    live_status.round = 1
    live_status.write(force=False)
    assert LiveStatus.read(tmp_path).round == 0
    live_status.write()
    record = LiveStatus.read(tmp_path)
    assert (record.round, record.rounds, record.pid) == (1, 3, os.getpid())
    (tmp_path / "live.json").write_text(json.dumps([1]))
    assert LiveStatus.read_if_valid(tmp_path) is None


def test_live_status_says_who_was_asked_and_who_replied(tmp_path):
    live_status = LiveStatusWriter(tmp_path, rounds=7, phase="train", requested=["a", "b", "c"], replied=["b"])
    live_status.failures["c"] = ClientFailure("no_reply", "silent")
    live_status.unreachable = ["c", "d"]
    live_status.write()
    content = json.loads((tmp_path / "live.json").read_text())
    assert (content["requested"], content["replied"], content["unreachable"]) == (["a", "b", "c"], ["b"], ["c", "d"])
    assert content["failures"] == {"c": {"kind": "no_reply", "text": "silent"}}
    assert LiveStatus.read(tmp_path).failures["c"] == ClientFailure("no_reply", "silent")
