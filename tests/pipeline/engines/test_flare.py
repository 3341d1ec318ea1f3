"""`exchange` over FLARE tasks: late replies, silent sites, size limits and halts. Sites are threads with a reply delay."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from pipeline.core.errors import RunHaltedError
from pipeline.engines import flare as flare_engine
from pipeline.engines.flare import FlareEngine
from pipeline.flare.constants import JSON_TEXT_KEY, MESSAGE_BYTES_KEY
from pipeline.protocol.messages import ClientFailure, Declined, RoundPolicy
from pipeline.protocol.serialization import deserialize_reply
from pipeline.records.live_status import LiveStatusWriter


class FakeSites:
    """`delays`: seconds until a site replies; None: never."""

    def __init__(self, tmp_path, delays, min_sites=1, make_answer=lambda site, message: message + b"!"):
        self.delays, self.make_answer = delays, make_answer
        self.last_seen = {site: time.monotonic() for site in delays}
        self.cancelled_tasks, self.halt_reason = [], ""
        self.live_status = LiveStatusWriter(tmp_path, 1)
        self.engine = FlareEngine(
            send_task=self.send,
            cancel_task=self.cancelled_tasks.append,
            last_seen=self.last_seen,
            live_status=self.live_status,
            halt_reason=lambda: self.halt_reason,
            min_sites=min_sites,
            verify_proof=lambda *_: True,
            reported_epsilon={},
        )

    def send(self, task, site):
        def reply_after_delay():
            time.sleep(self.delays[site])
            result = self.make_answer(site, task.data[MESSAGE_BYTES_KEY])
            if isinstance(result, bytes):
                result, message = make_reply(ReturnCode.OK), result
                result[MESSAGE_BYTES_KEY] = message
            task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site), result=result), None)

        if self.delays[site] is not None:
            threading.Thread(target=reply_after_delay, daemon=True).start()

    def exchange(self, message, **round_policy):
        return dict(self.engine.exchange(dict.fromkeys(self.delays, message), RoundPolicy(**round_policy)))

    @contextmanager
    def send_heartbeats(self, site):
        stop = threading.Event()

        def send():
            while not stop.wait(0.05):
                self.last_seen[site] = time.monotonic()

        threading.Thread(target=send, daemon=True).start()
        try:
            yield
        finally:
            stop.set()


def test_exchange_sends_each_site_its_message_and_yields_replies_as_they_arrive(tmp_path):
    sites = FakeSites(tmp_path, {"a": 0.3, "b": 0.0})
    replies = list(sites.engine.exchange({"a": b"for a", "b": b"for b"}, RoundPolicy()))
    assert replies == [("b", b"for b!"), ("a", b"for a!")]
    assert sites.live_status.replied == ["b", "a"]


def test_late_reply_is_kept_for_the_next_round_and_its_site_gets_no_task_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "DEADLINE_GRACE_SECONDS", 0.0)
    sites = FakeSites(tmp_path, {"a": 0.0, "b": 0.6})
    assert sites.exchange(b"1", deadline=0.2, late_updates="keep") == {"a": b"1!"}
    sites.delays["a"] = 0.7
    assert sites.exchange(b"2", deadline=1.0, late_updates="keep") == {"b": b"1!", "a": b"2!"}
    sites.delays["b"] = 0.0
    assert sites.exchange(b"3", deadline=1.0, late_updates="keep") == {"a": b"3!", "b": b"3!"}


def test_late_reply_is_dropped_if_late_updates_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "DEADLINE_GRACE_SECONDS", 0.0)
    sites = FakeSites(tmp_path, {"a": 0.0, "b": 0.4})
    assert sites.exchange(b"1", deadline=0.2) == {"a": b"1!"}
    assert [task.props["which"].split("-")[1] for task in sites.cancelled_tasks] == ["a", "b"]
    time.sleep(0.4)
    sites.delays["b"] = 0.0
    assert sites.exchange(b"2", deadline=1.0) == {"a": b"2!", "b": b"2!"}


def test_exchange_does_not_wait_for_a_silent_site(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "MAX_SILENCE_SECONDS", 0.3)
    sites = FakeSites(tmp_path, {"a": 0.0, "b": None})
    with sites.send_heartbeats("a"):
        assert sites.exchange(b"1") == {"a": b"1!"}
    assert sites.live_status.failures == {"b": ClientFailure("no_reply", "silent")}
    assert sites.live_status.unreachable == ["b"]


def test_exchange_waits_for_a_site_with_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "MAX_SILENCE_SECONDS", 0.4)
    sites = FakeSites(tmp_path, {"a": 0.0, "b": 1.2})
    with sites.send_heartbeats("b"):
        assert sites.exchange(b"1") == {"a": b"1!", "b": b"1!"}


def test_fewer_than_min_sites_halt_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "MAX_SILENCE_SECONDS", 0.3)
    with pytest.raises(RunHaltedError, match="b cannot be reached, and 2 sites are needed"):
        FakeSites(tmp_path, {"a": 0.4, "b": None}, min_sites=2).exchange(b"1")


def test_stop_request_halts_a_waiting_exchange(tmp_path):
    sites = FakeSites(tmp_path, {"a": None})
    threading.Timer(0.2, lambda: setattr(sites, "halt_reason", "stop")).start()
    with pytest.raises(RunHaltedError, match="stop"):
        sites.exchange(b"1")


def test_oversized_and_failed_replies_become_declined(tmp_path, monkeypatch):
    monkeypatch.setattr(flare_engine, "MAX_REPLY_BYTES", 10)

    def make_answer(site, message):
        return {"a": b"x" * 1000, "b": make_reply(ReturnCode.EXECUTION_EXCEPTION), "c": Shareable(), "d": b"ok"}[site]

    replies = FakeSites(tmp_path, dict.fromkeys("abcd", 0.0), make_answer=make_answer).exchange(b"1")
    declined_replies = {site: deserialize_reply(site, replies[site]) for site in "abc"}
    assert all(isinstance(declined, Declined) for declined in declined_replies.values())
    assert {site: declined.kind for site, declined in declined_replies.items()} == {
        "a": "too_large",
        "b": "failed",
        "c": "failed",
    }
    assert declined_replies["a"].text.startswith("sent 1000 bytes")
    assert "EXECUTION_EXCEPTION" in declined_replies["b"].text
    assert replies["d"] == b"ok"


def test_site_without_a_valid_proof_is_excluded(tmp_path):
    """FLARE accepts an old certificate; the engine needs a signature with the agent's key."""
    sites = FakeSites(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0}, make_answer=lambda site, message: b"!")
    sites.engine._verify_proof = lambda site, nonce, proof: proof == f"{site} {nonce}"

    def send(task, site):
        nonce = task.data[JSON_TEXT_KEY]
        summary = {"a": {"proof": f"a {nonce}"}, "b": {"proof": f"a {nonce}"}, "c": {"refused": "not approved"}}[site]
        result = make_reply(ReturnCode.OK)
        result[JSON_TEXT_KEY] = json.dumps(summary)
        task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site), result=result), None)

    original_send_task, sites.engine._send_task = sites.engine._send_task, send
    assert list(sites.engine.collect_data_summaries()) == ["a"]
    sites.engine._send_task = original_send_task
    assert sites.exchange(b"1") == {"a": b"!"}
