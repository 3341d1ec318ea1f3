"""Secure sums: the coordinator learns what the sites' numbers add up to, and nothing else of them.

Bonawitz et al. 2017, doi 10.1145/3133956.3133982. One sum takes four exchanges:

    advertise   each site: two fresh X25519 keys and a commitment, signed with the key that the roster has of it
    share       each site: t-of-n shares of its mask key and of its seed, one encrypted parcel for each other site
    mask        each site: numbers + its own mask +- a mask for each other site, modulo 2^bits
    unmask      each survivor: of every survivor a share of the seed, of every dropout a share of the mask key

Between sites that survive, pair masks cancel; the coordinator rebuilds and takes off the rest. As t = floor(2n/3) + 1,
and at least 3, fewer than a third of the sites may drop out: none of 3, one of 4 to 6, two of 7 to 9, six of 20.

What holds, and against whom:
- One sum per attempt, over at least t sites, if the coordinator follows the protocol and reads whatever it sees.
- A coordinator that lies invents no site and replays nothing, and gets the seed *or* the mask key of a site, never
  both, even with fewer than a third of the sites on its side. So it still gets one sum. By telling sites different
  lists of survivors it can shrink that sum below t: with no site on its side not for n < 10, but to 6 of 10 and to 11
  of 20, and always to more than a third; further with sites on its side. (The paper's fifth exchange, in which
  survivors sign the list, would keep it at t.)
- All but one in league know that one's numbers: they subtract their own from the sum. Only noise helps there.
- Wrong numbers are not noticed, nor could they be. Wrong shares are: they are done without, or void the sum.
- Two attempts with the *same* numbers and different survivors give away the difference, which may be a single site's.
  A site that has answered `unmask` must not mask the same numbers again.

This module is the coordinator's side: the coordinator's part in one secure sum: it carries parcels, adds masked vectors, and takes off what masks are left.

What does not check out raises BadReply and leaves the sum as it was: its site counts as a dropout. Of the masked
vectors only the running sum is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pipeline.core.errors import QuorumNotReachedError, ReplyError
from privacy.secure_aggregation.key_exchange import (
    ENCRYPTED_SHARES_BYTES,
    KeyAdvertisement,
    MalformedDataError,
    commit_to_seed,
    compute_roster_view,
    decode_share,
    derive_pair_seed,
    verify_payload,
)
from privacy.secure_aggregation.masking import MaskedSegment, UintArray, apply_masks
from privacy.secure_aggregation.shamir import (
    MIN_PARTICIPANTS,
    SHARE_BYTES,
    SharesByPosition,
    are_on_one_polynomial,
    reconstruct_secret,
    reconstruction_threshold,
)


class SecAggServer:
    """Answers go in site by site (`advertised`, `shared`, `masked`, `answered`); `adverts`, `parcels`, `survivors` and
    `unmasked` each end a phase and give what the next one sends, or TooFew."""

    def __init__(
        self,
        context: bytes,
        roster: Mapping[str, bytes],
        segments: Sequence[MaskedSegment],
        min_participants: int = MIN_PARTICIPANTS,
    ) -> None:
        self._context, self._roster, self._segments = context, dict(roster), tuple(segments)
        self._min_participants = max(MIN_PARTICIPANTS, min_participants)
        self._advertisements: dict[str, tuple[KeyAdvertisement, bytes]] = {}
        self._encrypted_shares: dict[str, dict[str, bytes]] = {}  # sender -> receiver -> parcel
        self._sharers: list[str] = []
        self._masked_sums = [segment.zeros() for segment in self._segments]
        self._survivors: set[str] = set()
        self._revealed_shares: dict[str, dict[str, int]] = {}  # who answered -> of whom -> share
        self._phase = "advertise"
        self.share_warnings: list[str] = []  # shares that did not fit and were done without

    def receive_advertisement(self, site: str, advertisement: bytes) -> None:
        self._check_sender("advertise", site, self._roster, self._advertisements)
        try:
            self._advertisements[site] = (
                KeyAdvertisement.from_signed_bytes(advertisement, self._roster[site], site, self._context),
                advertisement,
            )
        except MalformedDataError as error:
            raise ReplyError(f"{site}: {error}") from error

    def end_advertise_phase(self) -> dict[str, bytes]:
        """For every site that advertised, the same."""
        self._end_phase("advertise", "share")
        if len(self._advertisements) < self._min_participants:
            raise QuorumNotReachedError(
                f"{len(self._advertisements)} sites advertised for the secure sum, it needs {self._min_participants}"
            )
        advertisements = {site: signed_bytes for site, (_, signed_bytes) in sorted(self._advertisements.items())}
        self._roster_view, self._threshold = (
            compute_roster_view(advertisements, self._context),
            reconstruction_threshold(len(advertisements)),
        )
        self._min_sites = max(self._threshold, self._min_participants)
        return advertisements

    def receive_encrypted_shares(self, site: str, encrypted_shares: Mapping[str, bytes]) -> None:
        self._check_sender("share", site, self._advertisements, self._encrypted_shares)
        if set(encrypted_shares) != set(self._advertisements) - {site} or any(
            len(ciphertext) != ENCRYPTED_SHARES_BYTES for ciphertext in encrypted_shares.values()
        ):
            raise ReplyError(
                f"{site}: has to send each other site that advertised one parcel of {ENCRYPTED_SHARES_BYTES} bytes"
            )
        self._encrypted_shares[site] = dict(encrypted_shares)

    def end_share_phase(self) -> dict[str, dict[str, bytes]]:
        """receiver -> sender -> parcel, among those who shared."""
        self._end_phase("share", "mask")
        self._sharers = sorted(self._encrypted_shares)
        self._require_quorum(len(self._sharers), self._min_sites, "shared their secrets")
        sent_shares, self._encrypted_shares = self._encrypted_shares, {}
        return {
            receiver: {sender: sent_shares[sender][receiver] for sender in self._sharers if sender != receiver}
            for receiver in self._sharers
        }

    def receive_masked_vectors(self, site: str, vectors: Sequence[UintArray]) -> None:
        self._check_sender("mask", site, self._sharers, self._survivors)
        if len(vectors) != len(self._segments) or not all(map(MaskedSegment.matches, self._segments, vectors)):
            expected = ", ".join(f"{s.num_values} of {s.dtype}" for s in self._segments)
            received = ", ".join(f"{v.shape} of {v.dtype}" for v in vectors)
            raise ReplyError(f"{site}: sent masked numbers {received} instead of {expected}")
        for total, vector in zip(self._masked_sums, vectors, strict=True):
            total += vector
        self._survivors.add(site)

    def end_mask_phase(self) -> list[str]:
        """For every one of them, the same."""
        self._end_phase("mask", "unmask")
        self._require_quorum(len(self._survivors), self._min_sites, "sent masked numbers")
        return sorted(self._survivors)

    def receive_unmask_shares(self, site: str, reply: bytes) -> None:
        self._check_sender("unmask", site, self._survivors, self._revealed_shares)
        try:
            payload = verify_payload(
                reply, self._roster[site], "unmask", self._roster_view, site, *sorted(self._survivors)
            )
            if len(payload) != SHARE_BYTES * len(self._sharers):
                raise MalformedDataError(f"{len(payload)} bytes of shares, of {len(self._sharers)} sites")
            shares = [
                decode_share(payload[start : start + SHARE_BYTES]) for start in range(0, len(payload), SHARE_BYTES)
            ]
        except MalformedDataError as error:
            raise ReplyError(f"{site}: {error}") from error
        self._revealed_shares[site] = dict(zip(self._sharers, shares, strict=True))

    def unmask_sums(self) -> list[UintArray]:
        """The sums of the survivors' numbers, modulo 2^bits."""
        self._end_phase("unmask", "nothing")
        self._require_quorum(len(self._revealed_shares), self._threshold, "helped to unmask")
        added_seeds: list[bytes] = []  # seeds of streams
        removed_seeds: list[bytes] = []
        for name in self._sharers:
            secret = self._reconstruct_secret(name)
            if name in self._survivors:
                added_seeds.append(secret)
            else:
                for survivor, seed in self._pair_seeds(name, X25519PrivateKey.from_private_bytes(secret)):
                    (added_seeds if survivor < name else removed_seeds).append(seed)
        apply_masks(self._masked_sums, added_seeds=removed_seeds, removed_seeds=added_seeds)
        return [segment.reduce_modulo(total) for segment, total in zip(self._segments, self._masked_sums, strict=True)]

    def _pair_seeds(self, dropout: str, key: X25519PrivateKey) -> Iterator[tuple[str, bytes]]:
        for survivor in self._survivors:
            yield (
                survivor,
                derive_pair_seed(
                    key, self._advertisements[survivor][0].mask_public_key, self._roster_view, survivor, dropout
                ),
            )

    def _reconstruct_secret(self, name: str) -> bytes:
        """The seed of a survivor, the mask key of a dropout; it has to be the one that was advertised."""
        positions = {site: position for position, site in enumerate(sorted(self._advertisements), start=1)}
        shares = {positions[site]: site_shares[name] for site, site_shares in sorted(self._revealed_shares.items())}
        reconstructed = reconstruct_secret(
            shares, self._threshold, lambda secret: self._matches_advertisement(name, secret)
        )
        if reconstructed is None:
            raise ReplyError(self._unmask_failure(name, shares))
        secret, wrong_positions = reconstructed
        if wrong_positions:
            givers = ", ".join(site for site, position in positions.items() if position in wrong_positions)
            self.share_warnings.append(f"most likely a false share of {name}'s secret from {givers}: given or dealt so")
        return secret

    def _matches_advertisement(self, name: str, secret: bytes) -> bool:
        advertisement = self._advertisements[name][0]
        if name in self._survivors:
            return commit_to_seed(secret, name, self._context) == advertisement.seed_commitment
        return (
            X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == advertisement.mask_public_key
        )

    def _unmask_failure(self, name: str, shares: SharesByPosition) -> str:
        if len(shares) > self._threshold and are_on_one_polynomial(shares, self._threshold):
            cause = f"{name} dealt shares of another secret than it advertised; leave it out"
        else:
            cause = (
                f"{name} dealt false shares, or too many of {', '.join(sorted(self._revealed_shares))} gave false ones"
            )
        return f"{name}: its masks cannot be taken off, so this sum is void: {cause}; ask again as a new attempt"

    def _check_sender(
        self, phase: str, site: str, expected_sites: Collection[str], answered_sites: Collection[str]
    ) -> None:
        if self._phase != phase:
            raise ReplyError(f"{site}: answered to {phase}, and the secure sum is at {self._phase}")
        if site not in expected_sites:
            raise ReplyError(f"{site}: takes no part in this phase ({phase}) of the secure sum")
        if site in answered_sites:
            raise ReplyError(f"{site}: answered twice to {phase}; the first answer counts")

    def _end_phase(self, phase: str, next_phase: str) -> None:
        if self._phase != phase:
            raise ReplyError(f"the secure sum is at {self._phase} and cannot end {phase}")
        self._phase = next_phase

    def _require_quorum(self, count: int, needed: int, action: str) -> None:
        if count < needed:
            raise QuorumNotReachedError(
                f"{count} of the {len(self._advertisements)} sites of the secure sum {action}, it takes {needed}; ask again as a "
                "new attempt"
            )
