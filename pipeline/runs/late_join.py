"""A site that joins after training: it finds its group, trains its own part from what the run learnt, and keeps its model.

The common models stay as they are, and nothing that the new site computes is averaged into them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from pipeline.study.run_spec import model_header
from pipeline.coordinator.checkpoint import save_tensors
from pipeline.core.errors import BadData, BadRun, BadStudy
from pipeline.protocol.messages import Identity, SiteId, Wait
from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import Simulation, assemble, run
from pipeline.strategies.local_only import Local
from pipeline.study.schema import Study, load_study
from pipeline.protocol.tasks import Evaluate, Evaluated
from sites.population.simulated_sites import COORDINATOR, Population, populate
from sites.training.base import Ticket


@dataclass(frozen=True)
class Newcomer:
    name: SiteId
    data: Path | None
    sets: Mapping[str, Any]
    turns: int  # of local training


def join(folder: RunFolder, newcomer: Newcomer) -> dict[str, Any]:
    """What came of it, as joined/NAME/results.json in the run's folder has it; the model lies beside it."""
    if not folder.finished:
        raise BadRun(f"{folder.path} is not finished; continue it with `hemofed run --resume {folder.path}`")
    study = _study(folder, newcomer)
    if study.strategy.pools:
        raise BadStudy(f"{study.strategy.name} knows no sites that could join; use a federated run")
    people = _alone(populate(study, newcomer.data, torch.device("cpu")), newcomer.name)
    _fits(folder, people)
    was = folder.study()
    if newcomer.data is None and (study.data, study.seed) == (was.data, was.seed):
        raise BadData(
            "these are the run's own examples; say where the new site's lie (--data), or draw others: --set seed=7"
        )
    if not issubclass(was.strategy.state, study.strategy.state):
        raise BadStudy(
            f"a run of {was.strategy.name} cannot be gone on with by {study.strategy.name}: it keeps other things"
        )
    out = folder.path / "joined" / quote(newcomer.name, safe="")
    if out.exists():
        raise BadRun(f"{out} is there already; give the new site another --name, or remove that folder")
    try:
        return _join(folder, study, was, people, newcomer, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # half a site is none, and its name stays free
        raise


def _join(
    folder: RunFolder, study: Study, was: Study, people: Population, newcomer: Newcomer, out: Path
) -> dict[str, Any]:
    sim = assemble(study, RunFolder(out), newcomer.data, None, lambda record: None, people)
    progress = sim.coordinator.saved(*folder.load_checkpoint(), was.strategy.state)
    state, at, _ = sim.coordinator.result(progress)
    state, group = _placed(sim, state, newcomer.name)
    if group is None and not study.strategy.personalised:
        raise BadStudy(
            f"{study.strategy.name} gives sites no model of their own; score the common one with `hemofed evaluate`, or "
            "fine-tune it: --set strategy=finetune"
        )
    counted: dict[SiteId, Identity] = {}
    for turn in range(at + 1, at + 1 + newcomer.turns):
        asking = sim.coordinator.asking("train", replace(progress, round=turn, counted=counted), Wait())
        (reply,) = replace(asking, sees="each").each({newcomer.name: study.strategy.brief(state, newcomer.name)})
        state = study.strategy.welcome(state, reply)
        counted = {newcomer.name: (turn, progress.attempt)}
    there = replace(progress, counted=counted)
    test = sim.coordinator.judge(state, ("test",), there).final(sim.coordinator.focus)
    sim.coordinator.keep(state, there)
    kept = sim.engine.memories[newcomer.name].kept
    save_tensors(out / "models" / "own.safetensors", model_header(study, people.shape, people.classes, at), kept)
    results = {
        "site": newcomer.name,
        "run": str(folder.path),
        "strategy": study.strategy.name,
        "group": group,
        "turns": newcomer.turns,
        "examples": people.counts(newcomer.name),
        "own": test.get("pooled"),
        "global": test.get("views", {}).get("global", {}).get("pooled"),
        "alone": _by_itself(study, newcomer, out),
        "model": str(out / "models" / "own.safetensors"),
    }
    RunFolder(out).write_json("results.json", results)
    return results


def _study(folder: RunFolder, newcomer: Newcomer) -> Study:
    """The run's study with the new site as its only one, at a rate that has not run out."""
    fixed = {"sites": {"count": 1}, "partition": "iid", "public": {}, "local.schedule": "constant", "selection": {},
             "waiting": {}, "evaluation.where": "sites", "codec": {"up": []}, "combine": "mean", "skew": "none",
             "trainer": "auto", "privacy": {}}  # fmt: skip
    return load_study(folder.path / "study.toml", fixed | dict(newcomer.sets))


def _alone(people: Population, name: SiteId) -> Population:
    (was,) = people.sites
    examples = {name: people.examples[was], COORDINATOR: people.examples[COORDINATOR]}
    return replace(people, sites=(name,), examples=examples)


def _fits(folder: RunFolder, people: Population) -> None:
    about = folder.read_json("sites.json")
    if (list(people.classes), list(people.shape)) != (list(about["classes"]), list(about["shape"])):
        raise BadData(
            f"the new site's data have shape {people.shape} and the classes {', '.join(people.classes)}, the run's "
            f"{tuple(about['shape'])} and {', '.join(about['classes'])}; set data.size or data.classes alike"
        )


def _placed(sim: Simulation, state: Any, name: SiteId) -> tuple[Any, str | None]:
    """In the group whose model fits the new site's training examples best."""
    strategy = sim.coordinator.study.strategy
    models = strategy.candidates(state)
    if not models:
        return state, None
    jobs = [Ticket(name, 0, n, Evaluate(m.weights, "train", m.stats)) for n, m in enumerate(models.values())]
    losses = [float(seen.loss) for seen in sim.engine.trainer.run(jobs) if isinstance(seen, Evaluated)]
    group = list(models)[losses.index(min(losses))]
    return strategy.place(state, name, group), group


def _by_itself(study: Study, newcomer: Newcomer, out: Path) -> dict[str, Any] | None:
    """What the site reaches with its own examples alone, in as many rounds as the run had."""
    alone = study.model_copy(update={"strategy": Local(), "name": f"{study.name}-alone"})
    found: dict[str, Any] | None = run(alone, RunFolder.create(out / "alone", alone), newcomer.data)["test"].get(
        "pooled"
    )
    return found
