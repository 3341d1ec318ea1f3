"""Exports a finished run as a signed bundle, from the run's sums over validation images; it reads no patient's image."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from torch import nn

from deploy.bundle.bundle import RUNTIME_NORMALIZATIONS, BundleManifest, sign_files, write_zip
from deploy.bundle.calibration import ModelCalibration
from deploy.bundle.ood_guard import OodReference, build_ood_reference
from deploy.bundle.operating_points import OperatingPoint, build_operating_points
from deploy.export.corruptions import CORRUPTIONS
from deploy.export.model_card import build_card, build_monai_metadata, render_markdown
from deploy.export.onnx_graph import OPSET, ExportModule, check_parity, run_graph, to_onnx
from deploy.export.quantize import NUM_CALIBRATION_IMAGES, QuantizedModel, quantize_model
from deploy.inference.test_time_augmentation import predict_with_tta
from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import ModelProfile, num_tta_views, read_profile
from pipeline.core.errors import IncompatibleStudyError, RunFolderError
from pipeline.core.files import raise_no_space
from pipeline.protocol.tasks import TEMPERATURES
from pipeline.runs.score_saved_model import load_model
from pipeline.study.schema import Study
from privacy.ledger.keys import public_hex

NUM_PARITY_IMAGES = 500
NUM_RENDERED_CELLS = 1200  # synthetic, for parity, int8 scales and detection rates
RENDER_SEED = 0xED6E
LICENSE_NOT_STATED = "not stated; ask the study lead"


@dataclass(frozen=True)
class ExportResult:
    folder: Path
    zip_path: Path
    digest: str
    public_key: str
    model_card: dict[str, Any]
    calibration: ModelCalibration
    ood_reference: OodReference | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SyntheticCells:
    """Rendered cells in the network's input size; labels if the renderer knows the network's classes."""

    images: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.int64] | None


@dataclass(frozen=True)
class ExportSource:
    """A run's model that can be exported."""

    study: Study
    module: nn.Module
    header: Mapping[str, Any]  # of the saved model
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    crop_diameters: float | None
    rbc_diameter_px: float | None


def check_export(
    run_folder: RunFolder,
    model_name: str,
    output_folder: Path,
    crop_and_diameter_px: tuple[float | None, float | None] = (None, None),
) -> ExportSource:
    """Raises if the model cannot be exported to this folder; writes nothing. The arguments are those of `export_bundle`."""
    study = run_folder.load_study()
    crop_diameters, rbc_diameter_px = _resolve_scale(study, crop_and_diameter_px)
    for path in (output_folder, _zip_path(output_folder)):
        if path.exists():
            raise RunFolderError(f"{path} exists and is not overwritten; choose another -o, or move it")
    if study.normalization.name not in RUNTIME_NORMALIZATIONS:
        raise IncompatibleStudyError(
            f"normalization {study.normalization.name!r} comes from a plugin, which edge machines lack; train without it"
        )
    model_kind, _, site = model_name.partition("/")
    module, header = load_model(run_folder, f"site/{quote(site, safe='')}" if model_kind == "site" else model_name)
    input_shape = tuple(header["shape"])
    if len(input_shape) != 3:
        raise IncompatibleStudyError(
            f"{model_name} takes inputs of shape {input_shape}, but bundles are for images; export a study of images"
        )
    return ExportSource(
        study=study,
        module=module,
        header=header,
        input_shape=input_shape,
        classes=tuple(header["classes"]),
        crop_diameters=crop_diameters,
        rbc_diameter_px=rbc_diameter_px,
    )


def _zip_path(output_folder: Path) -> Path:
    return output_folder.with_name(f"{output_folder.name}.zip")


