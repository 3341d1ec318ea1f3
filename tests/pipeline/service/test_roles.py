"""The role that each route requires, for every role."""

import pytest

from pipeline.service.web.app import ROUTES

PATHS = [
    (
        method,
        path.replace("{id}", "x").replace("{name}", "x").replace("{path:path}", "x").replace("{name:path}", "x"),
        role,
    )
    for method, path, role, _ in ROUTES
]
PROTECTED_PATHS = [(m, p, role) for m, p, role in PATHS if role != "anyone"]
BODIES = {"/api/runs": {"study": "x"}, "/api/users": {"name": "x", "role": "lead"}, "/site/heartbeat": {"version": "1"}}


def test_every_route_has_a_role(service):
    declared = {(method, path) for method, path, _, _ in ROUTES}
    for route in service.app.routes:
        methods = getattr(route, "methods", None)
        if methods is None:
            assert route.path == "/static"
            continue
        for method in methods:
            assert (method, route.path) in declared
            role = next(role for m, p, role, _ in ROUTES if (m, p) == (method, route.path))
            assert route.openapi_extra == {"x-role": role}
            assert route.dependencies, "the route does not check the role"


def test_public_routes():
    assert {path for _, path, role in PATHS if role == "anyone"} == {
        "/",
        "/health",
        "/ca.pem",
        "/api/openapi.json",
        "/api/login",
        "/api/logout",
        "/site/enrol",
    }


@pytest.mark.parametrize(("method", "path", "role"), PROTECTED_PATHS)
def test_missing_or_wrong_token_is_rejected(service, method, path, role):
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


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, role in PATHS if role == "lead"])
@pytest.mark.parametrize("role", ["viewer", "officer"])
def test_lead_routes_are_forbidden_for_other_roles(service, method, path, role):
    response = service.add_user(role)(method, path, BODIES.get(path))
    assert response.status_code == 403
    assert role in response.json()["error"]
    assert service.app.state.context.log.read_last(1)[0]["who"] == f"a-{role}"


def test_officer_can_read_the_log_and_viewer_cannot(service):
    assert service.add_user("viewer").get("/api/log").status_code == 403
    assert service.add_user("officer").get("/api/log").status_code == 200


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, role in PATHS if role == "site"])
def test_users_cannot_call_site_routes(service, method, path):
    assert service.lead(method, path, BODIES.get(path)).status_code == 401


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, role in PATHS if role in ("viewer", "officer", "lead")])
def test_sites_cannot_call_user_routes(service, method, path):
    assert service.enrol_site("a")(method, path, BODIES.get(path)).status_code == 401


def test_revoked_user_has_no_access_and_the_last_lead_cannot_be_revoked(service):
    token = service.lead.post("/api/users", {"name": "eva", "role": "lead"}).json()["token"]
    eva = type(service.lead)(service.app, token)
    assert eva.get("/api/me").json()["name"] == "eva"
    assert service.lead.post("/api/users/eva/revoke").status_code == 200
    assert eva.get("/api/me").status_code == 401
    refusal = service.lead.post("/api/users/lead/revoke")
    assert refusal.status_code == 409
    assert "another one first" in refusal.json()["error"]
    assert service.lead.post("/api/users", {"name": "lead", "role": "viewer"}).status_code == 409
    assert [u["name"] for u in service.lead.get("/api/users").json()] == ["eva", "lead"]


def test_openapi_has_every_route(service):
    response = service.anonymous.get("/api/openapi.json").json()
    assert {(m.upper(), p) for p, ms in response["paths"].items() for m in ms} == {
        (m, p.replace(":path", "")) for m, p, _, _ in ROUTES
    }
    assert response["paths"]["/api/runs"]["post"]["x-role"] == "lead"
