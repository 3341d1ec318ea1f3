"""One machine plays all hospitals: a study -> data, trainer, engine and coordinator -> a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch

from models.networks.base import Model
from pipeline.study.run_spec import Blueprint, model_header
from pipeline.coordinator.round_loop import Coordinator, Progress
from pipeline.engines.simulated import InProcess, Profile
from pipeline.core.errors import BadRun, HemofedError
from pipeline.core.files import alone_in
from pipeline.coordinator.bootstrap import DRAWS, FEWEST, LEVEL, Answers, drawn, intervals
from pipeline.coordinator.metrics import Focus
from pipeline.study.validation import check
from pipeline.strategies.dry_run import Turn
from pipeline.reports.run.contact_sheets import write_cells
from pipeline.coordinator.results import write_results
from pipeline.coordinator.run_folder import RunFolder
from pipeline.study.schema import Study
from pipeline.core.parameters import Snapshot
from pipeline.protocol.tasks import Job, Result
from sites.population.simulated_sites import COORDINATOR, Population, populate
from sites.training.base import Bench, Recipe, Ticket
from sites.training.select_trainer import Kind, bench_of, choose, device_of, make_trainer, recipe_of, threads_for
from sites.training.evaluation import bins_of, logits_of

if TYPE_CHECKING:
    from pipeline.runs.privacy_setup import Protection

Watch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Simulation:
    coordinator: Coordinator
    engine: InProcess
    population: Population
    bench: Bench
    model: Model
    shield: Protection | None = None


def assemble(
    study: Study,
    folder: RunFolder,
    root: Path | None,
    machine: dict[str, Any] | None,
    watch: Watch,
    people: Population | None = None,
    homes: Path | None = None,
    dry: bool = False,
) -> Simulation:
    """`machine`: what a checkpoint says of the trainer and the threads it was made with; `people`: if already made;
    `homes`: where simulated sites keep their ledgers, if not in the run's folder; `dry`: nothing is written."""
    device = device_of(study)
    people = people or populate(study, root, device)
    drawn_up = Blueprint(study, people.shape, people.classes, len(people.sites))
    recipe = recipe_of(study, drawn_up.lr)
    check(study, drawn_up.spec, people, drawn_up.turns)
    shield = _shield(study, people, drawn_up.turns, recipe, None if dry else folder.path, homes)
    people = shield.people if shield else people
    bench = bench_of(drawn_up, people, recipe)
    threads = machine["threads"] if machine else threads_for(study.threads, bench)
    torch.set_num_threads(threads)
    kind: Kind = (
        machine["trainer"] if machine else choose(study.trainer, bench, threads, bool(shield and shield.promises))
    )
    trainer = shield.trainer(kind, bench, study) if shield else make_trainer(kind, bench)
    plan, wire = drawn_up.plan, drawn_up.wire
    engine = InProcess(people.sites, trainer, study.strategy, plan, study.weighting, _profile(study, people), wire)
    if shield:
        engine.desks = shield.desks

    def run_here(jobs: Sequence[Job], turn: int) -> list[Result]:
        return trainer.run([Ticket(COORDINATOR, turn, nth, job) for nth, job in enumerate(jobs)])

    now = {"trainer": kind, "threads": threads, "device": device.type, "torch": torch.__version__}
    for part, was in (machine or {}).items():
        if now[part] != was:
            raise BadRun(
                f"{folder.path} was begun with {part} {was}, here it is {now[part]}: it could not go on bit for bit"
            )
    focus = _focus(study, people)
    combine, masking = (shield.combine, shield.masking) if shield else (None, None)
    coordinator = Coordinator(
        study,
        plan,
        people.sites,
        engine,
        run_here,
        folder,
        focus,
        now,
        wire,
        combine,
        masking,
        watch,
        told=shield.told if shield else dict,
    )
    return Simulation(coordinator, engine, people, bench, study.model, shield)


def _shield(
    study: Study,
    people: Population,
    turns: Sequence[Turn],
    recipe: Recipe,
    run: Path | None,
    homes: Path | None,
) -> Protection | None:
    if not turns:
        return None
    from pipeline.runs.privacy_setup import protect  # opacus and cryptography are an extra

    return protect(study, people, turns, recipe, run, homes)


def run(
    study: Study,
    folder: RunFolder,
    root: Path | None = None,
    watch: Watch = lambda record: None,
    aside: bool = False,
    homes: Path | None = None,
) -> dict[str, Any]:
    """From the start, or from the folder's last checkpoint; returns what results.json holds.

    `aside`: a yardstick in the user's cache: it waits for another process that computes it, and holds no images.
    `homes`: where simulated sites live on between runs, with what they have spent.
    """
    with alone_in(folder.path, wait=aside):
        return _run(study, folder, root, watch, not aside, _homes(folder, homes))


def _homes(folder: RunFolder, given: Path | None) -> Path | None:
    """Where the run was begun with, so that a resumed run finds its sites again."""
    file = folder.path / "homes.json"
    if file.exists():
        return Path(folder.read_json("homes.json"))
    if given is not None:
        folder.write_json("homes.json", str(given.resolve()))
    return given and given.resolve()


