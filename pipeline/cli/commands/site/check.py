"""`hemofed site check`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeline.cli.output import console, errors, print_json, table
from pipeline.core.errors import BadRun, BadStudy, MissingData
from pipeline.reports.document.formatting import count_of
from sites.governance.settings import Settings

if TYPE_CHECKING:
    from pipeline.study.schema import Study
    from sites.data_check.check import Check
    from sites.data_check.findings import Tick

STYLES = {"stop": "bold red", "look": "yellow", "fine": "green"}
SHOWN = 5  # names behind a finding
SHOWN_CLASSES = 30


def check_command(home: Path, study: str | None, data: Path | None, out: Path | None, json: bool) -> None:
    """Exit code 1 if something has to be put right first. `data` goes before site.toml, and that before HEMOFED_DATA.
    `out`: HOME/check.html if not given."""
    if not home.is_dir():
        raise BadRun(f"{home} is no folder; make a site's home with `hemofed site init`")
    settings = Settings.load(home)
    if data is not None:
        settings = settings.model_copy(update={"data": data.resolve()})
    chosen, read_as = find_chosen(home, study)

    from pipeline.reports.site_check import write_check
    from sites.data.folder import Folder
    from sites.data_check.check import check
    from sites.data_check.examples import source_at
    from sites.governance.home import Home

    source = source_at(Folder() if chosen is None else chosen.data, settings)
    if settings.data is None and (root := os.environ.get("HEMOFED_DATA")):
        settings = settings.model_copy(update={"data": Path(root).resolve()})
    if chosen is None and settings.data is None:
        raise MissingData(
            f'where the site\'s images lie is not said: write `data = "/path/to/images"` into {home / "site.toml"}, or '
            "give --data; or name a study whose data need none"
        )
    remaining = Home.open(home).remaining if (home / "ledger.jsonl").is_file() else None
    with progress(json) as tick:
        found = check(source, chosen, settings, remaining, tick)
        tick("writing the page", 0, 0)
        page = home / "check.html" if out is None else out / "check.html" if out.is_dir() else out
        write_check(
            found, home.resolve().name, f"{read_as} ({source.name})", page, 0 if chosen is None else chosen.seed
        )
    if json:
        print_json({"home": str(home), "read_as": read_as, **found.json(), "page": str(page)})
    else:
        _print(found, read_as, page)
    if found.verdict == "stop":
        raise typer.Exit(1)


def find_chosen(home: Path, name: str | None) -> tuple[Study | None, str]:
    """The study that says how to read the data, and how it is called: a file, an offered run, or a packaged study."""
    from pipeline.study.schema import load_study
    from pipeline.study.toml_file import find_study
    from sites.governance.offers import offers_in, study_of

    offers = {offer.run: offer for offer in offers_in(home)}  # the newest last
    if name is None:
        if not offers:
            return None, "no study, a folder of images"
        name = list(offers)[-1]
    elif Path(name).is_file() or name not in offers:
        try:
            return load_study(find_study(name), {}), f"read as the study {Path(name).stem} says"
        except BadStudy as error:
            nor = f"; offered runs: {', '.join(offers)}" if offers and not Path(name).is_file() else ""
            raise BadStudy(f"{error}{nor}") from error
    return study_of(offers[name]), f"read as the offered run {name} says"


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Tick]:
    """A bar for each kind of work, gone when all is done; nothing where nobody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal)
    tasks: dict[str, TaskID] = {}

    def tick(doing: str, done: int, total: int) -> None:
        if doing not in tasks:
            tasks[doing] = bar.add_task(doing, total=total or None)
        bar.update(tasks[doing], completed=done, total=total or None)

    with bar:
        yield tick


def _print(found: Check, read_as: str, page: Path) -> None:
    from rich.text import Text

    console.print(f"{found.place}: {read_as}" if found.place else read_as, soft_wrap=True)
    if found.files:
        f = found.files
        console.print(
            f"{f['files']:,} files: {f['images']:,} images, {f['dicom']:,} DICOM, {f['other']:,} other, "
            f"{f['unreadable']:,} unreadable; {count_of(len(found.skipped), 'note')} on what was left out",
            soft_wrap=True,
        )
    if found.census is not None:
        census = found.census
        rows = [
            [name, *(f"{counts[at]:,}" for counts in census.counts.values())] for at, name in enumerate(census.classes)
        ]
        hidden = len(rows) - SHOWN_CLASSES
        rows = rows[:SHOWN_CLASSES] + ([[f"… {hidden} more", *("" for _ in census.counts)]] if hidden > 0 else [])
        if census.unit is not None:
            rows.append([f"{census.unit}s", *(f"{number:,}" for number in census.units.values())])
        console.print(table(["class", *census.counts], rows))
    for finding in found.findings:
        line = Text().append(f"{finding.level:5}", STYLES[finding.level]).append(finding.what)
        console.print(line, soft_wrap=True)
        if finding.where:
            rest = len(finding.where) - SHOWN
            more = f" and {rest:,} more" if rest > 0 else ""
            console.print(f"       {', '.join(finding.where[:SHOWN])}{more}", soft_wrap=True)
        if finding.cure:
            console.print(f"       -> {finding.cure}", soft_wrap=True)
    console.print(Text("verdict: ").append(found.verdict, STYLES[found.verdict]))
    console.print(f"wrote {page}: it shows images and stays here; nothing was sent anywhere", soft_wrap=True)
