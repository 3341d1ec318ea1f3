"""What a lying coordinator, a man in the middle, liars among the sites and colluders get: nothing, or what is written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from pipeline.core.errors import MessageError, ReplyError
from privacy.secure_aggregation.client import SecAggClient
from privacy.secure_aggregation.key_exchange import (
    SIGNATURE_BYTES,
    KeyAdvertisement,
    compute_roster_view,
    derive_pair_seed,
    sign_payload,
    verify_payload,
)
from privacy.secure_aggregation.masking import MaskedSegment, apply_masks
from privacy.secure_aggregation.server import SecAggServer
from privacy.secure_aggregation.shamir import PRIME, SHARE_BYTES, reconstruct_secret, reconstruction_threshold
from tests.privacy.secure_aggregation.test_secure_aggregation import (
    KEYS,
    LAYOUT,
    NAMES,
    NOW,
    ROSTER,
    Turn,
    after_masking,
    after_sharing,
    lists,
    members_of,
    plain_sum,
    turn_of,
    with_bits,
)

LATER = b"study 8f3a, turn 7, attempt 2"


def shares_in(answer: bytes, of: Iterable[str]) -> dict[str, int]:
    payload = answer[SIGNATURE_BYTES:]
    return {name: int.from_bytes(payload[i * SHARE_BYTES : (i + 1) * SHARE_BYTES]) for i, name in enumerate(sorted(of))}


def masked_by_all(turn: Turn) -> dict[str, list[np.ndarray]]:
    return {name: turn.mask(name, parcels) for name, parcels in after_sharing(turn).items()}


# order and repetition


def test_steps_are_taken_once_and_in_order() -> None:
    turn = turn_of(4)
    member, name = turn.members[NAMES[0]], NAMES[0]
    steps: dict[str, Callable[[], object]] = {
        "advertise": member.advertise_keys,
        "share": lambda: member.share_secrets({}),
        "mask": lambda: member.mask_vectors({}, []),
        "unmask": lambda: member.reveal_shares(NAMES[:4]),
    }

    def only(step: str | None) -> None:
        for other, call in steps.items():
            if other != step:
                with pytest.raises(MessageError, match=f"asked to {other}, and next"):
                    call()

    only("advertise")
    adverts = {each: turn.members[each].advertise_keys() for each in NAMES[:4]}
    only("share")
    sent = {each: turn.members[each].share_secrets(adverts) for each in NAMES[:4]}
    only("mask")
    member.mask_vectors(
        {by: parcels[name] for by, parcels in sent.items() if by != name}, with_bits(turn.data[name], LAYOUT)
    )
    only("unmask")
    member.reveal_shares(NAMES[:4])
    only(None)


@pytest.mark.parametrize("second", [NAMES[:5], NAMES[:4], [*NAMES[:3], NAMES[4]]], ids=["same", "fewer", "others"])
def test_a_second_list_of_survivors_is_not_answered(second: list[str]) -> None:
    turn = turn_of(5)
    masked_by_all(turn)
    turn.members[NAMES[0]].reveal_shares(NAMES[:5])
    with pytest.raises(MessageError, match="asked twice"):
        turn.members[NAMES[0]].reveal_shares(second)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [(NAMES[1:6], "not among the survivors"), ([*NAMES[:6], "mallory"], "mallory never shared")],
)
def test_a_list_that_cannot_be_is_not_answered_and_no_other_is_then(survivors: list[str], why: str) -> None:
    turn = turn_of(6)
    masked_by_all(turn)
    with pytest.raises(MessageError, match=why):
        turn.members[NAMES[0]].reveal_shares(survivors)
    with pytest.raises(MessageError, match="asked to unmask"):
        turn.members[NAMES[0]].reveal_shares(NAMES[:6])


def test_a_restarted_site_takes_nothing_meant_for_the_one_before() -> None:
    turn = turn_of(4)
    old, new = turn.members[NAMES[0]], members_of(NAMES[:1])[NAMES[0]]
    adverts = {name: member.advertise_keys() for name, member in turn.members.items()}
    sent = {name: member.share_secrets(adverts) for name, member in turn.members.items()}
    parcels = {by: each[old.name] for by, each in sent.items() if by != old.name}
    for call in (
        lambda: new.share_secrets(adverts),
        lambda: new.mask_vectors(parcels, []),
        lambda: new.reveal_shares(NAMES[:4]),
    ):
        with pytest.raises(MessageError, match="was restarted, and counts as a dropout"):
            call()
    new.advertise_keys()
    with pytest.raises(MessageError, match="from before a restart"):
        new.share_secrets(adverts)


# shares of both kinds


def both_kinds(turn: Turn, target: str, told: dict[str, list[str]], colluders: Iterable[str]) -> list[set[str]]:
    """Who gave the coordinator a share of the target's mask key, and of its seed. Colluders give both."""
    found: list[dict[str, int]] = [
        {c: turn.members[c]._received_shares[target][kind] for c in colluders} for kind in (0, 1)
    ]
    for name, survivors in told.items():
        answer = turn.members[name].reveal_shares(survivors)
        found[target in survivors][name] = shares_in(answer, turn.members)[target]
    t, places = (
        reconstruction_threshold(len(turn.members)),
        {name: i for i, name in enumerate(sorted(turn.members), start=1)},
    )
    secrets = (turn.members[target]._mask_key.private_bytes_raw(), turn.members[target]._seed)
    for kind, secret in zip(found, secrets, strict=True):
        rebuilt = reconstruct_secret({places[name]: share for name, share in kind.items()}, t, secret.__eq__)
        assert (rebuilt is not None) == (len(kind) >= t)  # t shares are what it takes, no more and no less
    return [set(kind) for kind in found]


