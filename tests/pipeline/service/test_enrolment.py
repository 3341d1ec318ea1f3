"""A site joins: one invitation, one name, one key."""

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from pipeline.protocol.invitations import ca_fingerprint, parse_invitation
from privacy.ledger import keys
from tests.pipeline.service.conftest import Web, beating, csr, enrolment


def join(world, *args, **more):
    return world.nobody.post("/site/enrol", enrolment(*args, **more))


def test_an_invited_site_gets_all_it_needs(world):
    invited = parse_invitation(world.lead.post("/api/sites/ward-1/invite", {"hours": 2}).json()["token"])
    told = join(world, invited.token, "ward-1").json()
    assert ca_fingerprint(told["ca"]) == ca_fingerprint(world.nobody.get("/ca.pem").text) == invited.fingerprint
    certificate = x509.load_pem_x509_certificate(told["certificate"].encode())
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "ward-1"
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(told["ca"].encode()))
    own = {"name": "Test Trust", "key": keys.public_hex(world.home.key), "host": "localhost", "port": 8443}
    assert told["coordinator"] == own
    assert Web(world.app, told["credential"]).post("/site/beat", beating()).status_code == 200
    (site,) = world.lead.get("/api/sites").json()
    assert (site["site"], site["connected"], site["left"]) == ("ward-1", True, None)


def test_an_invitation_is_good_once_for_one_name_and_not_for_ever(world):
    token, _ = world.store.accounts.create_invitation("a", 1, "lead")
    assert join(world, "wrong", "a").status_code == 403
    assert join(world, token, "b").status_code == 403
    assert join(world, token, "a").status_code == 200
    again = join(world, token, "a")
    assert again.status_code == 403
    assert "ask the lead for a new one" in again.json()["error"]
    late, _ = world.store.accounts.create_invitation("c", 1, "lead")
    world.clock.pass_by(hours=1)
    assert join(world, late, "c").status_code == 403
    assert [s.name for s in world.store.sites()] == ["a"]
    assert sum(e.what == "enrolment refused" for e in world.store.events()) == 4


def test_a_newer_invitation_voids_the_older(world):
    old, _ = world.store.accounts.create_invitation("a", 1, "lead")
    new, _ = world.store.accounts.create_invitation("a", 1, "lead")
    assert join(world, old, "a").status_code == 403
    assert join(world, new, "a").status_code == 200


def test_what_is_wrong_with_an_enrolment_does_not_use_up_the_invitation(world):
    token, _ = world.store.accounts.create_invitation("a", 1, "lead")
    stranger = keys.public_hex(keys.generate_key())
    assert "proof" in join(world, token, "a", key=None, **{"officer": stranger, "proof": "0" * 128}).json()["error"]
    other = enrolment(token, "a") | {"key": stranger}
    assert "proof" in world.nobody.post("/site/enrol", other).json()["error"]
    swapped = enrolment(token, "a") | {"csr": csr("a") + "\n"}
    assert "proof" in world.nobody.post("/site/enrol", swapped).json()["error"]
    assert "is for b" in join(world, token, "a", csr=csr("b")).json()["error"]
    assert join(world, token, "a").status_code == 200


def test_a_name_belongs_to_its_key_until_the_lead_removes_it(world):
    own, thief = keys.generate_key(), keys.generate_key()
    first = world.enrol("a", own)
    token, _ = world.store.accounts.create_invitation("a", 1, "lead")
    told = join(world, token, "a", thief)
    assert told.status_code == 403
    assert "removes it first" in told.json()["error"]
    assert first.post("/site/beat", beating()).status_code == 200
    assert join(world, token, "a", own).status_code == 200  # the same site again, say after a restore
    assert first.post("/site/beat", beating()).status_code == 401  # its old credential is void
    assert world.lead.post("/api/sites/a/remove").status_code == 200
    token, _ = world.store.accounts.create_invitation("a", 1, "lead")
    assert join(world, token, "a", thief).status_code == 200


def test_a_key_has_one_name(world):
    key = keys.generate_key()
    world.enrol("a", key)
    token, _ = world.store.accounts.create_invitation("b", 1, "lead")
    assert "another name" in join(world, token, "b", key).json()["error"]


def test_who_left_or_was_removed_is_out(world):
    a, b = world.enrol("a"), world.enrol("b")
    assert a.post("/site/leave").status_code == 200
    assert a.post("/site/beat", beating()).status_code == 401
    assert world.lead.post("/api/sites/b/remove").status_code == 200
    assert b.post("/site/beat", beating()).status_code == 401
    assert [s["connected"] for s in world.lead.get("/api/sites").json()] == [False, False]
    assert world.lead.post("/api/sites/nobody/remove").status_code == 404


@pytest.mark.parametrize("name", ["../a", "a/b", "a.b", ".a", "-a", "a b", "ä", "a" * 49, "a\n", "", "%2e%2e"])
def test_a_name_is_no_path(world, name):
    token, _ = world.store.accounts.create_invitation("a", 1, "lead")
    assert world.nobody.post("/site/enrol", enrolment(token, "a") | {"site": name}).status_code == 422
    if name and "/" not in name:
        told = world.lead.post(f"/api/sites/{name}/invite".replace("\n", "%0a"), {})
        assert told.status_code in (404, 405, 422)
    assert world.store.sites() == []


@pytest.mark.parametrize("name", ["server", "server_job", "coordinator", "Coordinator"])
def test_nobody_is_called_as_the_server_is(world, name):
    """A certificate of that name would speak for it."""
    told = world.lead.post(f"/api/sites/{name}/invite", {})
    assert told.status_code == 422
    assert "choose another" in told.json()["error"]


def test_no_secret_is_in_the_log_or_the_database(world):
    token = parse_invitation(world.lead.post("/api/sites/a/invite", {}).json()["token"]).token
    asked = enrolment(token, "a")
    told = world.nobody.post("/site/enrol", asked).json()
    person = world.lead.post("/api/users", {"name": "eva", "role": "viewer"}).json()["token"]
    cookie = world.nobody.post("/api/login", {"token": person}).cookies["hemofed"]
    world.nobody.post("/api/login", {"token": "wrong-" + person})
    Web(world.app, told["credential"]).post("/site/beat", beating())
    files = [world.home.log, *world.home.path.glob("hemofed.db*")]
    held = b"".join(file.read_bytes() for file in files)
    for secret in (token, told["credential"], person, cookie, world.lead_token, asked["proof"]):
        assert secret.encode() not in held
    assert b"eva" in held


def test_a_status_that_is_too_long_is_refused(world):
    told = world.enrol("a").post("/site/beat", beating(status={"x": "y" * 70_000}))
    assert told.status_code == 422
    assert "64000 bytes" in told.json()["error"]
