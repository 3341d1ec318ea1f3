"""Shamir shares, keystreams and encrypted shares by hand or against another implementation."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.secure_aggregation.key_exchange import (
    ENCRYPTED_SHARES_BYTES,
    MalformedDataError,
    ShareRoute,
    compute_roster_view,
    decode_share,
    derive_key,
    encode_parts,
)
from privacy.secure_aggregation.masking import MaskedSegment, apply_masks, narrowest_dtype
from privacy.secure_aggregation.server import reconstruct_secret
from privacy.secure_aggregation.shamir import (
    PRIME,
    are_on_one_polynomial,
    evaluate_polynomial,
    interpolate,
    split_secret,
)

BY_HAND = {1: 1494, 2: 1942, 3: 2578, 4: 3402, 5: 4414, 6: 5614}  # 1234 + 166 x + 94 x^2


def test_shamir_shares_of_a_small_polynomial_by_hand() -> None:
    assert {x: evaluate_polynomial([1234, 166, 94], x) for x in BY_HAND} == BY_HAND
    assert interpolate({x: BY_HAND[x] for x in (2, 4, 5)}) == 1234
    assert interpolate({x: BY_HAND[x] for x in (6, 1, 3)}, 2) == 1942


def test_shamir_prime_is_above_every_secret() -> None:
    assert PRIME > 2**256 - 1
    d, r = PRIME - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        x = pow(a, d, PRIME)
        assert x == 1 or PRIME - 1 in [pow(x, 2**k, PRIME) for k in range(r)]


@settings(max_examples=50, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), n=st.integers(1, 12), data=st.data())
def test_any_t_shares_reconstruct_the_secret(secret: bytes, n: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(1, n))
    shares = dict(enumerate(split_secret(secret, t, n), start=1))
    some = data.draw(st.permutations(sorted(shares)))[:t]
    assert interpolate({x: shares[x] for x in some}) == int.from_bytes(secret)
    assert are_on_one_polynomial(shares, t)


@settings(max_examples=50, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), other=st.binary(min_size=32, max_size=32), t=st.integers(2, 8))
def test_fewer_shares_are_consistent_with_every_secret(secret: bytes, other: bytes, t: int) -> None:
    """For every secret there is a t-th share that gives it."""
    known = dict(enumerate(split_secret(secret, t, t), start=1))
    del known[t]
    assert interpolate(known) != int.from_bytes(secret)
    with_other = known | {t: interpolate({0: int.from_bytes(other)} | known, t)}
    assert interpolate(with_other) == int.from_bytes(other)


def test_splitting_a_secret_is_random() -> None:
    assert not set(split_secret(bytes(32), 3, 5)) & set(split_secret(bytes(32), 3, 5))


def test_wrong_shares_are_found_and_ignored() -> None:
    secret = os.urandom(32)
    shares = dict(enumerate(split_secret(secret, 5, 9), start=1))
    for wrong_positions in ([], [1], [9], [1, 4], [2, 3, 8], [1, 2, 3, 4]):
        received = {x: (y + (x in wrong_positions) * (17 + x**3)) % PRIME for x, y in shares.items()}
        assert reconstruct_secret(received, 5, secret.__eq__) == (secret, wrong_positions)
    five = {x: (y + (x < 6) * (17 + x**3)) % PRIME for x, y in shares.items()}
    assert reconstruct_secret(five, 5, secret.__eq__) is None
    assert reconstruct_secret(dict(list(shares.items())[:4]), 5, secret.__eq__) is None
    assert not are_on_one_polynomial(shares | {7: shares[7] + 1}, 5)


def test_wrong_shares_that_cancel_out_are_located() -> None:
    """At 0 Lagrange's weights of 1 .. 5 are 5, -10, 10, -5, 1: the same error at 1 and 4 leaves the secret as it is."""
    secret = os.urandom(32)
    shares = dict(enumerate(split_secret(secret, 5, 9), start=1))
    received = {x: (y + (x in (1, 4))) % PRIME for x, y in shares.items()}
    assert interpolate({x: received[x] for x in range(1, 6)}) == int.from_bytes(secret)
    assert reconstruct_secret(received, 5, secret.__eq__) == (secret, [1, 4])


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_mask_is_aes_ctr_by_hand(dtype: str) -> None:
    seed, n = os.urandom(32), 140_003
    vectors = [np.zeros(n, dtype), np.full(5, 7, dtype)]
    apply_masks(vectors, added_seeds=[seed], removed_seeds=[])
    for index, vector in enumerate(vectors):
        block = Cipher(algorithms.AES(derive_key(seed, "stream", str(index))), modes.ECB()).encryptor()
        counters = b"".join(i.to_bytes(16) for i in range(vector.nbytes // 16 + 1))
        stream = np.frombuffer(block.update(counters)[: vector.nbytes], dtype)
        assert (vector == stream + (7 * index)).all()
    apply_masks(vectors, added_seeds=[], removed_seeds=[seed])
    assert not vectors[0].any()
    assert (vectors[1] == 7).all()


def test_every_segment_has_its_own_keystream() -> None:
    twice = [np.zeros(100, np.uint32), np.zeros(100, np.uint32)]
    apply_masks(twice, added_seeds=[bytes(32)], removed_seeds=[])
    assert (twice[0] != twice[1]).all()


@pytest.mark.parametrize(("bits", "dtype"), [(1, "uint16"), (16, "uint16"), (17, "uint32"), (33, "uint64")])
def test_narrowest_dtype(bits: int, dtype: str) -> None:
    assert narrowest_dtype(bits) == dtype


@pytest.mark.parametrize(("bits", "dtype"), [(0, "uint32"), (33, "uint32"), (65, "uint64"), (8, "int32"), (8, "uint8")])
def test_invalid_segments_are_refused(bits: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="take one of"):
        MaskedSegment(1, bits, dtype)


def test_encrypted_shares_are_aes_gcm_with_a_key_per_route() -> None:
    mine, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ciphertext = ShareRoute(b"view", "a", "b").encrypt_shares(mine, theirs.public_key().public_bytes_raw(), (5, 6))
    key = derive_key(theirs.exchange(mine.public_key()), "parcel", b"view", "a", "b")
    plain = AESGCM(key).decrypt(ciphertext[:12], ciphertext[12:], encode_parts("parcel", b"view", "a", "b"))
    assert plain == (5).to_bytes(33) + (6).to_bytes(33)


def test_shares_are_below_the_prime() -> None:
    assert decode_share((PRIME - 1).to_bytes(33)) == PRIME - 1
    with pytest.raises(MalformedDataError, match="above the prime"):
        decode_share(PRIME.to_bytes(33))


def test_encoded_parts_are_unambiguous() -> None:
    assert (
        len({encode_parts("ab", "c"), encode_parts("a", "bc"), encode_parts("abc"), encode_parts("ab", "c", "")}) == 4
    )
    assert compute_roster_view({"a": b"x", "b": b"y"}, b"") == compute_roster_view({"b": b"y", "a": b"x"}, b"")
    assert compute_roster_view({"a": b"x", "b": b"y"}, b"") != compute_roster_view({"a": b"y", "b": b"x"}, b"")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, ENCRYPTED_SHARES_BYTES - 1), bit=st.integers(0, 7))
def test_encrypted_shares_decrypt_only_for_their_receiver_and_unchanged(at: int, bit: int) -> None:
    mine, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    to, back = theirs.public_key().public_bytes_raw(), mine.public_key().public_bytes_raw()
    route = ShareRoute(b"view", "a", "b")
    ciphertext = route.encrypt_shares(mine, to, (5, PRIME - 1))
    assert len(ciphertext) == ENCRYPTED_SHARES_BYTES
    assert route.decrypt_shares(theirs, back, ciphertext) == (5, PRIME - 1)
    changed = bytearray(ciphertext)
    changed[at] ^= 1 << bit
    wrong = [ShareRoute(b"later", "a", "b"), ShareRoute(b"view", "b", "a"), ShareRoute(b"view", "a", "c")]
    for route_used, key, data in [
        (route, theirs, bytes(changed)),
        (route, theirs, ciphertext[:at]),
        (route, mine, ciphertext),
        *((r, theirs, ciphertext) for r in wrong),
    ]:
        with pytest.raises(MalformedDataError):
            route_used.decrypt_shares(key, back, data)
