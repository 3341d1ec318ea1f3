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

from pipeline.core.errors import BadMessage, BadReply
from privacy.secure_aggregation.key_exchange import SIGNATURE, Advert, pair_seed, signed, verified, view_of
from privacy.secure_aggregation.masking import Segment, change
from privacy.secure_aggregation.protocol import Gathering, Member, threshold
from privacy.secure_aggregation.shamir import PRIME, SHARE, rebuild
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
    payload = answer[SIGNATURE:]
    return {name: int.from_bytes(payload[i * SHARE : (i + 1) * SHARE]) for i, name in enumerate(sorted(of))}


def masked_by_all(turn: Turn) -> dict[str, list[np.ndarray]]:
    return {name: turn.mask(name, parcels) for name, parcels in after_sharing(turn).items()}


# order and repetition


def test_steps_are_taken_once_and_in_order() -> None:
    turn = turn_of(4)
    member, name = turn.members[NAMES[0]], NAMES[0]
    steps: dict[str, Callable[[], object]] = {
        "advertise": member.advertise,
        "share": lambda: member.share({}),
        "mask": lambda: member.mask({}, []),
        "unmask": lambda: member.unmask(NAMES[:4]),
    }

    def only(step: str | None) -> None:
        for other, call in steps.items():
            if other != step:
                with pytest.raises(BadMessage, match=f"asked to {other}, and next"):
                    call()

    only("advertise")
    adverts = {each: turn.members[each].advertise() for each in NAMES[:4]}
    only("share")
    sent = {each: turn.members[each].share(adverts) for each in NAMES[:4]}
    only("mask")
    member.mask({by: parcels[name] for by, parcels in sent.items() if by != name}, with_bits(turn.data[name], LAYOUT))
    only("unmask")
    member.unmask(NAMES[:4])
    only(None)


@pytest.mark.parametrize("second", [NAMES[:5], NAMES[:4], [*NAMES[:3], NAMES[4]]], ids=["same", "fewer", "others"])
def test_a_second_list_of_survivors_is_not_answered(second: list[str]) -> None:
    turn = turn_of(5)
    masked_by_all(turn)
    turn.members[NAMES[0]].unmask(NAMES[:5])
    with pytest.raises(BadMessage, match="asked twice"):
        turn.members[NAMES[0]].unmask(second)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [(NAMES[1:6], "not among the survivors"), ([*NAMES[:6], "mallory"], "mallory never shared")],
)
def test_a_list_that_cannot_be_is_not_answered_and_no_other_is_then(survivors: list[str], why: str) -> None:
    turn = turn_of(6)
    masked_by_all(turn)
    with pytest.raises(BadMessage, match=why):
        turn.members[NAMES[0]].unmask(survivors)
    with pytest.raises(BadMessage, match="asked to unmask"):
        turn.members[NAMES[0]].unmask(NAMES[:6])


def test_a_restarted_site_takes_nothing_meant_for_the_one_before() -> None:
    turn = turn_of(4)
    old, new = turn.members[NAMES[0]], members_of(NAMES[:1])[NAMES[0]]
    adverts = {name: member.advertise() for name, member in turn.members.items()}
    sent = {name: member.share(adverts) for name, member in turn.members.items()}
    parcels = {by: each[old.name] for by, each in sent.items() if by != old.name}
    for call in (lambda: new.share(adverts), lambda: new.mask(parcels, []), lambda: new.unmask(NAMES[:4])):
        with pytest.raises(BadMessage, match="was restarted, and counts as a dropout"):
            call()
    new.advertise()
    with pytest.raises(BadMessage, match="from before a restart"):
        new.share(adverts)


# shares of both kinds


def both_kinds(turn: Turn, target: str, told: dict[str, list[str]], colluders: Iterable[str]) -> list[set[str]]:
    """Who gave the coordinator a share of the target's mask key, and of its seed. Colluders give both."""
    found: list[dict[str, int]] = [{c: turn.members[c]._held[target][kind] for c in colluders} for kind in (0, 1)]
    for name, survivors in told.items():
        answer = turn.members[name].unmask(survivors)
        found[target in survivors][name] = shares_in(answer, turn.members)[target]
    t, places = threshold(len(turn.members)), {name: i for i, name in enumerate(sorted(turn.members), start=1)}
    secrets = (turn.members[target]._mask_key.private_bytes_raw(), turn.members[target]._seed)
    for kind, secret in zip(found, secrets, strict=True):
        rebuilt = rebuild({places[name]: share for name, share in kind.items()}, t, secret.__eq__)
        assert (rebuilt is not None) == (len(kind) >= t)  # t shares are what it takes, no more and no less
    return [set(kind) for kind in found]


def test_no_split_of_four_gives_both_secrets() -> None:
    target = NAMES[0]
    for split in itertools.product([True, False], repeat=3):
        turn = turn_of(4, [Segment(1, 8)])
        masked_by_all(turn)
        told = {target: NAMES[:4]}
        told |= {name: NAMES[:4] if alive else NAMES[1:4] for name, alive in zip(NAMES[1:4], split, strict=True)}
        assert sorted(map(len, both_kinds(turn, target, told, []))) in ([0, 4], [1, 3], [2, 2])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(3, 9))
