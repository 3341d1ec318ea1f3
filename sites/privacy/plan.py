"""What a study's `[privacy.at_site]` comes to at each site: noise, sampling rate, steps, and the epsilon they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Fit
from pipeline.strategies.dry_run import Turn
from pipeline.study.privacy import AtSite
from privacy.accounting.accountant import Event, account, noise_for
from sites.training.base import Effort, Examples, Recipe
from sites.training.unit_clipping import Terms


@dataclass(frozen=True)
class Promise:
    """Of one site, before its first step."""

    terms: Terms
    delta: float
    steps: int  # of a turn
    turns: int  # that it is in at most
    epsilon: float  # after all of them
    accountant: str
    examples: int

    def event(self, steps: int) -> Event:
        return Event(self.terms.noise, self.terms.rate, steps)

    def dump(self) -> dict[str, Any]:
        flat = asdict(self)
        return {**flat.pop("terms"), **flat}


def promise(
    asked: AtSite, epsilon: float | None, unit: str, units: int, n: int, batch: int, steps: int, turns: int
) -> Promise:
    """`epsilon`: this site's, where the study says one."""
    rate = min(1.0, batch / n)
    noise = noise_for(epsilon, asked.delta, rate, steps * turns) if epsilon is not None else asked.noise
    assert noise is not None  # the section asks for one of both
    whole = account([Event(noise, rate, steps * turns)], asked.delta)
    terms = Terms(noise, asked.clip, unit, units, rate, units / n)
    return Promise(terms, asked.delta, steps, turns, whole.epsilon, whole.how, n)


def steps_of(turns: Sequence[Turn], examples: Examples, recipe: Recipe) -> int:
    """Private steps of a turn, at most."""
    return max(
        sum(Effort.of(job, examples, recipe).asked for job in turn.jobs if isinstance(job, Fit) and job.data == "train")
        for turn in turns
    )


def unit_of(asked: AtSite, known: str | None) -> str:
    """By name; "auto" is the coarsest key that the data have."""
    return asked.unit if asked.unit != "auto" or known is None else known


def units_in(train: Tensor, unit: Tensor | None) -> int:
    return len(train) if unit is None else len(unit[train].unique())


def each(value: float | tuple[float, ...] | None, sites: Sequence[SiteId]) -> Mapping[SiteId, float | None]:
    """One value for all sites, or one each."""
    values = value if isinstance(value, tuple) else (value,) * len(sites)
    return dict(zip(sites, values, strict=True))
