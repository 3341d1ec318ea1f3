"""Parts of a study that do not go together: said when it is read, all at once, not at round 17."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeline.aggregation.client_sampling import how_many
from pipeline.codecs.base import ANY
from pipeline.core.errors import Refused
from pipeline.core.parameters import Spec
from pipeline.strategies.dry_run import Turn
from pipeline.study.schema import Study
from pipeline.study.validation_privacy import of_privacy
from sites.data.base import SPLITS
from sites.population.simulated_sites import Population


def check(study: Study, spec: Spec, people: Population, turns: Sequence[Turn] = (), among: int | None = None) -> None:
    """`turns`: rehearsed, where the study protects anything; `among`: how many sites there are, if `people` is one."""
    sites = among or len(people.sites)
    found = [
        *_of_evaluation(study, people, among is not None),
        *_of_training(study, spec, people),
        *_of_travel(study, how_many(sites, study.selection.fraction)),
        *study.strategy.objections(study.local, spec),
        *(of_privacy(study, spec, people, turns, sites) if turns else ()),
    ]
    if found:
        raise Refused("\n".join(found))


def _of_travel(study: Study, asked: int) -> Iterator[str]:
    for way, chain in (("up", study.up), ("down", study.codec.down)):
        for before, after in pairwise(chain):
            if before.left(1000, ANY) is None:
                yield f"codec.{way}: {after.name} stands behind {before.name}, which leaves it nothing; swap or drop one"
    for codec in study.codec.down:
        if not codec.downward:
            yield f"codec.down = {codec.name!r} would send models with most of it missing; use qsgd or fp16 for the way down"
    if study.combine.sees == "each" and study.strategy.own_sums:
        yield f"{study.strategy.name} adds up more than the update, which combine = {study.combine.name!r} does not guard; use 'mean'"
    if study.combine.fewest > asked:
        yield f"combine = {study.combine.name!r} needs {study.combine.fewest} answers, but {asked} sites are asked a round; lower combine.bad, or use 'median'"
    if study.combine.fewest > 1 and study.strategy.sees != "totals":
        yield f"combine = {study.combine.name!r} needs {study.combine.fewest} answers at once, and {study.strategy.name} combines some of them at a time; use 'median'"
    if study.strategy.probes and not (study.public.share or study.public.data):
        yield f"{study.strategy.name} compares networks on public examples; set public.share or public.data"


def _of_evaluation(study: Study, people: Population, alone: bool) -> Iterator[str]:
    """`alone`: one site of several, which need not have everything."""
    evaluation, classes = study.evaluation, ", ".join(people.classes)
    if evaluation.where == "coordinator" and study.strategy.personalised:
        yield f"{study.strategy.name} gives every site a model of its own, which only the site can judge; set evaluation.where to 'sites' or 'both'"
    if evaluation.patience is not None and "val" not in evaluation.watch:
        yield "evaluation.patience looks at val; put it into evaluation.watch"
    if evaluation.patience is not None and not alone and not any(len(e.val) for e in people.examples.values()):
        yield "evaluation.patience needs validation examples; set data.val > 0"
    if evaluation.target is not None and not evaluation.watch:
        yield "evaluation.target needs a split in evaluation.watch"
    if evaluation.best.startswith("positive_") and evaluation.positive is None:
        yield f"evaluation.best = {evaluation.best!r} needs evaluation.positive; classes: {classes}"
    if evaluation.positive is not None and evaluation.positive not in people.classes:
        yield f"evaluation.positive = {evaluation.positive!r} is no class; classes: {classes}"
    elif evaluation.positive is not None and not alone:
        which = people.classes.index(evaluation.positive)
        held = {split: sum(people.counts(site)[split][which] for site in people.sites) for split in SPLITS}
        if lacking := [split for split, count in held.items() if not count and _any(people, split)]:
            yield f"there is no {evaluation.positive} in {' and '.join(lacking)}, so it cannot be learnt or judged; choose other data, splits or evaluation.positive"


def _any(people: Population, split: str) -> bool:
    return any(len(getattr(people.examples[site], split)) for site in people.sites)


def _of_training(study: Study, spec: Spec, people: Population) -> Iterator[str]:
    local, waiting = study.local, study.waiting
    if study.augment != type(study.augment)() and len(people.shape) != 3:
        yield f"augment changes images, not data of shape {people.shape}; leave [augment] out"
    if study.strategy.whole and (study.augment != type(study.augment)() or local.balance == "sample"):
        yield f"{study.strategy.name} takes whole gradients, so there is no batch to draw or augment; leave out [augment] and local.balance = 'sample'"
    if study.public.warmup_epochs and not (study.public.share or study.public.data):
        yield "public.warmup_epochs needs public.share > 0 or public.data: there is nothing to warm up on"
    if study.public.share and study.public.data:
        yield "public.share and public.data are two sources of public examples; give one of them"
    if waiting.late == "keep" and (study.wait.partial == "keep" or waiting.deadline is None):
        yield "waiting.late = 'keep' needs a deadline and waiting.partial = 'drop': else nobody is late"
    if spec.stat_size and local.batch != "all":
        alone = [site for site in people.sites if people.examples[site].n % local.batch == 1]
        if alone:
            yield f"{', '.join(alone)}: the last batch is one example, of which BatchNorm has no spread; change local.batch"
