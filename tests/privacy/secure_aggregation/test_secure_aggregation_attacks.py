"""Secure aggregation against a malicious coordinator, a man in the middle, malicious sites and colluders."""

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
from privacy.secure_aggregation.server import SecAggServer, reconstruct_secret
from privacy.secure_aggregation.shamir import PRIME, SHARE_BYTES, reconstruction_threshold
from tests.support.secagg_factory import (
    CONTEXT,
    KEYS,
    LAYOUT,
    NAMES,
    NEXT_CONTEXT,
    ROSTER,
    SecAggRound,
    add_bits,
    advertise_all,
    make_clients,
    make_round,
    plain_sum,
    to_lists,
)


def parse_shares(answer: bytes, of: Iterable[str]) -> dict[str, int]:
    payload = answer[SIGNATURE_BYTES:]
    return {name: int.from_bytes(payload[i * SHARE_BYTES : (i + 1) * SHARE_BYTES]) for i, name in enumerate(sorted(of))}


def mask_all(secagg_round: SecAggRound) -> dict[str, list[np.ndarray]]:
    return {
        name: secagg_round.mask(name, encrypted_shares)
        for name, encrypted_shares in secagg_round.run_until_shared().items()
    }


# Order and repetition


def test_secagg_steps_are_taken_once_and_in_order() -> None:
    secagg_round = make_round(4)
    client, name = secagg_round.clients[NAMES[0]], NAMES[0]
    steps: dict[str, Callable[[], object]] = {
        "advertise": client.advertise_keys,
        "share": lambda: client.share_secrets({}),
        "mask": lambda: client.mask_vectors({}, []),
        "unmask": lambda: client.reveal_shares(NAMES[:4]),
    }

    def assert_only_step(step: str | None) -> None:
        for other, call in steps.items():
            if other != step:
                with pytest.raises(MessageError, match=f"asked to {other}, and its next step"):
                    call()

    assert_only_step("advertise")
    advertisements = {each: secagg_round.clients[each].advertise_keys() for each in NAMES[:4]}
    assert_only_step("share")
    sent = {each: secagg_round.clients[each].share_secrets(advertisements) for each in NAMES[:4]}
    assert_only_step("mask")
    client.mask_vectors(
        {by: encrypted_shares[name] for by, encrypted_shares in sent.items() if by != name},
        add_bits(secagg_round.data[name], LAYOUT),
    )
    assert_only_step("unmask")
    client.reveal_shares(NAMES[:4])
    assert_only_step(None)


@pytest.mark.parametrize("second", [NAMES[:5], NAMES[:4], [*NAMES[:3], NAMES[4]]], ids=["same", "fewer", "others"])
def test_secagg_client_answers_one_survivor_list(second: list[str]) -> None:
    secagg_round = make_round(5)
    mask_all(secagg_round)
    secagg_round.clients[NAMES[0]].reveal_shares(NAMES[:5])
    with pytest.raises(MessageError, match="asked twice"):
        secagg_round.clients[NAMES[0]].reveal_shares(second)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [(NAMES[1:6], "not among the survivors"), ([*NAMES[:6], "mallory"], "mallory never shared")],
)
def test_secagg_invalid_survivor_list_ends_the_client(survivors: list[str], why: str) -> None:
    secagg_round = make_round(6)
    mask_all(secagg_round)
    with pytest.raises(MessageError, match=why):
        secagg_round.clients[NAMES[0]].reveal_shares(survivors)
    with pytest.raises(MessageError, match="asked to unmask"):
        secagg_round.clients[NAMES[0]].reveal_shares(NAMES[:6])


def test_secagg_restarted_client_counts_as_dropout() -> None:
    secagg_round = make_round(4)
    old, new = secagg_round.clients[NAMES[0]], make_clients(NAMES[:1])[NAMES[0]]
    advertisements = {name: client.advertise_keys() for name, client in secagg_round.clients.items()}
    sent = {name: client.share_secrets(advertisements) for name, client in secagg_round.clients.items()}
    encrypted_shares = {by: each[old.name] for by, each in sent.items() if by != old.name}
    for call in (
        lambda: new.share_secrets(advertisements),
        lambda: new.mask_vectors(encrypted_shares, []),
        lambda: new.reveal_shares(NAMES[:4]),
    ):
        with pytest.raises(MessageError, match="was restarted, and counts as a dropout"):
            call()
    new.advertise_keys()
    with pytest.raises(MessageError, match="from before a restart"):
        new.share_secrets(advertisements)


# Shares of both secrets of a site


