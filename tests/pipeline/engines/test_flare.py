"""`exchange` over FLARE's tasks: late answers, silence, sizes and halts. Sites are threads that answer when told to."""

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

from pipeline.coordinator.live_status import LiveStatus
from pipeline.core.errors import RunHaltedError
from pipeline.engines import flare as engine
from pipeline.engines.flare import FlareEngine
from pipeline.protocol.messages import Declined, RoundPolicy
from pipeline.protocol.serialization import deserialize_reply


class Sites:
    """`delays`: seconds until a site answers; None: never."""

    def __init__(self, tmp_path, delays, fewest=1, answer=lambda site, parcel: parcel + b"!"):
        self.delays, self.answer = delays, answer
        self.heard = {site: time.monotonic() for site in delays}
        self.cancelled, self.halted = [], ""
        self.live = LiveStatus(tmp_path, 1)
        self.flare = FlareEngine(
            self.send, self.cancelled.append, self.heard, self.live, lambda: self.halted, fewest, lambda *_: True
        )

    def send(self, task, site):
        def work():
            time.sleep(self.delays[site])
            result = self.answer(site, task.data["parcel"])
            if isinstance(result, bytes):
                result, parcel = make_reply(ReturnCode.OK), result
                result["parcel"] = parcel
            task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site), result=result), None)

        if self.delays[site] is not None:
            threading.Thread(target=work, daemon=True).start()

    def ask(self, word, **wait):
        return dict(self.flare.exchange(dict.fromkeys(self.delays, word), RoundPolicy(**wait)))

    @contextmanager
    def beating(self, site):
        stop = threading.Event()

        def beat():
            while not stop.wait(0.05):
                self.heard[site] = time.monotonic()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            stop.set()


def test_each_gets_its_own_and_answers_come_as_they_arrive(tmp_path):
    sites = Sites(tmp_path, {"a": 0.3, "b": 0.0})
    got = list(sites.flare.exchange({"a": b"for a", "b": b"for b"}, RoundPolicy()))
    assert got == [("b", b"for b!"), ("a", b"for a!")]
    assert sites.live.answered == ["b", "a"]


def test_a_late_answer_is_kept_for_the_next_turn_and_its_site_is_not_asked_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SLACK", 0.0)
    sites = Sites(tmp_path, {"a": 0.0, "b": 0.6})
    assert sites.ask(b"1", deadline=0.2, late="keep") == {"a": b"1!"}
    sites.delays["a"] = 0.7
    assert sites.ask(b"2", deadline=1.0, late="keep") == {"b": b"1!", "a": b"2!"}
    sites.delays["b"] = 0.0
    assert sites.ask(b"3", deadline=1.0, late="keep") == {"a": b"3!", "b": b"3!"}


def test_a_late_answer_that_nobody_wants_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SLACK", 0.0)
    sites = Sites(tmp_path, {"a": 0.0, "b": 0.4})
    assert sites.ask(b"1", deadline=0.2) == {"a": b"1!"}
    assert [task.props["which"].split("-")[1] for task in sites.cancelled] == ["a", "b"]
    time.sleep(0.4)
    sites.delays["b"] = 0.0
    assert sites.ask(b"2", deadline=1.0) == {"a": b"2!", "b": b"2!"}


def test_a_silent_site_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SILENCE", 0.3)
    sites = Sites(tmp_path, {"a": 0.0, "b": None})
    with sites.beating("a"):
        assert sites.ask(b"1") == {"a": b"1!"}
    assert sites.live.missed == {"b": "silent"}
    assert sites.live.lost == ["b"]


def test_a_site_that_says_it_is_alive_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SILENCE", 0.4)
    sites = Sites(tmp_path, {"a": 0.0, "b": 1.2})
    with sites.beating("b"):
        assert sites.ask(b"1") == {"a": b"1!", "b": b"1!"}


def test_too_few_that_can_be_reached_halt_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SILENCE", 0.3)
    with pytest.raises(RunHaltedError, match="b cannot be reached, and 2 sites are needed"):
        Sites(tmp_path, {"a": 0.4, "b": None}, fewest=2).ask(b"1")


def test_a_stop_is_heard_while_waiting(tmp_path):
    sites = Sites(tmp_path, {"a": None})
    threading.Timer(0.2, lambda: setattr(sites, "halted", "stop")).start()
    with pytest.raises(RunHaltedError, match="stop"):
        sites.ask(b"1")


def test_oversized_and_failed_answers_become_excuses(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LARGEST", 10)

    def answer(site, parcel):
        return {"a": b"x" * 1000, "b": make_reply(ReturnCode.EXECUTION_EXCEPTION), "c": Shareable(), "d": b"ok"}[site]

    got = Sites(tmp_path, dict.fromkeys("abcd", 0.0), answer=answer).ask(b"1")
    told = {site: deserialize_reply(site, got[site]) for site in "abc"}
    assert all(isinstance(one, Declined) for one in told.values())
    assert told["a"].reason.startswith("quarantined: sent 1000 bytes")
    assert "EXECUTION_EXCEPTION" in told["b"].reason
    assert got["d"] == b"ok"


def test_a_site_that_cannot_sign_as_itself_takes_no_part(tmp_path):
    """An old certificate is enough for FLARE; the agent's key is what counts."""
    sites = Sites(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0}, answer=lambda site, parcel: b"!")
    sites.flare._verify_proof = lambda site, once, proof: proof == f"{site} {once}"

    def send(task, site):
        once = task.data["told"]
        said = {"a": {"proof": f"a {once}"}, "b": {"proof": f"a {once}"}, "c": {"refused": "not approved"}}[site]
        result = make_reply(ReturnCode.OK)
        result["told"] = json.dumps(said)
        task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site), result=result), None)

    real, sites.flare._send_task = sites.flare._send_task, send
    assert list(sites.flare.collect_data_summaries()) == ["a"]
    sites.flare._send_task = real
    assert sites.ask(b"1") == {"a": b"!"}
