"""Secure sums are the plain sums, bit for bit, whoever drops out when; and a bad answer spoils nothing but itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
from privacy.secure_aggregation.server import SecAggServer
from privacy.secure_aggregation.shamir import reconstruction_threshold

NAMES = [f"site-{i:02}" for i in range(20)]
KEYS = {name: Ed25519PrivateKey.generate() for name in NAMES}
ROSTER = {name: key.public_key().public_bytes_raw() for name, key in KEYS.items()}
NOW = b"study 8f3a, turn 7, attempt 1"
LAYOUT = (MaskedSegment(5, 19), MaskedSegment(3, 40, "uint64"))

PHASES = [4, 4, 4, 4, 4, 4, 3, 3, 2, 2, 1, 0]  # that a site takes part in; mostly all of them

Vectors = list[np.ndarray]


def members_of(names: Collection[str], context: bytes = NOW, fewest: int = 3) -> dict[str, SecAggClient]:
    return {name: SecAggClient(name, KEYS[name], ROSTER, context, fewest) for name in names}


def random_vectors(layout: Sequence[MaskedSegment], seed: int) -> Vectors:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 2**s.bits - 1, s.num_values, s.dtype, endpoint=True) for s in layout]


def with_bits(vectors: Vectors, layout: Sequence[MaskedSegment]) -> list[tuple[np.ndarray, int]]:
    return [(vector, segment.bits) for vector, segment in zip(vectors, layout, strict=True)]


def plain_sum(vectors: Collection[Vectors], layout: Sequence[MaskedSegment]) -> list[list[int]]:
    """In Python's own numbers."""
    return [
        [sum(int(each[k][i]) for each in vectors) % 2**s.bits for i in range(s.num_values)]
        for k, s in enumerate(layout)
    ]


@dataclass
class Turn:
    members: dict[str, SecAggClient]
    gathering: SecAggServer
    data: dict[str, Vectors]
    layout: Sequence[MaskedSegment]

    def mask(self, site: str, parcels: Mapping[str, bytes]) -> Vectors:
        return self.members[site].mask_vectors(parcels, with_bits(self.data[site], self.layout))


def turn_of(n: int, layout: Sequence[MaskedSegment] = LAYOUT, context: bytes = NOW) -> Turn:
    names = NAMES[:n]
    data = {name: random_vectors(layout, i) for i, name in enumerate(names)}
    return Turn(members_of(names, context), SecAggServer(context, ROSTER, layout), data, layout)


def after_sharing(turn: Turn) -> dict[str, dict[str, bytes]]:
    for name, member in turn.members.items():
        turn.gathering.receive_advertisement(name, member.advertise_keys())
    adverts = turn.gathering.end_advertise_phase()
    for name, member in turn.members.items():
        turn.gathering.receive_encrypted_shares(name, member.share_secrets(adverts))
    return turn.gathering.end_share_phase()


def after_masking(turn: Turn, dropouts: Collection[str] = ()) -> list[str]:
    for name, parcels in after_sharing(turn).items():
        if name not in dropouts:
            turn.gathering.receive_masked_vectors(name, turn.mask(name, parcels))
    return turn.gathering.end_mask_phase()


def lists(vectors: Sequence[np.ndarray]) -> list[list[int]]:
    return [vector.tolist() for vector in vectors]


segments = st.sampled_from(["uint16", "uint32", "uint64"]).flatmap(
    lambda dtype: st.builds(
        MaskedSegment, st.integers(0, 6), st.integers(1, 8 * np.dtype(dtype).itemsize), st.just(dtype)
    )
)


