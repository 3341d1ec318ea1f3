"""Key files with access for their owner only, fingerprints, and signatures of one value for one purpose."""

import hashlib
import json
import math
import os
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import KeyFileError, NoSpaceError
from privacy.ledger.keys import (
    canonical_json,
    fingerprint,
    generate_key,
    is_valid_signature,
    load_key,
    public_bytes,
    public_hex,
    save_key,
    sign,
)
from tests.support.machine import fill_disk, mount_small_disk

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def file_mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("passphrase", [None, "köstlich und lang"])
def test_saved_key_is_loaded_again(tmp_path, passphrase):
    key = generate_key()
    path = save_key(key, tmp_path / "site" / "agent.pem", passphrase)
    assert file_mode(path) == 0o600
    assert public_bytes(load_key(path, passphrase)) == public_bytes(key)
    assert (b"ENCRYPTED" in path.read_bytes()) is (passphrase is not None)


def test_key_file_mode_does_not_depend_on_umask(tmp_path):
    old = os.umask(0)
    try:
        path = save_key(generate_key(), tmp_path / "agent.pem")
    finally:
        os.umask(old)
    assert file_mode(path) == 0o600


def test_openssl_reads_the_key_file(tmp_path):
    """Another implementation finds the same public key in the file."""
    key = generate_key()
    path = save_key(key, tmp_path / "agent.pem", "secret words")
    result = subprocess.run(
        ["openssl", "pkey", "-in", path, "-passin", "pass:secret words", "-pubout", "-outform", "DER"],
        capture_output=True,
        check=True,
    )
    assert result.stdout[-32:] == public_bytes(key)


def test_key_file_is_never_overwritten(tmp_path):
    path = save_key(generate_key(), tmp_path / "agent.pem")
    before = path.read_bytes()
    with pytest.raises(KeyFileError, match="not overwritten"):
        save_key(generate_key(), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_key_file_with_access_for_others_is_refused(tmp_path, mode):
    path = save_key(generate_key(), tmp_path / "agent.pem")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=rf"mode 0{mode:o}\): chmod 600 {path}"):
        load_key(path)
    path.chmod(0o600)
    load_key(path)


def test_wrong_and_missing_passphrases_have_different_messages(tmp_path):
    locked = save_key(generate_key(), tmp_path / "locked.pem", "right")
    unlocked = save_key(generate_key(), tmp_path / "unlocked.pem")
    with pytest.raises(KeyFileError, match="passphrase is wrong"):
        load_key(locked, "wrong")
    with pytest.raises(KeyFileError, match="none was given"):
        load_key(locked)
    with pytest.raises(KeyFileError, match="leave the passphrase out"):
        load_key(unlocked, "right")


@pytest.mark.parametrize(
    "text", [b"", b"\x00\xff" * 40, b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_damaged_key_file_is_named(tmp_path, text):
    path = tmp_path / "agent.pem"
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(KeyFileError, match=r"agent\.pem cannot be read: it is damaged"):
        load_key(path)


def test_cut_key_file_is_refused(tmp_path):
    pem = save_key(generate_key(), tmp_path / "complete.pem").read_bytes()
    path = tmp_path / "cut.pem"
    path.touch(0o600)
    for end in range(0, len(pem) - 3, 5):
        path.write_bytes(pem[:end])
        with pytest.raises(KeyFileError):
            load_key(path)


def test_other_files_are_refused_as_keys(tmp_path):
    with pytest.raises(KeyFileError, match="there is no key at"):
        load_key(tmp_path / "nowhere.pem")
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        load_key(tmp_path)
    other = tmp_path / "other.pem"
    other.touch(0o600)
    curve = generate_private_key(SECP256R1())
    other.write_bytes(curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(KeyFileError, match="Ed25519"):
        load_key(other)


def test_full_disk_leaves_no_partial_key(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk)
        with pytest.raises(NoSpaceError, match=r"agent\.pem"):
            save_key(generate_key(), disk / "agent.pem")
        assert not (disk / "agent.pem").exists()


def test_fingerprint_is_eight_groups_of_four():
    public = bytes(range(32))
    groups = fingerprint(public).split("-")
    assert [len(group) for group in groups] == [4] * 8
    assert "".join(groups) == hashlib.sha256(public).hexdigest()[:32]


def test_canonical_json_by_hand():
    value = {"b": [1, 1.0, 1e-05, True, None], "a": {"é": '"', "z": -0.0}}
    assert canonical_json(value) == '{"a":{"z":-0.0,"é":"\\""},"b":[1,1.0,1e-05,true,null]}'.encode()


@given(JSON)
def test_canonical_json_round_trip(value):
    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf]])
def test_nan_and_infinity_are_not_signed(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        sign(generate_key(), "entry", value)


def test_signature_is_for_one_key_purpose_and_value():
    key, other = generate_key(), generate_key()
    signature = sign(key, "entry", {"x": 1})
    assert is_valid_signature(public_hex(key), "entry", {"x": 1}, signature)
    assert not is_valid_signature(public_hex(other), "entry", {"x": 1}, signature)
    assert not is_valid_signature(public_hex(key), "receipt", {"x": 1}, signature)
    assert not is_valid_signature(public_hex(key), "entry", {"x": 1.0}, signature)


def test_signature_has_one_spelling():
    key = generate_key()
    signature = sign(key, "entry", "x")
    for other in (signature.upper(), f" {signature}", signature[:-2], signature + "00", "", "zz" * 64):
        assert not is_valid_signature(public_hex(key), "entry", "x", other)
    assert not is_valid_signature(public_hex(key).upper(), "entry", "x", signature)
    assert not is_valid_signature("00" * 31, "entry", "x", signature)