def split_survivor_lists(
    secagg_round: SecAggRound, target: str, survivor_lists: dict[str, list[str]], colluders: Iterable[str]
) -> list[set[str]]:
    """The sites that reveal a share of the target's mask key, and of its seed. Colluders reveal both."""
    revealed: list[dict[str, int]] = [
        {c: secagg_round.clients[c]._received_shares[target][kind] for c in colluders} for kind in (0, 1)
    ]
    for name, survivors in survivor_lists.items():
        answer = secagg_round.clients[name].reveal_shares(survivors)
        revealed[target in survivors][name] = parse_shares(answer, secagg_round.clients)[target]
    t = reconstruction_threshold(len(secagg_round.clients))
    positions = {name: i for i, name in enumerate(sorted(secagg_round.clients), start=1)}
    secrets = (secagg_round.clients[target]._mask_key.private_bytes_raw(), secagg_round.clients[target]._seed)
    for shares, secret in zip(revealed, secrets, strict=True):
        result = reconstruct_secret({positions[name]: share for name, share in shares.items()}, t, secret.__eq__)
        assert (result is not None) == (len(shares) >= t)  # exactly t shares suffice
    return [set(shares) for shares in revealed]


def test_secagg_no_split_of_four_reveals_both_secrets() -> None:
    target = NAMES[0]
    for split in itertools.product([True, False], repeat=3):
        secagg_round = make_round(4, [MaskedSegment(1, 8)])
        mask_all(secagg_round)
        survivor_lists = {target: NAMES[:4]}
        survivor_lists |= {
            name: NAMES[:4] if alive else NAMES[1:4] for name, alive in zip(NAMES[1:4], split, strict=True)
        }
        assert sorted(map(len, split_survivor_lists(secagg_round, target, survivor_lists, []))) in (
            [0, 4],
            [1, 3],
            [2, 2],
        )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(3, 9))
