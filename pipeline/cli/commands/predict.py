"""`hemofed predict`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from deploy.bundle.bundle import ModelBundle, Precision
from deploy.bundle.operating_points import OperatingPoint
from deploy.bundle.trust_store import TrustStore
from deploy.imaging.images import InputImage, expand_paths, printable_path, read_image_bytes, read_image_file
from deploy.inference.local_calibration import load_local_calibration
from deploy.inference.runtime import BundleRuntime
from deploy.slide.html_report import build_rows, format_headline
from deploy.slide.outputs import (
    PredictSession,
    cells_to_csv,
    record_image,
    session_notes,
    write_dicom_results,
    write_report,
)
from deploy.slide.reader import ImageResult, InputType, SlideReader, SlideResult, summarize_slide
from deploy.slide.verdict import RESEARCH_USE_NOTICE
from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.core.errors import DataError, IncompatibleStudyError, StudyError

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


@dataclass(frozen=True)
class SlidePrediction:
    """What a bundle finds on the images of one slide."""

    slide: SlideResult
    images: tuple[ImageResult, ...]
    failures: tuple[tuple[str, str], ...]  # file, and why it could not be read
    bundle: Mapping[str, Any]  # the record of the model in every result, as `BundleRuntime.describe_model` returns it
    written_files: tuple[Path, ...]


def predict_slide(options: PredictOptions, report_progress: Callable[[str], None]) -> SlidePrediction:
    """Images that cannot be read do not stop the others."""
    # files of another slide must not mix with those of this one
    for folder in filter(None, (options.out, options.dicom_out)):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StudyError(
                f"{folder} is not an empty folder; choose another one for this slide, or remove the files of an interrupted call"
            )
    bundle = ModelBundle.open(options.bundle, TrustStore.open_default())
    runtime = BundleRuntime(
        bundle,
        options.precision,
        options.num_threads,
        None if options.ignore_local_calibration else load_local_calibration(bundle, options.precision),
    )
    operating_point = select_operating_point(runtime, options.operating_point)
    reader = SlideReader(runtime, operating_point, options.input_type, options.rbc_diameter_px)
    session = _read_slide(options, reader, report_progress)
    slide = summarize_slide(
        session.image_results, runtime, operating_point, [*_slide_identity_warnings(session), *session_notes(session)]
    )
    bundle_info = runtime.describe_model()
    written_files = write_report(options.out, session, slide, bundle_info) if options.out else []
    written_files += write_dicom_results(options.dicom_out, session, slide, bundle_info) if options.dicom_out else []
    return SlidePrediction(
        slide, tuple(session.image_results), tuple(session.failures), bundle_info, tuple(written_files)
    )


def predict_command(options: PredictOptions, as_csv: bool, json: bool) -> None:
    """The exit code is 1 if some images cannot be read."""
    if as_csv and json:
        raise StudyError("--csv and --json exclude each other; give one of them")
    with stderr_console.status("reading") as status:
        prediction = predict_slide(options, status.update)
    if json:
        image_records = [r.to_dict() for r in prediction.images] + [
            {"path": name, "error": reason} for name, reason in prediction.failures
        ]
        print_json(
            {
                "notice": RESEARCH_USE_NOTICE,
                "bundle": prediction.bundle,
                "images": image_records,
                "slide": prediction.slide.to_dict(),
                "written": [str(path) for path in prediction.written_files],
            }
        )
    elif as_csv:
        sys.stdout.write(cells_to_csv(list(prediction.images)))
    else:
        _print_slide(prediction)
    for name, reason in prediction.failures:
        stderr_console.print(f"error: {reason if reason.startswith(name) else f'{name}: {reason}'}", soft_wrap=True)
    if prediction.failures:
        sys.exit(1)


def _slide_identity_warnings(session: PredictSession) -> list[str]:
    if not session.dicom_overlays:
        return []
    from deploy.slide.dicom_sources import find_slide_conflicts

    return find_slide_conflicts(list(session.dicom_overlays))


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


def _iter_images(paths: tuple[Path, ...]) -> Iterator[tuple[str, list[InputImage] | str]]:
    """The name of each file with its images, or with the reason why it cannot be read."""
    for path in paths:
        if str(path) == "-":
            yield "-", _read_or_reason(lambda: read_image_bytes(sys.stdin.buffer.read(), "-"))
            continue
        files = list(expand_paths([path]))
        if not files:
            yield printable_path(path), "no such file" if not path.exists() else "no image in this folder"
        for file in files:
            yield printable_path(file), _read_or_reason(partial(read_image_file, file))


def _read_or_reason(read_images: Callable[[], list[InputImage]]) -> list[InputImage] | str:
    try:
        return read_images()
    except DataError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _read_slide(options: PredictOptions, reader: SlideReader, report_progress: Callable[[str], None]) -> PredictSession:
    """Classifies fields one by one, and all single cells together at the end."""
    session = PredictSession()
    single_cells: list[InputImage] = []
    for name, images in _iter_images(options.paths):
        report_progress(f"reading {name}")
        if isinstance(images, str):
            session.failures.append((name, images))
            continue
        for image in images:
            if reader.is_field(image):
                _classify_images(options, session, [image], lambda fields: [reader.read_field(f) for f in fields])
            else:
                single_cells.append(image)
    if single_cells:
        _classify_images(options, session, single_cells, reader.read_cells)
    return session


def _classify_images(
    options: PredictOptions,
    session: PredictSession,
    images: list[InputImage],
    classify: Callable[[list[InputImage]], list[ImageResult]],
) -> None:
    try:
        results = classify(images)
    except (DataError, IncompatibleStudyError) as error:
        session.failures += [(image.name, str(error)) for image in images]
        return
    for image, result in zip(images, results, strict=True):
        record_image(session, image, _mark_duplicate(result, image, session), options.out, options.dicom_out)


def _mark_duplicate(result: ImageResult, image: InputImage, session: PredictSession) -> ImageResult:
    """Marks an image with the same pixels as an earlier one; its cells are not counted again."""
    digest = hashlib.sha256(f"{image.pixels.shape}".encode() + image.pixels.tobytes()).digest()
    if digest not in session.first_by_digest:
        session.first_by_digest[digest] = image.name
        return result
    return replace(result, duplicate_of=session.first_by_digest[digest])


def _print_slide(prediction: SlidePrediction) -> None:
    slide = prediction.slide
    fields = [r for r in prediction.images if r.kind == "field"]
    cells = [r for r in prediction.images if r.kind == "cell"]
    if cells:
        rows = [
            [
                _display_name(r.name),
                r.cells[0].label or "",
                r.cells[0].exclusion_reason or "",
                f"{r.cells[0].probability:.4f}",
            ]
            for r in cells[:MAX_SHOWN_IMAGES]
        ]
        # p is the probability of the positive class, which may be another class than the one in the row
        probability_column = f"p({slide.positive_class})" if slide.positive_class else "probability"
        console.print(build_table(["cell", "class", "note", probability_column], rows, num_text_columns=3))
    if fields:
        rows = [
            [
                _display_name(r.name),
                f"{len(r.cells):,}",
                f"{sum(c.is_counted for c in r.cells):,}",
                f"{sum(c.is_flagged for c in r.cells):,}",
            ]
            for r in fields[:MAX_SHOWN_IMAGES]
        ]
        console.print(
            build_table(["field", "found", "counted", f"flagged as {slide.positive_class or 'positive'}"], rows)
        )
    if num_hidden := sum(max(0, len(results) - MAX_SHOWN_IMAGES) for results in (cells, fields)):
        console.print(f"… and {num_hidden} more; --csv and --json list all")
    if slide.positive_class is not None and prediction.images:
        slide_record = slide.to_dict()
        console.print(
            build_table(
                ["slide report", ""],
                [list(row) for row in build_rows(slide_record, prediction.bundle)],
                num_text_columns=2,
            )
        )
        for warning in (*slide.reliability_warnings, *slide.notes):
            console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        console.print(format_headline(slide_record), style="bold", soft_wrap=True)
    for path in [path for path in prediction.written_files if not path.name.startswith("overlay-")]:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(RESEARCH_USE_NOTICE, style="yellow")


def _display_name(name: str) -> str:
    """The last part of a path, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in Path(name).name or name)