def _run(
    study: Study, folder: RunFolder, root: Path | None, watch: Watch, sheets: bool, homes: Path | None
) -> dict[str, Any]:
    if folder.finished:
        results: dict[str, Any] = folder.read_json("results.json")
        return results
    if folder.begun:
        header, tensors = folder.load_checkpoint()
        if header["study"] != study.hash:
            raise BadRun(f"{folder.path} was made by another study or version; start it anew with `hemofed run`")
        sim = assemble(study, folder, root, header["machine"], watch, homes=homes)
        _same_data(folder, sim.population)
        progress = sim.coordinator.restore(header, tensors)
        folder.cut_back(progress.round)
    else:
        sim = assemble(study, folder, root, None, watch, homes=homes)
        folder.cut_back(-1)
        folder.write_json("sites.json", _sites(sim.population))
        if sim.shield:
            folder.write_json("privacy.json", sim.shield.about)
        if sheets:
            write_cells(folder.path, sim.population, study.evaluation.positive)
        progress = sim.coordinator.start(sim.bench.spec.read(sim.bench.make()))
    progress, why = sim.coordinator.run(progress)
    _check_trained(folder)
    state = sim.coordinator.result(progress)[0]
    _keep_own(sim, study, state, progress, folder)
    sure = _intervals(sim, study, state)
    shape, classes = sim.population.shape, sim.population.classes
    return write_results(sim.coordinator, folder, progress, why, shape, classes, sure, profile=sheets)


def _keep_own(sim: Simulation, study: Study, state: Any, progress: Progress, folder: RunFolder) -> None:
    """A model a site, where sites have their own. In a hospital it would be stored there."""
    if not (study.strategy.personalised or study.strategy.remembers):
        return
    sim.coordinator.keep(state, progress)
    header = model_header(study, sim.population.shape, sim.population.classes, sim.coordinator.result(progress)[1])
    for site, memory in sim.engine.memories.items():
        own = Snapshot(memory.kept["weights"], memory.kept["stats"])
        folder.save_model(f"site/{quote(site, safe='')}", own, header)


def _intervals(sim: Simulation, study: Study, state: Any) -> dict[str, Any] | None:
    """Of the global model at the sites' test examples, or at the coordinator's."""
    model = study.strategy.models(state).get("global")
    people, pool = sim.population, sim.population.pool
    who = (COORDINATOR,) if study.evaluation.where == "coordinator" else people.sites
    rows = torch.cat([people.examples[w].test for w in who])
    if model is None or not len(rows):
        return None
    module = sim.bench.make().to(pool.device)
    sim.bench.spec.write(module, model)
    logits = logits_of(module, pool, rows)
    unit = np.arange(len(rows)) if pool.unit is None else pool.unit[rows].cpu().numpy()
    told = Answers(bins_of(logits).numpy(), logits.argmax(1).numpy(), pool.labels(rows).cpu().numpy(), unit)
    site = np.repeat(np.arange(len(who)), [len(people.examples[w].test) for w in who])
    focus = sim.coordinator.focus
    whole = intervals(told, focus, study.seed)
    each = {w: intervals(told.where(site == n), focus, study.seed) for n, w in enumerate(who)}
    leads = "accuracy" if focus.positive is None else "positive_auroc"
    paired = [round(float(v), 5) for v in drawn(told, focus, study.seed).get(leads, ())]
    about = {"unit": people.unit or "example", "units": len(np.unique(unit)), "fewest": FEWEST, "draws": DRAWS,
             "level": LEVEL, "paired": {"metric": leads, "values": paired} if np.isfinite(paired).all() else None}  # fmt: skip
    if study.evaluation.where == "coordinator":
        return about | {"coordinator": whole}
    return about | {"pooled": whole, "sites": each}


def _check_trained(folder: RunFolder) -> None:
    """A run in which no round ever counted has no result; its folder stays to be looked at."""
    trained = folder.rounds()[1:]
    if trained and all(record["void"] for record in trained):
        last = trained[-1]
        reasons = "; ".join(f"{site}: {reason}" for site, reason in list(last["missed"].items())[:3])
        raise HemofedError(f"no round counted, so there is no result ({last['void']}). In the last round: {reasons}")


def look(study: Study, root: Path | None) -> Simulation:
    """Everything short of running: data read, model built, refusals made."""
    return assemble(study, RunFolder(Path()), root, None, lambda record: None, dry=True)


def _focus(study: Study, people: Population) -> Focus:
    positive = study.evaluation.positive
    return Focus(None if positive is None else people.classes.index(positive), study.evaluation.specificity)


def _profile(study: Study, people: Population) -> Profile:
    def spread(value: float | tuple[float, ...]) -> dict[str, float]:
        values = value if isinstance(value, tuple) else (value,) * len(people.sites)
        return dict(zip(people.sites, values, strict=True))

    return Profile(spread(study.sites.speed), spread(study.sites.dropout), study.sites.stragglers, study.seed)


def _sites(people: Population) -> dict[str, Any]:
    return {
        "classes": people.classes,
        "shape": people.shape,
        "sites": {site: people.counts(site) for site in people.sites},
        "coordinator": people.counts(COORDINATOR),
        "fingerprint": people.fingerprint,
        "skipped": people.skipped,
    }


def _same_data(folder: RunFolder, people: Population) -> None:
    before = folder.read_json("sites.json")["fingerprint"]
    if before != people.fingerprint:
        raise BadRun(
            f"{folder.path} was begun with other data (fingerprint {before[:12]}, now {people.fingerprint[:12]})"
        )