def test_no_split_of_four_gives_both_secrets() -> None:
    target = NAMES[0]
    for split in itertools.product([True, False], repeat=3):
        turn = turn_of(4, [MaskedSegment(1, 8)])
        masked_by_all(turn)
        told = {target: NAMES[:4]}
        told |= {name: NAMES[:4] if alive else NAMES[1:4] for name, alive in zip(NAMES[1:4], split, strict=True)}
        assert sorted(map(len, both_kinds(turn, target, told, []))) in ([0, 4], [1, 3], [2, 2])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(3, 9))
def test_no_split_gives_both_secrets_even_with_a_third_in_league(data: st.DataObject, n: int) -> None:
    turn, t = turn_of(n, [MaskedSegment(1, 8)]), reconstruction_threshold(n)
    masked_by_all(turn)
    names = data.draw(st.permutations(NAMES[:n]))
    target = names[0]
    colluders = names[1 : 1 + data.draw(st.integers(0, (n - 1) // 3))]
    told = {}
    for name in set(names) - set(colluders):
        rest = data.draw(st.permutations([each for each in names if each != name]))
        told[name] = [name, *rest[: data.draw(st.integers(t - 1, n - 1))]]
    keys, seeds = both_kinds(turn, target, told, colluders)
    assert not (len(keys) >= t and len(seeds) >= t)


def test_with_more_than_a_third_in_league_a_split_does_give_both() -> None:
    """So the bound is where it is said to be: 3 of 7."""
    turn = turn_of(7, [MaskedSegment(1, 8)])
    masked_by_all(turn)
    target, *others = NAMES[:4]
    told = {target: NAMES[:7], others[0]: NAMES[:7]} | dict.fromkeys(others[1:], NAMES[1:7])
    keys, seeds = both_kinds(turn, target, told, NAMES[4:7])
    assert len(keys) == len(seeds) == reconstruction_threshold(7) == 5


def smallest_sum(n: int) -> int:
    """That a coordinator can get by telling sites different lists, none of them in league with it, by counting.

    To sum over s sites it needs the mask keys of the d others that these s heard of, t shares of each. A site leaves at
    most as many off its list as it heard of beyond t, and never itself.
    """
    t = reconstruction_threshold(n)

    def possible(s: int, d: int) -> bool:
        left_out = s * min(s + d - t, d) + d * min(n - t, d - 1) + (n - s - d) * min(n - t, d)
        return s + d >= t and d * t <= left_out

    return min(s for s in range(1, n + 1) for d in range(n - s + 1) if possible(s, d))


def test_different_lists_shrink_the_sum_as_far_as_documented() -> None:
    assert all(smallest_sum(n) == reconstruction_threshold(n) for n in range(3, 10))
    assert (smallest_sum(10), smallest_sum(20)) == (6, 11)
    assert all(3 * smallest_sum(n) > n for n in range(3, 100))


def test_a_coordinator_that_tells_ten_sites_different_lists_gets_one_sum_of_six() -> None:
    turn = turn_of(10)  # t = 7
    kept, left_out = NAMES[:6], NAMES[6:10]
    masked = masked_by_all(turn)
    off = {name: [each for each in left_out if each != name] for name in left_out}
    off |= {name: [each for k, each in enumerate(left_out) if k != i % 4] for i, name in enumerate(kept)}
    answers = {
        name: turn.members[name].reveal_shares([s for s in NAMES[:10] if s not in off[name]]) for name in NAMES[:10]
    }
    places = {name: i for i, name in enumerate(NAMES[:10], start=1)}

    def secret(of: str, gone: bool, wanted: bytes) -> bytes:
        given_ = {places[n]: shares_in(a, NAMES[:10])[of] for n, a in answers.items() if (of in off[n]) == gone}
        found = reconstruct_secret(given_, 7, wanted.__eq__)
        assert found is not None
        return found[0]

    total = [sum(masked[name][k] for name in kept) for k in range(2)]
    view = turn.gathering._roster_view
    for name in kept:
        apply_masks(total, added_seeds=[], removed_seeds=[secret(name, False, turn.members[name]._seed)])
    for gone in left_out:
        key = turn.members[gone]._mask_key
        assert secret(gone, True, key.private_bytes_raw()) == key.private_bytes_raw()
        for name in kept:  # they come before all that were left out, so they added
            public = turn.members[name]._mask_key.public_key().public_bytes_raw()
            apply_masks(total, added_seeds=[], removed_seeds=[derive_pair_seed(key, public, view, name, gone)])
    cut = [segment.reduce_modulo(vector) for segment, vector in zip(LAYOUT, total, strict=True)]
    assert lists(cut) == plain_sum([turn.data[name] for name in kept], LAYOUT)


# forged, swapped and replayed


def adverts_of(members: dict[str, SecAggClient]) -> dict[str, bytes]:
    return {name: member.advertise_keys() for name, member in members.items()}


def test_invented_and_swapped_and_foreign_adverts_are_refused() -> None:
    evil = Ed25519PrivateKey.generate()

    def mallory(name: str) -> bytes:
        return SecAggClient(name, evil, {name: evil.public_key().public_bytes_raw()}, NOW).advertise_keys()

    me, first, second = NAMES[:3]
    low = KeyAdvertisement(*[bytes(32)] * 3).to_signed_bytes(KEYS[first], first, NOW)
    lies: list[tuple[str, Callable[[dict[str, bytes]], dict[str, bytes]]]] = [
        ("mallory is not on the roster", lambda a: a | {"mallory": mallory("mallory")}),
        (f"advert of {first}: no signature", lambda a: a | {first: mallory(first)}),
        (f"advert of {first}: no signature", lambda a: a | {first: a[second], second: a[first]}),
        (f"advert of {second}: no signature", lambda a: a | adverts_of(members_of([second], LATER))),
        (f"advert of {first}: a public key that no honest site makes", lambda a: a | {first: low}),
        ("is not the one it made", lambda a: a | {me: a[first]}),
        ("is not the one it made", lambda a: a | adverts_of(members_of([me]))),
    ]
    for why, lie in lies:
        members = members_of(NAMES[:4])
        adverts = lie(adverts_of(members))
        with pytest.raises(MessageError, match=why):
            members[me].share_secrets(adverts)


def test_parcels_that_were_changed_swapped_or_kept_from_another_attempt_are_refused() -> None:
    old = after_sharing(turn_of(4, context=LATER))[NAMES[0]]
    lies: list[Callable[[dict[str, bytes]], dict[str, bytes]]] = [
        lambda p: p | {NAMES[1]: bytes([p[NAMES[1]][0] ^ 1]) + p[NAMES[1]][1:]},
        lambda p: p | {NAMES[1]: p[NAMES[2]]},
        lambda p: p | {NAMES[1]: old[NAMES[1]]},
        lambda p: p | {NAMES[1]: p[NAMES[1]][:-1]},
        lambda p: {(NAMES[4] if by == NAMES[1] else by): parcel for by, parcel in p.items()},
    ]
    for lie in lies:
        turn = turn_of(4)
        parcels = after_sharing(turn)
        with pytest.raises(MessageError, match=f"from ({NAMES[1]}|{NAMES[4]})"):
            turn.mask(NAMES[0], lie(parcels[NAMES[0]]))
        with pytest.raises(MessageError, match="counts as a dropout"):
            turn.mask(NAMES[0], parcels[NAMES[0]])


def test_a_site_takes_no_parcel_from_itself() -> None:
    turn = turn_of(4)
    parcels = after_sharing(turn)[NAMES[0]]
    with pytest.raises(MessageError, match=f"from {NAMES[0]}, which does not take part beside"):
        turn.mask(NAMES[0], parcels | {NAMES[0]: parcels[NAMES[1]]})


def test_sites_that_were_told_of_different_sites_do_not_work_together() -> None:
    members = members_of(NAMES[:5])
    adverts = adverts_of(members)
    fewer = {name: adverts[name] for name in NAMES[:4]}
    sent = {name: members[name].share_secrets(fewer if name == NAMES[0] else adverts) for name in NAMES[:5]}
    with pytest.raises(MessageError, match=f"from {NAMES[1]}"):
        members[NAMES[0]].mask_vectors({name: sent[name][NAMES[0]] for name in NAMES[1:4]}, [])


def test_an_answer_from_another_attempt_or_for_another_list_is_refused() -> None:
    turn, again = turn_of(4), turn_of(4, context=LATER)
    survivors, later = after_masking(turn), after_masking(again)
    with pytest.raises(ReplyError, match="no signature"):
        again.gathering.receive_unmask_shares(NAMES[0], turn.members[NAMES[0]].reveal_shares(survivors))
    with pytest.raises(ReplyError, match="no signature"):
        again.gathering.receive_unmask_shares(NAMES[0], again.members[NAMES[0]].reveal_shares(later[:3]))
    with pytest.raises(ReplyError, match=NAMES[1]):
        SecAggServer(LATER, ROSTER, LAYOUT).receive_advertisement(
            NAMES[1], members_of(NAMES[1:2])[NAMES[1]].advertise_keys()
        )


# liars among the sites


def with_false_share(turn: Turn, liar: str, survivors: list[str], of: str) -> bytes:
    """Signed as it should be."""
    purpose = ("unmask", turn.gathering._roster_view, liar, *sorted(survivors))
    payload = bytearray(verify_payload(turn.members[liar].reveal_shares(survivors), ROSTER[liar], *purpose))
    at = sorted(turn.members).index(of) * SHARE_BYTES
    false = (int.from_bytes(payload[at : at + SHARE_BYTES]) + 1) % PRIME
    payload[at : at + SHARE_BYTES] = false.to_bytes(SHARE_BYTES)
    return sign_payload(KEYS[liar], bytes(payload), *purpose)


@pytest.mark.parametrize("of", [NAMES[5], NAMES[8]], ids=["seed of a survivor", "key of a dropout"])
def test_a_false_share_is_done_without_and_named(of: str) -> None:
    turn = turn_of(9)  # t = 7, 8 survive: one share to spare
    survivors = after_masking(turn, NAMES[8:9])
    for name in survivors:
        lies = name == NAMES[2]
        answer = with_false_share(turn, name, survivors, of) if lies else turn.members[name].reveal_shares(survivors)
        turn.gathering.receive_unmask_shares(name, answer)
    assert lists(turn.gathering.unmask_sums()) == plain_sum([turn.data[name] for name in survivors], LAYOUT)
    (doubt,) = turn.gathering.share_warnings
    assert f"false share of {of}'s secret from {NAMES[2]}:" in doubt


def test_too_many_false_shares_void_the_sum() -> None:
    turn = turn_of(9)
    survivors = after_masking(turn)
    for i, name in enumerate(survivors):
        lies = i < 3
        answer = (
            with_false_share(turn, name, survivors, NAMES[7]) if lies else turn.members[name].reveal_shares(survivors)
        )
        turn.gathering.receive_unmask_shares(name, answer)
    with pytest.raises(ReplyError, match=f"{NAMES[7]}: its masks cannot be taken off.* too many of"):
        turn.gathering.unmask_sums()


@pytest.mark.parametrize(
    ("n", "cause"),
    [
        (5, f"{NAMES[2]} dealt shares of another secret than it advertised; leave it out"),
        (3, f"{NAMES[2]} dealt false shares, or too many of"),  # three shares always agree
    ],
)
def test_a_site_that_dealt_another_seed_than_it_committed_to_is_named(n: int, cause: str) -> None:
    turn = turn_of(n)
    for name, member in turn.members.items():
        turn.gathering.receive_advertisement(name, member.advertise_keys())
    turn.members[NAMES[2]]._seed = os.urandom(32)
    adverts = turn.gathering.end_advertise_phase()
    for name, member in turn.members.items():
        turn.gathering.receive_encrypted_shares(name, member.share_secrets(adverts))
    for name, parcels in turn.gathering.end_share_phase().items():
        turn.gathering.receive_masked_vectors(name, turn.mask(name, parcels))
    survivors = turn.gathering.end_mask_phase()
    for name in survivors:
        turn.gathering.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
    with pytest.raises(ReplyError, match=cause):
        turn.gathering.unmask_sums()


# what can be seen


def looks_uniform(vector: np.ndarray) -> bool:
    """Its lowest and highest bytes; of an even vector one time in a million not."""
    data = vector.view(np.uint8).reshape(len(vector), -1)
    return all(chisquare(np.bincount(data[:, k], minlength=256)).pvalue > 5e-7 for k in (0, -1))


ZEROS = [MaskedSegment(2**16, 32)]


def zeros_turn(context: bytes = NOW) -> Turn:
    turn = turn_of(4, ZEROS, context)
    turn.data = {name: [np.zeros(2**16, np.uint32)] for name in turn.data}
    return turn


def test_one_masked_vector_looks_uniform_and_never_the_same() -> None:
    ones = [masked_by_all(zeros_turn(context))[NAMES[0]][0] for context in (NOW, NOW, LATER)]
    assert all(map(looks_uniform, ones))
    assert not looks_uniform(np.zeros(2**16, np.uint32))
    for one, other in itertools.combinations(ones, 2):
        assert (one == other).sum() < 10
        assert looks_uniform(one - other)


def test_either_mask_alone_hides_the_numbers() -> None:
    """A survivor's seed is known at the end and a dropout's mask key: its vector may have come late, after all."""
    turn = zeros_turn()
    masked, member = masked_by_all(turn)[NAMES[0]][0], turn.members[NAMES[0]]
    without_own, without_pairs = masked.copy(), masked.copy()
    apply_masks([without_own], added_seeds=[], removed_seeds=[member._seed])
    adverts = {name: advert for name, (_, advert) in turn.gathering._advertisements.items()}
    view = compute_roster_view(adverts, NOW)
    pairs = [
        derive_pair_seed(member._mask_key, member._advertisements[n].mask_public_key, view, n, NAMES[0])
        for n in NAMES[1:4]
    ]
    apply_masks([without_pairs], added_seeds=[], removed_seeds=pairs)  # the first name of all adds every pair's mask
    assert looks_uniform(without_own)
    assert looks_uniform(without_pairs)
    apply_masks([without_own], added_seeds=[], removed_seeds=pairs)
    assert not without_own.any()


def test_all_but_one_in_league_know_that_ones_numbers() -> None:
    turn = turn_of(5)
    survivors = after_masking(turn)
    for name in survivors:
        turn.gathering.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
    total = turn.gathering.unmask_sums()
    own = plain_sum([turn.data[name] for name in survivors[1:]], LAYOUT)
    learnt = [
        [(int(a) - b) % 2**s.bits for a, b in zip(vector, mine, strict=True)]
        for vector, mine, s in zip(total, own, LAYOUT, strict=True)
    ]
    assert learnt == lists(turn.data[survivors[0]])


def test_the_same_numbers_in_two_attempts_give_a_site_away() -> None:
    """Why a site that has answered `unmask` must not mask the same numbers again."""
    sums = []
    for context, dropouts in ((NOW, []), (LATER, NAMES[2:3])):
        turn = turn_of(5, context=context)
        survivors = after_masking(turn, dropouts)
        for name in survivors:
            turn.gathering.receive_unmask_shares(name, turn.members[name].reveal_shares(survivors))
        sums.append(turn.gathering.unmask_sums())
    apart = [s.cut(a - b) for s, a, b in zip(LAYOUT, *sums, strict=True)]
    assert lists(apart) == lists(turn_of(5).data[NAMES[2]])
