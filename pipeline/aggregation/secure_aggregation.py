"""The secure sum's four exchanges of one turn, on any engine: advertise, share, train, unmask.

An update becomes whole numbers on two rings. Its vectors, scaled by weight / heaviest, clipped to one length and rounded,
take 32 bits a number; the weight itself, statistics, single numbers and sums go along as fixed-point numbers of 64 bits.
The coordinator gets their sums. Who worked how much it does not learn: `Total.works` is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.codecs.fixed_point import Grid, from_ring, to_ring
from pipeline.core.errors import BadMessage, BadReply, TooFew
from pipeline.protocol.messages import Reply, SiteId, Total, Update, Vectors
from pipeline.study.privacy import SecureSum
from privacy.secure_aggregation.protocol import Gathering, Segment

if TYPE_CHECKING:
    from pipeline.aggregation.requests import Asking

POINT = 2**24  # fixed-point numbers are multiples of 1 / POINT
PARCEL = "parcel/"


@dataclass(frozen=True)
class Form:
    """Where the numbers of an update lie. Both sides have it from the study, before anything is trained."""

    means: tuple[tuple[str, tuple[int, ...]], ...]
    sums: tuple[tuple[str, tuple[int, ...]], ...]
    sites: int
    settings: SecureSum

    @classmethod
    def of(cls, update: Update, sites: int, settings: SecureSum) -> Form:
        def shapes(vectors: Vectors) -> tuple[tuple[str, tuple[int, ...]], ...]:
            return tuple((key, tuple(vectors[key].shape)) for key in sorted(vectors))

        return cls(shapes(update.mean), shapes(update.sum), sites, settings)

    @cached_property
    def grid(self) -> Grid:
        return Grid.finest(sum(math.prod(shape) for _, shape in self._clipped), self.settings.clip, self.sites)

    @cached_property
    def segments(self) -> list[Segment]:
        exact = 1 + sum(math.prod(shape) for _, shape in (*self._others, *self.sums))
        return [Segment(self.grid.n, self.grid.bits), Segment(exact, 64, "uint64")]

    @property
    def _clipped(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(key, shape) for key, shape in self.means if _is_vector(key, shape)]

    @property
    def _others(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(key, shape) for key, shape in self.means if not _is_vector(key, shape)]

    def numbers(self, update: Update, weight: float, heaviest: float, dice: torch.Generator) -> list[np.ndarray]:
        """A site's update as it is masked."""
        if Form.of(update, self.sites, self.settings) != self:
            raise BadMessage("this update has other parts than the study's strategy sends; is it of the same version?")
        if weight > heaviest:
            raise BadMessage(
                f"the site's weight {weight:g} is more than privacy.secure_sum.heaviest ({heaviest:g}); raise it"
            )
        share = weight / heaviest
        vector = _flat([update.mean[key] * share for key, _ in self._clipped])
        others = [update.mean[key].double() * share for key, _ in self._others]
        exact = torch.cat([torch.tensor([share], dtype=torch.float64), _flat(others), _flat([update.sum[key].double() for key, _ in self.sums])])  # fmt: skip
        if not (bool(torch.isfinite(vector).all()) and float(exact.abs().max()) < 2**62 / POINT / self.sites):
            raise BadMessage("an update that is not finite cannot be summed; lower local.lr or look at the site's data")
        ring = to_ring(vector.float(), self.grid, dice).numpy().astype(np.uint32)
        return [ring, (exact * POINT).round().to(torch.int64).numpy().view(np.uint64)]

    def total(self, sums: list[np.ndarray], sites: list[SiteId]) -> Total:
        vector = from_ring(torch.from_numpy(sums[0].astype(np.int64)), self.grid)
        exact = torch.from_numpy(sums[1].view(np.int64).copy()).double() / POINT
        means = _cut(vector, self._clipped)
        rest = _cut(exact[1:].float(), [*((f"mean/{k}", s) for k, s in self._others), *((f"sum/{k}", s) for k, s in self.sums)])  # fmt: skip
        means |= {key: rest[f"mean/{key}"] for key, _ in self._others}
        return Total.summed(means, float(exact[0]), {key: rest[f"sum/{key}"] for key, _ in self.sums}, sites)


