"""A verified bundle at work: onnxruntime and numpy, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.bundle.bundle import Bundle, Precision
from deploy.bundle.ood_guard import Reference
from deploy.bundle.operating_points import Calibration, Point, log_odds, tempered
from deploy.inference.onnx_session import onnxruntime, session
from deploy.inference.resize import Images, resized
from deploy.inference.test_time_augmentation import Seen, seen_from_all_sides
from pipeline.core.errors import BadBundle

if TYPE_CHECKING:
    from deploy.inference.local_calibration import Lab

CHUNK = 256  # images at once
OUTPUTS = ["probabilities", "traits", "measures"]


@dataclass(frozen=True)
class Answers:
    """Of N images."""

    probabilities: NDArray[np.float32]  # (N, C), calibrated
    refused: tuple[str | None, ...]  # why one is not answered for
    traits: NDArray[np.float32]  # (N, D), whitened
    measures: NDArray[np.float32]  # (N, Q)


class Runtime:
    def __init__(
        self, bundle: Bundle, precision: Precision | None = None, threads: int = 1, lab: Lab | None = None
    ) -> None:
        """`precision`: fp32 if not said; `lab`: what this lab measured for itself."""
        self.bundle, self.lab = bundle, lab
        self.precision: Precision = precision or "fp32"  # with which the stated rates were measured
        try:
            self._session = session(bundle.graph(self.precision), threads)
        except BadBundle:
            raise
        except Exception as error:  # onnxruntime's own classes, which differ between versions
            made = bundle.manifest.software.get("onnxruntime", "another version")
            raise BadBundle(
                f"onnxruntime {onnxruntime().__version__} cannot load {bundle.origin} ({error}); it was made with {made}"
            ) from error
        self._check()

    def _check(self) -> None:
        """A signature says who made a bundle, not that its parts fit together."""
        manifest, reference = self.bundle.manifest, self.reference
        shapes = {output.name: output.shape for output in self._session.get_outputs()}
        (image,) = self._session.get_inputs()
        fits = (
            (image.name, image.type, list(image.shape[1:])) == ("image", "tensor(uint8)", [*manifest.size, 3])
            and set(OUTPUTS) <= shapes.keys()
            and shapes["probabilities"][1] == len(manifest.classes)
            and (reference is None or shapes["traits"][1] == len(reference.middle))
        )
        if not fits:
            raise BadBundle(
                f"{self.bundle.origin}: its graph does not fit bundle.json or reference.json; export it anew"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        return self.bundle.manifest.classes

    @property
    def calibration(self) -> Calibration:
        return self.lab.calibration if self.lab else self.bundle.calibration

    @property
    def reference(self) -> Reference | None:
        return self.lab.reference if self.lab else self.bundle.reference

    @property
    def positive(self) -> int | None:
        name = self.calibration.positive
        return None if name is None else self.classes.index(name)

    @property
    def unfit(self) -> str | None:
        """What this lab found against the model, if it did."""
        return self.lab.unfit if self.lab else None

    def about(self) -> dict[str, Any]:
        """What every result says of the model that it comes from."""
        bundle, calibrated = self.bundle, self.calibration.measured_on + (f" ({self.lab.made})" if self.lab else "")
        return {"name": bundle.manifest.name, "model": bundle.manifest.model, "title": bundle.title, "digest": bundle.digest,
                "signer": bundle.signer, "precision": self.precision, "calibrated": calibrated, "lab": self.lab is not None,
                "classes": list(self.classes)}  # fmt: skip

    def answer(self, images: Images) -> Answers:
        """(N, H, W, 3) uint8 of any size, RGB."""
        manifest = self.bundle.manifest
        small = self._coloured(resized(images, manifest.size, manifest.resize))
        if not len(small):
            return Answers(np.zeros((0, len(self.classes)), np.float32), (), *(np.zeros((0, 0), np.float32),) * 2)
        chunks = (small[at : at + CHUNK] for at in range(0, len(small), CHUNK))
        parts = [seen_from_all_sides(self._run, chunk, manifest.turns) for chunk in chunks]
        p, traits, measures = (np.concatenate(part) for part in zip(*parts, strict=True))
        refused = self.reference.refusals(traits, measures) if self.reference else [None] * len(p)
        # the graph divides by the bundle's temperature; a lab may have another one
        ratio = self.bundle.calibration.temperature / self.calibration.temperature
        return Answers(tempered(p, ratio), tuple(refused), traits, measures)

    def flagged(self, probabilities: NDArray[np.float32], point: Point | None) -> NDArray[np.bool_]:
        """Which are called positive at an operating point."""
        if self.positive is None or point is None:
            return np.zeros(len(probabilities), bool)
        return np.asarray(log_odds(probabilities, self.positive) >= point.log_odds)

    def _run(self, images: Images) -> Seen:
        return tuple(self._session.run(OUTPUTS, {"image": images}))

    def _coloured(self, images: Images) -> Images:
        """As the study's normalisation would show this place's images."""
        rule = self.bundle.manifest.normalise
        if rule["name"] in ("none", "image") or not len(images):
            return images
        from sites.data.color_tables import look_up, table_of

        table = np.asarray(self.lab.colours, np.uint8) if self.lab and self.lab.colours else table_of(rule, images)
        return look_up(images, table)