def test_no_split_gives_both_secrets_even_with_a_third_in_league(data: st.DataObject, n: int) -> None:
    turn, t = turn_of(n, [Segment(1, 8)]), threshold(n)
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
    turn = turn_of(7, [Segment(1, 8)])
    masked_by_all(turn)
    target, *others = NAMES[:4]
    told = {target: NAMES[:7], others[0]: NAMES[:7]} | dict.fromkeys(others[1:], NAMES[1:7])
    keys, seeds = both_kinds(turn, target, told, NAMES[4:7])
    assert len(keys) == len(seeds) == threshold(7) == 5


def smallest_sum(n: int) -> int:
    """That a coordinator can get by telling sites different lists, none of them in league with it, by counting.

    To sum over s sites it needs the mask keys of the d others that these s heard of, t shares of each. A site leaves at
    most as many off its list as it heard of beyond t, and never itself.
    """
    t = threshold(n)

    def possible(s: int, d: int) -> bool:
        left_out = s * min(s + d - t, d) + d * min(n - t, d - 1) + (n - s - d) * min(n - t, d)
        return s + d >= t and d * t <= left_out

    return min(s for s in range(1, n + 1) for d in range(n - s + 1) if possible(s, d))


def test_different_lists_shrink_the_sum_as_far_as_documented() -> None:
    assert all(smallest_sum(n) == threshold(n) for n in range(3, 10))
    assert (smallest_sum(10), smallest_sum(20)) == (6, 11)
    assert all(3 * smallest_sum(n) > n for n in range(3, 100))


def test_a_coordinator_that_tells_ten_sites_different_lists_gets_one_sum_of_six() -> None:
    turn = turn_of(10)  # t = 7
    kept, left_out = NAMES[:6], NAMES[6:10]
    masked = masked_by_all(turn)
    off = {name: [each for each in left_out if each != name] for name in left_out}
    off |= {name: [each for k, each in enumerate(left_out) if k != i % 4] for i, name in enumerate(kept)}
    answers = {name: turn.members[name].unmask([s for s in NAMES[:10] if s not in off[name]]) for name in NAMES[:10]}
    places = {name: i for i, name in enumerate(NAMES[:10], start=1)}

    def secret(of: str, gone: bool, wanted: bytes) -> bytes:
        given_ = {places[n]: shares_in(a, NAMES[:10])[of] for n, a in answers.items() if (of in off[n]) == gone}
        found = rebuild(given_, 7, wanted.__eq__)
        assert found is not None
        return found[0]

    total = [sum(masked[name][k] for name in kept) for k in range(2)]
    view = turn.gathering._view
    for name in kept:
        change(total, plus=[], minus=[secret(name, False, turn.members[name]._seed)])
    for gone in left_out:
        key = turn.members[gone]._mask_key
        assert secret(gone, True, key.private_bytes_raw()) == key.private_bytes_raw()
        for name in kept:  # they come before all that were left out, so they added
            public = turn.members[name]._mask_key.public_key().public_bytes_raw()
            change(total, plus=[], minus=[pair_seed(key, public, view, name, gone)])
    cut = [segment.cut(vector) for segment, vector in zip(LAYOUT, total, strict=True)]
    assert lists(cut) == plain_sum([turn.data[name] for name in kept], LAYOUT)


# forged, swapped and replayed


def adverts_of(members: dict[str, Member]) -> dict[str, bytes]:
    return {name: member.advertise() for name, member in members.items()}


def test_invented_and_swapped_and_foreign_adverts_are_refused() -> None:
    evil = Ed25519PrivateKey.generate()

    def mallory(name: str) -> bytes:
        return Member(name, evil, {name: evil.public_key().public_bytes_raw()}, NOW).advertise()

    me, first, second = NAMES[:3]
    low = Advert(*[bytes(32)] * 3).signed(KEYS[first], first, NOW)
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
        with pytest.raises(BadMessage, match=why):
            members[me].share(adverts)


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
        with pytest.raises(BadMessage, match=f"from ({NAMES[1]}|{NAMES[4]})"):
            turn.mask(NAMES[0], lie(parcels[NAMES[0]]))
        with pytest.raises(BadMessage, match="counts as a dropout"):
            turn.mask(NAMES[0], parcels[NAMES[0]])


def test_a_site_takes_no_parcel_from_itself() -> None:
    turn = turn_of(4)
    parcels = after_sharing(turn)[NAMES[0]]
    with pytest.raises(BadMessage, match=f"from {NAMES[0]}, which does not take part beside"):
        turn.mask(NAMES[0], parcels | {NAMES[0]: parcels[NAMES[1]]})


def test_sites_that_were_told_of_different_sites_do_not_work_together() -> None:
    members = members_of(NAMES[:5])
    adverts = adverts_of(members)
    fewer = {name: adverts[name] for name in NAMES[:4]}
    sent = {name: members[name].share(fewer if name == NAMES[0] else adverts) for name in NAMES[:5]}
    with pytest.raises(BadMessage, match=f"from {NAMES[1]}"):
        members[NAMES[0]].mask({name: sent[name][NAMES[0]] for name in NAMES[1:4]}, [])


