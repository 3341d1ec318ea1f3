"""From a study's `[privacy]` to what enforces it: terms for the trainer, a desk for every site, noise, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from pipeline.aggregation.rules import Combine
from pipeline.aggregation.secure_aggregation import Form, Masking
from pipeline.protocol.messages import SiteId
from pipeline.study.privacy import AtCoordinator, AtSite
from pipeline.strategies.dry_run import Turn
from pipeline.aggregation.client_sampling import how_many, select
from pipeline.study.schema import Study
from privacy.ledger import keys
from privacy.accounting.accountant import Event, account, noise_for
from privacy.ledger.records import Budget, Commit, Data
from privacy.ledger.countersigner import Countersigner
from privacy.secure_aggregation.protocol import threshold
from pipeline.aggregation.client_level_dp import SiteNoise
from sites.population.simulated_sites import Population
from sites.privacy.secure_agg_client import Desk
from sites.privacy.budget_guard import Guard
from sites.governance.home import Home
from sites.privacy.plan import Promise, each, promise, steps_of, unit_of, units_in
from sites.training.base import Bench, Recipe, Trainer
from sites.training.select_trainer import Kind, make_trainer
from sites.training.unit_clipping import Mode, way_for

UNLIMITED = 1e6  # epsilon of a simulated site for which the study names none: only counted


@dataclass(frozen=True)
class Protection:
    people: Population  # without those who withdrew
    promises: Mapping[SiteId, Promise] = field(default_factory=dict)
    desks: Mapping[SiteId, Desk] = field(default_factory=dict)
    masking: Masking | None = None
    combine: Combine | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # for privacy.json

    def told(self) -> dict[str, Any]:
        """Epsilon spent at each site so far, over all studies on its data."""
        if not self.promises:
            return {}
        spent = {site: desk.home.ledger.spent_events() for site, desk in self.desks.items()}
        return {"epsilon": {site: charges[-1].epsilon if charges else 0.0 for site, charges in spent.items()}}

    def trainer(self, kind: Kind, bench: Bench, study: Study) -> Trainer:
        terms = {site: made.terms for site, made in self.promises.items()}
        return make_trainer(kind, bench, terms, mode_of(study, bench, self.promises))


def promises_of(study: Study, people: Population, turns: Sequence[Turn], recipe: Recipe) -> dict[SiteId, Promise]:
    asked = study.privacy.at_site
    if asked is None:
        return {}
    return {site: promise_for(study, asked, people, site, people.sites, turns, recipe) for site in people.sites}


def promise_for(
    study: Study,
    asked: AtSite,
    people: Population,
    site: SiteId,
    sites: Sequence[SiteId],
    turns: Sequence[Turn],
    recipe: Recipe,
) -> Promise:
    """`sites`: all of the study, of which `people` may be this one alone."""
    unit = unit_of(asked, people.unit)
    examples = people.examples[site]
    n, units = examples.n, units_in(examples.train, None if unit == "example" else people.pool.unit)
    invited = times_asked(study, sites, site)
    taken = min(asked.participations or invited, invited)
    steps, batch = steps_of(turns, examples, recipe), min(recipe.batch or n, n)
    return promise(asked, each(asked.epsilon, sites)[site], unit, units, n, batch, steps, taken)


def protect(
    study: Study, people: Population, turns: Sequence[Turn], recipe: Recipe, run: Path | None, homes: Path | None
) -> Protection:
    """`homes`: where simulated sites live between runs; in the run's folder, new, if not given. Without a run, promises
    are only worked out."""
    if run is None:
        promises = promises_of(study, people, turns, recipe)
        return Protection(people, promises, about=about_privacy(study, people.sites, promises, None))
    own = _homes(study, people, homes or run / "homes")
    people = without_withdrawn(people, own)
    for site, home in own.items():
        note_data(home, people, site)
    promises = {
        site: as_committed(made, own[site], study.hash)
        for site, made in promises_of(study, people, turns, recipe).items()
    }
    roster = {site: keys.public_bytes(home.key) for site, home in own.items()}
    masking = masking_of(study, roster, turns, study.hash)
    key, signer = countersigner_in(run / "coordinator" if homes is None else homes / ".coordinator")
    desks = {}
    for site, home in own.items():
        made = promises.get(site)
        guard = None if made is None else Guard(home, made, study.name, study.hash, signer.countersign, key)
        desks[site] = Desk(site, home, guard, masking, study.weighting)
    about = about_privacy(study, people.sites, promises, masking)
    return Protection(people, promises, desks, masking, site_noise(study, about), about)


def as_committed(made: Promise, home: Home, plan: str) -> Promise:
    """A plan that has begun goes on as it began, whoever withdrew since."""
    begun, data = None, None
    for entry in home.ledger.entries():
        if isinstance(entry.what, Data):
            data = entry.what
        if isinstance(entry.what, Commit) and entry.what.plan == plan:
            begun = entry.what
            break
    if begun is None or data is None:
        return made
    terms = replace(
        made.terms, noise=begun.noise, rate=begun.rate, units=data.units, scale=data.units / max(data.examples, 1)
    )
    return replace(made, terms=terms, steps=begun.steps_per_turn, turns=begun.turns)


def masking_of(study: Study, roster: Mapping[SiteId, bytes], turns: Sequence[Turn], identity: str) -> Masking | None:
    """`roster`: public keys of all sites of the study; `identity`: what sums are bound to, so that none is made twice."""
    settings = study.privacy.secure_sum
    if settings is None:
        return None
    if study.privacy.at_coordinator is not None:
        settings = settings.model_copy(update={"clip": study.privacy.at_coordinator.clip})
    update = turns[-1].update
    if study.privacy.at_site is not None:  # a training loss is no mechanism's: it stays at the site
        update = replace(update, sum={k: v for k, v in update.sum.items() if k != "train_loss"})
    asked = how_many(len(roster), study.selection.fraction)
    return Masking(Form.of(update, asked, settings), roster, identity, threshold(asked))


def without_withdrawn(people: Population, homes: Mapping[SiteId, Home]) -> Population:
    """Nobody who withdrew is trained on, or judged on, any more."""
    unit = people.pool.unit
    if unit is None or not any(home.forgotten for home in homes.values()):
        return people
    examples = dict(people.examples)
    for site, home in homes.items():
        left = torch.tensor(home.remaining(people.unit_names), device=unit.device)
        mine = examples[site]
        train, val, test = (rows[left[unit[rows]]] for rows in (mine.train, mine.val, mine.test))
        examples[site] = replace(mine, train=train, val=val, test=test)
    return replace(people, examples=examples)


def _homes(study: Study, people: Population, where: Path) -> dict[SiteId, Home]:
    asked = study.privacy.at_site
    unit = unit_of(asked, people.unit) if asked else people.unit or "example"
    wanted = dict.fromkeys(people.sites, None) if asked is None else each(asked.budget or asked.epsilon, people.sites)
    found = {}
    for site in people.sites:
        path = where / quote(site, safe="")
        if (path / "ledger.jsonl").is_file():
            found[site] = Home.open(path)
        else:
            budget = Budget(epsilon=wanted[site] or UNLIMITED, delta=asked.delta if asked else 1e-5)
            found[site] = Home.create(path, site, f"{site}:{study.data.name}", unit, budget)
    return found


def note_data(home: Home, people: Population, site: SiteId) -> None:
    """What the data set is made of now, if that is news."""
    codes = None if home.ledger.standing.opening.unit == "example" else people.pool.unit
    train = people.examples[site].train
    now = Data(fingerprint=people.fingerprint, units=units_in(train, codes), examples=len(train))
    seen = [entry.what for entry in home.ledger.entries("data")]
    if not seen or seen[-1] != now:
        home.ledger.append(now)


def countersigner_in(folder: Path) -> tuple[str, Countersigner]:
    """One coordinator, with its public key, for all runs that share the sites' homes."""
    path = folder / "key.pem"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        keys.save(keys.generate(), path)
    key = keys.load(path)
    return keys.public_hex(key), Countersigner(folder / "receipts", key)


