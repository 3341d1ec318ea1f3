"""What a study promises, before it is run: lines for `hemofed study check` and `hemofed run`."""

from __future__ import annotations

import math

from pipeline.protection import Privacy
from pipeline.simulate import Simulation
from pipeline.study import Study
from pipeline.work import Fit

DROWNED = 3.0  # times the longest gradient; noise beyond it needs many steps to average out


def promise_lines(sim: Simulation) -> list[str]:
    study, shield = sim.coordinator.study, sim.shield
    if shield is None:
        return []
    lines = []
    for site, made in shield.promises.items():
        t = made.terms
        lines.append(
            f"{site}: epsilon {made.epsilon:.4g} at delta {made.delta:g} for each of {t.units} {t.unit}s "
            f"({made.examples:,} examples), after {made.turns} turns of {made.steps} steps; noise {t.noise:.3g}, rate {t.rate:.3g}"
        )
    return lines + [f"careful: {words}" for words in _doubts(sim)] + few_sites(study, len(sim.population.sites))


def _doubts(sim: Simulation) -> list[str]:
    """Where noise would drown what is learnt."""
    assert sim.shield is not None
    bench = sim.bench
    moving = sum(bench.spec.sizes[place] for place in bench.moving(Fit(bench.spec.read(bench.make()).weights)))
    lengths = {
        site: made.terms.noise / (made.terms.rate * made.terms.units) * math.sqrt(moving)
        for site, made in sim.shield.promises.items()
    }
    worst = max(lengths, key=lambda site: lengths[site], default=None)
    if worst is None or lengths[worst] <= DROWNED:
        return []
    return [
        (
            f"at {worst} a step's noise is {lengths[worst]:.0f} times as long as the mean gradient can be, over {moving:,} "
            "parameters; larger batches, fewer steps and fewer trained parameters (local.trains) help: docs/epsilon.md"
        )
    ]


def few_sites(study: Study, sites: int) -> list[str]:
    if study.privacy == Privacy() or study.privacy.at_coordinator is None:
        return []
    from privacy.site_dp import FEW

    if sites >= FEW:
        return []
    return [
        (
            f"careful: privacy.at_coordinator with {sites} sites: below {FEW} the noise of a useful epsilon drowns the mean; "
            "and it protects nobody from the coordinator itself"
        )
    ]
