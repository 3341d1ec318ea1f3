"""What does not go with a study's `[privacy]`, each with its cure. Said when the study is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.aggregation.client_sampling import how_many
from pipeline.core.parameters import Spec
from pipeline.protocol.tasks import Evaluate, Fit, Gradient
from pipeline.strategies.dry_run import Turn
from pipeline.study.privacy import AtSite
from pipeline.study.schema import Study
from sites.population.simulated_sites import Population

FEWEST_MASKED = 3  # with two, each knows the other's


def of_privacy(study: Study, spec: Spec, people: Population, turns: Sequence[Turn], sites: int) -> Iterator[str]:
    """`sites`: of the study, of which `people` may be one."""
    privacy = study.privacy
    if privacy.at_site is not None:
        yield from _at_site(study, privacy.at_site, spec, people, sites)
        yield from _jobs(study.strategy.name, turns)
    if privacy.at_coordinator is not None:
        yield from _at_coordinator(study, spec, turns)
    if privacy.secure_sum is not None:
        yield from _secure_sum(study, how_many(sites, study.selection.fraction))


def _at_site(study: Study, asked: AtSite, spec: Spec, people: Population, sites: int) -> Iterator[str]:
    local = study.local
    if study.strategy.pools:
        yield f"{study.strategy.name} trains in one place, where there is no site to protect anybody; use a federated strategy"
    if spec.stat_size:
        yield "BatchNorm mixes the examples of a batch, so no patient's part can be clipped, and its statistics would leave the site; set model.norm = 'group'"
    if study.trainer == "stacked":
        yield "trainer = 'stacked' has no privacy mechanism; use 'auto'"
    if local.balance == "sample":
        yield "local.balance = 'sample' draws by the site's own classes, where privacy draws patients alike; use 'root' with public.data, or 'none'"
    elif local.balance != "none" and not len(people.public):
        yield f"local.balance = {local.balance!r} would weigh by how many the site has of each class, which tells of its patients; give public.data, from which the weights are then taken, or use 'none'"
    if study.normalise.name not in ("none", "image"):
        yield f"normalise = {study.normalise.name!r} measures all of a site's images together, so that one patient changes everybody's; use 'image' or 'none'"
    if "train" in study.evaluation.watch and study.evaluation.where != "coordinator":
        yield "evaluation.watch = 'train' would send scores of the very patients who are protected; watch 'val'"
    yield from _unit(asked, people)
    for key in ("epsilon", "budget"):
        given = getattr(asked, key)
        if isinstance(given, tuple) and len(given) != sites:
            yield f"privacy.at_site.{key} has {len(given)} values for {sites} sites; give one each, or one for all"


def _unit(asked: AtSite, people: Population) -> Iterator[str]:
    if asked.unit == "example":
        return
    if people.unit is None:
        yield "these data do not say whose each example is; give them a patient, slide or group (docs/data.md), or ask for privacy.at_site.unit = 'example', which protects single images, not patients"
        return
    if asked.unit not in ("auto", people.unit):
        yield f"privacy.at_site.unit = {asked.unit!r}, but these data have {people.unit!r}; use 'auto', or 'example' for single images"
    if any(people.examples[site].epoch is not None for site in people.sites):
        yield "a partition that draws each epoch afresh gives every site everybody's examples; use 'iid', 'quantity' or 'key'"
    shared = _at_several(people)
    if shared:
        yield f"{shared} of the {people.unit}s have training examples at more than one site, each of which would spend on them; use partition 'key', 'iid' or 'quantity', which keep a {people.unit} whole"


def _at_several(people: Population) -> int:
    """Units that more than one site trains on."""
    assert people.pool.unit is not None
    seen: dict[int, int] = {}
    for site in people.sites:
        for unit in people.pool.unit[people.examples[site].train].unique().tolist():
            seen[unit] = seen.get(unit, 0) + 1
    return sum(count > 1 for count in seen.values())


def _jobs(name: str, turns: Sequence[Turn]) -> Iterator[str]:
    jobs = [job for turn in turns for job in turn.jobs]
    if any(isinstance(job, Fit) and job.gamma is not None for job in jobs):
        yield f"{name}.gamma looks at the whole local gradient after every epoch, without noise; leave strategy.gamma out"
    if any(isinstance(job, Fit) and job.ahead for job in jobs):
        yield f"{name} takes a gradient at a point that other patients' gradients led to, which has no privacy mechanism; use fedavg with finetune, or ditto"
    if any(isinstance(job, Gradient) for job in jobs):
        yield f"{name} sends whole gradients, which have no privacy mechanism here; use fedavg with local.steps = 1"
    if any(isinstance(job, Evaluate) for job in jobs):
        yield f"{name} decides by losses on the patients' examples, which nothing protects; use a strategy that only trains, such as fedavg, fedprox or ditto"


def _at_coordinator(study: Study, spec: Spec, turns: Sequence[Turn]) -> Iterator[str]:
    name = study.strategy.name
    if study.strategy.sees != "totals":
        yield f"privacy.at_coordinator noises one sum, and {name} looks at {study.strategy.sees}; use a strategy that sees totals"
    extra = {key for turn in turns for key in (*turn.update.mean, *turn.update.sum)} - {"delta", "stats", "train_loss"}
    if extra:
        yield f"{name} also sends {', '.join(sorted(extra))}, for which privacy.at_coordinator has no noise; use fedavg, fedprox or fedopt"
    if spec.stat_size:
        yield "BatchNorm's statistics would leave the coordinator without noise; set model.norm = 'group'"
    if study.weighting != "equal":
        yield "privacy.at_coordinator lets all sites count alike; set weighting = 'equal'"
    if study.combine.name != "mean":
        yield f"combine = {study.combine.name!r} and privacy.at_coordinator both decide how updates are added up; use combine = 'mean'"
    if study.waiting.late == "keep":
        yield "with waiting.late = 'keep' a site could be twice in one sum; privacy.at_coordinator needs 'drop'"


def _secure_sum(study: Study, asked: int) -> Iterator[str]:
    name, strategy = study.strategy.name, study.strategy
    if strategy.sees != "totals":
        told = "a group of one site is that site's update" if strategy.sees == "groups" else "single updates"
        yield f"{name} has to see {strategy.sees} ({told}), which a secure sum hides; use a strategy that sees totals, or leave privacy.secure_sum out"
    if study.combine.sees != "totals":
        yield f"combine = {study.combine.name!r} compares single updates, which a secure sum hides; use combine = 'mean'"
    if study.up:
        yield "a secure sum sends whole numbers on a ring, to which no other codec can be added; set codec.up = []"
    if study.waiting.late == "keep":
        yield "an answer to an earlier turn carries that turn's masks; privacy.secure_sum needs waiting.late = 'drop'"
    if study.weighting == "inverse":
        yield "privacy.secure_sum knows the weightings 'examples' and 'equal'"
    if asked < FEWEST_MASKED:
        yield f"a secure sum of {asked} sites hides nothing from the others; ask at least {FEWEST_MASKED} a round"
