"""`hemofed predict`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.bundle.bundle import ModelBundle, Precision
from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.operating_points import OperatingPoint
from deploy.bundle.trust_store import TrustStore
from deploy.inference.local_calibration import load_local_calibration
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageResult
from deploy.slide.outputs import SlideOutputs, cells_to_csv
from deploy.slide.predict import SlidePrediction, predict_slide
from deploy.slide.reader import InputType, SlideReader
from deploy.slide.slide_text import build_rows, format_headline
from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.core.errors import StudyError

MAX_SHOWN_IMAGES = 40  # rows of each table


@dataclass(frozen=True)
class PredictOptions:
    bundle: Path
    paths: tuple[Path, ...]
    out: Path | None
    dicom_out: Path | None
    input_type: InputType
    operating_point: str | None
    rbc_diameter_px: float | None
    precision: Precision | None
    ignore_local_calibration: bool
    num_threads: int


def predict_command(options: PredictOptions, as_csv: bool, json: bool) -> None:
    """Images that cannot be read do not stop the others; the exit code is then 1."""
    if as_csv and json:
        raise StudyError("--csv and --json exclude each other; give one of them")
    outputs = SlideOutputs(options.out, options.dicom_out)
    reader = open_reader(options)
    with stderr_console.status("reading") as status:
        prediction = predict_slide(options.paths, reader, outputs, status.update)
    if json:
        print_json(prediction.to_document().model_dump(mode="json", by_alias=True))
    elif as_csv:
        sys.stdout.write(cells_to_csv(prediction.images))
    else:
        _print_prediction(prediction)
    for failure in prediction.failures:
        name, reason = failure.name, failure.reason
        stderr_console.print(f"error: {reason if reason.startswith(name) else f'{name}: {reason}'}", soft_wrap=True)
    if prediction.failures:
        sys.exit(1)


def open_reader(options: PredictOptions) -> SlideReader:
    bundle = ModelBundle.open(options.bundle, TrustStore.open_default())
    local_calibration = None if options.ignore_local_calibration else load_local_calibration(bundle, options.precision)
    runtime = BundleRuntime(bundle, options.precision, options.num_threads, local_calibration)
    operating_point = select_operating_point(runtime, options.operating_point)
    return SlideReader(runtime, operating_point, options.input_type, options.rbc_diameter_px)


def select_operating_point(runtime: BundleRuntime, requested: str | None) -> OperatingPoint | None:
    """The operating point of this name, or the measured point at or next above this probability."""
    calibration = runtime.calibration
    if requested is None or calibration.find_point(requested):
        return calibration.find_point(requested)
    try:
        probability = float(requested)
    except ValueError:
        probability = -1.0
    names = ", ".join(p.name for p in calibration.operating_points) or "none, because this model was not calibrated"
    if not 0 < probability < 1 or not calibration.curve:
        raise StudyError(
            f"--operating-point {requested}: no such operating point; valid: {names}, or a probability between 0 and 1"
        )
    return calibration.point_at_probability(probability)


def _print_prediction(prediction: SlidePrediction) -> None:
    cells, fields = ([r for r in prediction.images if r.kind == kind] for kind in ("cell", "field"))
    _print_cells(cells, prediction.slide.positive_class)
    _print_fields(fields, prediction.slide.positive_class)
    if num_hidden := sum(max(0, len(results) - MAX_SHOWN_IMAGES) for results in (cells, fields)):
        console.print(f"… and {num_hidden} more; --csv and --json list all")
    if prediction.slide.positive_class is not None and prediction.images:
        _print_slide(prediction)
    for path in [path for path in prediction.written if not path.name.startswith("overlay-")]:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(RESEARCH_USE_NOTICE, style="yellow")


def _print_cells(results: Sequence[ImageResult], positive_class: str | None) -> None:
    if not results:
        return
    rows = []
    for result in results[:MAX_SHOWN_IMAGES]:
        (cell,) = result.cells
        rows.append(
            [_display_name(result.name), cell.label or "", cell.exclusion_reason or "", f"{cell.probability:.4f}"]
        )
    # p is the probability of the positive class, which may be another class than the one in the row
    probability_column = f"p({positive_class})" if positive_class else "probability"
    console.print(build_table(["cell", "class", "note", probability_column], rows, num_text_columns=3))


def _print_fields(results: Sequence[ImageResult], positive_class: str | None) -> None:
    if not results:
        return
    rows = [
        [_display_name(r.name), f"{len(r.cells):,}", f"{r.num_counted:,}", f"{r.num_flagged:,}"]
        for r in results[:MAX_SHOWN_IMAGES]
    ]
    console.print(build_table(["field", "found", "counted", f"flagged as {positive_class or 'positive'}"], rows))


def _print_slide(prediction: SlidePrediction) -> None:
    slide = prediction.slide
    rows = [list(row) for row in build_rows(slide, prediction.model)]
    console.print(build_table(["slide report", ""], rows, num_text_columns=2))
    for warning in (*slide.reliability_warnings, *slide.notes):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    console.print(format_headline(slide), style="bold", soft_wrap=True)


def _display_name(name: str) -> str:
    """The last part of a path, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in Path(name).name or name)
