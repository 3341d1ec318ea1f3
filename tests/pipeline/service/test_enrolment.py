"""Enrolment of a site: one invitation, one name, one key."""

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from pipeline.protocol.invitations import ca_fingerprint, parse_invitation
from privacy.ledger import keys
from tests.support.service_factory import ApiCaller, make_csr, make_enrolment, make_heartbeat


def post_enrolment(service, *args, **fields):
    return service.anonymous.post("/site/enrol", make_enrolment(*args, **fields))


def test_enrolment_returns_credential_certificate_and_coordinator(service):
    invitation = parse_invitation(service.lead.post("/api/sites/ward-1/invite", {"hours": 2}).json()["token"])
    response = post_enrolment(service, invitation.token, "ward-1").json()
    assert (
        ca_fingerprint(response["ca"])
        == ca_fingerprint(service.anonymous.get("/ca.pem").text)
        == invitation.fingerprint
    )
    certificate = x509.load_pem_x509_certificate(response["certificate"].encode())
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "ward-1"
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(response["ca"].encode()))
    coordinator = {
        "name": "Test Trust",
        "key": keys.public_hex(service.home.signing_key),
        "host": "localhost",
        "port": 8443,
    }
    assert response["coordinator"] == coordinator
    assert ApiCaller(service.app, response["credential"]).post("/site/heartbeat", make_heartbeat()).status_code == 200
    (site,) = service.lead.get("/api/sites").json()
    assert (site["site"], site["connected"], site["left"]) == ("ward-1", True, None)


def test_invitation_works_once_for_one_name_until_it_expires(service):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert post_enrolment(service, "wrong", "a").status_code == 403
    assert post_enrolment(service, token, "b").status_code == 403
    assert post_enrolment(service, token, "a").status_code == 200
    second = post_enrolment(service, token, "a")
    assert second.status_code == 403
    assert "ask the lead for a new one" in second.json()["error"]
    expired, _ = service.store.accounts.create_invitation("c", 1, "lead")
    service.clock.advance(hours=1)
    assert post_enrolment(service, expired, "c").status_code == 403
    assert [s.name for s in service.store.list_sites()] == ["a"]
    assert sum(e.action == "enrolment refused" for e in service.store.list_events()) == 4


def test_newer_invitation_voids_the_older(service):
    old, _ = service.store.accounts.create_invitation("a", 1, "lead")
    new, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert post_enrolment(service, old, "a").status_code == 403
    assert post_enrolment(service, new, "a").status_code == 200


def test_failed_enrolment_does_not_use_up_the_invitation(service):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    other_key = keys.public_hex(keys.generate_key())
    assert (
        "proof"
        in post_enrolment(service, token, "a", key=None, **{"officer": other_key, "proof": "0" * 128}).json()["error"]
    )
    wrong_key = make_enrolment(token, "a") | {"key": other_key}
    assert "proof" in service.anonymous.post("/site/enrol", wrong_key).json()["error"]
    wrong_csr = make_enrolment(token, "a") | {"csr": make_csr("a") + "\n"}
    assert "proof" in service.anonymous.post("/site/enrol", wrong_csr).json()["error"]
    assert "is for b" in post_enrolment(service, token, "a", csr=make_csr("b")).json()["error"]
    assert post_enrolment(service, token, "a").status_code == 200


def test_name_belongs_to_its_key_until_the_lead_removes_the_site(service):
    site_key, other_key = keys.generate_key(), keys.generate_key()
    first = service.enrol_site("a", site_key)
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    response = post_enrolment(service, token, "a", other_key)
    assert response.status_code == 403
    assert "ask the lead to remove the site" in response.json()["error"]
    assert first.post("/site/heartbeat", make_heartbeat()).status_code == 200
    assert (
        post_enrolment(service, token, "a", site_key).status_code == 200
    )  # the same site, for example after a restore
    assert first.post("/site/heartbeat", make_heartbeat()).status_code == 401  # its old credential is void
    assert service.lead.post("/api/sites/a/remove").status_code == 200
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert post_enrolment(service, token, "a", other_key).status_code == 200


def test_key_cannot_have_two_names(service):
    key = keys.generate_key()
    service.enrol_site("a", key)
    token, _ = service.store.accounts.create_invitation("b", 1, "lead")
    assert "another name" in post_enrolment(service, token, "b", key).json()["error"]


def test_site_that_left_or_was_removed_has_no_access(service):
    a, b = service.enrol_site("a"), service.enrol_site("b")
    assert a.post("/site/leave").status_code == 200
    assert a.post("/site/heartbeat", make_heartbeat()).status_code == 401
    assert service.lead.post("/api/sites/b/remove").status_code == 200
    assert b.post("/site/heartbeat", make_heartbeat()).status_code == 401
    assert [s["connected"] for s in service.lead.get("/api/sites").json()] == [False, False]
    assert service.lead.post("/api/sites/nobody/remove").status_code == 404


@pytest.mark.parametrize("name", ["../a", "a/b", "a.b", ".a", "-a", "a b", "ä", "a" * 49, "a\n", "", "%2e%2e"])
def test_invalid_site_names_are_refused(service, name):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert service.anonymous.post("/site/enrol", make_enrolment(token, "a") | {"site": name}).status_code == 422
    if name and "/" not in name:
        response = service.lead.post(f"/api/sites/{name}/invite".replace("\n", "%0a"), {})
        assert response.status_code in (404, 405, 422)
    assert service.store.list_sites() == []


@pytest.mark.parametrize("name", ["server", "server_job", "coordinator", "Coordinator"])
def test_reserved_site_names_are_refused(service, name):
    """A certificate for such a name could impersonate the server."""
    response = service.lead.post(f"/api/sites/{name}/invite", {})
    assert response.status_code == 422
    assert "choose another" in response.json()["error"]


def test_log_and_database_contain_no_secret(service):
    token = parse_invitation(service.lead.post("/api/sites/a/invite", {}).json()["token"]).token
    enrolment = make_enrolment(token, "a")
    response = service.anonymous.post("/site/enrol", enrolment).json()
    user_token = service.lead.post("/api/users", {"name": "eva", "role": "viewer"}).json()["token"]
    cookie = service.anonymous.post("/api/login", {"token": user_token}).cookies["hemofed"]
    service.anonymous.post("/api/login", {"token": "wrong-" + user_token})
    ApiCaller(service.app, response["credential"]).post("/site/heartbeat", make_heartbeat())
    files = [service.home.log_path, *service.home.path.glob("hemofed.db*")]
    stored = b"".join(file.read_bytes() for file in files)
    for secret in (token, response["credential"], user_token, cookie, service.lead_token, enrolment["proof"]):
        assert secret.encode() not in stored
    assert b"eva" in stored


def test_oversized_status_is_refused(service):
    response = service.enrol_site("a").post("/site/heartbeat", make_heartbeat(status={"x": "y" * 70_000}))
    assert response.status_code == 422
    assert "64000 bytes" in response.json()["error"]
