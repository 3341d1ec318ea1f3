"""Secure aggregation equals the plain sum bit for bit for any dropouts, and ignores invalid messages."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError
from privacy.ledger.keys import fingerprint
from privacy.secure_aggregation.client import SecAggClient
from privacy.secure_aggregation.key_exchange import KeyAdvertisement, sign_payload
from privacy.secure_aggregation.masking import MaskedSegment
from privacy.secure_aggregation.shamir import reconstruction_threshold
from tests.support.secagg_factory import (
    CONTEXT,
    KEYS,
    LAYOUT,
    NAMES,
    ROSTER,
    make_clients,
    make_round,
    plain_sum,
    to_lists,
)

PHASES = [4, 4, 4, 4, 4, 4, 3, 3, 2, 2, 1, 0]  # the last phase in which a site takes part, mostly the last of all

segments = st.sampled_from(["uint16", "uint32", "uint64"]).flatmap(
    lambda dtype: st.builds(
        MaskedSegment, st.integers(0, 6), st.integers(1, 8 * np.dtype(dtype).itemsize), st.just(dtype)
    )
)


@settings(max_examples=150, deadline=None)
@given(
    last_phases=st.lists(st.sampled_from(PHASES), min_size=3, max_size=9),
    layout=st.lists(segments, min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_secagg_equals_plain_sum_or_fails_for_any_dropouts(
    last_phases: list[int], layout: list[MaskedSegment], order: object
) -> None:
    secagg_round = make_round(len(last_phases), layout)
    names = list(secagg_round.clients)
    order.shuffle(names)  # type: ignore[attr-defined]
    last_phase = dict(zip(secagg_round.clients, last_phases, strict=True))
    active = [[name for name in names if last_phase[name] >= phase] for phase in (1, 2, 3, 4)]
    t = max(3, 2 * len(active[0]) // 3 + 1)
    is_quorum_reached = len(active[0]) >= 3 and len(active[3]) >= t

    def run() -> list[np.ndarray]:
        g = secagg_round.server
        for name in active[0]:
            g.receive_advertisement(name, secagg_round.clients[name].advertise_keys())
        advertisements = g.end_advertise_phase()
        for name in active[1]:
            g.receive_encrypted_shares(name, secagg_round.clients[name].share_secrets(advertisements))
        encrypted_shares = g.end_share_phase()
        for name in active[2]:
            g.receive_masked_vectors(name, secagg_round.mask(name, encrypted_shares[name]))
        survivors = g.end_mask_phase()
        for name in active[3]:
            g.receive_unmask_shares(name, secagg_round.clients[name].reveal_shares(survivors))
        return g.unmask_sums()

    if is_quorum_reached:
        total = run()
        assert to_lists(total) == plain_sum([secagg_round.data[name] for name in active[2]], layout)
        assert [vector.dtype.name for vector in total] == [segment.dtype for segment in layout]
    else:
        with pytest.raises(QuorumNotReachedError):
            run()


@pytest.mark.parametrize(("dtype", "bits"), [("uint16", 16), ("uint32", 19), ("uint32", 32), ("uint64", 64)])
def test_secagg_of_vectors_longer_than_the_buffer(dtype: str, bits: int) -> None:
    layout = [MaskedSegment(140_001, bits, dtype)]
    secagg_round = make_round(4, layout)
    survivors = secagg_round.run_until_masked(NAMES[1:2])
    secagg_round.reveal_all(survivors)
    expected = sum(secagg_round.data[name][0].astype(object) for name in survivors) % 2**bits
    assert (secagg_round.server.unmask_sums()[0] == expected).all()


@pytest.mark.parametrize(("n", "t"), [(3, 3), (4, 3), (5, 4), (6, 5), (9, 7), (20, 14), (30, 21)])
def test_secagg_threshold_is_more_than_two_thirds_and_at_least_three(n: int, t: int) -> None:
    assert reconstruction_threshold(n) == t


def test_secagg_below_the_threshold_is_refused_on_both_sides() -> None:
    pair = make_clients(NAMES[:2])
    advertisements = {name: client.advertise_keys() for name, client in pair.items()}
    with pytest.raises(QuorumNotReachedError, match="2 sites take part"):
        pair[NAMES[0]].share_secrets(advertisements)

    secagg_round = make_round(6)  # t = 5
    encrypted_shares = secagg_round.run_until_shared()
    few = dict(list(encrypted_shares[NAMES[0]].items())[:3])
    with pytest.raises(QuorumNotReachedError, match="4 sites shared"):
        secagg_round.mask(NAMES[0], few)
    for name in NAMES[1:6]:
        secagg_round.server.receive_masked_vectors(name, secagg_round.mask(name, encrypted_shares[name]))
    survivors = secagg_round.server.end_mask_phase()
    with pytest.raises(QuorumNotReachedError, match="4 sites survived"):
        secagg_round.clients[NAMES[1]].reveal_shares(survivors[:4])
    for name in survivors[1:]:
        secagg_round.server.receive_unmask_shares(name, secagg_round.clients[name].reveal_shares(survivors))
    with pytest.raises(
        QuorumNotReachedError, match="4 of the 6 sites of the secure aggregation helped to unmask, it needs 5"
    ):
        secagg_round.server.unmask_sums()


def test_secagg_client_may_require_more_participants() -> None:
    clients = make_clients(NAMES[:4], min_participants=5)
    with pytest.raises(QuorumNotReachedError, match="it needs 5"):
        clients[NAMES[0]].share_secrets({name: client.advertise_keys() for name, client in clients.items()})


def test_secagg_ignores_invalid_masked_vectors() -> None:
    secagg_round = make_round(7)  # t = 5
    g, encrypted_shares = secagg_round.server, secagg_round.run_until_shared()
    good = {name: secagg_round.mask(name, encrypted_shares[name]) for name in NAMES[:7]}
    narrow, long = good[NAMES[0]], good[NAMES[1]]
    bad = {
        "type": (NAMES[0], [narrow[0].astype(np.uint64), narrow[1]]),
        "shape": (NAMES[1], [long[0], np.append(long[1], long[1])]),
        "count": (NAMES[1], long[:1]),
        "stranger": (NAMES[8], long),
    }
    for site, vectors in bad.values():
        with pytest.raises(ReplyError, match=site):
            g.receive_masked_vectors(site, vectors)
    for name in NAMES[2:7]:
        g.receive_masked_vectors(name, good[name])
    with pytest.raises(ReplyError, match="twice"):
        g.receive_masked_vectors(NAMES[2], good[NAMES[2]])
    survivors = g.end_mask_phase()
    with pytest.raises(ReplyError, match="is at unmask"):
        g.receive_masked_vectors(NAMES[0], narrow)
    for name in survivors:
        g.receive_unmask_shares(name, secagg_round.clients[name].reveal_shares(survivors))
    assert to_lists(g.unmask_sums()) == plain_sum([secagg_round.data[name] for name in NAMES[2:7]], LAYOUT)


def test_secagg_ignores_invalid_advertisements_and_shares() -> None:
    secagg_round = make_round(7)
    g = secagg_round.server
    advertisements = {name: client.advertise_keys() for name, client in secagg_round.clients.items()}
    forger = Ed25519PrivateKey.generate()
    # a point of low order
    low = KeyAdvertisement(bytes(32), bytes(32), bytes(32)).to_signed_bytes(KEYS[NAMES[0]], NAMES[0], CONTEXT)
    short = advertisements[NAMES[0]][:-1]
    forged = KeyAdvertisement(*[bytes([9] * 32)] * 3).to_signed_bytes(forger, NAMES[0], CONTEXT)
    incomplete = KeyAdvertisement(bytes([9] * 32), bytes([9] * 32), b"").to_signed_bytes(
        KEYS[NAMES[0]], NAMES[0], CONTEXT
    )
    bad = [(NAMES[0], advertisement) for advertisement in (low, short, forged, incomplete)]
    for site, advertisement in [*bad, ("mallory", advertisements[NAMES[0]])]:
        with pytest.raises(ReplyError, match=site):
            g.receive_advertisement(site, advertisement)
    for name in NAMES[1:7]:  # n = 6, t = 5
        g.receive_advertisement(name, advertisements[name])
    received = g.end_advertise_phase()
    sent = {name: secagg_round.clients[name].share_secrets(received) for name in received}
    first = sent[NAMES[1]]
    for encrypted_shares in (
        dict(list(first.items())[1:]),
        {name: ciphertext[1:] for name, ciphertext in first.items()},
    ):
        with pytest.raises(ReplyError, match=NAMES[1]):
            g.receive_encrypted_shares(NAMES[1], encrypted_shares)
    for name in received:
        g.receive_encrypted_shares(name, sent[name])
    for name, encrypted_shares in g.end_share_phase().items():
        g.receive_masked_vectors(name, secagg_round.mask(name, encrypted_shares))
    survivors = g.end_mask_phase()
    answers = {name: secagg_round.clients[name].reveal_shares(survivors) for name in survivors}
    with pytest.raises(ReplyError, match="no valid signature"):
        g.receive_unmask_shares(NAMES[1], answers[NAMES[2]])
    with pytest.raises(ReplyError, match="no valid signature"):
        g.receive_unmask_shares(NAMES[1], answers[NAMES[1]][:-1] + b"!")
    for payload in (b"", bytes(33 * 5), bytes(33 * 7), b"\xff" * 33 * 6):
        answer = sign_payload(KEYS[NAMES[1]], payload, "unmask", g._roster_view, NAMES[1], *survivors)
        with pytest.raises(ReplyError, match=f"{NAMES[1]}: (.* of 6 sites|a share above)"):
            g.receive_unmask_shares(NAMES[1], answer)
    for name in survivors[1:]:
        g.receive_unmask_shares(name, answers[name])
    assert to_lists(g.unmask_sums()) == plain_sum([secagg_round.data[name] for name in survivors], LAYOUT)


def test_secagg_client_refuses_values_outside_the_ring() -> None:
    for numbers, bits in [
        (np.array([2**19], np.uint32), 19),
        (np.array([1], np.int32), 19),
        (np.array([1], np.uint32), 33),
        (np.ones((2, 2), np.uint32), 19),
    ]:
        secagg_round = make_round(3)
        encrypted_shares = secagg_round.run_until_shared()
        with pytest.raises(ReplyError, match=NAMES[0]):
            secagg_round.clients[NAMES[0]].mask_vectors(encrypted_shares[NAMES[0]], [(numbers, bits)])


def test_secagg_masking_does_not_change_the_input() -> None:
    secagg_round = make_round(3)
    before = to_lists(secagg_round.data[NAMES[0]])
    masked = secagg_round.mask(NAMES[0], secagg_round.run_until_shared()[NAMES[0]])
    assert to_lists(secagg_round.data[NAMES[0]]) == before != to_lists(masked)


def test_secagg_server_stores_one_sum_and_no_vector() -> None:
    secagg_round = make_round(12, [MaskedSegment(1000, 32)])
    references = []
    for name, encrypted_shares in secagg_round.run_until_shared().items():
        masked = secagg_round.mask(name, encrypted_shares)
        secagg_round.server.receive_masked_vectors(name, masked)
        references.append(weakref.ref(masked[0]))
        del masked
    assert not any(ref() is not None for ref in references)
    num_bytes, visited, queue = 0, set(), [secagg_round.server.__dict__]
    while queue:
        value = queue.pop()
        if id(value) not in visited and isinstance(value, dict | list | tuple | set | np.ndarray):
            visited.add(id(value))
            num_bytes += value.nbytes if isinstance(value, np.ndarray) else 0
            queue += gc.get_referents(value)
    assert num_bytes == 4000


def test_secagg_roster_must_have_the_own_key_and_unique_keys() -> None:
    with pytest.raises(MessageError, match="own key"):
        SecAggClient(NAMES[0], KEYS[NAMES[1]], ROSTER, CONTEXT)
    with pytest.raises(MessageError, match="two names"):
        SecAggClient(NAMES[0], KEYS[NAMES[0]], ROSTER | {"twin": ROSTER[NAMES[1]]}, CONTEXT)


def test_roster_fingerprints_are_groups_of_four() -> None:
    groups = fingerprint(ROSTER[NAMES[0]]).split("-")
    assert all(len(group) == 4 and int(group, 16) >= 0 for group in groups)
    assert len({fingerprint(key) for key in ROSTER.values()}) == len(ROSTER)
