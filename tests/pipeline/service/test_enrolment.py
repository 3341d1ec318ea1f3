"""A site joins: one invitation, one name, one key."""

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from pipeline.protocol.invitations import ca_fingerprint, parse_invitation
from privacy.ledger import keys
from tests.support.service_factory import ApiCaller, make_csr, make_enrolment, make_heartbeat


def join(service, *args, **more):
    return service.anonymous.post("/site/enrol", make_enrolment(*args, **more))


def test_an_invited_site_gets_all_it_needs(service):
    invited = parse_invitation(service.lead.post("/api/sites/ward-1/invite", {"hours": 2}).json()["token"])
    response = join(service, invited.token, "ward-1").json()
    assert (
        ca_fingerprint(response["ca"]) == ca_fingerprint(service.anonymous.get("/ca.pem").text) == invited.fingerprint
    )
    certificate = x509.load_pem_x509_certificate(response["certificate"].encode())
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "ward-1"
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(response["ca"].encode()))
    own = {"name": "Test Trust", "key": keys.public_hex(service.home.signing_key), "host": "localhost", "port": 8443}
    assert response["coordinator"] == own
    assert ApiCaller(service.app, response["credential"]).post("/site/heartbeat", make_heartbeat()).status_code == 200
    (site,) = service.lead.get("/api/sites").json()
    assert (site["site"], site["connected"], site["left"]) == ("ward-1", True, None)


def test_an_invitation_is_good_once_for_one_name_and_not_for_ever(service):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert join(service, "wrong", "a").status_code == 403
    assert join(service, token, "b").status_code == 403
    assert join(service, token, "a").status_code == 200
    again = join(service, token, "a")
    assert again.status_code == 403
    assert "ask the lead for a new one" in again.json()["error"]
    late, _ = service.store.accounts.create_invitation("c", 1, "lead")
    service.clock.advance(hours=1)
    assert join(service, late, "c").status_code == 403
    assert [s.name for s in service.store.list_sites()] == ["a"]
    assert sum(e.action == "enrolment refused" for e in service.store.list_events()) == 4


def test_a_newer_invitation_voids_the_older(service):
    old, _ = service.store.accounts.create_invitation("a", 1, "lead")
    new, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert join(service, old, "a").status_code == 403
    assert join(service, new, "a").status_code == 200


def test_what_is_wrong_with_an_enrolment_does_not_use_up_the_invitation(service):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    stranger = keys.public_hex(keys.generate_key())
    assert "proof" in join(service, token, "a", key=None, **{"officer": stranger, "proof": "0" * 128}).json()["error"]
    other = make_enrolment(token, "a") | {"key": stranger}
    assert "proof" in service.anonymous.post("/site/enrol", other).json()["error"]
    swapped = make_enrolment(token, "a") | {"csr": make_csr("a") + "\n"}
    assert "proof" in service.anonymous.post("/site/enrol", swapped).json()["error"]
    assert "is for b" in join(service, token, "a", csr=make_csr("b")).json()["error"]
    assert join(service, token, "a").status_code == 200


def test_a_name_belongs_to_its_key_until_the_lead_removes_it(service):
    own, thief = keys.generate_key(), keys.generate_key()
    first = service.enrol_site("a", own)
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    response = join(service, token, "a", thief)
    assert response.status_code == 403
    assert "removes it first" in response.json()["error"]
    assert first.post("/site/heartbeat", make_heartbeat()).status_code == 200
    assert join(service, token, "a", own).status_code == 200  # the same site again, say after a restore
    assert first.post("/site/heartbeat", make_heartbeat()).status_code == 401  # its old credential is void
    assert service.lead.post("/api/sites/a/remove").status_code == 200
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert join(service, token, "a", thief).status_code == 200


def test_a_key_has_one_name(service):
    key = keys.generate_key()
    service.enrol_site("a", key)
    token, _ = service.store.accounts.create_invitation("b", 1, "lead")
    assert "another name" in join(service, token, "b", key).json()["error"]


def test_who_left_or_was_removed_is_out(service):
    a, b = service.enrol_site("a"), service.enrol_site("b")
    assert a.post("/site/leave").status_code == 200
    assert a.post("/site/heartbeat", make_heartbeat()).status_code == 401
    assert service.lead.post("/api/sites/b/remove").status_code == 200
    assert b.post("/site/heartbeat", make_heartbeat()).status_code == 401
    assert [s["connected"] for s in service.lead.get("/api/sites").json()] == [False, False]
    assert service.lead.post("/api/sites/nobody/remove").status_code == 404


@pytest.mark.parametrize("name", ["../a", "a/b", "a.b", ".a", "-a", "a b", "ä", "a" * 49, "a\n", "", "%2e%2e"])
def test_a_name_is_no_path(service, name):
    token, _ = service.store.accounts.create_invitation("a", 1, "lead")
    assert service.anonymous.post("/site/enrol", make_enrolment(token, "a") | {"site": name}).status_code == 422
    if name and "/" not in name:
        response = service.lead.post(f"/api/sites/{name}/invite".replace("\n", "%0a"), {})
        assert response.status_code in (404, 405, 422)
    assert service.store.list_sites() == []


@pytest.mark.parametrize("name", ["server", "server_job", "coordinator", "Coordinator"])
def test_nobody_is_called_as_the_server_is(service, name):
    """A certificate of that name would speak for it."""
    response = service.lead.post(f"/api/sites/{name}/invite", {})
    assert response.status_code == 422
    assert "choose another" in response.json()["error"]


def test_no_secret_is_in_the_log_or_the_database(service):
    token = parse_invitation(service.lead.post("/api/sites/a/invite", {}).json()["token"]).token
    asked = make_enrolment(token, "a")
    response = service.anonymous.post("/site/enrol", asked).json()
    person = service.lead.post("/api/users", {"name": "eva", "role": "viewer"}).json()["token"]
    cookie = service.anonymous.post("/api/login", {"token": person}).cookies["hemofed"]
    service.anonymous.post("/api/login", {"token": "wrong-" + person})
    ApiCaller(service.app, response["credential"]).post("/site/heartbeat", make_heartbeat())
    files = [service.home.log_path, *service.home.path.glob("hemofed.db*")]
    held = b"".join(file.read_bytes() for file in files)
    for secret in (token, response["credential"], person, cookie, service.lead_token, asked["proof"]):
        assert secret.encode() not in held
    assert b"eva" in held


def test_a_status_that_is_too_long_is_refused(service):
    response = service.enrol_site("a").post("/site/heartbeat", make_heartbeat(status={"x": "y" * 70_000}))
    assert response.status_code == 422
    assert "64000 bytes" in response.json()["error"]
