"""Attacks on a finished run, as evidence beside the promise: attacks.json and a picture in its folder.

Membership is asked of the final model. Canaries need a training of their own: one site's turns are rehearsed with them
among its units, by the run's own trainer and terms; its models are thrown away and nothing is charged, so this is for
simulations and public data. Inversion takes one step on one image of each site, which is the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.coordinator.checkpoint import load_tensors
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadRun
from pipeline.core.files import write_atomically
from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Fit, Fitted
from pipeline.runs.simulation import Simulation, look
from privacy.attacks.canaries import Audit, Canaries, Turns, audit, by_gradient, by_loss, make_canaries, together
from privacy.attacks.inversion_figure import exhibit
from privacy.attacks.membership import by_unit, losses, membership
from sites.training.base import Bench, Pool, Ticket, Trainer
from sites.training.sequential import Loop

CANARIES = 200
PER_UNIT = 2
TURNS = 10  # that a rehearsal of an unprotected run takes
SHOWN = 8  # sites whose sum is attacked
STEPS = 600  # of the search for an image
PLAIN = (1.0, 1.0)  # clip and noise of the picture, where the run has none


def attack_run(folder: RunFolder, data: Path | None) -> dict[str, Any]:
    if not folder.finished:
        raise BadRun(f"{folder.path} is not finished; continue it with `hemofed run --resume {folder.path}`")
    if not (folder.path / "models" / "global.safetensors").is_file():
        raise BadRun(f"{folder.path} has no common model that could be attacked; its sites keep their own")
    study = folder.study()
    sim = look(study, data)
    found = {
        "membership": _membership(sim, _final(sim, folder)),
        "canaries": _canaries(sim),
        "inversion": _inversion(sim, folder),
    }
    folder.write_json("attacks.json", found)
    return found


def _final(sim: Simulation, folder: RunFolder) -> nn.Module:
    _, tensors = load_tensors(folder.path / "models" / "global.safetensors")
    module = sim.bench.make()
    sim.bench.spec.write(module, Snapshot(tensors["weights"], tensors["stats"]))
    return module


def _membership(sim: Simulation, module: nn.Module) -> dict[str, Any]:
    people, pool = sim.population, sim.population.pool
    sides = []
    for split in ("train", "test"):
        rows = torch.cat([getattr(people.examples[site], split) for site in people.sites]).unique().cpu()
        sides.append((losses(module, pool.inputs(rows), pool.labels(rows)), None if pool.unit is None else pool.unit[rows]))  # fmt: skip
    (inside, their), (outside, others) = sides
    unit = "example"
    if their is not None and others is not None:
        inside, outside, unit = by_unit(inside, their), by_unit(outside, others), people.unit or "unit"
    found = membership(inside, outside, unit=unit)
    sure = "succeeds" if found.low > 0.5 else "does no better than chance"
    return {
        "auc": found.auc, "low": found.low, "high": found.high, "unit": unit, "members": found.members,
        "others": found.others, "advantage": found.advantage,
        "words": f"Guessing from the final model's loss whether a {unit} was trained on {sure}: AUC {found.auc:.3f} "
        f"(95 % interval {found.low:.3f} to {found.high:.3f}; 0.5 is chance, 1 certainty).",
    }  # fmt: skip


@dataclass(frozen=True)
class Rehearsal:
    """One site's turns with canaries among its units."""

    sim: Simulation
    site: SiteId
    canaries: Canaries
    start: Vec

    def __call__(self, included: Tensor) -> Turns:
        bench, turns, steps = self._bench(included), TURNS, None
        made = self.sim.shield.promises.get(self.site) if self.sim.shield else None
        trainer: Trainer = Loop(bench)
        if made is not None:
            from pipeline.runs.privacy_setup import mode_of
            from sites.training.dp_sgd import Private

            assert self.sim.shield is not None
            terms = replace(made.terms, units=made.terms.units + CANARIES // 2)  # not how many coins fell so
            mode = mode_of(self.sim.coordinator.study, bench, self.sim.shield.promises)
            trainer = Private(bench, {self.site: terms}, mode)
            turns, steps = made.turns, made.steps
        local, seen, weights = self.sim.coordinator.study.local, [], self.start
        stats = bench.spec.read(bench.make()).stats
        for turn in range(1, turns + 1):
            job = Fit(weights, stats, steps=steps or local.steps, epochs=None if steps else local.epochs)
            (fit,) = trainer.run([Ticket(self.site, turn, 0, job, private=made is not None)])
            assert isinstance(fit, Fitted)
            seen.append((weights, fit.weights))
            weights, stats = fit.weights, fit.stats
        return seen

    def _bench(self, included: Tensor) -> Bench:
        bench = self.sim.bench
        pool, mine = bench.pool, bench.examples[self.site]
        first, rows = len(pool.y), self.canaries.rows(included)
        own = torch.arange(len(pool.y)) if pool.unit is None else pool.unit
        x = self.canaries.x if pool.x.is_floating_point() else (self.canaries.x * 255).round().to(pool.x.dtype)
        unit = torch.cat([own, int(own.max()) + 1 + self.canaries.unit])
        wide = Pool(torch.cat([pool.x, x]), torch.cat([pool.y, self.canaries.y]), pool.device, unit)
        train = torch.cat([mine.train, first + rows])
        return replace(bench, pool=wide, examples={**bench.examples, self.site: replace(mine, train=train, epoch=None)})


def _canaries(sim: Simulation) -> dict[str, Any]:
    people = sim.population
    made = sim.shield.promises if sim.shield else {}
    site = max(people.sites, key=lambda s: made[s].terms.units if s in made else len(people.examples[s].train))
    promised, delta = (made[site].epsilon, made[site].delta) if site in made else (None, 1e-5)
    per_unit = 1 if site in made and made[site].terms.unit == "example" else PER_UNIT
    canaries = make_canaries(people.shape, len(people.classes), CANARIES, per_unit)
    module = sim.bench.make()
    start = sim.bench.spec.read(module).weights.clone()
    power = 1.0 if sim.coordinator.study.local.optimiser == "sgd" else 0.5  # Adam evens gradients out
    score = together(by_loss(module, canaries), by_gradient(module, canaries, power=power))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # canaries are scored a few images at a time
    try:
        found = audit(Rehearsal(sim, site, canaries, start), score, CANARIES, delta)
    finally:
        torch.set_num_threads(threads)
    return {
        "epsilon_low": found.epsilon_low, "confidence": found.confidence, "epsilon_promised": promised, "delta": delta,
        "m": found.m, "guesses": found.guesses, "correct": found.correct, "most": found.most, "site": site,
        "words": _of_canaries(found, promised, site),
    }  # fmt: skip


def _of_canaries(found: Audit, promised: float | None, site: SiteId) -> str:
    told = (
        f"Of {found.m} canaries each was trained on by a coin at {site}; {found.correct} of {found.guesses} guesses which "
        f"were right. That refutes any epsilon below {found.epsilon_low:.2f} at {100 * found.confidence:g} % confidence; "
        f"with every guess right it would have been {found.most:.2f}."
    )
    if promised is None:
        return told + " The run promises nothing."
    if found.epsilon_low <= promised:
        return told + f" The promise, {promised:.2f}, is consistent with that."
    return told + f" The promise, {promised:.2f}, is BROKEN: do not use this software until that is explained."


def _inversion(sim: Simulation, folder: RunFolder) -> dict[str, Any] | None:
    people, pool = sim.population, sim.population.pool
    if len(people.shape) != 3:
        return None  # points are no picture
    made = next(iter(sim.shield.promises.values()), None) if sim.shield else None
    clip, noise = (made.terms.clip, made.terms.noise) if made else PLAIN
    rows = torch.stack([people.examples[site].train[0] for site in people.sites[:SHOWN]])
    others = torch.cat([people.examples[site].test for site in people.sites])[:500]
    typical = pool.inputs(others if len(others) else rows).mean(0)
    shown = exhibit(sim.bench.make(), pool.inputs(rows), pool.labels(rows), typical, clip, noise, STEPS)
    write_atomically(folder.path / "attacks" / "inversion.png", shown.png())
    cases = [{"name": f.title, "ssim": f.likeness.ssim, "psnr": f.likeness.psnr, "route": f.route} for f in shown.finds]
    by_name = {case["name"]: float(str(case["ssim"])) for case in cases}
    return {
        "picture": "attacks/inversion.png",
        "cases": cases,
        "words": "One step on one image, at the model before training: the image is sought again from the update. Likeness (SSIM, 1 is the "
        "same): " + ", ".join(f"{name} {value:.2f}" for name, value in by_name.items()) + ". The mean image is what "
        "anybody has without an attack.",
    }  # fmt: skip
