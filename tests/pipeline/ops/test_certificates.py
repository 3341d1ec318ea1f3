"""The federation's authority: what it signs, and what a peer believes."""

import socket
import ssl
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from pipeline.core.errors import KeyFileError
from pipeline.ops.certificates import CertificateAuthority
from tests.pipeline.service.conftest import RSA, csr


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return CertificateAuthority.create(tmp_path_factory.mktemp("ca"), "Test CA")


def certificate(pem):
    return x509.load_pem_x509_certificate(pem.encode())


def files(folder, name, cert, key):
    (folder / f"{name}.crt").write_text(cert)
    (folder / f"{name}.key").write_text(key)
    return folder / f"{name}.crt", folder / f"{name}.key"


def shake(tmp_path, authority, server, client=None, host="localhost"):
    """A TLS handshake over a pair of sockets, the server asking for a certificate."""
    (tmp_path / "ca.pem").write_text(authority.pem)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(*server)
    theirs.load_verify_locations(tmp_path / "ca.pem")
    theirs.verify_mode = ssl.CERT_REQUIRED if client else ssl.CERT_NONE
    ours = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    if client:
        ours.load_cert_chain(*client)
    near, far = socket.socketpair()
    far.settimeout(5)
    near.settimeout(5)
    heard = []

    def serve():
        try:
            with theirs.wrap_socket(far, server_side=True) as wrapped:
                heard.append(wrapped.recv(5))
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours.wrap_socket(near, server_hostname=host) as wrapped:
            wrapped.sendall(b"hello")
    except ssl.SSLCertVerificationError:
        raise
    except OSError:  # TLS 1.3: a server that does not believe us may hang up before we have spoken, or after
        heard.clear()
    finally:
        near.close()
        thread.join()
    return heard == [b"hello"]


def rsa_pem():
    return RSA.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()


def test_a_signed_site_gets_through_and_poses_as_nobody(authority, tmp_path):
    shown = authority.issue_server(["fl.example.org", "localhost", "127.0.0.1"])
    server = files(tmp_path, "server", shown.certificate, shown.key)
    site = files(tmp_path, "site", authority.sign_request(csr("localhost"), "localhost"), rsa_pem())
    assert shake(tmp_path, authority, server, site)
    assert shake(tmp_path, authority, server, site, host="127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(tmp_path, authority, server, site, host="elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError):  # a site called localhost is no server of that name
        shake(tmp_path, authority, site, site)


def test_a_foreign_certificate_is_refused(authority, tmp_path):
    shown = authority.issue_server(["localhost"])
    other = CertificateAuthority.create(tmp_path / "other", "Test CA").issue_client("a")  # even of the same name
    server = files(tmp_path, "server", shown.certificate, shown.key)
    assert not shake(tmp_path, authority, server, files(tmp_path, "foreign", other.certificate_pem, other.key_pem))


def test_what_a_site_may_do_stands_in_its_certificate(authority):
    made = certificate(authority.sign_request(csr("a"), "a"))
    assert made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "a"
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert [u._name for u in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value] == ["clientAuth"]
    assert made.public_key() == RSA.public_key()
    age = made.not_valid_after_utc - made.not_valid_before_utc
    assert age.days == 2 * 365 + 1


def test_an_administrator_has_a_role_and_a_site_has_none(authority):
    admin = certificate(authority.issue_client("admin@hemofed", "project_admin").certificate)
    assert admin.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)[0].value == "project_admin"
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, "a"), x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, "project_admin")]
    )
    from cryptography.hazmat.primitives import hashes

    sly = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(RSA, hashes.SHA256())
    made = certificate(authority.sign_request(sly.public_bytes(Encoding.PEM).decode(), "a"))
    assert not made.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)


def test_requests_that_are_not_the_sites_own_are_refused(authority):
    with pytest.raises(KeyFileError, match="is for b, and a enrols"):
        authority.sign_request(csr("b"), "a")
    with pytest.raises(KeyFileError, match="no PKCS#10"):
        authority.sign_request("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----", "a")
    with pytest.raises(KeyFileError, match="RSA"):
        authority.sign_request(csr("a", ec.generate_private_key(ec.SECP256R1())), "a")
    body = csr("a").splitlines()
    swapped = "\n".join([*body[:-3], body[-3][:-4] + ("AAAA" if body[-3][-4:] != "AAAA" else "BBBB"), *body[-2:]])
    with pytest.raises(KeyFileError, match=r"not signed by its own key|no PKCS#10"):
        authority.sign_request(swapped, "a")


def test_it_opens_again_and_notices_another_key(authority, tmp_path):
    made = CertificateAuthority.create(tmp_path / "one", "One")
    assert (tmp_path / "one" / "ca.key").stat().st_mode & 0o777 == 0o600
    assert CertificateAuthority.open(tmp_path / "one").pem == made.pem
    CertificateAuthority.create(tmp_path / "two", "Two")
    (tmp_path / "two" / "ca.pem").replace(tmp_path / "one" / "ca.pem")
    with pytest.raises(KeyFileError, match="does not belong"):
        CertificateAuthority.open(tmp_path / "one")