def test_an_answer_from_another_attempt_or_for_another_list_is_refused() -> None:
    turn, again = turn_of(4), turn_of(4, context=LATER)
    survivors, later = after_masking(turn), after_masking(again)
    with pytest.raises(BadReply, match="no signature"):
        again.gathering.answered(NAMES[0], turn.members[NAMES[0]].unmask(survivors))
    with pytest.raises(BadReply, match="no signature"):
        again.gathering.answered(NAMES[0], again.members[NAMES[0]].unmask(later[:3]))
    with pytest.raises(BadReply, match=NAMES[1]):
        Gathering(LATER, ROSTER, LAYOUT).advertised(NAMES[1], members_of(NAMES[1:2])[NAMES[1]].advertise())


# liars among the sites


def with_false_share(turn: Turn, liar: str, survivors: list[str], of: str) -> bytes:
    """Signed as it should be."""
    purpose = ("unmask", turn.gathering._view, liar, *sorted(survivors))
    payload = bytearray(verified(turn.members[liar].unmask(survivors), ROSTER[liar], *purpose))
    at = sorted(turn.members).index(of) * SHARE
    false = (int.from_bytes(payload[at : at + SHARE]) + 1) % PRIME
    payload[at : at + SHARE] = false.to_bytes(SHARE)
    return signed(KEYS[liar], bytes(payload), *purpose)


@pytest.mark.parametrize("of", [NAMES[5], NAMES[8]], ids=["seed of a survivor", "key of a dropout"])
def test_a_false_share_is_done_without_and_named(of: str) -> None:
    turn = turn_of(9)  # t = 7, 8 survive: one share to spare
    survivors = after_masking(turn, NAMES[8:9])
    for name in survivors:
        lies = name == NAMES[2]
        answer = with_false_share(turn, name, survivors, of) if lies else turn.members[name].unmask(survivors)
        turn.gathering.answered(name, answer)
    assert lists(turn.gathering.unmasked()) == plain_sum([turn.data[name] for name in survivors], LAYOUT)
    (doubt,) = turn.gathering.doubts
    assert f"false share of {of}'s secret from {NAMES[2]}:" in doubt


def test_too_many_false_shares_void_the_sum() -> None:
    turn = turn_of(9)
    survivors = after_masking(turn)
    for i, name in enumerate(survivors):
        lies = i < 3
        answer = with_false_share(turn, name, survivors, NAMES[7]) if lies else turn.members[name].unmask(survivors)
        turn.gathering.answered(name, answer)
    with pytest.raises(BadReply, match=f"{NAMES[7]}: its masks cannot be taken off.* too many of"):
        turn.gathering.unmasked()


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
        turn.gathering.advertised(name, member.advertise())
    turn.members[NAMES[2]]._seed = os.urandom(32)
    adverts = turn.gathering.adverts()
    for name, member in turn.members.items():
        turn.gathering.shared(name, member.share(adverts))
    for name, parcels in turn.gathering.parcels().items():
        turn.gathering.masked(name, turn.mask(name, parcels))
    survivors = turn.gathering.survivors()
    for name in survivors:
        turn.gathering.answered(name, turn.members[name].unmask(survivors))
    with pytest.raises(BadReply, match=cause):
        turn.gathering.unmasked()


# what can be seen


def looks_uniform(vector: np.ndarray) -> bool:
    """Its lowest and highest bytes; of an even vector one time in a million not."""
    data = vector.view(np.uint8).reshape(len(vector), -1)
    return all(chisquare(np.bincount(data[:, k], minlength=256)).pvalue > 5e-7 for k in (0, -1))


ZEROS = [Segment(2**16, 32)]


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
    change([without_own], plus=[], minus=[member._seed])
    adverts = {name: advert for name, (_, advert) in turn.gathering._adverts.items()}
    view = view_of(adverts, NOW)
    pairs = [pair_seed(member._mask_key, member._adverts[n].for_masks, view, n, NAMES[0]) for n in NAMES[1:4]]
    change([without_pairs], plus=[], minus=pairs)  # the first name of all adds every pair's mask
    assert looks_uniform(without_own)
    assert looks_uniform(without_pairs)
    change([without_own], plus=[], minus=pairs)
    assert not without_own.any()


def test_all_but_one_in_league_know_that_ones_numbers() -> None:
    turn = turn_of(5)
    survivors = after_masking(turn)
    for name in survivors:
        turn.gathering.answered(name, turn.members[name].unmask(survivors))
    total = turn.gathering.unmasked()
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
            turn.gathering.answered(name, turn.members[name].unmask(survivors))
        sums.append(turn.gathering.unmasked())
    apart = [s.cut(a - b) for s, a, b in zip(LAYOUT, *sums, strict=True)]
    assert lists(apart) == lists(turn_of(5).data[NAMES[2]])
