"""A decoded image of a slide, and whose slide it is."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Warning filters are global to the process: two threads that set and restore them would restore the wrong ones.
WARNINGS_LOCK = threading.RLock()


@dataclass(frozen=True)
class SlideIdentity:
    """Hashes that tell patients and studies apart; they are compared, never shown and never stored."""

    patient: str
    study: str  # of the study and the accession

    @classmethod
    def of(cls, patient_id: str, patient_name: str, study_uid: str, accession: str) -> SlideIdentity:
        patient = ("id", patient_id) if patient_id else ("name", patient_name)
        return cls(patient=_hash_texts(*patient), study=_hash_texts(study_uid, accession))


def _hash_texts(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True)
class InputImage:
    name: str  # path as given, "-" for stdin, "path#3" for a frame
    pixels: np.ndarray  # (H, W, 3) uint8 RGB
    dicom_path: Path | None = None  # the DICOM file that results refer to; None for other formats
    frame_number: int = 1
    identity: SlideIdentity | None = None  # None for formats that name no patient

    @property
    def pixel_digest(self) -> str:
        """Equal for images with equal pixels, whatever their file format."""
        return hashlib.sha256(f"{self.pixels.shape}".encode() + self.pixels.tobytes()).hexdigest()
