"""`hemofed study new | check | show | list`."""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeline.commands.output import console, print_json, table
from pipeline.errors import BadStudy
from pipeline.reports.words import count_of
from pipeline.study import load_study
from pipeline.study_file import PACKAGED, find_study, parse_override, to_toml

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
    from pipeline.commands.promises import promise_lines
    from pipeline.simulate import look
    from sites.trainers.choose import device_of

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
