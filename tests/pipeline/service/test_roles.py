"""Who may do what: every route, every role."""

import pytest

from pipeline.service.web.app import ROUTES

PATHS = [
    (
        method,
        path.replace("{id}", "x").replace("{name}", "x").replace("{path:path}", "x").replace("{name:path}", "x"),
        need,
    )
    for method, path, need, _ in ROUTES
]
CLOSED = [(m, p, n) for m, p, n in PATHS if n != "anyone"]
BODIES = {"/api/runs": {"study": "x"}, "/api/users": {"name": "x", "role": "lead"}, "/site/heartbeat": {"version": "1"}}


def test_no_route_is_without_a_role(service):
    declared = {(method, path) for method, path, _, _ in ROUTES}
    for route in service.app.routes:
        methods = getattr(route, "methods", None)
        if methods is None:
            assert route.path == "/static"
            continue
        for method in methods:
            assert (method, route.path) in declared
            need = next(n for m, p, n, _ in ROUTES if (m, p) == (method, route.path))
            assert route.openapi_extra == {"x-role": need}
            assert route.dependencies, "a route without its gate"


def test_only_these_are_open():
    assert {p for _, p, n in PATHS if n == "anyone"} == {
        "/",
        "/health",
        "/ca.pem",
        "/api/openapi.json",
        "/api/login",
        "/api/logout",
        "/site/enrol",
    }


@pytest.mark.parametrize(("method", "path", "need"), CLOSED)
def test_without_a_token_or_with_a_wrong_one_nothing_is_told(service, method, path, need):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic bGVhZDp4"},
        {"cookie": "hemofed=wrong"},
    ):
        response = service.anonymous(method, path, BODIES.get(path), headers=headers)
        assert response.status_code == 401, (headers, response.text)
        assert set(response.json()) == {"error"}
    refused = [r for r in service.app.state.context.log.read_last(10) if r["event"] == "refused"]
    assert [r["path"] for r in refused] == [path] * 4


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, n in PATHS if n == "lead"])
@pytest.mark.parametrize("role", ["viewer", "officer"])
def test_what_a_lead_does_nobody_else_does(service, method, path, role):
    response = service.add_user(role)(method, path, BODIES.get(path))
    assert response.status_code == 403
    assert role in response.json()["error"]
    assert service.app.state.context.log.read_last(1)[0]["who"] == f"a-{role}"


def test_a_viewer_does_not_read_the_log_and_an_officer_does(service):
    assert service.add_user("viewer").get("/api/log").status_code == 403
    assert service.add_user("officer").get("/api/log").status_code == 200


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, n in PATHS if n == "site"])
def test_people_are_no_sites(service, method, path):
    assert service.lead(method, path, BODIES.get(path)).status_code == 401


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, n in PATHS if n in ("viewer", "officer", "lead")])
def test_sites_are_no_people(service, method, path):
    assert service.enrol_site("a")(method, path, BODIES.get(path)).status_code == 401


def test_a_revoked_user_is_out_at_once_and_the_last_lead_stays(service):
    second = service.lead.post("/api/users", {"name": "eva", "role": "lead"}).json()["token"]
    eva = type(service.lead)(service.app, second)
    assert eva.get("/api/me").json()["name"] == "eva"
    assert service.lead.post("/api/users/eva/revoke").status_code == 200
    assert eva.get("/api/me").status_code == 401
    last = service.lead.post("/api/users/lead/revoke")
    assert last.status_code == 409
    assert "another one first" in last.json()["error"]
    assert service.lead.post("/api/users", {"name": "lead", "role": "viewer"}).status_code == 409
    assert [u["name"] for u in service.lead.get("/api/users").json()] == ["eva", "lead"]


def test_openapi_names_every_route(service):
    response = service.anonymous.get("/api/openapi.json").json()
    assert {(m.upper(), p) for p, ms in response["paths"].items() for m in ms} == {
        (m, p.replace(":path", "")) for m, p, _, _ in ROUTES
    }
    assert response["paths"]["/api/runs"]["post"]["x-role"] == "lead"
