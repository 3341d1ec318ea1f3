"""`hemofed study new | check | show | list`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.output import console, print_json, table
from pipeline.core.errors import BadStudy
from pipeline.protocol.tasks import Fit
from pipeline.reports.document.formatting import count_of
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import PACKAGED, find_study, parse_override, to_toml

if TYPE_CHECKING:
    from pipeline.runs.simulation import Simulation

SHOWN = 5


def new_command(path: Path, like: str) -> None:
    if path.exists():
        raise BadStudy(f"{path} exists; choose another name")
    path.write_text(find_study(like).read_text(encoding="utf-8"), encoding="utf-8")
    console.print(f"wrote {path}; edit it, then: hemofed study check {path}", soft_wrap=True)


def show_command(name: str, sets: list[str], json: bool) -> None:
    study = load_study(find_study(name), dict(map(parse_override, sets)))
    if json:
        print_json(study.dump() | {"hash": study.hash})
    else:
        console.print(to_toml(study.dump()), soft_wrap=True)


def list_command(json: bool) -> None:
    studies = [load_study(path) for path in sorted(PACKAGED.glob("*.toml"))]
    if json:
        print_json(
            [{"name": s.name, "about": s.about, "data": s.data.name, "strategy": s.strategy.name} for s in studies]
        )
    else:
        rows = [[s.name, s.data.name, s.strategy.name, str(s.rounds), s.about] for s in studies]
        console.print(table(["study", "data", "strategy", "rounds", "about"], rows, words=5))


def check_command(name: str, sets: list[str], data: Path | None, json: bool) -> None:
    from pipeline.runs.simulation import look
    from sites.training.select_trainer import device_of

    study = load_study(find_study(name), dict(map(parse_override, sets)))
    sim = look(study, data)
    people, machine = sim.population, sim.coordinator.machine
    counts = {site: people.counts(site) for site in people.sites}
    if json:
        print_json({"study": study.name, "hash": study.hash, "parameters": sim.bench.spec.size, "classes": people.classes,
                    "sites": counts, "skipped": people.skipped, **machine,
                    **({"privacy": sim.shield.about} if sim.shield else {})})  # fmt: skip
        return
    rows = [
        [site, *(str(sum(c[split])) for split in ("train", "val", "test")), " ".join(map(str, c["train"]))]
        for site, c in counts.items()
    ]
    console.print(
        table(
            ["site", "train", "val", "test", "train by class"], rows, title=f"{study.name}: {', '.join(people.classes)}"
        )
    )
    wait = study.wait
    console.print(
        f"{study.strategy.name}, {study.rounds} rounds, {study.model.name} with {sim.bench.spec.size:,} parameters, "
        f"trainer {machine['trainer']} on {device_of(study).type} with {count_of(machine['threads'], 'thread')}; "
        f"work cut short is {'kept' if wait.partial == 'keep' else 'dropped'}",
    )
    for line in promise_lines(sim):
        console.print(line, soft_wrap=True)
    for note in people.skipped[:SHOWN]:
        console.print(f"left out: {note}", soft_wrap=True)
    if len(people.skipped) > SHOWN:
        console.print(f"left out: {len(people.skipped) - SHOWN} more; --json lists them all")
    again = [name, *(word for s in sets for word in ("--set", s)), *(["--data", str(data)] if data else [])]
    console.print(f"good to run: hemofed run {shlex.join(again)}", soft_wrap=True, markup=False)


# What a study promises, before it is run: lines for `hemofed study check` and `hemofed run`.

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
    if study.privacy.at_coordinator is None:
        return []
    from pipeline.aggregation.client_level_dp import FEW

    if sites >= FEW:
        return []
    return [
        (
            f"careful: privacy.at_coordinator with {sites} sites: below {FEW} the noise of a useful epsilon drowns the mean; "
            "and it protects nobody from the coordinator itself"
        )
    ]


# `hemofed site preview`.

SHOWN_SITES = 20


def preview_command(name: str, sets: list[str], data: Path | None, out: Path, json: bool) -> None:
    import torch

    from pipeline.reports.site_preview import look_at, write_preview
    from sites.population.simulated_sites import populate

    study = load_study(find_study(name), dict(map(parse_override, sets)))
    people = populate(study, data, torch.device("cpu"))
    seen = look_at(people)
    page = write_preview(study, people, seen, out / "preview.html" if out.is_dir() else out)
    if json:
        sites = {site: one.json(people.classes) for site, one in seen.items()}
        about = {"study": study.name, "classes": people.classes, "shape": people.shape, "skipped": people.skipped}
        print_json({**about, "sites": sites, "page": str(page)})
        return
    rows = [
        [site, one.acquisition or "–", str(sum(one.counts["train"])), " ".join(f"{mean:.2f}" for mean in one.means)]
        for site, one in list(seen.items())[:SHOWN_SITES]
    ]
    console.print(table(["site", "acquisition", "train", "means"], rows, words=2))
    if len(seen) > SHOWN_SITES:
        console.print(f"… {len(seen) - SHOWN_SITES} more on the page")
    console.print(f"wrote {page}: it shows training examples; nothing of it was sent anywhere", soft_wrap=True)
