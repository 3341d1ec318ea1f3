"""DICOM files to pictures: grey is windowed as the file says or scaled by its full range of bits, palettes are looked up.

Nothing is stretched to an image's own range, so equal values stay equal across images and hospitals.
ICC profiles, overlays and shutters are not applied, as on the training side.
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

from deploy.imaging.dicom_frames import AGAIN, MAX_TOTAL, Layout, open_frames
from deploy.imaging.images import FILTERS, Picture
from pipeline.core.errors import BadData

MARKED = "Cells marked by a trained model; research use only"  # how our own overlays say that they are no photographs


def read_dicom(data: bytes | Path, name: str, path: Path | None = None) -> list[Picture]:
    """All frames. `path` is the file the bytes came from, for results to refer to."""
    if isinstance(data, Path):
        path = data
        try:
            data = data.read_bytes()
        except OSError as error:
            raise BadData(f"{name}: cannot be read ({error.strerror}); check its rights and the disk") from error
    with FILTERS, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            pictures = list(_pictures(_parse(data), name, path))
            _heed(str(warning.message) for warning in said)
            return pictures
        except BadData as error:
            raise BadData(f"{name}: {error}") from error
        except MemoryError as error:
            raise BadData(f"{name}: too large for this machine's memory; export fewer frames") from error
        except Exception as error:  # damaged bytes can raise anything inside pydicom and its plugins
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise BadData(f"{name}: damaged DICOM ({reason}); {AGAIN}") from error


def _heed(said: Iterable[str]) -> None:
    """pydicom warns of what it mended (odd lengths, wrong VRs) and of a JPEG's own colours; one warning is a cut picture."""
    for text in said:
        more = re.search(r"decoded RLE segment .* (\d+) vs\. (\d+) bytes", text)
        if more and int(more[1]) > int(more[2]) + 2:  # up to two bytes are padding
            raise BadData(f"the compressed pixels are more than Rows and Columns say; {AGAIN}")


def _parse(data: bytes) -> Dataset:
    deflated = uid.DeflatedExplicitVRLittleEndian.encode() in data[: 2**16]
    header = pydicom.dcmread(io.BytesIO(_inflated(data) if deflated else data), force=True)
    sop = str(header.get("SOPClassUID") or "")
    if data[128:132] != b"DICM" and not (
        sop.startswith("1.2.840.10008.") or ("Rows" in header and "PixelData" in header)
    ):
        raise BadData(f"neither a picture nor DICOM; {AGAIN} as PNG, JPEG, TIFF, BMP or DICOM")
    if not header.get("PixelData"):
        if not sop:  # the parser gives up on what is cut and hands back nothing
            raise BadData("damaged or cut DICOM, without a SOP class and pixels; copy or export it again")
        raise BadData(f"DICOM without pixel data ({uid.UID(sop).name}); give the image instances")
    kind: Any = header.get("ImageType") or ()
    if len(kind) > 2 and kind[2] in ("LABEL", "OVERVIEW", "THUMBNAIL"):
        raise BadData(f"the {kind[2].lower()} image of a slide, not a field; give the VOLUME instance")
    if str(header.get("DerivationDescription") or "") == MARKED:
        raise BadData("a result of hemofed with its boxes drawn in, not a field; give the images that it was made of")
    return header


def _inflated(data: bytes) -> bytes:
    """What follows the file meta group. pydicom would unpack it without a limit, so it is not left to pydicom."""
    at, syntax = 132 if data[128:132] == b"DICM" else 0, b""
    while data[at : at + 2] == b"\2\0":
        start, size = (
            (12, slice(at + 8, at + 12)) if data[at + 4 : at + 6] in (b"OB", b"UN") else (8, slice(at + 6, at + 8))
        )
        end = at + start + int.from_bytes(data[size], "little")
        if data[at : at + 4] == b"\2\0\x10\0":
            syntax = data[at + start : end].rstrip(b"\0 ")
        at = end
    if syntax and syntax != uid.DeflatedExplicitVRLittleEndian.encode():
        return data  # it only speaks of deflated files
    if not syntax:
        raise BadData(f"the file meta group is damaged; {AGAIN} uncompressed")
    limit, inflate = 3 * MAX_TOTAL + 2**24, zlib.decompressobj(-zlib.MAX_WBITS)
    whole = inflate.decompress(data[at:], limit)
    if not inflate.eof:
        raise BadData(
            f"unpacks to more than {limit // 2**20} MiB; split it into several instances"
            if len(whole) == limit
            else "cut short inside its deflated part; copy it again"
        )
    return whole