@settings(max_examples=150, deadline=None)
@given(
    lasts=st.lists(st.sampled_from(PHASES), min_size=3, max_size=9),
    layout=st.lists(segments, min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_whoever_drops_out_when_the_sum_is_the_plain_one_or_too_few(
    lasts: list[int], layout: list[MaskedSegment], order: object
) -> None:
    turn = turn_of(len(lasts), layout)
    names = list(turn.members)
    order.shuffle(names)  # type: ignore[attr-defined]
    last = dict(zip(turn.members, lasts, strict=True))
    there = [[name for name in names if last[name] >= phase] for phase in (1, 2, 3, 4)]
    t = max(3, 2 * len(there[0]) // 3 + 1)
    enough = len(there[0]) >= 3 and len(there[3]) >= t

    def run() -> list[np.ndarray]:
        g = turn.gathering
        for name in there[0]:
            g.receive_advertisement(name, turn.members[name].advertise_keys())
        adverts = g.end_advertise_phase()
        for name in there[1]:
            g.receive_encrypted_shares(name, turn.members[name].share_secrets(adverts))
        parcels = g.end_share_phase()
        for name in there[2]:
            g.receive_masked_vectors(name, turn.mask(name, parcels[name]))
        survivors = g.end_mask_phase()
        for name in there[3]:
            g.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
        return g.unmask_sums()

    if enough:
        total = run()
        assert lists(total) == plain_sum([turn.data[name] for name in there[2]], layout)
        assert [vector.dtype.name for vector in total] == [segment.dtype for segment in layout]
    else:
        with pytest.raises(QuorumNotReachedError):
            run()


@pytest.mark.parametrize(("dtype", "bits"), [("uint16", 16), ("uint32", 19), ("uint32", 32), ("uint64", 64)])
def test_vectors_longer_than_the_buffer_add_up(dtype: str, bits: int) -> None:
    layout = [MaskedSegment(140_001, bits, dtype)]
    turn = turn_of(4, layout)
    survivors = after_masking(turn, dropouts=NAMES[1:2])
    for name in survivors:
        turn.gathering.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
    wanted = sum(turn.data[name][0].astype(object) for name in survivors) % 2**bits
    assert (turn.gathering.unmask_sums()[0] == wanted).all()


@pytest.mark.parametrize(("n", "t"), [(3, 3), (4, 3), (5, 4), (6, 5), (9, 7), (20, 14), (30, 21)])
def test_the_threshold_is_more_than_two_thirds_and_at_least_three(n: int, t: int) -> None:
    assert reconstruction_threshold(n) == t


def test_sums_of_fewer_than_the_threshold_are_refused_on_both_sides() -> None:
    pair = members_of(NAMES[:2])
    adverts = {name: member.advertise_keys() for name, member in pair.items()}
    with pytest.raises(QuorumNotReachedError, match="2 sites take part"):
        pair[NAMES[0]].share_secrets(adverts)

    turn = turn_of(6)  # t = 5
    parcels = after_sharing(turn)
    few = dict(list(parcels[NAMES[0]].items())[:3])
    with pytest.raises(QuorumNotReachedError, match="4 sites shared"):
        turn.mask(NAMES[0], few)
    for name in NAMES[1:6]:
        turn.gathering.receive_masked_vectors(name, turn.mask(name, parcels[name]))
    survivors = turn.gathering.end_mask_phase()
    with pytest.raises(QuorumNotReachedError, match="4 sites survived"):
        turn.members[NAMES[1]].reveal_shares(survivors[:4])
    for name in survivors[1:]:
        turn.gathering.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
    with pytest.raises(QuorumNotReachedError, match="4 of the 6 sites of the secure sum helped to unmask, it takes 5"):
        turn.gathering.unmask_sums()


def test_a_site_may_want_more_company() -> None:
    members = members_of(NAMES[:4], fewest=5)
    with pytest.raises(QuorumNotReachedError, match="at least 5"):
        members[NAMES[0]].share_secrets({name: member.advertise_keys() for name, member in members.items()})


def test_a_bad_masked_vector_is_left_out_and_spoils_nothing() -> None:
    turn = turn_of(7)  # t = 5
    g, parcels = turn.gathering, after_sharing(turn)
    good = {name: turn.mask(name, parcels[name]) for name in NAMES[:7]}
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
        g.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
    assert lists(g.unmask_sums()) == plain_sum([turn.data[name] for name in NAMES[2:7]], LAYOUT)


def test_bad_adverts_parcels_and_answers_are_left_out() -> None:
    turn = turn_of(7)
    g, adverts = turn.gathering, {name: member.advertise_keys() for name, member in turn.members.items()}
    nobody = Ed25519PrivateKey.generate()
    low = KeyAdvertisement(bytes(32), bytes(32), bytes(32)).to_signed_bytes(
        KEYS[NAMES[0]], NAMES[0], NOW
    )  # a point of low order
    short = adverts[NAMES[0]][:-1]
    forged = KeyAdvertisement(*[bytes([9] * 32)] * 3).to_signed_bytes(nobody, NAMES[0], NOW)
    cut = KeyAdvertisement(bytes([9] * 32), bytes([9] * 32), b"").to_signed_bytes(KEYS[NAMES[0]], NAMES[0], NOW)
    bad = [(NAMES[0], advert) for advert in (low, short, forged, cut)]
    for site, advert in [*bad, ("mallory", adverts[NAMES[0]])]:
        with pytest.raises(ReplyError, match=site):
            g.receive_advertisement(site, advert)
    for name in NAMES[1:7]:  # n = 6, t = 5
        g.receive_advertisement(name, adverts[name])
    told = g.end_advertise_phase()
    sent = {name: turn.members[name].share_secrets(told) for name in told}
    first = sent[NAMES[1]]
    for parcels in (dict(list(first.items())[1:]), {name: parcel[1:] for name, parcel in first.items()}):
        with pytest.raises(ReplyError, match=NAMES[1]):
            g.receive_encrypted_shares(NAMES[1], parcels)
    for name in told:
        g.receive_encrypted_shares(name, sent[name])
    for name, parcels in g.end_share_phase().items():
        g.receive_masked_vectors(name, turn.mask(name, parcels))
    survivors = g.end_mask_phase()
    answers = {name: turn.members[name].reveal_shares(survivors) for name in survivors}
    with pytest.raises(ReplyError, match="no signature"):
        g.receive_unmask_shares(NAMES[1], answers[NAMES[2]])
    with pytest.raises(ReplyError, match="no signature"):
        g.receive_unmask_shares(NAMES[1], answers[NAMES[1]][:-1] + b"!")
    for payload in (b"", bytes(33 * 5), bytes(33 * 7), b"\xff" * 33 * 6):
        answer = sign_payload(KEYS[NAMES[1]], payload, "unmask", g._roster_view, NAMES[1], *survivors)
        with pytest.raises(ReplyError, match=f"{NAMES[1]}: (.* of 6 sites|a share beyond)"):
            g.receive_unmask_shares(NAMES[1], answer)
    for name in survivors[1:]:
        g.receive_unmask_shares(name, answers[name])
    assert lists(g.unmask_sums()) == plain_sum([turn.data[name] for name in survivors], LAYOUT)


def test_numbers_that_do_not_fit_the_ring_are_refused_at_the_site() -> None:
    for numbers, bits in [
        (np.array([2**19], np.uint32), 19),
        (np.array([1], np.int32), 19),
        (np.array([1], np.uint32), 33),
        (np.ones((2, 2), np.uint32), 19),
    ]:
        turn = turn_of(3)
        parcels = after_sharing(turn)
        with pytest.raises(ReplyError, match=NAMES[0]):
            turn.members[NAMES[0]].mask_vectors(parcels[NAMES[0]], [(numbers, bits)])


def test_the_site_keeps_its_own_numbers_as_they_were() -> None:
    turn = turn_of(3)
    before = lists(turn.data[NAMES[0]])
    masked = turn.mask(NAMES[0], after_sharing(turn)[NAMES[0]])
    assert lists(turn.data[NAMES[0]]) == before != lists(masked)


def test_the_coordinator_keeps_one_sum_and_no_vector() -> None:
    turn = turn_of(12, [MaskedSegment(1000, 32)])
    gone = []
    for name, parcels in after_sharing(turn).items():
        masked = turn.mask(name, parcels)
        turn.gathering.receive_masked_vectors(name, masked)
        gone.append(weakref.ref(masked[0]))
        del masked
    assert not any(ref() is not None for ref in gone)
    arrays, seen, front = 0, set(), [turn.gathering.__dict__]
    while front:
        thing = front.pop()
        if id(thing) not in seen and isinstance(thing, dict | list | tuple | set | np.ndarray):
            seen.add(id(thing))
            arrays += thing.nbytes if isinstance(thing, np.ndarray) else 0
            front += gc.get_referents(thing)
    assert arrays == 4000


def test_a_roster_has_the_sites_own_key_and_no_key_twice() -> None:
    with pytest.raises(MessageError, match="own key"):
        SecAggClient(NAMES[0], KEYS[NAMES[1]], ROSTER, NOW)
    with pytest.raises(MessageError, match="two names"):
        SecAggClient(NAMES[0], KEYS[NAMES[0]], ROSTER | {"twin": ROSTER[NAMES[1]]}, NOW)


def test_fingerprints_can_be_read_aloud() -> None:
    groups = fingerprint(ROSTER[NAMES[0]]).split("-")
    assert all(len(group) == 4 and int(group, 16) >= 0 for group in groups)
    assert len({fingerprint(key) for key in ROSTER.values()}) == len(ROSTER)
