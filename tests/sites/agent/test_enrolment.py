"""Enrolment against a coordinator played over real TLS."""

import json
import os
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pipeline.core.errors import KeyFileError, MessageError, RunFolderError
from pipeline.protocol.invitations import (
    Invitation,
    ca_fingerprint,
    format_invitation,
    normalize_certificate,
    parse_invitation,
)
from privacy.ledger.records import LedgerBudget
from sites.agent.enrolment import (
    SiteMembership,
    delete_membership,
    enrol_site,
    has_membership,
    membership_summary,
    write_private_file,
)
from sites.agent.http import AccessDeniedError, UnreachableError
from sites.governance.home import SiteHome
from tests.support.fake_coordinator import Stage, authority, served

TOKEN = "secret-token-0123"


@pytest.fixture
def home(tmp_path):
    return SiteHome.create(tmp_path / "home", "north", "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))


@pytest.fixture
def stage():
    played = Stage()
    played.invited = {TOKEN: "north"}
    return played


@pytest.fixture
def url(stage, tmp_path):
    with served(stage.app, tmp_path) as port:
        yield f"https://localhost:{port}"


def invited(token=TOKEN, name="stage") -> str:
    return format_invitation(token, authority(name).pem)


def files(home: SiteHome) -> set[str]:
    return {p.relative_to(home.path).as_posix() for p in home.path.rglob("*")}


def test_a_site_enrols_and_its_private_keys_stay(home, stage, url):
    member = enrol_site(home, url, "north", invited())
    assert SiteMembership.load(home.path) == member
    assert (member.site, member.url, member.credential) == ("north", url, "the-credential")
    assert member.coordinator.key == about_key(stage)
    kit = home.path / "kit"
    assert {p.relative_to(kit).as_posix() for p in kit.rglob("*") if p.is_file()} == {
        "startup/client.key",
        "startup/client.crt",
        "startup/rootCA.pem",
    }  # nothing of what the coordinator sent along
    for private in (home.path / "membership.json", *(p for p in kit.rglob("*") if p.is_file())):
        assert stat.S_IMODE(private.stat().st_mode) == 0o600, private
    assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    key = load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    certificate = x509.load_pem_x509_certificate((kit / "startup/client.crt").read_bytes())
    assert certificate.public_key() == key.public_key()
    (told,) = stage.enrolments  # the stage has checked the proof of possession
    assert "PRIVATE" not in json.dumps(told)
    assert told["officer"] == home.ledger.state.keys.officer


def about_key(stage: Stage) -> str:
    from privacy.ledger.keys import public_hex

    return public_hex(stage.key)


def test_secrets_are_not_shown(home, url):
    member = enrol_site(home, url, "north", invited())
    shown = repr(member) + str(membership_summary(member)) + repr(parse_invitation(invited()))
    assert "the-credential" not in shown
    assert TOKEN not in shown


def test_another_authority_than_the_invitation_names_is_told_nothing(home, stage, url):
    with pytest.raises(KeyFileError, match="is not the coordinator of this invitation"):
        enrol_site(home, url, "north", invited(name="foreign"))
    assert stage.enrolments == []
    assert stage.invited  # not even the token was tried
    assert not has_membership(home.path)


def test_the_right_authority_but_anothers_server_is_told_nothing(home, tmp_path):
    """Who serves a copied ca.pem still cannot show a certificate of that authority."""
    impostor = Stage()
    impostor.invited = {TOKEN: "north"}
    with (
        served(impostor.app, tmp_path, by=authority("foreign")) as port,
        pytest.raises(UnreachableError, match="Somebody may"),
    ):
        enrol_site(home, f"https://localhost:{port}", "north", invited())
    assert impostor.enrolments == []


def test_a_second_certificate_beside_the_right_one_is_refused(home, stage, url):
    stage.ca = type("Two", (), {"pem": authority().pem + authority("foreign").pem})()
    with pytest.raises(KeyFileError, match="not one certificate"):
        enrol_site(home, url, "north", invited())


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ({"credential": "a\nb"}, MessageError, "credential"),
        ({"coordinator": {"name": "x", "key": "12", "host": "h", "port": 1}}, MessageError, "coordinator.key"),
        ({"certificate": "nonsense"}, KeyFileError, "damaged"),
        ({"ca": authority("foreign").pem}, KeyFileError, "another certificate authority"),
    ],
)
def test_a_bad_answer_leaves_nothing_and_enrolling_can_be_repeated(home, stage, url, answer, error, words):
    before = files(home)
    stage.answer = answer
    with pytest.raises(error, match=words):
        enrol_site(home, url, "north", invited())
    assert files(home) == before
    stage.answer = {}
    stage.invited = {TOKEN: "north"}
    enrol_site(home, url, "north", invited())
    assert has_membership(home.path)


def test_a_certificate_for_another_name_or_of_another_authority_is_refused(home, stage, url):
    real = stage.ca.client
    for wrong in (authority("foreign").client, lambda csr: real(stage.enrolments[0]["csr"])):
        stage.invited = {TOKEN: "north"}
        stage.ca.client = wrong
        try:
            with pytest.raises(KeyFileError, match="certificate that came back"):
                enrol_site(home, url, "north", invited())
        finally:
            stage.ca.client = real
    assert not has_membership(home.path)


def test_a_full_disk_in_between_leaves_nothing(home, url, monkeypatch):
    before = files(home)

    def full(path, data):
        if path.name == "membership.json":
            raise OSError(28, "No space left on device")
        return write_private_file(path, data)

    monkeypatch.setattr("sites.agent.enrolment.write_private_file", full)
    with pytest.raises(OSError, match="No space"):
        enrol_site(home, url, "north", invited())
    assert files(home) == before


def test_refusals_name_the_cure_and_not_the_token(home, stage, url):
    with pytest.raises(AccessDeniedError, match="unknown, used or expired") as told:
        enrol_site(home, url, "north", invited("other-token-0123"))
    assert "other-token" not in str(told.value)
    with pytest.raises(RunFolderError, match="home of north"):
        enrol_site(home, url, "south", invited())
    for no_invitation in ("", TOKEN, f"hemofed1.{TOKEN}", f"hemofed1.{TOKEN}.1234", f"hemofed2.{TOKEN}.{'0' * 32}"):
        with pytest.raises(KeyFileError, match="no invitation") as told:
            enrol_site(home, url, "north", no_invitation)
        assert TOKEN not in str(told.value)
    enrol_site(home, url, "north", TOKEN, ca_fingerprint(authority().pem))
    with pytest.raises(RunFolderError, match="already"):
        enrol_site(home, url, "north", invited())


def test_leaving_forgets_kit_and_membership_only(home, url):
    before = files(home)
    enrol_site(home, url, "north", invited())
    delete_membership(home.path)
    assert files(home) == before
    with pytest.raises(RunFolderError, match="belongs to no coordinator"):
        SiteMembership.load(home.path)


def test_an_invitation_is_read_as_it_was_written():
    pem = authority().pem
    assert parse_invitation(f" {format_invitation(TOKEN, pem)}\n") == Invitation(TOKEN, ca_fingerprint(pem))
    assert normalize_certificate(f"\n{pem}\n\n") == normalize_certificate(pem)
    with pytest.raises(KeyFileError):
        ca_fingerprint("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----")


def test_a_private_file_is_private_from_its_first_byte(tmp_path):
    mask = os.umask(0)
    try:
        path = write_private_file(tmp_path / "x", b"secret")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
