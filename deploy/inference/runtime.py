"""Runs a verified bundle with onnxruntime and numpy, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from deploy.bundle.bundle import ModelBundle, Precision
from deploy.bundle.calibration import ModelCalibration, rescale_temperature
from deploy.bundle.ood_guard import OodReference
from deploy.bundle.operating_points import OperatingPoint, compute_log_odds
from deploy.inference.onnx_session import OUTPUT_NAMES, create_session, load_onnxruntime, run_session
from deploy.inference.resize import ImageBatch, resize_images
from deploy.inference.test_time_augmentation import predict_with_tta
from pipeline.core.errors import BundleError

if TYPE_CHECKING:
    from deploy.inference.local_calibration import LocalCalibration

BATCH_SIZE = 256


@dataclass(frozen=True)
class Predictions:
    """The model's outputs for N images."""

    probabilities: NDArray[np.float32]  # (N, C), calibrated
    rejection_reasons: tuple[str | None, ...]  # of the out-of-distribution guard; None: accepted
    features: NDArray[np.float32]  # (N, D), whitened
    quality_measures: NDArray[np.float32]  # (N, Q)


class ModelInfo(BaseModel):
    """Which model gave a result, and on what it was calibrated."""

    model_config = ConfigDict(frozen=True)

    name: str
    model: str
    title: str
    digest: str  # of the bundle
    signer: str
    precision: Precision
    calibrated_on: str
    has_local_calibration: bool
    classes: tuple[str, ...]


class BundleRuntime:
    def __init__(
        self,
        bundle: ModelBundle,
        precision: Precision | None = None,
        num_threads: int = 1,
        local_calibration: LocalCalibration | None = None,
    ) -> None:
        """`precision`: fp32 by default, with which the card's rates were measured."""
        self.bundle, self.local_calibration = bundle, local_calibration
        self.precision: Precision = precision or "fp32"
        try:
            self._session = create_session(bundle.onnx_graph(self.precision), num_threads)
        except BundleError:
            raise
        except Exception as error:  # onnxruntime's exception classes differ between versions
            built_with = bundle.manifest.software.get("onnxruntime", "another version")
            raise BundleError(
                f"onnxruntime {load_onnxruntime().__version__} cannot load {bundle.origin} ({error}); install onnxruntime "
                f"{built_with}, with which it was made, or export it again"
            ) from error
        self._check_graph()

    def _check_graph(self) -> None:
        """Checks the graph's inputs and outputs against the manifest: a valid signature does not imply consistency."""
        manifest, ood_reference = self.bundle.manifest, self.ood_reference
        shapes = {output.name: output.shape for output in self._session.get_outputs()}
        (image,) = self._session.get_inputs()
        fits = (
            (image.name, image.type, list(image.shape[1:])) == ("image", "tensor(uint8)", [*manifest.input_size, 3])
            and set(OUTPUT_NAMES) <= shapes.keys()
            and shapes["probabilities"][1] == len(manifest.classes)
            and (ood_reference is None or shapes["features"][1] == len(ood_reference.feature_mean))
        )
        if not fits:
            raise BundleError(
                f"{self.bundle.origin}: its graph does not match bundle.json or reference.json; export it again"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        return self.bundle.manifest.classes

    @property
    def calibration(self) -> ModelCalibration:
        return self.local_calibration.calibration if self.local_calibration else self.bundle.calibration

    @property
    def ood_reference(self) -> OodReference | None:
        return self.local_calibration.ood_reference if self.local_calibration else self.bundle.ood_reference

    @property
    def positive_index(self) -> int | None:
        name = self.calibration.positive_class
        return None if name is None else self.classes.index(name)

    @property
    def unfit_reason(self) -> str | None:
        """Why the local calibration forbids a verdict; None if it does not."""
        return self.local_calibration.unfit_reason if self.local_calibration else None

    @property
    def model_info(self) -> ModelInfo:
        bundle, local = self.bundle, self.local_calibration
        return ModelInfo(
            name=bundle.manifest.name,
            model=bundle.manifest.model,
            title=bundle.title,
            digest=bundle.digest,
            signer=bundle.signer,
            precision=self.precision,
            calibrated_on=self.calibration.measured_on + (f" ({local.created})" if local else ""),
            has_local_calibration=local is not None,
            classes=self.classes,
        )

    def predict(self, images: ImageBatch) -> Predictions:
        """(N, H, W, 3) uint8 of any size, RGB."""
        manifest = self.bundle.manifest
        inputs = self._normalize_colors(resize_images(images, manifest.input_size, manifest.resize))
        if not len(inputs):
            return Predictions(np.zeros((0, len(self.classes)), np.float32), (), *(np.zeros((0, 0), np.float32),) * 2)
        chunks = (inputs[start : start + BATCH_SIZE] for start in range(0, len(inputs), BATCH_SIZE))
        run = partial(run_session, self._session)
        parts = [predict_with_tta(run, chunk, manifest.num_tta_views) for chunk in chunks]
        p, features, quality_measures = (np.concatenate(part) for part in zip(*parts, strict=True))
        rejection_reasons = (
            self.ood_reference.rejection_reasons(features, quality_measures) if self.ood_reference else [None] * len(p)
        )
        # the graph divides by the bundle's temperature; a local calibration may have another one
        ratio = self.bundle.calibration.temperature / self.calibration.temperature
        return Predictions(rescale_temperature(p, ratio), tuple(rejection_reasons), features, quality_measures)

    def flag_positives(
        self, probabilities: NDArray[np.float32], operating_point: OperatingPoint | None
    ) -> NDArray[np.bool_]:
        """(N,) whether each image is positive at the operating point; all False without one."""
        if self.positive_index is None or operating_point is None:
            return np.zeros(len(probabilities), bool)
        return np.asarray(compute_log_odds(probabilities, self.positive_index) >= operating_point.log_odds)

    def _normalize_colors(self, images: ImageBatch) -> ImageBatch:
        """Applies the study's color normalization with the local calibration's tables, or tables of these images."""
        normalization = self.bundle.manifest.normalization
        if normalization["name"] in ("none", "image") or not len(images):
            return images
        from sites.data.color_tables import apply_table, build_color_table

        color_tables = (
            np.asarray(self.local_calibration.color_tables, np.uint8)
            if self.local_calibration and self.local_calibration.color_tables
            else build_color_table(normalization, images)
        )
        return apply_table(images, color_tables)
