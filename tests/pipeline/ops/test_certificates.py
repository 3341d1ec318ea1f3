"""The certificate authority of a federation: what it signs, and what a TLS peer accepts."""

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
from tests.support.service_factory import make_csr, shared_rsa_key


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return CertificateAuthority.create(tmp_path_factory.mktemp("ca"), "Test CA")


def parse_certificate(pem):
    return x509.load_pem_x509_certificate(pem.encode())


def write_key_pair(folder, name, cert, key):
    (folder / f"{name}.crt").write_text(cert)
    (folder / f"{name}.key").write_text(key)
    return folder / f"{name}.crt", folder / f"{name}.key"


def is_handshake_accepted(tmp_path, authority, server, client=None, host="localhost"):
    """Does a TLS handshake over a pair of sockets; the server asks for a certificate."""
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
    except OSError:  # TLS 1.3: a server that rejects our certificate may close before or after we send
        heard.clear()
    finally:
        near.close()
        thread.join()
    return heard == [b"hello"]


def rsa_pem():
    return shared_rsa_key().private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()


def test_site_certificate_is_accepted_as_client_and_not_as_server(authority, tmp_path):
    shown = authority.issue_server(["fl.example.org", "localhost", "127.0.0.1"])
    server = write_key_pair(tmp_path, "server", shown.certificate_pem, shown.key_pem)
    site = write_key_pair(tmp_path, "site", authority.sign_request(make_csr("localhost"), "localhost"), rsa_pem())
    assert is_handshake_accepted(tmp_path, authority, server, site)
    assert is_handshake_accepted(tmp_path, authority, server, site, host="127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        is_handshake_accepted(tmp_path, authority, server, site, host="elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError):  # a site called localhost is no server of that name
        is_handshake_accepted(tmp_path, authority, site, site)


def test_foreign_certificate_is_refused(authority, tmp_path):
    shown = authority.issue_server(["localhost"])
    other = CertificateAuthority.create(tmp_path / "other", "Test CA").issue_client("a")  # even of the same name
    server = write_key_pair(tmp_path, "server", shown.certificate_pem, shown.key_pem)
    assert not is_handshake_accepted(
        tmp_path, authority, server, write_key_pair(tmp_path, "foreign", other.certificate_pem, other.key_pem)
    )


def test_site_certificate_extensions_and_lifetime(authority):
    made = parse_certificate(authority.sign_request(make_csr("a"), "a"))
    assert made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "a"
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert [u._name for u in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value] == ["clientAuth"]
    assert made.public_key() == shared_rsa_key().public_key()
    age = made.not_valid_after_utc - made.not_valid_before_utc
    assert age.days == 2 * 365 + 1


def test_only_admin_certificates_have_a_role(authority):
    admin = parse_certificate(authority.issue_client("admin@hemofed", "project_admin").certificate_pem)
    assert admin.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)[0].value == "project_admin"
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, "a"), x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, "project_admin")]
    )
    from cryptography.hazmat.primitives import hashes

    sly = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(shared_rsa_key(), hashes.SHA256())
    made = parse_certificate(authority.sign_request(sly.public_bytes(Encoding.PEM).decode(), "a"))
    assert not made.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)


def test_invalid_certificate_requests_are_refused(authority):
    with pytest.raises(KeyFileError, match="is for b, but a enrols"):
        authority.sign_request(make_csr("b"), "a")
    with pytest.raises(KeyFileError, match="not PKCS#10"):
        authority.sign_request("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----", "a")
    with pytest.raises(KeyFileError, match="RSA"):
        authority.sign_request(make_csr("a", ec.generate_private_key(ec.SECP256R1())), "a")
    body = make_csr("a").splitlines()
    swapped = "\n".join([*body[:-3], body[-3][:-4] + ("AAAA" if body[-3][-4:] != "AAAA" else "BBBB"), *body[-2:]])
    with pytest.raises(KeyFileError, match=r"not signed by its own key|not PKCS#10"):
        authority.sign_request(swapped, "a")


def test_certificate_authority_reopens_and_detects_another_key(authority, tmp_path):
    made = CertificateAuthority.create(tmp_path / "one", "One")
    assert (tmp_path / "one" / "ca.key").stat().st_mode & 0o777 == 0o600
    assert CertificateAuthority.open(tmp_path / "one").pem == made.pem
    CertificateAuthority.create(tmp_path / "two", "Two")
    (tmp_path / "two" / "ca.pem").replace(tmp_path / "one" / "ca.pem")
    with pytest.raises(KeyFileError, match="does not belong"):
        CertificateAuthority.open(tmp_path / "one")
