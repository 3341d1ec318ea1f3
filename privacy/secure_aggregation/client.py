"""Secure aggregation, a site's side (Bonawitz et al. 2017, figure 4): four steps, each taken once and in order.

A client serves one attempt of one round and keeps its state in memory, so a site that restarts has dropped out. A step
that rejects its input ends the client, because a second try would answer a second request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError
from privacy.secure_aggregation.key_exchange import (
    KeyAdvertisement,
    MalformedDataError,
    ShareRoute,
    commit_to_seed,
    compute_roster_view,
    derive_pair_seed,
    encode_share,
    sign_payload,
)
from privacy.secure_aggregation.masking import MaskedSegment, UintArray, apply_masks
from privacy.secure_aggregation.shamir import MIN_PARTICIPANTS, SECRET_BYTES, reconstruction_threshold, split_secret

NO_STEP = "nothing"


class SecAggClient:
    """`roster`: name -> Ed25519 public key, verified out of band. `context`: identifies study hash, round and attempt.

    `min_participants`: sites that must take part until the end. Without it a coordinator that colludes with two sites
    could show a third site only those two.
    """

    def __init__(
        self,
        name: str,
        signing_key: Ed25519PrivateKey,
        roster: Mapping[str, bytes],
        context: bytes,
        min_participants: int = MIN_PARTICIPANTS,
    ) -> None:
        if roster.get(name) != signing_key.public_key().public_bytes_raw():
            raise MessageError(f"the roster does not have {name}'s own key; let the study lead add its fingerprint")
        if len(set(roster.values())) < len(roster):
            raise MessageError(f"{name}: the roster has one key under two names; each site needs its own")
        self.name, self._signing_key, self._roster, self._context = name, signing_key, dict(roster), context
        self._min_participants = max(MIN_PARTICIPANTS, min_participants)
        self._encryption_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = os.urandom(SECRET_BYTES)
        self._received_shares: dict[str, tuple[int, int]] = {}  # owner -> shares of its mask key and of its seed
        self._next_step = "advertise"

    def advertise_keys(self) -> bytes:
        with self._enter_step("advertise", next_step="share"):
            advertisement = KeyAdvertisement(
                self._encryption_key.public_key().public_bytes_raw(),
                self._mask_key.public_key().public_bytes_raw(),
                commit_to_seed(self._seed, self.name, self._context),
            )
            self._advertisement = advertisement.to_signed_bytes(self._signing_key, self.name, self._context)
            return self._advertisement

    def share_secrets(self, advertisements: Mapping[str, bytes]) -> dict[str, bytes]:
        """Encrypted shares for each other site that advertised."""
        with self._enter_step("share", next_step="mask"):
            num_sites = len(advertisements)
            if num_sites < self._min_participants:
                raise QuorumNotReachedError(
                    f"{self.name}: {num_sites} sites take part in the secure aggregation, it needs {self._min_participants}"
                )
            if advertisements.get(self.name) != self._advertisement:
                raise MessageError(
                    f"{self.name}: the advertisement under this site's name is not the one it made in this attempt; it is "
                    "forged, or from before a restart: repeat the secure aggregation as a new attempt"
                )
            self._advertisements = {
                name: self._read_advertisement(name, advertisements[name]) for name in sorted(advertisements)
            }
            self._roster_view = compute_roster_view(advertisements, self._context)
            self._threshold = reconstruction_threshold(num_sites)
            self._min_sites = max(self._threshold, self._min_participants)
            mask_key_shares = split_secret(self._mask_key.private_bytes_raw(), self._threshold, num_sites)
            seed_shares = split_secret(self._seed, self._threshold, num_sites)
            shares_by_site = dict(
                zip(self._advertisements, zip(mask_key_shares, seed_shares, strict=True), strict=True)
            )
            self._received_shares[self.name] = shares_by_site.pop(self.name)
            return {
                name: ShareRoute(self._roster_view, self.name, name).encrypt_shares(
                    self._encryption_key, self._advertisements[name].encryption_public_key, shares
                )
                for name, shares in shares_by_site.items()
            }

    def mask_vectors(
        self, encrypted_shares: Mapping[str, bytes], segments: Sequence[tuple[UintArray, int]]
    ) -> list[UintArray]:
        """`encrypted_shares`: by sender, of each other site that shared. `segments`: (values from 0 to 2^bits - 1, bits)."""
        with self._enter_step("mask", next_step="unmask"):
            if len(encrypted_shares) + 1 < self._min_sites:
                raise QuorumNotReachedError(
                    f"{self.name}: {len(encrypted_shares) + 1} sites shared their secrets, it needs {self._min_sites}"
                )
            self._received_shares |= {
                name: self._decrypt_shares(name, ciphertext) for name, ciphertext in encrypted_shares.items()
            }
            masked = [self._check_values(values, bits).copy() for values, bits in segments]
            pairs = {
                name: derive_pair_seed(
                    self._mask_key, self._advertisements[name].mask_public_key, self._roster_view, self.name, name
                )
                for name in encrypted_shares
            }
            apply_masks(
                masked,
                added_seeds=[self._seed, *(seed for name, seed in pairs.items() if self.name < name)],
                removed_seeds=[seed for name, seed in pairs.items() if self.name > name],
            )
            return [
                MaskedSegment.from_array(m, bits).reduce_modulo(m)
                for m, (_, bits) in zip(masked, segments, strict=True)
            ]

    def reveal_shares(self, survivors: Sequence[str]) -> bytes:
        """One share per site that shared: of the seed of a survivor, of the mask key of a dropout."""
        with self._enter_step("unmask", next_step=NO_STEP):
            surviving = set(survivors)
            if self.name not in surviving:
                raise MessageError(f"{self.name} sent its vector and is not among the survivors: it sends no shares")
            if strangers := sorted(surviving - set(self._received_shares)):
                raise MessageError(f"{self.name}: {', '.join(strangers)} never shared and cannot have survived")
            if len(surviving) < self._min_sites:
                raise QuorumNotReachedError(
                    f"{self.name}: {len(surviving)} sites survived, and sums of fewer than {self._min_sites} stay masked"
                )
            shares = [self._received_shares[name][name in surviving] for name in sorted(self._received_shares)]
            self._received_shares = {}
            payload = b"".join(map(encode_share, shares))
            return sign_payload(self._signing_key, payload, "unmask", self._roster_view, self.name, *sorted(surviving))

    @contextmanager
    def _enter_step(self, step: str, next_step: str) -> Iterator[None]:
        if self._next_step != step:
            raise MessageError(
                f"{self.name} was asked to {step}, and its next step in this attempt is {self._next_step}: it was asked twice "
                "or was restarted, and counts as a dropout; repeat the secure aggregation as a new attempt"
            )
        self._next_step = NO_STEP
        yield
        self._next_step = next_step

    def _read_advertisement(self, name: str, advertisement: bytes) -> KeyAdvertisement:
        if name not in self._roster:
            raise MessageError(f"{self.name}: {name} is not on the roster that this site approved")
        try:
            return KeyAdvertisement.from_signed_bytes(advertisement, self._roster[name], name, self._context)
        except MalformedDataError as error:
            raise MessageError(
                f"{self.name}: the advertisement of {name}: {error}; leave {name} out in a new attempt"
            ) from error

    def _decrypt_shares(self, name: str, encrypted_shares: bytes) -> tuple[int, int]:
        if name == self.name or name not in self._advertisements:
            raise MessageError(f"{self.name}: encrypted shares from {name}, which is no other site of this aggregation")
        try:
            route = ShareRoute(self._roster_view, name, self.name)
            return route.decrypt_shares(
                self._encryption_key, self._advertisements[name].encryption_public_key, encrypted_shares
            )
        except MalformedDataError as error:
            raise MessageError(f"{self.name}: from {name}: {error}; leave {name} out in a new attempt") from error

    def _check_values(self, values: UintArray, bits: int) -> UintArray:
        try:
            segment = MaskedSegment.from_array(values, bits)
        except ValueError as error:
            raise ReplyError(f"{self.name}: {error}") from error
        if values.ndim != 1 or (values.size and int(values.max()) >= 2**segment.bits):
            raise ReplyError(f"{self.name}: values to mask must be one vector of numbers below 2^{bits}")
        return values
