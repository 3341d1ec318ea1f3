"""Enrolment with a fake coordinator over real TLS."""

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
from privacy.ledger.keys import public_hex
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
from tests.support.fake_coordinator import (
    INVITATION_TOKEN,
    FakeCoordinator,
    certificate_authority,
    make_site_home,
    serve_tls,
)


@pytest.fixture
def home(tmp_path):
    return make_site_home(tmp_path)


@pytest.fixture
def coordinator():
    return FakeCoordinator()


@pytest.fixture
def url(coordinator, tmp_path):
    with serve_tls(coordinator.app, tmp_path) as port:
        yield f"https://localhost:{port}"


def make_invitation(token=INVITATION_TOKEN, name="test") -> str:
    return format_invitation(token, certificate_authority(name).pem)


def list_files(home: SiteHome) -> set[str]:
    return {p.relative_to(home.path).as_posix() for p in home.path.rglob("*")}


def test_enrolment_keeps_private_keys_at_the_site(home, coordinator, url):
    member = enrol_site(home, url, "north", make_invitation())
    assert SiteMembership.load(home.path) == member
    assert (member.site, member.url, member.credential) == ("north", url, "the-credential")
    assert member.coordinator.key == public_hex(coordinator.key)
    kit = home.path / "kit"
    assert {p.relative_to(kit).as_posix() for p in kit.rglob("*") if p.is_file()} == {
        "startup/client.key",
        "startup/client.crt",
        "startup/rootCA.pem",
    }  # no file of the kit that the coordinator sent
    for private_file in (home.path / "membership.json", *(p for p in kit.rglob("*") if p.is_file())):
        assert stat.S_IMODE(private_file.stat().st_mode) == 0o600, private_file
    assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    key = load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    certificate = x509.load_pem_x509_certificate((kit / "startup/client.crt").read_bytes())
    assert certificate.public_key() == key.public_key()
    (payload,) = coordinator.enrolments  # the fake coordinator has checked the proof of possession
    assert "PRIVATE" not in json.dumps(payload)
    assert payload["officer"] == home.ledger.state.keys.officer_key


def test_repr_and_summary_show_no_secrets(home, url):
    member = enrol_site(home, url, "north", make_invitation())
    shown = repr(member) + str(membership_summary(member)) + repr(parse_invitation(make_invitation()))
    assert "the-credential" not in shown
    assert INVITATION_TOKEN not in shown


def test_ca_fingerprint_mismatch_sends_nothing_to_the_coordinator(home, coordinator, url):
    with pytest.raises(KeyFileError, match="is not the coordinator of this invitation"):
        enrol_site(home, url, "north", make_invitation(name="foreign"))
    assert coordinator.enrolments == []
    assert coordinator.invitations  # the token was not sent
    assert not has_membership(home.path)


def test_a_server_without_a_certificate_of_the_ca_receives_nothing(home, tmp_path):
    """An impostor can serve a copy of ca.pem, but has no certificate from that authority."""
    impostor = FakeCoordinator()
    with (
        serve_tls(impostor.app, tmp_path, authority=certificate_authority("foreign")) as port,
        pytest.raises(UnreachableError, match="may be intercepted"),
    ):
        enrol_site(home, f"https://localhost:{port}", "north", make_invitation())
    assert impostor.enrolments == []


