"""Local calibration: a lab measures a bundle on its own labelled cells and sets temperature and thresholds from them.

Stored outside the bundle, which is signed: FOLDER/DIGEST-PRECISION.json.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.bundle.bundle import ModelBundle, Precision
from deploy.bundle.calibration import ModelCalibration, rescale_temperature
from deploy.bundle.crop import describe_crop, is_field_image
from deploy.bundle.ood_guard import OodReference
from deploy.bundle.operating_points import SAFE_SPECIFICITY, bin_scores, build_operating_points, compute_log_odds
from deploy.imaging.images import expand_paths, read_image_file
from deploy.inference.metrics import compute_auroc, compute_balanced_accuracy
from deploy.inference.resize import ImageBatch, resize_images
from deploy.inference.runtime import BundleRuntime, Predictions
from models.probe.feature_names import QUALITY_MEASURES
from pipeline.core.errors import BundleError, DataError, MissingDataError
from pipeline.core.files import write_atomically

MIN_POSITIVE_CELLS, MIN_NEGATIVE_CELLS = 20, 500  # labelled cells needed to set thresholds
MIN_AUROC = 0.7  # a lower AUROC makes any threshold useless
NUM_SCORE_BINS = 4096
TEMPERATURES = np.exp2(np.linspace(-3, 3, 97))


class LocalCalibration(BaseModel):
    """Replaces the bundle's calibration and out-of-distribution reference on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    bundle_digest: str
    precision: Precision  # with which it was measured
    created: str
    calibration: ModelCalibration
    ood_reference: OodReference | None
    color_tables: list[list[int]] | None = None  # (3, 256), where the study normalizes colors by site
    # why this lab must not use the model: the figures are then the bundle's own, and no verdict is given
    unfit_reason: str | None = None


@dataclass(frozen=True)
class LabeledCells:
    images: ImageBatch  # in the network's input size
    labels: NDArray[np.int64]
    skipped: tuple[str, ...]  # why each file was left out


def local_calibrations_folder() -> Path:
    """HEMOFED_LOCAL_CALIBRATIONS, or a folder in the user's data."""
    override = os.environ.get("HEMOFED_LOCAL_CALIBRATIONS")
    return Path(override) if override else user_data_path("hemofed") / "local-calibrations"


def load_local_calibration(bundle: ModelBundle, precision: Precision | None = None) -> LocalCalibration | None:
    """The calibration of this bundle with this precision (fp32 by default); None if there is none."""
    path = _calibration_path(bundle.digest, precision or "fp32")
    try:
        local_calibration = LocalCalibration.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BundleError(
            f"{path} is damaged or has the format of another hemofed version; remove it and run `hemofed edge calibrate` again"
        ) from error
    if (local_calibration.bundle_digest, local_calibration.precision) != (bundle.digest, precision or "fp32"):
        raise BundleError(
            f"{path} belongs to another bundle or precision; remove it and run `hemofed edge calibrate` again"
        )
    return local_calibration


def save_local_calibration(local_calibration: LocalCalibration) -> Path:
    return write_atomically(
        _calibration_path(local_calibration.bundle_digest, local_calibration.precision),
        (local_calibration.model_dump_json(indent=1) + "\n").encode(),
    )


def _calibration_path(digest: str, precision: Precision) -> Path:
    return local_calibrations_folder() / f"{digest}-{precision}.json"


