"""The coordinator's part in one secure sum: it carries parcels, adds masked vectors, and takes off what masks are left.

What does not check out raises BadReply and leaves the sum as it was: its site counts as a dropout. Of the masked
vectors only the running sum is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pipeline.core.errors import BadReply, TooFew
from privacy.secure_aggregation.key_exchange import (
    PARCEL,
    Advert,
    Broken,
    commitment,
    pair_seed,
    unpacked,
    verified,
    view_of,
)
from privacy.secure_aggregation.masking import Segment, Whole, change
from privacy.secure_aggregation.shamir import FEWEST, SHARE, Shares, on_one_polynomial, rebuild, threshold


class Gathering:
    """Answers go in site by site (`advertised`, `shared`, `masked`, `answered`); `adverts`, `parcels`, `survivors` and
    `unmasked` each end a phase and give what the next one sends, or TooFew."""

    def __init__(
        self, context: bytes, roster: Mapping[str, bytes], segments: Sequence[Segment], fewest: int = FEWEST
    ) -> None:
        self._context, self._roster, self._segments = context, dict(roster), tuple(segments)
        self._fewest = max(FEWEST, fewest)
        self._adverts: dict[str, tuple[Advert, bytes]] = {}
        self._parcels: dict[str, dict[str, bytes]] = {}  # sender -> receiver -> parcel
        self._sharers: list[str] = []
        self._sums = [segment.zeros() for segment in self._segments]
        self._survivors: set[str] = set()
        self._answers: dict[str, dict[str, int]] = {}  # who answered -> of whom -> share
        self._phase = "advertise"
        self.doubts: list[str] = []  # shares that did not fit and were done without

    def advertised(self, site: str, advert: bytes) -> None:
        self._check("advertise", site, self._roster, self._adverts)
        try:
            self._adverts[site] = Advert.read(advert, self._roster[site], site, self._context), advert
        except Broken as error:
            raise BadReply(f"{site}: {error}") from error

    def adverts(self) -> dict[str, bytes]:
        """For every site that advertised, the same."""
        self._close("advertise", "share")
        if len(self._adverts) < self._fewest:
            raise TooFew(f"{len(self._adverts)} sites advertised for the secure sum, it needs {self._fewest}")
        found = {site: raw for site, (_, raw) in sorted(self._adverts.items())}
        self._view, self._t = view_of(found, self._context), threshold(len(found))
        self._least = max(self._t, self._fewest)
        return found

    def shared(self, site: str, parcels: Mapping[str, bytes]) -> None:
        self._check("share", site, self._adverts, self._parcels)
        if set(parcels) != set(self._adverts) - {site} or any(len(parcel) != PARCEL for parcel in parcels.values()):
            raise BadReply(f"{site}: has to send each other site that advertised one parcel of {PARCEL} bytes")
        self._parcels[site] = dict(parcels)

    def parcels(self) -> dict[str, dict[str, bytes]]:
        """receiver -> sender -> parcel, among those who shared."""
        self._close("share", "mask")
        self._sharers = sorted(self._parcels)
        self._enough(len(self._sharers), self._least, "shared their secrets")
        sent, self._parcels = self._parcels, {}
        return {to: {by: sent[by][to] for by in self._sharers if by != to} for to in self._sharers}

    def masked(self, site: str, vectors: Sequence[Whole]) -> None:
        self._check("mask", site, self._sharers, self._survivors)
        if len(vectors) != len(self._segments) or not all(map(Segment.takes, self._segments, vectors)):
            wanted = ", ".join(f"{s.n} of {s.dtype}" for s in self._segments)
            came = ", ".join(f"{v.shape} of {v.dtype}" for v in vectors)
            raise BadReply(f"{site}: sent masked numbers {came} instead of {wanted}")
        for total, vector in zip(self._sums, vectors, strict=True):
            total += vector
        self._survivors.add(site)

    def survivors(self) -> list[str]:
        """For every one of them, the same."""
        self._close("mask", "unmask")
        self._enough(len(self._survivors), self._least, "sent masked numbers")
        return sorted(self._survivors)

    def answered(self, site: str, answer: bytes) -> None:
        self._check("unmask", site, self._survivors, self._answers)
        try:
            payload = verified(answer, self._roster[site], "unmask", self._view, site, *sorted(self._survivors))
            if len(payload) != SHARE * len(self._sharers):
                raise Broken(f"{len(payload)} bytes of shares, of {len(self._sharers)} sites")
            cut = [unpacked(payload[at : at + SHARE]) for at in range(0, len(payload), SHARE)]
        except Broken as error:
            raise BadReply(f"{site}: {error}") from error
        self._answers[site] = dict(zip(self._sharers, cut, strict=True))

    def unmasked(self) -> list[Whole]:
        """The sums of the survivors' numbers, modulo 2^bits."""
        self._close("unmask", "nothing")
        self._enough(len(self._answers), self._t, "helped to unmask")
        added: list[bytes] = []  # seeds of streams
        taken: list[bytes] = []
        for name in self._sharers:
            secret = self._secret(name)
            if name in self._survivors:
                added.append(secret)
            else:
                for survivor, seed in self._pairs(name, X25519PrivateKey.from_private_bytes(secret)):
                    (added if survivor < name else taken).append(seed)
        change(self._sums, plus=taken, minus=added)
        return [segment.cut(total) for segment, total in zip(self._segments, self._sums, strict=True)]

    def _pairs(self, dropout: str, key: X25519PrivateKey) -> Iterator[tuple[str, bytes]]:
        for survivor in self._survivors:
            yield survivor, pair_seed(key, self._adverts[survivor][0].for_masks, self._view, survivor, dropout)

    def _secret(self, name: str) -> bytes:
        """The seed of a survivor, the mask key of a dropout; it has to be the one that was advertised."""
        places = {site: place for place, site in enumerate(sorted(self._adverts), start=1)}
        shares = {places[site]: given[name] for site, given in sorted(self._answers.items())}
        found = rebuild(shares, self._t, lambda secret: self._fits(name, secret))
        if found is None:
            raise BadReply(self._blame(name, shares))
        secret, wrong = found
        if wrong:
            givers = ", ".join(site for site, place in places.items() if place in wrong)
            self.doubts.append(f"most likely a false share of {name}'s secret from {givers}: given or dealt so")
        return secret

    def _fits(self, name: str, secret: bytes) -> bool:
        advert = self._adverts[name][0]
        if name in self._survivors:
            return commitment(secret, name, self._context) == advert.commitment
        return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == advert.for_masks

    def _blame(self, name: str, shares: Shares) -> str:
        if len(shares) > self._t and on_one_polynomial(shares, self._t):
            cause = f"{name} dealt shares of another secret than it advertised; leave it out"
        else:
            cause = f"{name} dealt false shares, or too many of {', '.join(sorted(self._answers))} gave false ones"
        return f"{name}: its masks cannot be taken off, so this sum is void: {cause}; ask again as a new attempt"

    def _check(self, phase: str, site: str, known: Collection[str], done: Collection[str]) -> None:
        if self._phase != phase:
            raise BadReply(f"{site}: answered to {phase}, and the secure sum is at {self._phase}")
        if site not in known:
            raise BadReply(f"{site}: takes no part in this phase ({phase}) of the secure sum")
        if site in done:
            raise BadReply(f"{site}: answered twice to {phase}; the first answer counts")

    def _close(self, phase: str, then: str) -> None:
        if self._phase != phase:
            raise BadReply(f"the secure sum is at {self._phase} and cannot end {phase}")
        self._phase = then

    def _enough(self, count: int, needed: int, what: str) -> None:
        if count < needed:
            raise TooFew(
                f"{count} of the {len(self._adverts)} sites of the secure sum {what}, it takes {needed}; ask again as a "
                "new attempt"
            )