def test_a_ca_bundle_of_two_certificates_is_refused(home, coordinator, url):
    coordinator.ca = type("Two", (), {"pem": certificate_authority().pem + certificate_authority("foreign").pem})()
    with pytest.raises(KeyFileError, match="not one certificate"):
        enrol_site(home, url, "north", make_invitation())


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"credential": "a\nb"}, MessageError, "credential"),
        ({"coordinator": {"name": "x", "key": "12", "host": "h", "port": 1}}, MessageError, "coordinator.key"),
        ({"certificate": "nonsense"}, KeyFileError, "damaged"),
        ({"ca": certificate_authority("foreign").pem}, KeyFileError, "another certificate authority"),
    ],
)
def test_an_invalid_enrolment_reply_writes_nothing_and_enrolment_can_be_repeated(
    home, coordinator, url, overrides, error, message
):
    files_before = list_files(home)
    coordinator.reply_overrides = overrides
    with pytest.raises(error, match=message):
        enrol_site(home, url, "north", make_invitation())
    assert list_files(home) == files_before
    coordinator.reply_overrides = {}
    coordinator.invitations = {INVITATION_TOKEN: "north"}
    enrol_site(home, url, "north", make_invitation())
    assert has_membership(home.path)


def test_a_certificate_with_a_wrong_name_or_authority_is_refused(home, coordinator, url):
    sign = coordinator.ca.sign_client_certificate
    for wrong_sign in (
        certificate_authority("foreign").sign_client_certificate,
        lambda csr: sign(coordinator.enrolments[0]["csr"]),
    ):
        coordinator.invitations = {INVITATION_TOKEN: "north"}
        coordinator.ca.sign_client_certificate = wrong_sign
        try:
            with pytest.raises(KeyFileError, match="the client certificate"):
                enrol_site(home, url, "north", make_invitation())
        finally:
            coordinator.ca.sign_client_certificate = sign
    assert not has_membership(home.path)


def test_a_full_disk_during_enrolment_leaves_no_files(home, url, monkeypatch):
    files_before = list_files(home)

    def fail_on_membership(path, data):
        if path.name == "membership.json":
            raise OSError(28, "No space left on device")
        return write_private_file(path, data)

    monkeypatch.setattr("sites.agent.enrolment.write_private_file", fail_on_membership)
    with pytest.raises(OSError, match="No space"):
        enrol_site(home, url, "north", make_invitation())
    assert list_files(home) == files_before


def test_enrolment_errors_name_the_cure_and_not_the_token(home, coordinator, url):
    with pytest.raises(AccessDeniedError, match="unknown, used or expired") as raised:
        enrol_site(home, url, "north", make_invitation("other-token-0123"))
    assert "other-token" not in str(raised.value)
    with pytest.raises(RunFolderError, match="home of north"):
        enrol_site(home, url, "south", make_invitation())
    for invalid in (
        "",
        INVITATION_TOKEN,
        f"hemofed1.{INVITATION_TOKEN}",
        f"hemofed1.{INVITATION_TOKEN}.1234",
        f"hemofed2.{INVITATION_TOKEN}.{'0' * 32}",
    ):
        with pytest.raises(KeyFileError, match="not an invitation") as raised:
            enrol_site(home, url, "north", invalid)
        assert INVITATION_TOKEN not in str(raised.value)
    enrol_site(home, url, "north", INVITATION_TOKEN, ca_fingerprint(certificate_authority().pem))
    with pytest.raises(RunFolderError, match="already"):
        enrol_site(home, url, "north", make_invitation())


def test_leaving_deletes_only_kit_and_membership(home, url):
    files_before = list_files(home)
    enrol_site(home, url, "north", make_invitation())
    delete_membership(home.path)
    assert list_files(home) == files_before
    with pytest.raises(RunFolderError, match="belongs to no coordinator"):
        SiteMembership.load(home.path)


def test_invitation_round_trip():
    pem = certificate_authority().pem
    assert parse_invitation(f" {format_invitation(INVITATION_TOKEN, pem)}\n") == Invitation(
        INVITATION_TOKEN, ca_fingerprint(pem)
    )
    assert normalize_certificate(f"\n{pem}\n\n") == normalize_certificate(pem)
    with pytest.raises(KeyFileError):
        ca_fingerprint("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----")


def test_private_files_have_mode_600_from_the_first_byte(tmp_path):
    mask = os.umask(0)
    try:
        path = write_private_file(tmp_path / "x", b"secret")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