def read_labeled_cells(
    path: Path, bundle: ModelBundle, report_progress: Callable[[int, int], None] = lambda done, all_: None
) -> LabeledCells:
    """Reads labelled cells from folders named after the classes, or from a CSV file with the columns path and label.

    Identical images count once; an image with two labels raises.
    """
    labeled_files = _list_from_csv(path) if path.is_file() else _list_from_folders(path, bundle.manifest.classes)
    classes, images, labels, skipped = bundle.manifest.classes, [], [], []
    first_by_digest: dict[str, tuple[Path, str]] = {}
    for n, (file, label) in enumerate(labeled_files):
        report_progress(n, len(labeled_files))
        if label not in classes:
            raise DataError(
                f"{path}: {label!r} is not a class of {bundle.manifest.name}; its classes are {', '.join(classes)}"
            )
        try:
            (input_image,) = read_image_file(file)
        except (DataError, ValueError) as error:
            skipped.append(
                str(error) if isinstance(error, DataError) else f"{file}: several frames; give one cell per file"
            )
            continue
        if is_field_image(bundle, input_image):
            skipped.append(f"{file}: a whole field; cut single cells out of it ({describe_crop(bundle)})")
            continue
        first_file, first_label = first_by_digest.setdefault(input_image.pixel_digest, (file, label))
        if first_label != label:
            raise DataError(
                f"{first_file} and {file} are the same image, once {first_label} and once {label}; correct one label"
            )
        if first_file is not file:
            skipped.append(f"{file}: the same image as {first_file}")
            continue
        images.append(resize_images(input_image.pixels[None], bundle.manifest.input_size, bundle.manifest.resize)[0])
        labels.append(classes.index(label))
    if not images:
        raise MissingDataError(
            f"{path} holds no labelled images; put single cells into folders named {', '.join(classes)}, or list them in a CSV "
            "file with the columns path and label"
        )
    return LabeledCells(np.stack(images), np.array(labels, np.int64), tuple(skipped))


def measure_bundle(
    runtime: BundleRuntime, labeled_cells: LabeledCells
) -> tuple[dict[str, Any], LocalCalibration | str]:
    """Metrics of the bundle's own figures, and a local calibration or the reason why there is none."""
    bundle, positive_index = runtime.bundle, runtime.positive_index
    predictions = runtime.predict(labeled_cells.images)
    metrics = _compute_metrics(predictions, labeled_cells.labels, runtime)
    if positive_index is None:
        return metrics, "the study names no positive class, so there are no thresholds to set"
    is_positive = labeled_cells.labels == positive_index
    if (
        metrics["auroc"] is not None
        and min(is_positive.sum(), (~is_positive).sum()) >= MIN_POSITIVE_CELLS
        and metrics["auroc"] < MIN_AUROC
    ):
        reason = f"an AUROC of {metrics['auroc']:.2f} on {len(is_positive):,} labelled cells of this lab is too low for any threshold"
        return metrics, LocalCalibration(
            bundle_digest=bundle.digest,
            precision=runtime.precision,
            created=_utc_timestamp(),
            calibration=bundle.calibration,
            ood_reference=bundle.ood_reference,
            unfit_reason=reason,
        )
    if is_positive.sum() < MIN_POSITIVE_CELLS or (~is_positive).sum() < MIN_NEGATIVE_CELLS:
        name = bundle.calibration.positive_class
        return (
            metrics,
            f"too few labelled cells to set thresholds (at least {MIN_POSITIVE_CELLS} of {name} and {MIN_NEGATIVE_CELLS} others)",
        )
    temperature, before, after = _fit_temperature(
        predictions.probabilities, labeled_cells.labels, bundle.calibration.temperature
    )
    probabilities = rescale_temperature(predictions.probabilities, bundle.calibration.temperature / temperature)
    operating_points, curve = build_operating_points(
        bin_scores(compute_log_odds(probabilities, positive_index), is_positive, NUM_SCORE_BINS)
    )
    if not operating_points[0].tp:
        return (
            metrics,
            f"at a specificity of {SAFE_SPECIFICITY} the model finds none of this lab's positive cells: thresholds from them are useless",
        )
    calibration = ModelCalibration(
        temperature=temperature,
        positive_class=bundle.calibration.positive_class,
        operating_points=operating_points,
        curve=curve,
        measured_on=f"{len(is_positive):,} labelled cells of this lab",
        loss=after,
        loss_before=before,
    )
    ood_reference = bundle.ood_reference and _widen_reference(bundle.ood_reference, predictions)
    return metrics, LocalCalibration(
        bundle_digest=bundle.digest,
        precision=runtime.precision,
        created=_utc_timestamp(),
        calibration=calibration,
        ood_reference=ood_reference,
        color_tables=_fit_color_tables(bundle, labeled_cells.images),
    )


