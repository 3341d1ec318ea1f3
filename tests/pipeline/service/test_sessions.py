"""Browser sessions: login, cookies, CSRF protection, security headers, limits on bodies and failures."""

import asyncio

import pytest

from pipeline.service.web.middleware import MAX_BODY_BYTES, AuthFailureLimiter
from tests.support.service_factory import ApiCaller


def log_in(service, token=None):
    """A caller with the session cookie, and the login's response."""
    response = service.anonymous.post("/api/login", {"token": token or service.lead_token})
    assert response.status_code == 200, response.text
    return ApiCaller(service.app, cookies=dict(response.cookies)), response


def test_login_cookie_is_hidden_from_scripts_and_other_origins(service):
    web, response = log_in(service)
    assert response.json() == {"name": "lead", "role": "lead"}
    flags = {part.strip().lower() for part in response.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= flags
    assert service.lead_token not in response.headers["set-cookie"]
    user = web.get("/api/me").json()
    assert user["coordinator"]["name"] == "Test Trust"
    assert user["coordinator"]["fingerprint"].count("-") == 7


def test_logout_ends_the_session(service):
    web, _ = log_in(service)
    assert web.post("/api/logout", headers={"x-hemofed": "1"}).status_code == 200
    assert web.get("/api/me").status_code == 401


def test_session_ends_by_time_and_when_the_user_is_revoked(service):
    web, _ = log_in(service)
    service.clock.advance(hours=13)
    assert web.get("/api/me").status_code == 401
    token = service.store.accounts.add_user("eva", "viewer", "lead")
    web, _ = log_in(service, token)
    assert web.get("/api/me").status_code == 200
    service.store.accounts.revoke_user("eva", "lead")
    assert web.get("/api/me").status_code == 401


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_cookie_without_csrf_header_is_rejected(service, content_type):
    service.enrol_site("a")
    run = service.offer_run()
    web, _ = log_in(service)
    headers = {"content-type": content_type} if content_type else {}
    response = web.post(f"/api/runs/{run}/stop", headers=headers, content=b"{}")
    assert response.status_code == 403
    assert "X-Hemofed" in response.json()["error"]
    assert service.run_state(run) == "offered"
    assert web.post(f"/api/runs/{run}/stop", headers={"x-hemofed": "1"}).json()["state"] == "stopped"
    assert web.post(f"/api/runs/{run}/resume", {}).json()["state"] == "offered"  # JSON


def test_login_from_another_origin_is_rejected(service):
    response = service.anonymous.post("/api/login", headers={"content-type": "text/plain"}, content=b'{"token": "x"}')
    assert response.status_code in (403, 422)
    assert "set-cookie" not in response.headers


def test_failed_logins_are_recorded_up_to_a_limit(service):
    for _ in range(10):
        assert service.anonymous.post("/api/login", {"token": "wrong-secret"}).status_code == 401
    response = service.anonymous.post("/api/login", {"token": "wrong-secret"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "300")
    assert sum(e.action == "login refused" for e in service.store.list_events()) == 10
    log_in(service)  # a valid token from the same address still works


def test_auth_failures_are_counted_by_address_and_expire():
    now = [0.0]
    failures = AuthFailureLimiter(max_failures=2, window_seconds=10, clock=lambda: now[0])
    assert [failures.record_failure("a") for _ in range(3)] == [False, False, True]
    assert not failures.record_failure("b")
    now[0] = 11
    assert not failures.record_failure("a")
    assert set(failures._times_by_address) == {"a"}


def test_every_response_has_security_headers(service):
    for path in ("/", "/health", "/api/me", "/nothing", "/static/nothing.js"):
        headers = service.anonymous.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert service.lead.get("/api/runs").headers["cache-control"] == "no-store"


def test_oversized_body_is_rejected(service):
    response = service.lead.post("/api/runs", {"study": "x" * MAX_BODY_BYTES})
    assert response.status_code == 413
    assert "2 MB" in response.json()["error"]
    assert response.headers["x-frame-options"] == "DENY"
    assert service.app.state.context.log.read_last(1)[0]["status"] == 413


def test_oversized_body_without_content_length_is_rejected(service):
    async def generate_chunks():
        for _ in range(5):
            await asyncio.sleep(0)
            yield b"x" * (MAX_BODY_BYTES // 2)

    headers = {"content-type": "application/json"}
    assert service.lead.post("/api/runs", content=generate_chunks(), headers=headers).status_code == 413


def test_validation_error_names_the_field_without_its_value(service):
    response = service.anonymous.post("/api/login", {"token": ["s3cret"], "extra": "s3cret"})
    assert response.status_code == 422
    assert "token" in response.json()["error"]
    assert "s3cret" not in response.text
    assert "s3cret" not in service.home.log_path.read_text()


def test_internal_error_is_logged_but_not_sent(service, monkeypatch):
    monkeypatch.setattr(type(service.store), "list_runs", lambda self: 1 / 0)
    response = service.lead.get("/api/runs")
    assert response.status_code == 500
    assert "division" not in response.text
    record = service.app.state.context.log.read_last(1)[0]
    assert (record["event"], record["level"]) == ("failed", "error")
    assert "division" in record["why"]
