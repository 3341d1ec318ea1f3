"""`hemofed reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.cli.output import RoundProgressTable, build_table, console, print_json, stderr_console
from pipeline.core.errors import StudyError
from pipeline.core.registry import suggest_names
from pipeline.reproductions.base import ReproductionContext, ReproductionResult, load_reproductions


def reproduce_command(name: str, out: Path | None, data: Path | None, quiet: bool, json: bool) -> None:
    reproductions = load_reproductions()
    if not name:
        if json:
            print_json({n: module.DESCRIPTION for n, module in reproductions.items()})
        else:
            console.print(
                build_table(
                    ["reproduction", "description"],
                    [[n, module.DESCRIPTION] for n, module in reproductions.items()],
                    num_text_columns=2,
                )
            )
        return
    if name not in reproductions:
        raise StudyError(f"unknown reproduction {name!r}; {suggest_names(name, reproductions)}")
    folder = out or Path("runs") / f"reproduce-{name}"
    context = ReproductionContext(
        folder, data, lambda label, rounds, is_finished: RoundProgressTable(label, rounds, quiet or json or is_finished)
    )
    try:
        reproduction: ReproductionResult = reproductions[name].run(context)
    except KeyboardInterrupt:
        stderr_console.print(f"\nstopped; continue with the same command: hemofed reproduce {name} --out {folder}")
        raise
    page = write_page(reproductions[name], reproduction, folder)
    if json:
        print_json(reproduction.payload)
        return
    for table in reproduction.tables:
        console.print(build_table(table.columns, table.rows, title=table.title))
    for check in reproduction.checks:
        verdict = "holds   " if check.holds else "DOES NOT"
        console.print(f"{verdict}  {check.claim} ({check.measured})", soft_wrap=True)
    console.print(f"page: {page}", soft_wrap=True)


def write_page(module: Any, reproduction: ReproductionResult, folder: Path) -> Path:
    from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, to_svg
    from pipeline.reports.document.page import HtmlPage, TableColumn

    page = HtmlPage(module.NAME, module.DESCRIPTION)
    page.add_section("Claims").add_table(
        [TableColumn("claim"), TableColumn("holds"), TableColumn("measured")],
        [[c.claim, "yes" if c.holds else "no", c.measured] for c in reproduction.checks],
    )
    page.add_text(*reproduction.notes)
    page.add_section("Figures")
    for number, (caption, figure) in enumerate(reproduction.figures):
        page.add_figure(to_svg(figure, f"figure-{number}"), caption, wide=figure.get_figwidth() > HALF_WIDTH_INCHES[0])
    for table in reproduction.tables:
        page.add_section(table.title).add_table(
            [TableColumn(title, is_numeric=index > 1) for index, title in enumerate(table.columns)], table.rows
        )
    return page.save(folder / "page.html")