def about_privacy(
    study: Study, sites: Sequence[SiteId], promises: Mapping[SiteId, Promise], masking: Masking | None
) -> dict[str, Any]:
    """privacy.json: what was promised before anything was trained."""
    told: dict[str, Any] = {"at_site": {site: made.dump() for site, made in promises.items()}}
    if study.privacy.at_coordinator is not None:
        told["at_coordinator"] = _at_coordinator(study, study.privacy.at_coordinator, sites, masking)
    if masking is not None:
        form = masking.form
        many = how_many(len(sites), study.selection.fraction)
        told["secure_sum"] = {"asked": many, "threshold": threshold(many), "clip": form.settings.clip,
                              "bits": form.grid.bits, "step": form.grid.step,
                              "fingerprints": {s: keys.fingerprint(k) for s, k in masking.roster.items()}}  # fmt: skip
    return told


def _at_coordinator(
    study: Study, asked: AtCoordinator, sites: Sequence[SiteId], masking: Masking | None
) -> dict[str, Any]:
    turns = max(times_asked(study, sites, site) for site in sites)
    noise = asked.noise or noise_for(asked.epsilon or 0.0, asked.delta, 1.0, turns)
    spent = account([Event(noise, 1.0, turns)], asked.delta)
    many = how_many(len(sites), study.selection.fraction)
    longest = asked.clip if masking is None else masking.form.grid.longest
    return {"noise": noise, "clip": asked.clip, "longest": longest, "delta": asked.delta, "epsilon": spent.epsilon,
            "accountant": spent.how, "turns": turns, "sites": len(sites), "asked": many}  # fmt: skip


def site_noise(study: Study, about: Mapping[str, Any]) -> Combine | None:
    made = about.get("at_coordinator")
    return made and SiteNoise(clip=made["clip"], noise=made["noise"], longest=made["longest"], asked=made["asked"])


def times_asked(study: Study, sites: Sequence[SiteId], site: SiteId) -> int:
    """Known beforehand: who is asked when follows from the study's seed. At least 1, for a plan of no steps is none."""
    turns = range(1, study.rounds + 1)
    return max(1, sum(site in select(sites, study.selection.fraction, study.seed, turn) for turn in turns))


def mode_of(study: Study, bench: Bench, promises: Mapping[SiteId, Promise]) -> Mode:
    asked = study.privacy.at_site
    if asked is not None and asked.mode != "auto":
        return asked.mode
    examples = sum(made.examples for made in promises.values())
    units = sum(made.terms.units for made in promises.values())
    return way_for(bench.make(), examples / max(units, 1))
