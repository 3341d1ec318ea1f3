"""Commands from a finished run to the bedside: export, predict, trust, edge."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.options import Json, Quiet

trust_app = typer.Typer(help="Whose bundles this machine believes.", no_args_is_help=True)
edge_app = typer.Typer(
    help="A bundle at a lab: measure it there, and look at smears in a browser.", no_args_is_help=True
)

Bundle = Annotated[Path, typer.Argument(help="Bundle: a folder or its zip file")]


class How(StrEnum):
    auto = "auto"
    cell = "cell"
    field = "field"


class Precision(StrEnum):
    fp32 = "fp32"
    int8 = "int8"


def _named(precision: Precision | None) -> Literal["fp32", "int8"] | None:
    return None if precision is None else "int8" if precision is Precision.int8 else "fp32"


Point = Annotated[
    str | None, typer.Option(help="Operating point: safe (the default), screening, even, or a probability")
]
Delivered = Annotated[bool, typer.Option("--as-delivered", help="Leave what this lab measured (`edge verify`) aside")]
Precise = Annotated[
    Precision | None, typer.Option(help="fp32, or int8 where the bundle has it: smaller and a little faster")
]
Threads = Annotated[int, typer.Option(min=1, help="Processor cores to use")]


def export(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Bundle folder to make; its zip file goes beside it")],
    model: Annotated[str | None, typer.Option(help="global (the default), or a group's: group/2")] = None,
    site: Annotated[str | None, typer.Option(help="Instead: this site's own model")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Also a quantised model, if it loses little")] = False,
    key: Annotated[
        Path | None, typer.Option(help="Private key to sign with; your own, made at first, if not given")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Under which it is given away")] = None,
    window: Annotated[
        float | None, typer.Option(help="Pixels of a field that a training image shows, where the data do not tell")
    ] = None,
    diameter: Annotated[
        float | None, typer.Option(min=4, max=600, help="Pixels of a red cell in such a field, likewise")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Make a signed ONNX bundle of a run's model, for machines without torch."""
    from pipeline.cli.commands.export import export_command

    export_command(run, out, model, site, int8, key, licence, (window, diameter), quiet or json, json)


def predict(
    bundle: Bundle,
    paths: Annotated[
        list[Path], typer.Argument(help="Pictures or DICOM files of cells or whole fields, folders, - for stdin")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for report.html, cells.csv, overlays")] = None,
    dicom: Annotated[Path | None, typer.Option("--dicom", help="Folder for results as DICOM, of DICOM sources")] = None,
    how: Annotated[How, typer.Option("--as", help="What the pictures are")] = How.auto,
    point: Point = None,
    diameter: Annotated[
        float | None, typer.Option(min=4, max=600, help="Pixels of a red cell in these fields, if known")
    ] = None,
    precision: Precise = None,
    delivered: Delivered = False,
    threads: Threads = 1,
    csv: Annotated[bool, typer.Option("--csv", help="Print a line a cell, as CSV")] = False,
    json: Json = False,
) -> None:
    """Classify cells, count them on whole fields of one slide, and say what the counts mean."""
    from pipeline.cli.commands.predict import Wish, predict_command

    wish = Wish(bundle, tuple(paths), out, dicom, how.value, point, diameter, _named(precision), delivered, threads)
    predict_command(wish, csv, json)


@trust_app.command("add")
def trust_add(
    name: Annotated[str, typer.Argument(help="Whose key it is")],
    key: Annotated[
        str,
        typer.Argument(help="The public key (64 hex digits), a file that begins with it, or a bundle that it signed"),
    ],
    json: Json = False,
) -> None:
    """Pin a key: bundles that it signed are believed from now on."""
    from pipeline.cli.commands.edge import add_command

    add_command(name, key, json)


@trust_app.command("list")
def trust_list(json: Json = False) -> None:
    """The pinned keys."""
    from pipeline.cli.commands.edge import list_command

    list_command(json)


@trust_app.command("remove")
def trust_remove(name: str) -> None:
    """Bundles signed by this key are refused from now on."""
    from pipeline.cli.commands.edge import remove_command

    remove_command(name)


@edge_app.command("verify")
def edge_verify(
    bundle: Bundle,
    data: Annotated[
        Path, typer.Option("--data", help="Labelled cells: a folder a class, or a CSV file with path and label")
    ],
    keep: Annotated[
        bool, typer.Option("--keep/--dry", help="Use this lab's temperature and thresholds from now on, or only tell")
    ] = True,
    precision: Precise = None,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """How good a bundle is on this lab's own labelled cells; sets temperature and thresholds for it."""
    from pipeline.cli.commands.edge import verify_command

    verify_command(bundle, data, keep, _named(precision), threads, json)


@edge_app.command("show")
def edge_show(bundle: Bundle, json: Json = False) -> None:
    """Check a bundle's signature and print its card."""
    from pipeline.cli.commands.edge import show_command

    show_command(bundle, json)


@edge_app.command("serve")
def edge_serve(
    bundle: Bundle,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8600,
    precision: Precise = None,
    delivered: Delivered = False,
    threads: Threads = 1,
) -> None:
    """A page on this machine: drop a smear's pictures, see cells, counts and what they mean."""
    from pipeline.cli.commands.edge import serve_command

    serve_command(bundle, port, _named(precision), delivered, threads)
