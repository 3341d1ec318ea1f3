"""`hemofed site check`: checks the site's images and writes a page about them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.core.errors import MissingDataError, RunFolderError, StudyError
from pipeline.reports.document.formatting import format_count
from sites.governance.settings import SiteSettings

if TYPE_CHECKING:
    from pipeline.study.schema import Study
    from sites.data_check.check import DataCheck
    from sites.data_check.findings import ProgressCallback

LEVEL_STYLES = {"stop": "bold red", "look": "yellow", "fine": "green"}
MAX_SHOWN_NAMES = 5  # files of a finding
MAX_SHOWN_CLASSES = 30


def check_command(home: Path, study: str | None, data: Path | None, out: Path | None, json: bool) -> None:
    """Exit code 1 if something must be corrected first.

    `data` takes precedence over site.toml, and site.toml over HEMOFED_DATA. `out` None: HOME/check.html."""
    if not home.is_dir():
        raise RunFolderError(f"{home} is not a folder; create a site's home with `hemofed site init`")
    settings = SiteSettings.load(home)
    if data is not None:
        settings = settings.model_copy(update={"data": data.resolve()})
    resolved_study, read_as = resolve_study(home, study)

    from pipeline.reports.site_check import write_site_check
    from sites.data.folder import ImageFolder
    from sites.data_check.check import check_data
    from sites.data_check.examples import resolve_source
    from sites.governance.home import SiteHome

    source = resolve_source(ImageFolder() if resolved_study is None else resolved_study.data, settings)
    if settings.data is None and (root := os.environ.get("HEMOFED_DATA")):
        settings = settings.model_copy(update={"data": Path(root).resolve()})
    if resolved_study is None and settings.data is None:
        raise MissingDataError(
            f'the folder of the site\'s images is unknown: write `data = "/path/to/images"` into {home / "site.toml"}, or '
            "give --data, or name a study whose data need no folder"
        )
    retained_mask = SiteHome.open(home).retained_mask if (home / "ledger.jsonl").is_file() else None
    with progress_bar(json) as on_progress:
        result = check_data(source, resolved_study, settings, retained_mask, on_progress)
        on_progress("writing the page", 0, 0)
        page = home / "check.html" if out is None else out / "check.html" if out.is_dir() else out
        write_site_check(
            result,
            home.resolve().name,
            f"{read_as} ({source.name})",
            page,
            0 if resolved_study is None else resolved_study.seed,
        )
    if json:
        print_json({"home": str(home), "read_as": read_as, **result.to_dict(), "page": str(page)})
    else:
        _print_result(result, read_as, page)
    if result.severity == "stop":
        raise typer.Exit(1)


def resolve_study(home: Path, name: str | None) -> tuple[Study | None, str]:
    """The study that defines how the data are read, and a description of it; `name` None: the newest offer."""
    from pipeline.study.toml_file import find_study, load_study
    from sites.governance.offers import list_offers, offered_study

    offers = {offer.run: offer for offer in list_offers(home)}  # the newest is the last
    if name is None:
        if not offers:
            return None, "read as a folder of images, without a study"
        name = list(offers)[-1]
    elif Path(name).is_file() or name not in offers:
        try:
            return load_study(find_study(name), {}), f"read as the study {Path(name).stem} defines"
        except StudyError as error:
            offered_hint = f"; offered runs: {', '.join(offers)}" if offers and not Path(name).is_file() else ""
            raise StudyError(f"{error}{offered_hint}") from error
    return offered_study(offers[name]), f"read as the offered run {name} defines"


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[ProgressCallback]:
    """One bar per task, removed at the end; no bars if `quiet` or without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=stderr_console, transient=True, disable=quiet or not stderr_console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def update_progress(task_name: str, done: int, total: int) -> None:
        if task_name not in tasks:
            tasks[task_name] = bar.add_task(task_name, total=total or None)
        bar.update(tasks[task_name], completed=done, total=total or None)

    with bar:
        yield update_progress


def _print_result(result: DataCheck, read_as: str, page: Path) -> None:
    from rich.text import Text

    console.print(f"{result.data_path}: {read_as}" if result.data_path else read_as, soft_wrap=True)
    if result.file_counts:
        f = result.file_counts
        console.print(
            f"{f['files']:,} files: {f['images']:,} images, {f['dicom']:,} DICOM, {f['other']:,} other, "
            f"{f['unreadable']:,} unreadable; {format_count(len(result.skipped), 'note')} on files that were left out",
            soft_wrap=True,
        )
    if result.class_counts is not None:
        class_counts = result.class_counts
        rows = [
            [name, *(f"{counts[class_index]:,}" for counts in class_counts.counts.values())]
            for class_index, name in enumerate(class_counts.classes)
        ]
        num_hidden = len(rows) - MAX_SHOWN_CLASSES
        rows = rows[:MAX_SHOWN_CLASSES] + (
            [[f"… {num_hidden} more", *("" for _ in class_counts.counts)]] if num_hidden > 0 else []
        )
        if class_counts.unit is not None:
            rows.append([f"{class_counts.unit}s", *(f"{number:,}" for number in class_counts.num_units.values())])
        console.print(build_table(["class", *class_counts.counts], rows))
    for finding in result.findings:
        line = Text().append(f"{finding.severity:5}", LEVEL_STYLES[finding.severity]).append(finding.message)
        console.print(line, soft_wrap=True)
        if finding.locations:
            num_more = len(finding.locations) - MAX_SHOWN_NAMES
            more = f" and {num_more:,} more" if num_more > 0 else ""
            console.print(f"       {', '.join(finding.locations[:MAX_SHOWN_NAMES])}{more}", soft_wrap=True)
        if finding.remedy:
            console.print(f"       -> {finding.remedy}", soft_wrap=True)
    console.print(Text("verdict: ").append(result.severity, LEVEL_STYLES[result.severity]))
    console.print(
        f"wrote {page}: it shows images and must stay at this site; nothing was sent anywhere", soft_wrap=True
    )
