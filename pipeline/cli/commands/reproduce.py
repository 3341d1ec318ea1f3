"""`hemofed reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.cli.output import console, errors, print_json, table
from pipeline.core.errors import BadStudy
from pipeline.core.registry import near
from pipeline.reproductions.base import Context, Reproduction, names


def reproduce_command(name: str, out: Path | None, data: Path | None, quiet: bool, json: bool) -> None:
    known = names()
    if not name:
        if json:
            print_json({n: module.ABOUT for n, module in known.items()})
        else:
            console.print(table(["reproduction", "what"], [[n, module.ABOUT] for n, module in known.items()], words=2))
        return
    if name not in known:
        raise BadStudy(f"there is no reproduction {name!r}; {near(name, known)}")
    folder = out or Path("runs") / f"reproduce-{name}"
    context = Context(folder, data, quiet or json)
    try:
        done: Reproduction = known[name].run(context)
    except KeyboardInterrupt:
        errors.print(
            f"\nstopped; the same command goes on where it was: hemofed reproduce {name} --out {folder}",
        )
        raise
    page = write_page(known[name], done, folder)
    if json:
        print_json(done.payload)
        return
    for grid in done.grids:
        console.print(table(grid.columns, grid.rows, title=grid.title))
    for check in done.checks:
        verdict = "holds   " if check.holds else "DOES NOT"
        console.print(f"{verdict}  {check.claim} ({check.measured})", soft_wrap=True)
    console.print(f"page: {page}", soft_wrap=True)


def write_page(module: Any, done: Reproduction, folder: Path) -> Path:
    from pipeline.reports.document.figure_style import HALF, to_svg
    from pipeline.reports.document.page import Column, Page

    page = Page(module.NAME, module.ABOUT)
    page.section("Claims").table(
        [Column("claim"), Column("holds"), Column("measured")],
        [[c.claim, "yes" if c.holds else "no", c.measured] for c in done.checks],
    )
    page.text(*done.notes)
    page.section("Figures")
    for number, (caption, figure) in enumerate(done.figures):
        page.figure(to_svg(figure, f"figure-{number}"), caption, wide=figure.get_figwidth() > HALF[0])
    for grid in done.grids:
        page.section(grid.title).table(
            [Column(title, numeric=place > 1) for place, title in enumerate(grid.columns)], grid.rows
        )
    return page.save(folder / "page.html")
