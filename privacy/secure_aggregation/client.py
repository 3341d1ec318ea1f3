"""A site's part in one secure sum (Bonawitz et al. 2017, figure 4): four steps, each taken once and in order.

A member lives for one attempt of one turn and keeps everything in memory: a site that is restarted in between has
dropped out. A step that refuses what it was given ends the member, for a second try would be a second question.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pipeline.core.errors import BadMessage, BadReply, TooFew
from privacy.secure_aggregation.key_exchange import (
    Advert,
    Broken,
    Route,
    commitment,
    packed,
    pair_seed,
    signed,
    view_of,
)
from privacy.secure_aggregation.masking import Segment, Whole, change
from privacy.secure_aggregation.shamir import FEWEST, SECRET, deal, threshold

LEFT = "nothing"


class Member:
    """`roster`: name -> Ed25519 public key, compared out of band. `context` names the study's hash, turn and attempt.

    `fewest` is how many have to take part, to the end, at least: a coordinator in league with two sites could otherwise show a third
    one only those two.
    """

    def __init__(
        self,
        name: str,
        signing_key: Ed25519PrivateKey,
        roster: Mapping[str, bytes],
        context: bytes,
        fewest: int = FEWEST,
    ) -> None:
        if roster.get(name) != signing_key.public_key().public_bytes_raw():
            raise BadMessage(f"the roster does not have {name}'s own key; let the study lead take up its fingerprint")
        if len(set(roster.values())) < len(roster):
            raise BadMessage(f"{name}: the roster has one key under two names; each site needs its own")
        self.name, self._signing, self._roster, self._context = name, signing_key, dict(roster), context
        self._fewest = max(FEWEST, fewest)
        self._parcel_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = os.urandom(SECRET)
        self._held: dict[str, tuple[int, int]] = {}  # of whom -> shares of its mask key and of its seed
        self._next = "advertise"

    def advertise(self) -> bytes:
        with self._step("advertise", then="share"):
            advert = Advert(
                self._parcel_key.public_key().public_bytes_raw(),
                self._mask_key.public_key().public_bytes_raw(),
                commitment(self._seed, self.name, self._context),
            )
            self._advert = advert.signed(self._signing, self.name, self._context)
            return self._advert

    def share(self, adverts: Mapping[str, bytes]) -> dict[str, bytes]:
        """A parcel for each other site that advertised."""
        with self._step("share", then="mask"):
            n = len(adverts)
            if n < self._fewest:
                raise TooFew(f"{self.name}: {n} sites take part in the sum, at least {self._fewest} have to")
            if adverts.get(self.name) != self._advert:
                raise BadMessage(
                    f"{self.name}: the advert under this site's name is not the one it made in this attempt; it is "
                    "forged, or from before a restart: ask all sites again as a new attempt"
                )
            self._adverts = {name: self._read(name, adverts[name]) for name in sorted(adverts)}
            self._view, self._t = view_of(adverts, self._context), threshold(n)
            self._least = max(self._t, self._fewest)
            keys = deal(self._mask_key.private_bytes_raw(), self._t, n)
            dealt = dict(zip(self._adverts, zip(keys, deal(self._seed, self._t, n), strict=True), strict=True))
            self._held[self.name] = dealt.pop(self.name)
            return {
                name: Route(self._view, self.name, name).seal(self._parcel_key, self._adverts[name].for_parcels, shares)
                for name, shares in dealt.items()
            }

    def mask(self, parcels: Mapping[str, bytes], segments: Sequence[tuple[Whole, int]]) -> list[Whole]:
        """`parcels`: from each other site that shared. `segments`: numbers from 0 to 2^bits - 1, and these bits."""
        with self._step("mask", then="unmask"):
            if len(parcels) + 1 < self._least:
                raise TooFew(f"{self.name}: {len(parcels) + 1} sites shared their secrets, {self._least} have to")
            self._held |= {name: self._opened(name, parcel) for name, parcel in parcels.items()}
            masked = [self._checked(numbers, bits).copy() for numbers, bits in segments]
            pairs = {
                name: pair_seed(self._mask_key, self._adverts[name].for_masks, self._view, self.name, name)
                for name in parcels
            }
            change(
                masked,
                plus=[self._seed, *(seed for name, seed in pairs.items() if self.name < name)],
                minus=[seed for name, seed in pairs.items() if self.name > name],
            )
            return [Segment.of(m, bits).cut(m) for m, (_, bits) in zip(masked, segments, strict=True)]

    def unmask(self, survivors: Sequence[str]) -> bytes:
        """For each site that shared one of its two shares: of its seed if it survived, else of its mask key."""
        with self._step("unmask", then=LEFT):
            alive = set(survivors)
            if self.name not in alive:
                raise BadMessage(f"{self.name} sent its numbers and is not among the survivors: it helps nobody unmask")
            if strangers := sorted(alive - set(self._held)):
                raise BadMessage(f"{self.name}: {', '.join(strangers)} never shared and cannot have survived")
            if len(alive) < self._least:
                raise TooFew(
                    f"{self.name}: {len(alive)} sites survived, and sums of fewer than {self._least} stay masked"
                )
            shares = [self._held[name][name in alive] for name in sorted(self._held)]
            self._held = {}
            payload = b"".join(map(packed, shares))
            return signed(self._signing, payload, "unmask", self._view, self.name, *sorted(alive))

    @contextmanager
    def _step(self, step: str, then: str) -> Iterator[None]:
        if self._next != step:
            raise BadMessage(
                f"{self.name} was asked to {step}, and next in this attempt would be to {self._next}: it was asked "
                "twice or was restarted, and counts as a dropout; ask all sites again as a new attempt"
            )
        self._next = LEFT
        yield
        self._next = then

    def _read(self, name: str, advert: bytes) -> Advert:
        if name not in self._roster:
            raise BadMessage(f"{self.name}: {name} is not on the roster that this site approved")
        try:
            return Advert.read(advert, self._roster[name], name, self._context)
        except Broken as error:
            raise BadMessage(
                f"{self.name}: the advert of {name}: {error}; leave {name} out, as a new attempt"
            ) from error

    def _opened(self, name: str, parcel: bytes) -> tuple[int, int]:
        if name == self.name or name not in self._adverts:
            raise BadMessage(f"{self.name}: a parcel from {name}, which does not take part beside this site")
        try:
            route = Route(self._view, name, self.name)
            return route.open(self._parcel_key, self._adverts[name].for_parcels, parcel)
        except Broken as error:
            raise BadMessage(f"{self.name}: from {name}: {error}; leave {name} out, as a new attempt") from error

    def _checked(self, numbers: Whole, bits: int) -> Whole:
        try:
            segment = Segment.of(numbers, bits)
        except ValueError as error:
            raise BadReply(f"{self.name}: {error}") from error
        if numbers.ndim != 1 or (numbers.size and int(numbers.max()) >= 2**segment.bits):
            raise BadReply(f"{self.name}: numbers to mask have to be one row, each below 2^{bits}")
        return numbers
