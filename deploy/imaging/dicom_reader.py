"""Decodes DICOM files to RGB: applies the file's window to gray values (or scales their bit range) and color palettes.

Values are never stretched to an image's own range, so equal values stay equal across images and hospitals.
ICC profiles, overlays and shutters are ignored, as on the training side.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_color_lut

from deploy.imaging.dicom_frames import EXPORT_AGAIN_HINT, MAX_TOTAL_PIXELS, PixelLayout, open_frames
from deploy.imaging.input_image import WARNINGS_LOCK, InputImage, SlideIdentity
from pipeline.core.errors import DataError

OVERLAY_DERIVATION = "Cells marked by a trained model; research use only"  # Derivation Description of our overlays


def read_dicom(data: bytes | Path, name: str, path: Path | None = None) -> list[InputImage]:
    """All frames. `path`: the DICOM file of the bytes, to which results refer."""
    if isinstance(data, Path):
        path = data
        try:
            data = data.read_bytes()
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error.strerror}); check its permissions and the disk") from error
    with WARNINGS_LOCK, warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            input_images = list(_iter_input_images(_parse_header(data), name, path))
            _check_warnings(str(warning.message) for warning in caught_warnings)
            return input_images
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        except MemoryError as error:
            raise DataError(f"{name}: too large for this machine's memory; export fewer frames") from error
        except Exception as error:  # damaged bytes raise all kinds of exceptions in pydicom and its plugins
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{name}: damaged DICOM ({reason}); {EXPORT_AGAIN_HINT}") from error


def _check_warnings(messages: Iterable[str]) -> None:
    """Raises for the one pydicom warning that means truncated pixels; the others are about what it repaired."""
    for text in messages:
        match = re.search(r"decoded RLE segment .* (\d+) vs\. (\d+) bytes", text)
        if match and int(match[1]) > int(match[2]) + 2:  # up to two bytes are padding
            raise DataError(f"there are more compressed pixels than Rows and Columns say; {EXPORT_AGAIN_HINT}")


def _parse_header(data: bytes) -> Dataset:
    is_deflated = uid.DeflatedExplicitVRLittleEndian.encode() in data[: 2**16]
    header = pydicom.dcmread(io.BytesIO(_inflate(data) if is_deflated else data), force=True)
    sop_class = str(header.get("SOPClassUID") or "")
    if data[128:132] != b"DICM" and not (
        sop_class.startswith("1.2.840.10008.") or ("Rows" in header and "PixelData" in header)
    ):
        raise DataError(f"neither an image nor DICOM; {EXPORT_AGAIN_HINT} as PNG, JPEG, TIFF, BMP or DICOM")
    if not header.get("PixelData"):
        if not sop_class:  # the parser returns an empty header for a truncated file
            raise DataError("damaged or truncated DICOM, without a SOP class and pixels; copy or export it again")
        raise DataError(f"DICOM without pixel data ({uid.UID(sop_class).name}); give the image instances")
    image_type: Any = header.get("ImageType") or ()
    if len(image_type) > 2 and image_type[2] in ("LABEL", "OVERVIEW", "THUMBNAIL"):
        raise DataError(f"the {image_type[2].lower()} image of a slide, not a field; give the VOLUME instance")
    if str(header.get("DerivationDescription") or "") == OVERLAY_DERIVATION:
        raise DataError("an overlay drawn by hemofed, not a field; give the images that it was made of")
    return header


def _inflate(data: bytes) -> bytes:
    """Inflates what follows the file meta group, with a size limit, which pydicom lacks."""
    offset, syntax = 132 if data[128:132] == b"DICM" else 0, b""
    while data[offset : offset + 2] == b"\2\0":
        start, size = (
            (12, slice(offset + 8, offset + 12))
            if data[offset + 4 : offset + 6] in (b"OB", b"UN")
            else (8, slice(offset + 6, offset + 8))
        )
        end = offset + start + int.from_bytes(data[size], "little")
        if data[offset : offset + 4] == b"\2\0\x10\0":
            syntax = data[offset + start : end].rstrip(b"\0 ")
        offset = end
    if syntax and syntax != uid.DeflatedExplicitVRLittleEndian.encode():
        return data  # it only mentions the UID of deflated files
    if not syntax:
        raise DataError(f"the file meta group is damaged; {EXPORT_AGAIN_HINT} uncompressed")
    limit, decompressor = 3 * MAX_TOTAL_PIXELS + 2**24, zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = decompressor.decompress(data[offset:], limit)
    if not decompressor.eof:
        raise DataError(
            f"unpacks to more than {limit // 2**20} MiB; split it into several instances"
            if len(inflated) == limit
            else "truncated inside its deflated part; copy it again"
        )
    return inflated


def _iter_input_images(header: Dataset, name: str, path: Path | None) -> Iterator[InputImage]:
    layout, num_frames, frames = open_frames(header)
    convert_frame, identity = _frame_converter(header, layout), read_identity(header)
    for frame_number, frame in enumerate(frames, start=1):
        yield InputImage(
            name=name if num_frames == 1 else f"{name}#{frame_number}",
            pixels=convert_frame(frame, frame_number),
            dicom_path=path,
            frame_number=frame_number,
            identity=identity,
        )


def read_identity(header: Dataset) -> SlideIdentity:
    patient_id, patient_name, study_uid, accession = (
        str(header.get(keyword) or "")
        for keyword in ("PatientID", "PatientName", "StudyInstanceUID", "AccessionNumber")
    )
    return SlideIdentity.of(patient_id, patient_name, study_uid, accession)


def _frame_converter(header: Dataset, layout: PixelLayout) -> Callable[[np.ndarray, int], np.ndarray]:
    """(H, W) or (H, W, 3) as stored -> (H, W, 3) uint8."""
    if layout.samples_per_pixel == 3:
        return lambda frame, _: np.ascontiguousarray(_to_uint8(frame, layout.bits_stored))
    if layout.photometric_interpretation == "PALETTE COLOR":
        table = apply_color_lut(np.arange(2**layout.bits_stored, dtype=np.uint16), header)
        if table.dtype != np.uint8:  # some writers store 8-bit entries in 16-bit tables
            table = (table >> 8 if table.max() > 255 else table).astype(np.uint8)
        return lambda frame, _: table[frame]
    return lambda frame, frame_number: np.repeat(
        _convert_grayscale(frame, frame_number, header, layout)[..., None], 3, axis=2
    )


def _to_uint8(values: np.ndarray, bits: int) -> np.ndarray:
    if bits > 8:
        return (values >> (bits - 8)).astype(np.uint8)
    return values.astype(np.uint8) if bits == 8 else (values.astype(np.uint16) * 255 // (2**bits - 1)).astype(np.uint8)


def _convert_grayscale(frame: np.ndarray, frame_number: int, header: Dataset, layout: PixelLayout) -> np.ndarray:
    slope: float = _read_attribute(header, frame_number, "PixelValueTransformationSequence", "RescaleSlope", 1.0)
    window: float = _read_attribute(header, frame_number, "FrameVOILUTSequence", "WindowWidth", 0.0)
    voi_function = (
        str(_read_attribute(header, frame_number, "FrameVOILUTSequence", "VOILUTFunction", "LINEAR")).strip().upper()
    )
    if "ModalityLUTSequence" in header or ("VOILUTSequence" in header and not window) or not slope:
        raise DataError(
            f"gray values with a lookup table, or with rescale slope 0; {EXPORT_AGAIN_HINT} with a window or as RGB"
        )
    if window <= 0:  # absent or invalid
        offset = 2 ** (layout.bits_stored - 1) if layout.is_signed else 0
        gray = _to_uint8((frame.astype(np.int32) + offset).astype(np.uint16), layout.bits_stored)
        return _invert_if(gray, (slope < 0) != (layout.photometric_interpretation == "MONOCHROME1"))
    center = _read_attribute(header, frame_number, "FrameVOILUTSequence", "WindowCenter", 0.0)
    intercept = _read_attribute(header, frame_number, "PixelValueTransformationSequence", "RescaleIntercept", 0.0)
    x = frame.astype(np.float64) * slope + intercept
    # DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3
    if voi_function == "SIGMOID":
        y = 1 / (1 + np.exp(np.clip(-4 * (x - center) / window, -700, 700)))
    elif voi_function == "LINEAR_EXACT":
        y = (x - center) / window + 0.5
    else:
        y = (x - (center - 0.5)) / max(window - 1, 1e-6) + 0.5
    return _invert_if(
        np.rint(np.clip(y, 0, 1) * 255).astype(np.uint8), layout.photometric_interpretation == "MONOCHROME1"
    )


def _invert_if(gray: np.ndarray, invert: bool) -> np.ndarray:
    return np.subtract(np.uint8(255), gray) if invert else gray


def _read_attribute(header: Dataset, frame_number: int, group_sequence: str, keyword: str, default: Any) -> Any:
    """From the header, else from a multi-frame image's functional groups; the first of several values."""
    per_frame_groups = header.get("PerFrameFunctionalGroupsSequence") or []
    shared_groups = header.get("SharedFunctionalGroupsSequence") or []
    for item in (
        header,
        *(
            g
            for f in (*per_frame_groups[frame_number - 1 : frame_number], *shared_groups[:1])
            for g in f.get(group_sequence) or []
        ),
    ):
        value = item.get(keyword)
        if isinstance(value, pydicom.multival.MultiValue):
            value = value[0] if value else None
        if value is not None and value != "":
            return type(default)(value)
    return default
