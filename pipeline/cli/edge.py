"""Commands that bring a finished run's model to the edge: export, predict, trust, edge."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.options import JsonOption, QuietOption

trust_app = typer.Typer(help="Manage the keys of trusted bundle signers.", no_args_is_help=True)
edge_app = typer.Typer(help="Calibrate, show and serve a bundle at a lab.", no_args_is_help=True)

BundleArgument = Annotated[Path, typer.Argument(help="Bundle folder or zip file")]


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
    str | None, typer.Option(help="Operating point: safe, screening, even, or a probability; default: safe")
]
IgnoreLocalCalibrationOption = Annotated[
    bool, typer.Option("--ignore-local-calibration", help="Ignore this lab's own calibration (`edge calibrate`)")
]
PrecisionOption = Annotated[
    PrecisionChoice | None, typer.Option(help="fp32, or int8 (faster) if the bundle has it; default: fp32")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Number of processor cores to use")]


def export(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Bundle folder to write; the zip file is written next to it")
    ],
    model: Annotated[
        str | None, typer.Option(help="Model to export: global, or a cluster's such as cluster/2; default: global")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Site whose personalized model to export instead")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Add a quantized model if it loses little accuracy")] = False,
    key: Annotated[
        Path | None, typer.Option(help="Private key to sign with; default: your own, created at first use")
    ] = None,
    license_text: Annotated[
        str | None, typer.Option("--license", help="License of the bundle, for the model card")
    ] = None,
    crop_px: Annotated[
        float | None, typer.Option(help="Side of a training image in pixels of a field, if the data do not say")
    ] = None,
    rbc_diameter_px: Annotated[
        float | None,
        typer.Option(min=4, max=600, help="Diameter of a red cell in pixels of such a field, if the data do not say"),
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Export a run's model as a signed ONNX bundle, for machines without torch."""
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
        list[Path], typer.Argument(help="Images or DICOM files of cells or fields, folders of them, or - for stdin")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for report.html, cells.csv, overlays")] = None,
    dicom_out: Annotated[
        Path | None, typer.Option("--dicom", help="Folder for results as DICOM, if the images are DICOM")
    ] = None,
    input_type: Annotated[
        InputTypeChoice, typer.Option("--input-type", help="Type of the images: single cells or fields")
    ] = InputTypeChoice.auto,
    operating_point: OperatingPointOption = None,
    rbc_diameter_px: Annotated[
        float | None,
        typer.Option(min=4, max=600, help="Diameter of a red cell in pixels of these fields; default: measured"),
    ] = None,
    precision: PrecisionOption = None,
    ignore_local_calibration: IgnoreLocalCalibrationOption = False,
    threads: ThreadsOption = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with one line per cell")] = False,
    json: JsonOption = False,
) -> None:
    """Classify cells, count them on the fields of one slide, and give the slide's verdict."""
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
    name: Annotated[str, typer.Argument(help="Name of the key's owner")],
    key: Annotated[
        str,
        typer.Argument(help="Public key (64 hex digits), a file that begins with it, or a bundle signed with it"),
    ],
    json: JsonOption = False,
) -> None:
    """Pin a public key, so that bundles signed with it are accepted."""
    from pipeline.cli.commands.edge import trust_add_command

    trust_add_command(name, key, json)


@trust_app.command("list")
def trust_list(json: JsonOption = False) -> None:
    """List the pinned keys."""
    from pipeline.cli.commands.edge import trust_list_command

    trust_list_command(json)


@trust_app.command("remove")
def trust_remove(name: Annotated[str, typer.Argument(help="Name of the key's owner")]) -> None:
    """Remove a pinned key, so that bundles signed with it are refused."""
    from pipeline.cli.commands.edge import trust_remove_command

    trust_remove_command(name)


@edge_app.command("calibrate")
def edge_calibrate(
    bundle: BundleArgument,
    data: Annotated[
        Path, typer.Option("--data", help="Labelled cells: one folder per class, or a CSV file with path and label")
    ],
    should_save: Annotated[
        bool,
        typer.Option(
            "--save/--dry-run", help="Save and use this lab's temperature and thresholds, or only report them"
        ),
    ] = True,
    precision: PrecisionOption = None,
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """Measure a bundle on this lab's own labelled cells, and calibrate temperature and thresholds."""
    from pipeline.cli.commands.edge import calibrate_command

    calibrate_command(bundle, data, should_save, _precision_name(precision), threads, json)


@edge_app.command("show")
def edge_show(bundle: BundleArgument, json: JsonOption = False) -> None:
    """Verify a bundle's signature and print its model card."""
    from pipeline.cli.commands.edge import show_command

    show_command(bundle, json)


@edge_app.command("serve")
def edge_serve(
    bundle: BundleArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port")] = 8600,
    precision: PrecisionOption = None,
    ignore_local_calibration: IgnoreLocalCalibrationOption = False,
    threads: ThreadsOption = 1,
) -> None:
    """Serve a page on this machine that reads a smear's images and shows cells, counts and verdict."""
    from pipeline.cli.commands.edge import serve_command

    serve_command(bundle, port, _precision_name(precision), ignore_local_calibration, threads)
