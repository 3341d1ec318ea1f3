"""One look at all that a site holds, before any study. Nothing is trained, nothing is changed, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.core.errors import MissingData
from pipeline.study.schema import Study
from sites.data.base import Source
from sites.data_check import class_counts, duplicates, file_findings, image_quality, phi
from sites.data_check.class_counts import Census
from sites.data_check.duplicates import Copies, Where
from sites.data_check.examples import Holding, hold
from sites.data_check.file_survey import survey
from sites.data_check.findings import Finding, Level, Tick, count, gravest_first, silent, verdict
from sites.data_check.image_quality import Odd, measure
from sites.data_check.phi import Identity
from sites.data_check.redaction import Mask
from sites.governance.settings import Settings

Remaining = Callable[[Sequence[str]], list[bool]]


@dataclass(frozen=True)
class Check:
    """Names in it are masked; `holding` has the pixels for a page that stays at the site, and names that are not."""

    place: str  # where the data lie; "" if nowhere
    findings: tuple[Finding, ...]
    names: tuple[str, ...]  # of the examples
    skipped: tuple[str, ...]
    files: dict[str, int]
    census: Census | None
    identity: Identity | None
    odd: tuple[Odd, ...] = ()
    copies: Copies | None = None
    near: tuple[tuple[int, int], ...] = ()  # near copies in two splits, or of two units
    holding: Holding | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Level:
        return verdict(self.findings)

    def json(self) -> dict[str, Any]:
        copies = (
            None if self.copies is None or self.holding is None else self.copies.json(self.names, where(self.holding))
        )
        return {
            "verdict": self.verdict,
            "data": self.place,
            "findings": [finding.json() for finding in self.findings],
            "files": self.files,
            "skipped": self.skipped,
            "classes": [] if self.census is None else self.census.classes,
            **({} if self.census is None else self.census.json()),
            "odd": [odd.json(self.names) for odd in self.odd],
            "copies": copies,
            "identity": None if self.identity is None else self.identity.json(),
        }


def check(
    source: Source, study: Study | None, settings: Settings, remaining: Remaining | None = None, tick: Tick = silent
) -> Check:
    """`remaining`: of a home, tells which units did not withdraw."""
    place = source.path or settings.data
    if place is not None and not place.exists():
        raise MissingData(f"{place} does not exist; correct `data` in site.toml, or --data")
    found = None if place is None else survey(place, tick)
    mask = Mask() if found is None else phi.mask_of(found)
    held, refused = hold(source, study, settings, found, tick)
    told = [*file_findings.of_reading(source, held, refused, mask, found)]
    if found is not None:
        told += [*file_findings.of_survey(found, held, mask, source), *phi.findings(found, mask)]
    kinds = {} if found is None else file_findings.count_up(found)
    who = None if found is None else phi.identify(found)
    spot = "" if place is None else mask.path(str(place))
    if held is None:
        return Check(spot, gravest_first(told), (), (), kinds, None, who)
    held, gone = _without_withdrawn(held, remaining)
    names, skipped = tuple(map(mask.path, held.names)), tuple(map(mask.text, held.data.skipped))
    counted = class_counts.count_up(held.data)
    counted = Census(tuple(map(mask.path, counted.classes)), counted.counts, counted.unit, counted.units)
    told += [*gone, *class_counts.findings(counted)]
    if not held.is_images or not len(held.names):
        return Check(spot, gravest_first(told), names, skipped, kinds, counted, who, holding=held)
    measures = measure(held.data.x.numpy(), tick)
    odd = image_quality.odd_ones(measures)
    blank = [one.rows for one in odd if one.kind in ("blank", "black")]
    copies = duplicates.find_copies(measures, np.concatenate([np.zeros(0, np.int64), *blank]), tick)
    told += image_quality.findings(odd, measures, names.__getitem__)
    told += duplicates.findings(copies, where(held), names.__getitem__)
    near = tuple((int(a), int(b)) for a, b in duplicates.harmful(copies, where(held)))
    return Check(spot, gravest_first(told), names, skipped, kinds, counted, who, tuple(odd), copies, near, held)


def where(held: Holding) -> Where:
    return Where(held.data.y.numpy(), held.data.split.numpy(), held.unit)


def _without_withdrawn(held: Holding, remaining: Remaining | None) -> tuple[Holding, list[Finding]]:
    if remaining is None or held.data.unit is None:
        return held, []
    key = held.data.keys[held.data.unit]
    stays = np.array(remaining(key.names), bool)[key.codes.numpy()]
    if stays.all():
        return held, []
    gone = Finding(
        "fine", "counts", f"{count(int((~stays).sum()), 'example')} left out: their {held.data.unit} withdrew"
    )
    return held.rows(np.flatnonzero(stays)), [gone]
