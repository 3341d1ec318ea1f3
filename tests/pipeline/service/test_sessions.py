"""Browsers: login, cookies, requests from other pages, headers, and bodies that are too long."""

import asyncio

import pytest

from pipeline.service.web.middleware import MAX_BODY_BYTES, AuthFailureLimiter
from tests.support.service_factory import ApiCaller


def browser(service, token=None):
    response = service.anonymous.post("/api/login", {"token": token or service.lead_token})
    assert response.status_code == 200, response.text
    return ApiCaller(service.app, cookies=dict(response.cookies)), response


def test_a_login_sets_a_cookie_that_scripts_and_other_pages_do_not_get(service):
    web, response = browser(service)
    assert response.json() == {"name": "lead", "role": "lead"}
    flags = {part.strip().lower() for part in response.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= flags
    assert service.lead_token not in response.headers["set-cookie"]
    about = web.get("/api/me").json()
    assert about["coordinator"]["name"] == "Test Trust"
    assert about["coordinator"]["fingerprint"].count("-") == 7


def test_logout_ends_the_session_at_the_service(service):
    web, _ = browser(service)
    assert web.post("/api/logout", headers={"x-hemofed": "1"}).status_code == 200
    assert web.get("/api/me").status_code == 401


def test_a_session_ends_by_time_and_with_its_user(service):
    web, _ = browser(service)
    service.clock.advance(hours=13)
    assert web.get("/api/me").status_code == 401
    token = service.store.accounts.add_user("eva", "viewer", "lead")
    web, _ = browser(service, token)
    assert web.get("/api/me").status_code == 200
    service.store.accounts.revoke_user("eva", "lead")
    assert web.get("/api/me").status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_cookie_alone_changes_nothing(service, kind):
    run = (service.enrol_site("a"), service.offer_run())[1]
    web, _ = browser(service)
    headers = {"content-type": kind} if kind else {}
    response = web.post(f"/api/runs/{run}/stop", headers=headers, content=b"{}")
    assert response.status_code == 403
    assert "X-Hemofed" in response.json()["error"]
    assert service.run_state(run) == "offered"
    assert web.post(f"/api/runs/{run}/stop", headers={"x-hemofed": "1"}).json()["state"] == "stopped"
    assert web.post(f"/api/runs/{run}/resume", {}).json()["state"] == "offered"  # JSON


def test_nobody_is_logged_in_by_another_page(service):
    response = service.anonymous.post("/api/login", headers={"content-type": "text/plain"}, content=b'{"token": "x"}')
    assert response.status_code in (403, 422)
    assert "set-cookie" not in response.headers


def test_wrong_tokens_are_written_down_until_they_are_too_many(service):
    for _ in range(10):
        assert service.anonymous.post("/api/login", {"token": "wrong-secret"}).status_code == 401
    response = service.anonymous.post("/api/login", {"token": "wrong-secret"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "300")
    assert sum(e.action == "login refused" for e in service.store.list_events()) == 10
    browser(service)  # who has the right one is not locked out by others


def test_failures_are_counted_by_address_and_forgotten():
    now = [0.0]
    failures = AuthFailureLimiter(max_failures=2, window_seconds=10, clock=lambda: now[0])
    assert [failures.record_failure("a") for _ in range(3)] == [False, False, True]
    assert not failures.record_failure("b")
    now[0] = 11
    assert not failures.record_failure("a")
    assert set(failures._times_by_address) == {"a"}


def test_every_answer_tells_the_browser_to_be_careful(service):
    for path in ("/", "/health", "/api/me", "/nothing", "/static/nothing.js"):
        headers = service.anonymous.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert service.lead.get("/api/runs").headers["cache-control"] == "no-store"


def test_a_body_that_is_too_long_is_not_read(service):
    response = service.lead.post("/api/runs", {"study": "x" * MAX_BODY_BYTES})
    assert response.status_code == 413
    assert "2 MB" in response.json()["error"]
    assert response.headers["x-frame-options"] == "DENY"
    assert service.app.state.context.log.read_last(1)[0]["status"] == 413


def test_a_length_that_is_not_told_is_counted(service):
    async def endless():
        for _ in range(5):
            await asyncio.sleep(0)
            yield b"x" * (MAX_BODY_BYTES // 2)

    headers = {"content-type": "application/json"}
    assert service.lead.post("/api/runs", content=endless(), headers=headers).status_code == 413


def test_what_was_misread_is_named_and_not_repeated(service):
    response = service.anonymous.post("/api/login", {"token": ["s3cret"], "extra": "s3cret"})
    assert response.status_code == 422
    assert "token" in response.json()["error"]
    assert "s3cret" not in response.text
    assert "s3cret" not in service.home.log_path.read_text()


def test_what_breaks_is_logged_without_being_told(service, monkeypatch):
    monkeypatch.setattr(type(service.store), "list_runs", lambda self: 1 / 0)
    response = service.lead.get("/api/runs")
    assert response.status_code == 500
    assert "division" not in response.text
    last = service.app.state.context.log.read_last(1)[0]
    assert (last["event"], last["level"]) == ("failed", "error")
    assert "division" in last["why"]