def test_secagg_no_split_reveals_both_secrets_with_a_third_colluding(data: st.DataObject, n: int) -> None:
    secagg_round, t = make_round(n, [MaskedSegment(1, 8)]), reconstruction_threshold(n)
    mask_all(secagg_round)
    names = data.draw(st.permutations(NAMES[:n]))
    target = names[0]
    colluders = names[1 : 1 + data.draw(st.integers(0, (n - 1) // 3))]
    survivor_lists = {}
    for name in set(names) - set(colluders):
        rest = data.draw(st.permutations([each for each in names if each != name]))
        survivor_lists[name] = [name, *rest[: data.draw(st.integers(t - 1, n - 1))]]
    keys, seeds = split_survivor_lists(secagg_round, target, survivor_lists, colluders)
    assert not (len(keys) >= t and len(seeds) >= t)


def test_secagg_split_reveals_both_secrets_with_more_than_a_third_colluding() -> None:
    """The documented bound is tight: 3 of 7."""
    secagg_round = make_round(7, [MaskedSegment(1, 8)])
    mask_all(secagg_round)
    target, *others = NAMES[:4]
    survivor_lists = {target: NAMES[:7], others[0]: NAMES[:7]} | dict.fromkeys(others[1:], NAMES[1:7])
    keys, seeds = split_survivor_lists(secagg_round, target, survivor_lists, NAMES[4:7])
    assert len(keys) == len(seeds) == reconstruction_threshold(7) == 5


def min_sum_size(n: int) -> int:
    """The smallest sum that different survivor lists give a coordinator without colluders, by counting.

    To sum over s sites it needs the mask keys of the d others that these s know of, t shares of each. A site omits from
    its list at most as many sites as it knows of beyond t, and never itself.
    """
    t = reconstruction_threshold(n)

    def possible(s: int, d: int) -> bool:
        num_omitted = s * min(s + d - t, d) + d * min(n - t, d - 1) + (n - s - d) * min(n - t, d)
        return s + d >= t and d * t <= num_omitted

    return min(s for s in range(1, n + 1) for d in range(n - s + 1) if possible(s, d))


def test_secagg_different_survivor_lists_reduce_the_sum_as_documented() -> None:
    assert all(min_sum_size(n) == reconstruction_threshold(n) for n in range(3, 10))
    assert (min_sum_size(10), min_sum_size(20)) == (6, 11)
    assert all(3 * min_sum_size(n) > n for n in range(3, 100))


def test_secagg_different_survivor_lists_give_one_sum_of_six_of_ten() -> None:
    secagg_round = make_round(10)  # t = 7
    summed, omitted = NAMES[:6], NAMES[6:10]
    masked = mask_all(secagg_round)
    omitted_by = {name: [site for site in omitted if site != name] for name in omitted}
    omitted_by |= {name: [site for k, site in enumerate(omitted) if k != i % 4] for i, name in enumerate(summed)}
    answers = {
        name: secagg_round.clients[name].reveal_shares([s for s in NAMES[:10] if s not in omitted_by[name]])
        for name in NAMES[:10]
    }
    positions = {name: i for i, name in enumerate(NAMES[:10], start=1)}

    def reconstruct(owner: str, is_dropout: bool, secret: bytes) -> bytes:
        shares = {
            positions[name]: parse_shares(answer, NAMES[:10])[owner]
            for name, answer in answers.items()
            if (owner in omitted_by[name]) == is_dropout
        }
        result = reconstruct_secret(shares, 7, secret.__eq__)
        assert result is not None
        return result[0]

    total = [sum(masked[name][k] for name in summed) for k in range(2)]
    view = secagg_round.server._roster_view
    for name in summed:
        apply_masks(total, added_seeds=[], removed_seeds=[reconstruct(name, False, secagg_round.clients[name]._seed)])
    for dropout in omitted:
        key = secagg_round.clients[dropout]._mask_key
        assert reconstruct(dropout, True, key.private_bytes_raw()) == key.private_bytes_raw()
        for name in summed:  # their names come before all omitted ones, so they added the pair masks
            public = secagg_round.clients[name]._mask_key.public_key().public_bytes_raw()
            apply_masks(total, added_seeds=[], removed_seeds=[derive_pair_seed(key, public, view, name, dropout)])
    unmasked = [segment.reduce_modulo(vector) for segment, vector in zip(LAYOUT, total, strict=True)]
    assert to_lists(unmasked) == plain_sum([secagg_round.data[name] for name in summed], LAYOUT)


# Forged, swapped and replayed messages


def test_secagg_client_refuses_forged_swapped_and_replayed_advertisements() -> None:
    forger = Ed25519PrivateKey.generate()

    def forge_advertisement(name: str) -> bytes:
        return SecAggClient(name, forger, {name: forger.public_key().public_bytes_raw()}, CONTEXT).advertise_keys()

    me, first, second = NAMES[:3]
    low = KeyAdvertisement(*[bytes(32)] * 3).to_signed_bytes(KEYS[first], first, CONTEXT)
    changes: list[tuple[str, Callable[[dict[str, bytes]], dict[str, bytes]]]] = [
        ("mallory is not on the roster", lambda a: a | {"mallory": forge_advertisement("mallory")}),
        (f"advertisement of {first}: no valid signature", lambda a: a | {first: forge_advertisement(first)}),
        (f"advertisement of {first}: no valid signature", lambda a: a | {first: a[second], second: a[first]}),
        (
            f"advertisement of {second}: no valid signature",
            lambda a: a | advertise_all(make_clients([second], NEXT_CONTEXT)),
        ),
        (f"advertisement of {first}: a public key that no honest site makes", lambda a: a | {first: low}),
        ("is not the one it made", lambda a: a | {me: a[first]}),
        ("is not the one it made", lambda a: a | advertise_all(make_clients([me]))),
    ]
    for message, change in changes:
        clients = make_clients(NAMES[:4])
        advertisements = change(advertise_all(clients))
        with pytest.raises(MessageError, match=message):
            clients[me].share_secrets(advertisements)


def test_secagg_client_refuses_changed_swapped_and_replayed_shares() -> None:
    old = make_round(4, context=NEXT_CONTEXT).run_until_shared()[NAMES[0]]
    changes: list[Callable[[dict[str, bytes]], dict[str, bytes]]] = [
        lambda p: p | {NAMES[1]: bytes([p[NAMES[1]][0] ^ 1]) + p[NAMES[1]][1:]},
        lambda p: p | {NAMES[1]: p[NAMES[2]]},
        lambda p: p | {NAMES[1]: old[NAMES[1]]},
        lambda p: p | {NAMES[1]: p[NAMES[1]][:-1]},
        lambda p: {(NAMES[4] if by == NAMES[1] else by): ciphertext for by, ciphertext in p.items()},
    ]
    for change in changes:
        secagg_round = make_round(4)
        encrypted_shares = secagg_round.run_until_shared()
        with pytest.raises(MessageError, match=f"from ({NAMES[1]}|{NAMES[4]})"):
            secagg_round.mask(NAMES[0], change(encrypted_shares[NAMES[0]]))
        with pytest.raises(MessageError, match="counts as a dropout"):
            secagg_round.mask(NAMES[0], encrypted_shares[NAMES[0]])


def test_secagg_client_refuses_shares_from_itself() -> None:
    secagg_round = make_round(4)
    encrypted_shares = secagg_round.run_until_shared()[NAMES[0]]
    with pytest.raises(MessageError, match=f"from {NAMES[0]}, which is no other site"):
        secagg_round.mask(NAMES[0], encrypted_shares | {NAMES[0]: encrypted_shares[NAMES[1]]})


def test_secagg_clients_with_different_rosters_share_no_key() -> None:
    clients = make_clients(NAMES[:5])
    advertisements = advertise_all(clients)
    fewer = {name: advertisements[name] for name in NAMES[:4]}
    sent = {name: clients[name].share_secrets(fewer if name == NAMES[0] else advertisements) for name in NAMES[:5]}
    with pytest.raises(MessageError, match=f"from {NAMES[1]}"):
        clients[NAMES[0]].mask_vectors({name: sent[name][NAMES[0]] for name in NAMES[1:4]}, [])


def test_secagg_server_refuses_replies_of_another_attempt_or_list() -> None:
    secagg_round, again = make_round(4), make_round(4, context=NEXT_CONTEXT)
    survivors, later = secagg_round.run_until_masked(), again.run_until_masked()
    with pytest.raises(ReplyError, match="no valid signature"):
        again.server.receive_unmask_shares(NAMES[0], secagg_round.clients[NAMES[0]].reveal_shares(survivors))
    with pytest.raises(ReplyError, match="no valid signature"):
        again.server.receive_unmask_shares(NAMES[0], again.clients[NAMES[0]].reveal_shares(later[:3]))
    with pytest.raises(ReplyError, match=NAMES[1]):
        SecAggServer(NEXT_CONTEXT, ROSTER, LAYOUT).receive_advertisement(
            NAMES[1], make_clients(NAMES[1:2])[NAMES[1]].advertise_keys()
        )


# Malicious sites


def reveal_with_wrong_share(secagg_round: SecAggRound, liar: str, survivors: list[str], of: str) -> bytes:
    """With a valid signature."""
    purpose = ("unmask", secagg_round.server._roster_view, liar, *sorted(survivors))
    payload = bytearray(verify_payload(secagg_round.clients[liar].reveal_shares(survivors), ROSTER[liar], *purpose))
    at = sorted(secagg_round.clients).index(of) * SHARE_BYTES
    false = (int.from_bytes(payload[at : at + SHARE_BYTES]) + 1) % PRIME
    payload[at : at + SHARE_BYTES] = false.to_bytes(SHARE_BYTES)
    return sign_payload(KEYS[liar], bytes(payload), *purpose)


@pytest.mark.parametrize("of", [NAMES[5], NAMES[8]], ids=["seed of a survivor", "key of a dropout"])
def test_secagg_wrong_share_is_ignored_and_named(of: str) -> None:
    secagg_round = make_round(9)  # t = 7, 8 survive: one share to spare
    survivors = secagg_round.run_until_masked(NAMES[8:9])
    for name in survivors:
        lies = name == NAMES[2]
        answer = (
            reveal_with_wrong_share(secagg_round, name, survivors, of)
            if lies
            else secagg_round.clients[name].reveal_shares(survivors)
        )
        secagg_round.server.receive_unmask_shares(name, answer)
    assert to_lists(secagg_round.server.unmask_sums()) == plain_sum(
        [secagg_round.data[name] for name in survivors], LAYOUT
    )
    (warning,) = secagg_round.server.share_warnings
    assert f"{NAMES[2]} sent a wrong share of {of}'s secret, or received a wrong one from {of}" in warning


def test_secagg_too_many_wrong_shares_fail() -> None:
    secagg_round = make_round(9)
    survivors = secagg_round.run_until_masked()
    for i, name in enumerate(survivors):
        lies = i < 3
        answer = (
            reveal_with_wrong_share(secagg_round, name, survivors, NAMES[7])
            if lies
            else secagg_round.clients[name].reveal_shares(survivors)
        )
        secagg_round.server.receive_unmask_shares(name, answer)
    with pytest.raises(ReplyError, match=f"{NAMES[7]}: its masks cannot be removed.* too many of"):
        secagg_round.server.unmask_sums()


@pytest.mark.parametrize(
    ("n", "cause"),
    [
        (5, f"{NAMES[2]} shared another secret than it advertised; leave it out"),
        (3, f"{NAMES[2]} shared wrong shares, or too many of"),  # three shares always agree
    ],
)
def test_secagg_site_that_shared_another_seed_is_named(n: int, cause: str) -> None:
    secagg_round = make_round(n)
    for name, advertisement in advertise_all(secagg_round.clients).items():
        secagg_round.server.receive_advertisement(name, advertisement)
    secagg_round.clients[NAMES[2]]._seed = os.urandom(32)
    advertisements = secagg_round.server.end_advertise_phase()
    for name, client in secagg_round.clients.items():
        secagg_round.server.receive_encrypted_shares(name, client.share_secrets(advertisements))
    for name, encrypted_shares in secagg_round.server.end_share_phase().items():
        secagg_round.server.receive_masked_vectors(name, secagg_round.mask(name, encrypted_shares))
    survivors = secagg_round.server.end_mask_phase()
    secagg_round.reveal_all(survivors)
    with pytest.raises(ReplyError, match=cause):
        secagg_round.server.unmask_sums()


# What masked vectors reveal


def is_uniform(vector: np.ndarray) -> bool:
    """Chi-squared test of the lowest and highest bytes; fails for one uniform vector in a million."""
    data = vector.view(np.uint8).reshape(len(vector), -1)
    return all(chisquare(np.bincount(data[:, k], minlength=256)).pvalue > 5e-7 for k in (0, -1))


ZEROS = [MaskedSegment(2**16, 32)]


def make_zero_round(context: bytes = CONTEXT) -> SecAggRound:
    secagg_round = make_round(4, ZEROS, context)
    secagg_round.data = {name: [np.zeros(2**16, np.uint32)] for name in secagg_round.data}
    return secagg_round


def test_secagg_masked_vector_is_uniform_and_new_each_time() -> None:
    vectors = [mask_all(make_zero_round(context))[NAMES[0]][0] for context in (CONTEXT, CONTEXT, NEXT_CONTEXT)]
    assert all(map(is_uniform, vectors))
    assert not is_uniform(np.zeros(2**16, np.uint32))
    for vector, other in itertools.combinations(vectors, 2):
        assert (vector == other).sum() < 10
        assert is_uniform(vector - other)


def test_secagg_either_mask_alone_hides_the_vector() -> None:
    """At the end a survivor's seed is known, and a dropout's mask key, whose vector may still arrive late."""
    secagg_round = make_zero_round()
    masked, client = mask_all(secagg_round)[NAMES[0]][0], secagg_round.clients[NAMES[0]]
    without_own, without_pairs = masked.copy(), masked.copy()
    apply_masks([without_own], added_seeds=[], removed_seeds=[client._seed])
    advertisements = {name: advertisement for name, (_, advertisement) in secagg_round.server._advertisements.items()}
    view = compute_roster_view(advertisements, CONTEXT)
    pairs = [
        derive_pair_seed(client._mask_key, client._advertisements[n].mask_public_key, view, n, NAMES[0])
        for n in NAMES[1:4]
    ]
    apply_masks([without_pairs], added_seeds=[], removed_seeds=pairs)  # the first name adds the masks of all its pairs
    assert is_uniform(without_own)
    assert is_uniform(without_pairs)
    apply_masks([without_own], added_seeds=[], removed_seeds=pairs)
    assert not without_own.any()


def test_secagg_all_but_one_colluding_learn_the_vector() -> None:
    secagg_round = make_round(5)
    survivors = secagg_round.run_until_masked()
    secagg_round.reveal_all(survivors)
    total = secagg_round.server.unmask_sums()
    colluders_sum = plain_sum([secagg_round.data[name] for name in survivors[1:]], LAYOUT)
    difference = [
        [(int(a) - b) % 2**s.bits for a, b in zip(vector, known, strict=True)]
        for vector, known, s in zip(total, colluders_sum, LAYOUT, strict=True)
    ]
    assert difference == to_lists(secagg_round.data[survivors[0]])


def test_secagg_same_vectors_in_two_attempts_reveal_a_dropout() -> None:
    """Why a site that has answered `unmask` must not mask the same numbers again."""
    sums = []
    for context, dropouts in ((CONTEXT, []), (NEXT_CONTEXT, NAMES[2:3])):
        secagg_round = make_round(5, context=context)
        survivors = secagg_round.run_until_masked(dropouts)
        secagg_round.reveal_all(survivors)
        sums.append(secagg_round.server.unmask_sums())
    difference = [s.reduce_modulo(a - b) for s, a, b in zip(LAYOUT, *sums, strict=True)]
    assert to_lists(difference) == to_lists(make_round(5).data[NAMES[2]])
