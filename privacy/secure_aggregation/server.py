"""Secure aggregation, coordinator's side: the coordinator learns the sum of the sites' vectors and no single vector.

Bonawitz et al. 2017, doi 10.1145/3133956.3133982. One secure aggregation takes four phases:

    advertise   each site sends two new X25519 keys and a commitment, signed with its key on the roster
    share       each site sends t-of-n shares of its mask key and of its seed, encrypted for each other site
    mask        each site sends its vector + its own mask +- one pair mask per other site, modulo 2^bits
    unmask      each survivor sends a share of every survivor's seed and of every dropout's mask key

The pair masks of two survivors cancel; the coordinator reconstructs and removes the other masks. With the threshold
t = floor(2n/3) + 1, and at least 3, fewer than a third of the sites may drop out: none of 3, one of 4 to 6, two of 7 to
9, six of 20.

Threat model:
- Honest-but-curious coordinator: it follows the protocol and reads everything it sees. It learns one sum per attempt,
  over at least t sites.
- Malicious coordinator: it cannot invent a site or replay a message, and it obtains the seed *or* the mask key of a
  site, never both, even if fewer than a third of the sites collude with it. So it still learns only one sum. By sending
  different survivor lists to different sites it can reduce the number of sites in that sum below t. Without colluding
  sites: not for n < 10, to 6 of 10, to 11 of 20, and always to more than a third. With colluding sites: further. (The
  paper's fifth phase, in which survivors sign the list, would keep the sum at t sites.)
- Colluding sites: if all sites but one collude, they learn that site's vector by subtracting their own from the sum.
  Only noise protects against this.
- Malicious sites: a wrong vector cannot be detected. Wrong shares are detected; they are ignored, or the aggregation
  fails.
- Repeated attempts: two attempts with the *same* vectors and different survivors reveal the difference of the sums,
  which may be one site's vector. A site that has answered `unmask` must not mask the same vector again.

The server forwards encrypted shares, adds masked vectors and removes the remaining masks. An invalid message raises
ReplyError and leaves the sum unchanged; its site counts as a dropout. The server stores only the running sum of the
masked vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

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
    candidate_secrets,
    reconstruction_threshold,
    wrong_positions,
)


def reconstruct_secret(
    shares: SharesByPosition, threshold: int, is_right_secret: Callable[[bytes], bool]
) -> tuple[bytes, list[int]] | None:
    """The secret that satisfies `is_right_secret`, and the positions of wrong shares; None if not found.

    Wrong shares may cancel out at 0, so the search prefers the polynomial with the fewest wrong positions; with at most
    half of the spare shares wrong it is unique.
    """
    best: tuple[bytes, list[int]] | None = None
    for secret, trusted_shares in candidate_secrets(shares, threshold):
        if not is_right_secret(secret):
            continue
        wrong = wrong_positions(shares, trusted_shares)
        if best is None or len(wrong) < len(best[1]):
            best = secret, wrong
        if len(wrong) <= (len(shares) - threshold) // 2:
            break
    return best


class SecAggServer:
    """Receives messages site by site with the `receive_*` methods.

    `end_advertise_phase`, `end_share_phase`, `end_mask_phase` and `unmask_sums` each end a phase and return what the
    coordinator sends next, or raise QuorumNotReachedError.
    """

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
        self._encrypted_shares: dict[str, dict[str, bytes]] = {}  # sender -> receiver -> ciphertext
        self._sharers: list[str] = []
        self._masked_sums = [segment.zeros() for segment in self._segments]
        self._survivors: set[str] = set()
        self._revealed_shares: dict[str, dict[str, int]] = {}  # sender -> owner of the secret -> share
        self._phase = "advertise"
        self.share_warnings: list[str] = []  # wrong shares that were ignored

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
        """The advertisements, which the coordinator sends to every site that advertised."""
        self._end_phase("advertise", "share")
        if len(self._advertisements) < self._min_participants:
            raise QuorumNotReachedError(
                f"{len(self._advertisements)} sites advertised for the secure aggregation, it needs {self._min_participants}"
            )
        advertisements = {site: signed_bytes for site, (_, signed_bytes) in sorted(self._advertisements.items())}
        self._roster_view = compute_roster_view(advertisements, self._context)
        self._threshold = reconstruction_threshold(len(advertisements))
        self._min_sites = max(self._threshold, self._min_participants)
        return advertisements

    def receive_encrypted_shares(self, site: str, encrypted_shares: Mapping[str, bytes]) -> None:
        self._check_sender("share", site, self._advertisements, self._encrypted_shares)
        if set(encrypted_shares) != set(self._advertisements) - {site} or any(
            len(ciphertext) != ENCRYPTED_SHARES_BYTES for ciphertext in encrypted_shares.values()
        ):
            raise ReplyError(
                f"{site}: must send each other site that advertised {ENCRYPTED_SHARES_BYTES} bytes of encrypted shares"
            )
        self._encrypted_shares[site] = dict(encrypted_shares)

    def end_share_phase(self) -> dict[str, dict[str, bytes]]:
        """receiver -> sender -> encrypted shares, among the sites that shared."""
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
            raise ReplyError(f"{site}: sent masked vectors {received} instead of {expected}")
        for total, vector in zip(self._masked_sums, vectors, strict=True):
            total += vector
        self._survivors.add(site)

    def end_mask_phase(self) -> list[str]:
        """The survivors, whose list the coordinator sends to each of them."""
        self._end_phase("mask", "unmask")
        self._require_quorum(len(self._survivors), self._min_sites, "sent masked vectors")
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
        """The sums of the survivors' vectors, modulo 2^bits."""
        self._end_phase("unmask", "nothing")
        self._require_quorum(len(self._revealed_shares), self._threshold, "helped to unmask")
        added_seeds: list[bytes] = []
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
        """The seed of a survivor or the mask key of a dropout; it must match the advertisement."""
        positions = {site: position for position, site in enumerate(sorted(self._advertisements), start=1)}
        shares = {positions[site]: site_shares[name] for site, site_shares in sorted(self._revealed_shares.items())}
        reconstructed = reconstruct_secret(
            shares, self._threshold, lambda secret: self._matches_advertisement(name, secret)
        )
        if reconstructed is None:
            raise ReplyError(self._unmask_failure(name, shares))
        secret, wrong = reconstructed
        if wrong:
            senders = ", ".join(site for site, position in positions.items() if position in wrong)
            self.share_warnings.append(
                f"most likely {senders} sent a wrong share of {name}'s secret, or received a wrong one from {name}"
            )
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
            cause = f"{name} shared another secret than it advertised; leave it out"
        else:
            cause = (
                f"{name} shared wrong shares, or too many of {', '.join(sorted(self._revealed_shares))} sent wrong ones"
            )
        return f"{name}: its masks cannot be removed, so the secure aggregation failed: {cause}; repeat it as a new attempt"

    def _check_sender(
        self, phase: str, site: str, expected_sites: Collection[str], answered_sites: Collection[str]
    ) -> None:
        if self._phase != phase:
            raise ReplyError(f"{site}: replied to {phase}, and the secure aggregation is at {self._phase}")
        if site not in expected_sites:
            raise ReplyError(f"{site}: takes no part in this phase ({phase}) of the secure aggregation")
        if site in answered_sites:
            raise ReplyError(f"{site}: replied twice to {phase}; the first reply counts")

    def _end_phase(self, phase: str, next_phase: str) -> None:
        if self._phase != phase:
            raise ReplyError(f"the secure aggregation is at {self._phase} and cannot end {phase}")
        self._phase = next_phase

    def _require_quorum(self, count: int, needed: int, action: str) -> None:
        if count < needed:
            raise QuorumNotReachedError(
                f"{count} of the {len(self._advertisements)} sites of the secure aggregation {action}, it needs {needed}; repeat "
                "it as a new attempt"
            )