def _pictures(header: Dataset, name: str, path: Path | None) -> Iterator[Picture]:
    layout, count, frames = open_frames(header)
    finish = _finisher(header, layout)
    for place, frame in enumerate(frames, start=1):
        yield Picture(name if count == 1 else f"{name}#{place}", finish(frame, place), path, place)


def _finisher(header: Dataset, layout: Layout) -> Callable[[np.ndarray, int], np.ndarray]:
    """(H, W) or (H, W, 3) as stored -> (H, W, 3) uint8."""
    if layout.samples == 3:
        return lambda frame, _: np.ascontiguousarray(_eight(frame, layout.stored))
    if layout.colour == "PALETTE COLOR":
        table = apply_color_lut(np.arange(2**layout.stored, dtype=np.uint16), header)
        if table.dtype != np.uint8:  # some writers put 8-bit entries into 16-bit tables
            table = (table >> 8 if table.max() > 255 else table).astype(np.uint8)
        return lambda frame, _: table[frame]
    return lambda frame, place: np.repeat(_grey(frame, place, header, layout)[..., None], 3, axis=2)


def _eight(values: np.ndarray, bits: int) -> np.ndarray:
    if bits > 8:
        return (values >> (bits - 8)).astype(np.uint8)
    return values.astype(np.uint8) if bits == 8 else (values.astype(np.uint16) * 255 // (2**bits - 1)).astype(np.uint8)


def _grey(frame: np.ndarray, place: int, header: Dataset, layout: Layout) -> np.ndarray:
    slope: float = _told(header, place, "PixelValueTransformationSequence", "RescaleSlope", 1.0)
    window: float = _told(header, place, "FrameVOILUTSequence", "WindowWidth", 0.0)
    exact = str(_told(header, place, "FrameVOILUTSequence", "VOILUTFunction", "LINEAR")).strip().upper()
    if "ModalityLUTSequence" in header or ("VOILUTSequence" in header and not window) or not slope:
        raise BadData(f"grey values behind a lookup table, or with rescale slope 0; {AGAIN} with a window or as RGB")
    if window <= 0:  # absent, or zeros that cannot be meant
        offset = 2 ** (layout.stored - 1) if layout.signed else 0
        grey = _eight((frame.astype(np.int32) + offset).astype(np.uint16), layout.stored)
        return _turned(grey, (slope < 0) != (layout.colour == "MONOCHROME1"))
    centre = _told(header, place, "FrameVOILUTSequence", "WindowCenter", 0.0)
    shift = _told(header, place, "PixelValueTransformationSequence", "RescaleIntercept", 0.0)
    x = frame.astype(np.float64) * slope + shift
    # DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3
    if exact == "SIGMOID":
        y = 1 / (1 + np.exp(np.clip(-4 * (x - centre) / window, -700, 700)))
    elif exact == "LINEAR_EXACT":
        y = (x - centre) / window + 0.5
    else:
        y = (x - (centre - 0.5)) / max(window - 1, 1e-6) + 0.5
    return _turned(np.rint(np.clip(y, 0, 1) * 255).astype(np.uint8), layout.colour == "MONOCHROME1")


def _turned(grey: np.ndarray, over: bool) -> np.ndarray:
    return np.subtract(np.uint8(255), grey) if over else grey


def _told(header: Dataset, place: int, group: str, keyword: str, default: Any) -> Any:
    """From the image, else from the functional groups of a multi-frame one; the first of several windows."""
    frames = header.get("PerFrameFunctionalGroupsSequence") or []
    shared = header.get("SharedFunctionalGroupsSequence") or []
    for item in (header, *(g for f in (*frames[place - 1 : place], *shared[:1]) for g in f.get(group) or [])):
        value = item.get(keyword)
        if isinstance(value, pydicom.multival.MultiValue):
            value = value[0] if value else None
        if value is not None and value != "":
            return type(default)(value)
    return default
