"""Browsers: login, cookies, requests from other pages, headers, and bodies that are too long."""

import asyncio

import pytest

from pipeline.service.web.middleware import MAX_BODY_BYTES, AuthFailureLimiter
from tests.pipeline.service.conftest import Web


def browser(world, token=None):
    told = world.nobody.post("/api/login", {"token": token or world.lead_token})
    assert told.status_code == 200, told.text
    return Web(world.app, cookies=dict(told.cookies)), told


def test_a_login_sets_a_cookie_that_scripts_and_other_pages_do_not_get(world):
    web, told = browser(world)
    assert told.json() == {"name": "lead", "role": "lead"}
    flags = {part.strip().lower() for part in told.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= flags
    assert world.lead_token not in told.headers["set-cookie"]
    about = web.get("/api/me").json()
    assert about["coordinator"]["name"] == "Test Trust"
    assert about["coordinator"]["fingerprint"].count("-") == 7


def test_logout_ends_the_session_at_the_service(world):
    web, _ = browser(world)
    assert web.post("/api/logout", headers={"x-hemofed": "1"}).status_code == 200
    assert web.get("/api/me").status_code == 401


def test_a_session_ends_by_time_and_with_its_user(world):
    web, _ = browser(world)
    world.clock.pass_by(hours=13)
    assert web.get("/api/me").status_code == 401
    token = world.store.accounts.add_user("eva", "viewer", "lead")
    web, _ = browser(world, token)
    assert web.get("/api/me").status_code == 200
    world.store.accounts.revoke_user("eva", "lead")
    assert web.get("/api/me").status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_cookie_alone_changes_nothing(world, kind):
    run = (world.enrol("a"), world.offer())[1]
    web, _ = browser(world)
    headers = {"content-type": kind} if kind else {}
    told = web.post(f"/api/runs/{run}/stop", headers=headers, content=b"{}")
    assert told.status_code == 403
    assert "X-Hemofed" in told.json()["error"]
    assert world.state(run) == "offered"
    assert web.post(f"/api/runs/{run}/stop", headers={"x-hemofed": "1"}).json()["state"] == "stopped"
    assert web.post(f"/api/runs/{run}/resume", {}).json()["state"] == "offered"  # JSON


def test_nobody_is_logged_in_by_another_page(world):
    told = world.nobody.post("/api/login", headers={"content-type": "text/plain"}, content=b'{"token": "x"}')
    assert told.status_code in (403, 422)
    assert "set-cookie" not in told.headers


def test_wrong_tokens_are_written_down_until_they_are_too_many(world):
    for _ in range(10):
        assert world.nobody.post("/api/login", {"token": "wrong-secret"}).status_code == 401
    told = world.nobody.post("/api/login", {"token": "wrong-secret"})
    assert (told.status_code, told.headers["retry-after"]) == (429, "300")
    assert sum(e.what == "login refused" for e in world.store.events()) == 10
    browser(world)  # who has the right one is not locked out by others


def test_failures_are_counted_by_address_and_forgotten():
    now = [0.0]
    failures = AuthFailureLimiter(max_failures=2, window_seconds=10, clock=lambda: now[0])
    assert [failures.record_failure("a") for _ in range(3)] == [False, False, True]
    assert not failures.record_failure("b")
    now[0] = 11
    assert not failures.record_failure("a")
    assert set(failures._times_by_address) == {"a"}


def test_every_answer_tells_the_browser_to_be_careful(world):
    for path in ("/", "/health", "/api/me", "/nothing", "/static/nothing.js"):
        headers = world.nobody.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert world.lead.get("/api/runs").headers["cache-control"] == "no-store"


def test_a_body_that_is_too_long_is_not_read(world):
    told = world.lead.post("/api/runs", {"study": "x" * MAX_BODY_BYTES})
    assert told.status_code == 413
    assert "2 MB" in told.json()["error"]
    assert told.headers["x-frame-options"] == "DENY"
    assert world.app.state.parts.log.last(1)[0]["status"] == 413


def test_a_length_that_is_not_told_is_counted(world):
    async def endless():
        for _ in range(5):
            await asyncio.sleep(0)
            yield b"x" * (MAX_BODY_BYTES // 2)

    headers = {"content-type": "application/json"}
    assert world.lead.post("/api/runs", content=endless(), headers=headers).status_code == 413


def test_what_was_misread_is_named_and_not_repeated(world):
    told = world.nobody.post("/api/login", {"token": ["s3cret"], "extra": "s3cret"})
    assert told.status_code == 422
    assert "token" in told.json()["error"]
    assert "s3cret" not in told.text
    assert "s3cret" not in world.home.log.read_text()


def test_what_breaks_is_logged_without_being_told(world, monkeypatch):
    monkeypatch.setattr(type(world.store), "runs", lambda self: 1 / 0)
    told = world.lead.get("/api/runs")
    assert told.status_code == 500
    assert "division" not in told.text
    last = world.app.state.parts.log.last(1)[0]
    assert (last["event"], last["level"]) == ("failed", "error")
    assert "division" in last["why"]