def _utc_timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _compute_metrics(predictions: Predictions, y: NDArray[np.int64], runtime: BundleRuntime) -> dict[str, Any]:
    p, positive_index, operating_point = (
        predictions.probabilities,
        runtime.positive_index,
        runtime.calibration.find_point(),
    )
    counts = np.bincount(y, minlength=len(runtime.classes))
    is_rejected = np.array([reason is not None for reason in predictions.rejection_reasons])
    metrics: dict[str, Any] = {
        "cells": len(y),
        "by_class": dict(zip(runtime.classes, counts.tolist(), strict=True)),
        "refused": float(is_rejected.mean()),
        "drift": runtime.bundle.ood_reference.compute_drift(predictions.features)
        if runtime.bundle.ood_reference
        else None,
        "accuracy": float((p.argmax(1) == y).mean()),
        "balanced_accuracy": compute_balanced_accuracy(p, y),
        "auroc": compute_auroc(p, y, positive_index)
        if positive_index is not None and 0 < counts[positive_index] < len(y)
        else None,
    }
    if positive_index is not None and operating_point is not None:
        is_flagged, is_positive = runtime.flag_positives(p, operating_point), y == positive_index
        metrics |= {
            "sensitivity": float(is_flagged[is_positive].mean()) if is_positive.any() else None,
            "specificity": float((~is_flagged[~is_positive]).mean()) if (~is_positive).any() else None,
            "promised": {"sensitivity": operating_point.sensitivity, "specificity": operating_point.specificity},
        }
    return metrics


def _fit_temperature(p: NDArray[np.float32], y: NDArray[np.int64], current: float) -> tuple[float, float, float]:
    """The temperature with the lowest mean loss, the loss at `current`, and the loss at the best."""

    def loss(temperature: float) -> float:
        label_probabilities = rescale_temperature(p, current / temperature)[np.arange(len(y)), y]
        return float(-np.log(np.maximum(label_probabilities, 1e-30)).mean())

    best = min(TEMPERATURES, key=loss)
    return float(best), loss(current), loss(best)


def _widen_reference(ood_reference: OodReference, predictions: Predictions) -> OodReference:
    """Widens the limits to this lab's own cells, up to their 1 % and 99 % quantiles so that a few odd files do not count."""
    quality_limits = {}
    for column, name in enumerate(QUALITY_MEASURES):
        low, high = np.quantile(predictions.quality_measures[:, column], [0.01, 0.99])
        quality_limits[name] = (
            min(ood_reference.quality_limits[name][0], float(low)),
            max(ood_reference.quality_limits[name][1], float(high)),
        )
    max_distance = float(np.quantile(ood_reference.nearest_center_distances(predictions.features), 0.99))
    feature_mean = predictions.features.mean(0, dtype=np.float64)
    return ood_reference.model_copy(
        update={
            "quality_limits": quality_limits,
            "max_distance": max(ood_reference.max_distance, max_distance),
            "feature_mean": tuple(feature_mean.tolist()),
        }
    )


def _fit_color_tables(bundle: ModelBundle, images: ImageBatch) -> list[list[int]] | None:
    if bundle.manifest.normalization["name"] in ("none", "image"):
        return None
    from sites.data.color_tables import build_color_table

    tables: list[list[int]] = build_color_table(bundle.manifest.normalization, images).tolist()
    return tables


def _list_from_csv(path: Path) -> list[tuple[Path, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({error}); save it as one") from error
    if not rows or not {"path", "label"} <= rows[0].keys():
        raise DataError(f"{path} needs the columns path and label in its first line; add them")
    for n, row in enumerate(rows, start=2):
        if not row["path"] or not row["label"]:
            raise DataError(f"{path}, line {n}: path or label is missing; fill it in, or remove the line")
    return [(path.parent / row["path"], str(row["label"])) for row in rows]


def _list_from_folders(path: Path, classes: Sequence[str]) -> list[tuple[Path, str]]:
    if not path.is_dir():
        raise MissingDataError(f"{path} does not exist; name a folder with labelled cells")
    if unexpected := sorted(p.name for p in path.iterdir() if p.is_dir() and p.name not in classes):
        raise DataError(f"{path}: {', '.join(unexpected[:3])} is not a class; name the folders {', '.join(classes)}")
    return [(file, name) for name in classes if (path / name).is_dir() for file in expand_paths([path / name])]