def export_bundle(
    run_folder: RunFolder,
    model_name: str,
    output_folder: Path,
    signing_key: Ed25519PrivateKey,
    with_int8: bool = False,
    license_text: str = LICENSE_NOT_STATED,
    crop_and_diameter_px: tuple[float | None, float | None] = (None, None),
    report_progress: Callable[[str], None] = lambda text: None,
) -> ExportResult:
    """Writes OUTPUT_FOLDER and OUTPUT_FOLDER.zip.

    `model_name`: global, cluster/2 or site/S. `crop_and_diameter_px`: side of a training image and diameter of a red cell,
    in pixels of a field, if the study's data do not define them.
    """
    source = check_export(run_folder, model_name, output_folder, crop_and_diameter_px)
    study, module, input_shape, classes = source.study, source.module, source.input_shape, source.classes
    profile = read_profile(run_folder.path, model_name)
    whitening, warnings = (
        profile.whitening if profile else None,
        [] if profile else [_missing_profile_warning(study, model_name)],
    )
    positive_class = study.evaluation.positive_class
    report_progress("building the graph")
    export_module = ExportModule(module, input_shape, whitening, study.normalization.model_dump())
    graph = to_onnx(export_module, (input_shape[1], input_shape[2]))
    report_progress("comparing the graph with the network")
    synthetic_cells = render_cells((input_shape[1], input_shape[2]), classes)
    max_difference = check_parity(export_module, module, graph, synthetic_cells.images[:NUM_PARITY_IMAGES])
    int8_model = None
    if with_int8:
        report_progress("quantizing")
        int8_model = quantize_model(
            graph,
            synthetic_cells.images,
            synthetic_cells.labels,
            None if positive_class is None else classes.index(positive_class),
        )
        warnings += [f"no int8 model: {int8_model.reason}"] if int8_model.reason else []
    calibration = build_calibration(profile, positive_class, classes)
    ood_reference = (
        _measure_ood_reference(profile, graph, synthetic_cells, num_tta_views(study, input_shape)) if profile else None
    )
    manifest = BundleManifest(
        name=study.name,
        model=model_name,
        classes=classes,
        input_size=(input_shape[1], input_shape[2]),
        resize=study.data.resize_filter,
        num_tta_views=8 if num_tta_views(study, input_shape) == 8 else 1,
        normalization=study.normalization.model_dump(),
        crop_diameters=source.crop_diameters,
        rbc_diameter_px=source.rbc_diameter_px,
        precisions=("fp32", "int8") if int8_model and int8_model.graph else ("fp32",),
        opset=OPSET,
        created=_utc_timestamp(),
        software={package: version(package) for package in ("hemofed", "torch", "onnx", "onnxruntime")},
    )
    model_card = build_card(run_folder, model_name, source.header, license_text) | {
        "export": _export_record(manifest, max_difference, int8_model)
    }
    files = {
        "model.onnx": graph,
        "bundle.json": _encode_json(manifest.model_dump(mode="json")),
        "calibration.json": _encode_json(calibration.model_dump(mode="json")),
        "card.json": _encode_json(model_card),
        "card.md": render_markdown(model_card, calibration, ood_reference).encode(),
        "metadata.json": _encode_json(build_monai_metadata(model_card, manifest.input_size)),
    }
    if int8_model and int8_model.graph:
        files["model.int8.onnx"] = int8_model.graph
    if ood_reference:
        files["reference.json"] = _encode_json(ood_reference.model_dump(mode="json"))
    return _write_bundle(
        files=sign_files(files, signing_key),
        output_folder=output_folder,
        zip_path=_zip_path(output_folder),
        signing_key=signing_key,
        model_card=model_card,
        calibration=calibration,
        ood_reference=ood_reference,
        warnings=tuple(warnings),
    )


def render_cells(input_size: tuple[int, int], classes: tuple[str, ...]) -> SyntheticCells:
    from deploy.inference.resize import resize_images
    from sites.data.renderer.cell_outlines import CELL_TYPES
    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=NUM_RENDERED_CELLS, size=72, patients=60, task="types").load(None, RENDER_SEED)
    # shuffled, so that int8 calibration and int8 evaluation both see all patients
    order = np.random.default_rng(RENDER_SEED).permutation(NUM_RENDERED_CELLS)
    images = np.ascontiguousarray(data.x.permute(0, 2, 3, 1).numpy()[order])
    types = data.y.numpy()[order]
    labels = None
    if classes == CELL_TYPES:
        labels = types
    elif classes == ("other", "schistocyte"):
        labels = (types == CELL_TYPES.index("schistocyte")).astype(np.int64)
    return SyntheticCells(resize_images(images, input_size, "area"), labels)


