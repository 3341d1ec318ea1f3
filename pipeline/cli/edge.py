"""Commands from a finished run to the bedside: export, predict, trust, edge."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.options import JsonOption, QuietOption

trust_app = typer.Typer(help="Whose bundles this machine believes.", no_args_is_help=True)
edge_app = typer.Typer(
    help="A bundle at a lab: measure it there, and look at smears in a browser.", no_args_is_help=True
)

BundleArgument = Annotated[Path, typer.Argument(help="Bundle: a folder or its zip file")]


class InputTypeChoice(StrEnum):
    auto = "auto"
    cell = "cell"
    field = "field"


class PrecisionChoice(StrEnum):
    fp32 = "fp32"
    int8 = "int8"


def _precision_name(precision: PrecisionChoice | None) -> Literal["fp32", "int8"] | None:
    return None if precision is None else "int8" if precision is PrecisionChoice.int8 else "fp32"


OperatingPointOption = Annotated[
    str | None, typer.Option(help="Operating point: safe (the default), screening, even, or a probability")
]
IgnoreLocalCalibrationOption = Annotated[
    bool, typer.Option("--ignore-local-calibration", help="Leave what this lab measured (`edge calibrate`) aside")
]
PrecisionOption = Annotated[
    PrecisionChoice | None, typer.Option(help="fp32, or int8 where the bundle has it: smaller and a little faster")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Processor cores to use")]


def export(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Bundle folder to make; its zip file goes beside it")],
    model: Annotated[str | None, typer.Option(help="global (the default), or a group's: group/2")] = None,
    site: Annotated[str | None, typer.Option(help="Instead: this site's own model")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Also a quantised model, if it loses little")] = False,
    key: Annotated[
        Path | None, typer.Option(help="Private key to sign with; your own, made at first, if not given")
    ] = None,
    license_text: Annotated[str | None, typer.Option("--license", help="Under which it is given away")] = None,
    crop_px: Annotated[
        float | None, typer.Option(help="Pixels of a field that a training image shows, where the data do not tell")
    ] = None,
    rbc_diameter_px: Annotated[
        float | None, typer.Option(min=4, max=600, help="Pixels of a red cell in such a field, likewise")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Make a signed ONNX bundle of a run's model, for machines without torch."""
    from pipeline.cli.commands.export import export_command

    export_command(
        run=run,
        out=out,
        model=model,
        site=site,
        int8=int8,
        key=key,
        license_text=license_text,
        field_scale=(crop_px, rbc_diameter_px),
        quiet=quiet or json,
        json=json,
    )


def predict(
    bundle: BundleArgument,
    paths: Annotated[
        list[Path], typer.Argument(help="Pictures or DICOM files of cells or whole fields, folders, - for stdin")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for report.html, cells.csv, overlays")] = None,
    dicom_out: Annotated[
        Path | None, typer.Option("--dicom", help="Folder for results as DICOM, of DICOM sources")
    ] = None,
    input_type: Annotated[
        InputTypeChoice, typer.Option("--input-type", help="What the pictures are")
    ] = InputTypeChoice.auto,
    operating_point: OperatingPointOption = None,
    rbc_diameter_px: Annotated[
        float | None, typer.Option(min=4, max=600, help="Pixels of a red cell in these fields, if known")
    ] = None,
    precision: PrecisionOption = None,
    ignore_local_calibration: IgnoreLocalCalibrationOption = False,
    threads: ThreadsOption = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line a cell, as CSV")] = False,
    json: JsonOption = False,
) -> None:
    """Classify cells, count them on whole fields of one slide, and say what the counts mean."""
    from pipeline.cli.commands.predict import PredictOptions, predict_command

    options = PredictOptions(
        bundle=bundle,
        paths=tuple(paths),
        out=out,
        dicom_out=dicom_out,
        input_type=input_type.value,
        operating_point=operating_point,
        rbc_diameter_px=rbc_diameter_px,
        precision=_precision_name(precision),
        ignore_local_calibration=ignore_local_calibration,
        num_threads=threads,
    )
    predict_command(options, as_csv, json)


@trust_app.command("add")
def trust_add(
    name: Annotated[str, typer.Argument(help="Whose key it is")],
    key: Annotated[
        str,
        typer.Argument(help="The public key (64 hex digits), a file that begins with it, or a bundle that it signed"),
    ],
    json: JsonOption = False,
) -> None:
    """Pin a key: bundles that it signed are believed from now on."""
    from pipeline.cli.commands.edge import trust_add_command

    trust_add_command(name, key, json)


@trust_app.command("list")
def trust_list(json: JsonOption = False) -> None:
    """The pinned keys."""
    from pipeline.cli.commands.edge import trust_list_command

    trust_list_command(json)


@trust_app.command("remove")
def trust_remove(name: str) -> None:
    """Bundles signed by this key are refused from now on."""
    from pipeline.cli.commands.edge import trust_remove_command

    trust_remove_command(name)


@edge_app.command("calibrate")
def edge_calibrate(
    bundle: BundleArgument,
    data: Annotated[
        Path, typer.Option("--data", help="Labelled cells: a folder a class, or a CSV file with path and label")
    ],
    should_save: Annotated[
        bool,
        typer.Option("--save/--dry-run", help="Use this lab's temperature and thresholds from now on, or only tell"),
    ] = True,
    precision: PrecisionOption = None,
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """How good a bundle is on this lab's own labelled cells; sets temperature and thresholds for it."""
    from pipeline.cli.commands.edge import calibrate_command

    calibrate_command(bundle, data, should_save, _precision_name(precision), threads, json)


@edge_app.command("show")
def edge_show(bundle: BundleArgument, json: JsonOption = False) -> None:
    """Check a bundle's signature and print its card."""
    from pipeline.cli.commands.edge import show_command

    show_command(bundle, json)


@edge_app.command("serve")
def edge_serve(
    bundle: BundleArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8600,
    precision: PrecisionOption = None,
    ignore_local_calibration: IgnoreLocalCalibrationOption = False,
    threads: ThreadsOption = 1,
) -> None:
    """A page on this machine: drop a smear's pictures, see cells, counts and what they mean."""
    from pipeline.cli.commands.edge import serve_command

    serve_command(bundle, port, _precision_name(precision), ignore_local_calibration, threads)