def _is_vector(key: str, shape: tuple[int, ...]) -> bool:
    return key != "stats" and len(shape) == 1


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]) if tensors else torch.zeros(0)


def _cut(flat: Tensor, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for _, shape in shapes]) if shapes else ()
    return {key: part.view(shape) for (key, shape), part in zip(shapes, parts, strict=True)}


@dataclass(frozen=True)
class Masking:
    """What a study's secure sums need on either side."""

    form: Form
    roster: Mapping[SiteId, bytes]  # public keys
    study: str  # hash
    fewest: int = 3  # that have to take part: a coordinator in league with some must not show the others only those

    def context(self, turn: int, attempt: int) -> bytes:
        return json.dumps([self.study, turn, attempt]).encode()


def masked_total(asking: Asking, masking: Masking, sends: Mapping[SiteId, Vectors]) -> Total:
    roster = {site: key for site, key in masking.roster.items() if site in sends}
    gathering = Gathering(masking.context(asking.turn, asking.attempt), roster, masking.form.segments, masking.fewest)
    _phase(asking, "advertise", {site: {} for site in sends},
           lambda site, sums: gathering.advertised(site, _bytes(sums, "advert")))  # fmt: skip
    adverts = {f"advert/{site}": as_tensor(advert) for site, advert in gathering.adverts().items()}
    names = [key.removeprefix("advert/") for key in adverts]
    _phase(asking, "share", dict.fromkeys(names, adverts), lambda site, sums: gathering.shared(
        site, {key.removeprefix(PARCEL): _bytes(sums, key) for key in sums if key.startswith(PARCEL)}))  # fmt: skip
    parcels = {
        site: {f"{PARCEL}{sender}": as_tensor(parcel) for sender, parcel in received.items()}
        for site, received in gathering.parcels().items()
    }
    _phase(asking, "train", {site: {**sends[site], **extra} for site, extra in parcels.items()},
           lambda site, sums: gathering.masked(site, _numbers(site, sums)))  # fmt: skip
    survivors = gathering.survivors()
    alive = {"survivors": as_tensor(json.dumps(survivors).encode())}
    _phase(asking, "unmask", dict.fromkeys(survivors, alive),
           lambda site, sums: gathering.answered(site, _bytes(sums, "shares")))  # fmt: skip
    try:
        sums = gathering.unmasked()
    except BadReply as error:
        raise TooFew(str(error)) from error
    for site in survivors:  # a site that only failed to help unmask is in the sum all the same
        asking.log.missed.pop(site, None)
    replies = [Reply(site, asking.task, asking.turn, asking.attempt, Update(), 1.0) for site in survivors]
    asking.note(replies, sends)
    return masking.form.total(sums, survivors)


def _phase(asking: Asking, task: str, sends: Mapping[SiteId, Vectors], take: Callable[[SiteId, Vectors], None]) -> None:
    for site, sums in _answers(asking, task, sends):
        try:
            take(site, sums)
        except BadReply as error:
            asking.log.missed[site] = f"quarantined: {error}"


def _answers(asking: Asking, task: str, sends: Mapping[SiteId, Vectors]) -> Iterator[tuple[SiteId, Vectors]]:
    for reply in asking.exchanged(task, sends):
        yield reply.site, reply.update.sum


def as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _bytes(sums: Vectors, key: str) -> bytes:
    found = sums.get(key)
    if found is None or found.dtype != torch.uint8:
        raise BadReply(f"a part of the secure sum, {key!r}, is missing; is the site of the same version?")
    return found.numpy().tobytes()


def _numbers(site: SiteId, sums: Vectors) -> list[np.ndarray]:
    ring, exact = sums.get("ring"), sums.get("exact")
    if ring is None or exact is None or ring.dtype != torch.int32 or exact.dtype != torch.int64:
        raise BadReply(f"{site}: sent no masked numbers; is it of the same version?")
    return [ring.numpy().view(np.uint32), exact.numpy().view(np.uint64)]