def build_calibration(
    profile: ModelProfile | None, positive_class: str | None, classes: tuple[str, ...]
) -> ModelCalibration:
    if profile is None:
        return ModelCalibration(
            temperature=1.0, positive_class=positive_class, operating_points=(), measured_on="nothing"
        )
    sums, whitening = profile.sums, profile.whitening
    operating_points, curve = (
        _profile_operating_points(profile, classes.index(positive_class)) if positive_class else ((), ())
    )
    num_images = int(sums.n)
    return ModelCalibration(
        temperature=whitening.temperature,
        positive_class=positive_class,
        operating_points=operating_points,
        curve=curve,
        measured_on=f"{num_images:,} validation images of its sites, in sums",
        loss=float(np.interp(np.log(whitening.temperature), np.log(TEMPERATURES), sums.nll_by_temperature.numpy()))
        / num_images,
        loss_before=float(sums.nll_by_temperature[len(TEMPERATURES) // 2]) / num_images,
    )


def _profile_operating_points(
    profile: ModelProfile, class_index: int
) -> tuple[tuple[OperatingPoint, ...], tuple[OperatingPoint, ...]]:
    scores, between_site_variance = (
        profile.sums.scores[class_index].numpy(),
        profile.between_site_variance[class_index].numpy(),
    )
    return build_operating_points(scores.astype(np.int64), between_site_variance.astype(np.float64))


def _measure_ood_reference(
    profile: ModelProfile, graph: bytes, synthetic_cells: SyntheticCells, num_tta_views: int
) -> OodReference:
    """The guard's reference, with its detection rates on corrupted rendered cells."""
    sums, whitening = profile.sums, profile.whitening
    counts = sums.distances.numpy().astype(np.int64), sums.image_measures.numpy().astype(np.int64)
    ood_reference = build_ood_reference(int(sums.n), whitening.class_centers.numpy().astype(np.float64), *counts)
    detection_rates, run = {}, partial(run_graph, graph)
    for corruption, corrupt in CORRUPTIONS.items():
        _, features, quality_measures = predict_with_tta(
            run, corrupt(synthetic_cells.images[:NUM_CALIBRATION_IMAGES]), num_tta_views
        )
        rejection_reasons = ood_reference.rejection_reasons(features, quality_measures)
        detection_rates[corruption] = sum(reason is not None for reason in rejection_reasons) / len(rejection_reasons)
    return ood_reference.model_copy(update={"detection_rates": detection_rates})


def _resolve_scale(
    study: Study, crop_and_diameter_px: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Side of a cell's crop in diameters of a red cell, and that diameter in pixels; (None, None): single images only."""
    crop_px, rbc_diameter_px = (
        crop_and_diameter_px[0] or study.data.window_pixels,
        crop_and_diameter_px[1] or study.data.cell_pixels,
    )
    if (crop_px is None) != (rbc_diameter_px is None):
        raise IncompatibleStudyError(
            "cutting cells out of fields needs both --crop-px and --rbc-diameter-px; give both, or neither"
        )
    return (None, None) if crop_px is None or rbc_diameter_px is None else (crop_px / rbc_diameter_px, rbc_diameter_px)


def _missing_profile_warning(study: Study, model_name: str) -> str:
    reason = (
        "evaluation.validation_profile is off"
        if not study.evaluation.validation_profile
        else f"the run has no profile of {model_name}"
    )
    return (
        f"{reason}, so there are no calibrated probabilities, no operating points and no out-of-distribution guard. Run the study "
        "with evaluation.validation_profile = true and validation images, or calibrate it locally: hemofed edge calibrate"
    )


def _export_record(
    manifest: BundleManifest, max_difference: float, int8_model: QuantizedModel | None
) -> dict[str, Any]:
    int8_record: dict[str, Any] = {"words": "There is no int8 model."}
    if int8_model is not None:
        int8_text = (
            f"The int8 model was left out: {int8_model.reason}."
            if int8_model.reason
            else "The int8 model passed the comparison."
        )
        int8_record = {**int8_model.metrics, "reason": int8_model.reason, "words": int8_text}
    return {
        "made": manifest.created,
        "hemofed": manifest.software["hemofed"],
        "opset": OPSET,
        "onnxruntime": manifest.software["onnxruntime"],
        "parity": {"images": NUM_PARITY_IMAGES, "largest": max_difference},
        "int8": int8_record,
    }


def _write_bundle(
    files: dict[str, bytes],
    output_folder: Path,
    zip_path: Path,
    signing_key: Ed25519PrivateKey,
    model_card: dict[str, Any],
    calibration: ModelCalibration,
    ood_reference: OodReference | None,
    warnings: tuple[str, ...],
) -> ExportResult:
    """Writes the folder and the zip file atomically."""
    with raise_no_space(output_folder):
        output_folder.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(dir=output_folder.parent, prefix=f".{output_folder.name}."))
        try:
            unpacked_folder = temp_folder / "folder"
            unpacked_folder.mkdir()
            for name, data in files.items():
                (unpacked_folder / name).write_bytes(data)
            write_zip(files, temp_folder / "zip")
            for path in (*unpacked_folder.iterdir(), temp_folder / "zip"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            unpacked_folder.rename(output_folder)
            (temp_folder / "zip").rename(zip_path)
        finally:
            shutil.rmtree(temp_folder, ignore_errors=True)
    digest = hashlib.sha256(files["SHA256SUMS"]).hexdigest()
    return ExportResult(
        folder=output_folder,
        zip_path=zip_path,
        digest=digest,
        public_key=public_hex(signing_key),
        model_card=model_card,
        calibration=calibration,
        ood_reference=ood_reference,
        warnings=warnings,
    )


def _encode_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _utc_timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
