"""The frames of a DICOM image, one by one, after the header was checked against the pixel data itself.

Offset tables are not used: a frame begins where a fragment begins with its format's first marker (RLE: at every fragment),
so wrong tables and a compressed file's wrong Number of Frames do no harm. Uncompressed pixels carry no marks:
there the header has to fit to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate, generate_fragments
from pydicom.pixels.decoders.base import get_decoder

from deploy.imaging.jpeg_headers import BEGINNINGS, Stream, jpeg, stream
from pipeline.core.errors import BadData
from sites.data.images import MAX_PIXELS

MAX_FRAMES = 2_000
MAX_TOTAL = 400_000_000  # pixels of all frames
AGAIN = "export it again"
GREYS = ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR")
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
# One plugin for all frames: a change between them would change pixels. Those that refuse damaged streams come first.
PLUGINS = ("pyjpegls", "pydicom", "pylibjpeg", "pillow")


@dataclass(frozen=True)
class Layout:
    rows: int
    columns: int
    samples: int
    colour: str  # photometric interpretation
    allocated: int
    stored: int
    signed: bool
    planar: int

    def options(self) -> dict[str, Any]:
        """As pydicom's decoders call them."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "samples_per_pixel": self.samples,
            "photometric_interpretation": self.colour,
            "bits_allocated": self.allocated,
            "bits_stored": self.stored,
            "pixel_representation": int(self.signed),
            "planar_configuration": self.planar,
            "pixel_keyword": "PixelData",
        }


def open_frames(header: Dataset) -> tuple[Layout, int, Iterator[np.ndarray]]:
    """How many, and (H, W) or (H, W, 3) arrays with colours as RGB; none is unpacked before it is asked for."""
    syntax, declared = _syntax(header), _declared(header)
    packed = header["PixelData"].is_undefined_length
    if packed != syntax.is_encapsulated:
        raise BadData(
            f"the pixels are {'' if packed else 'not '}compressed, but the header says {syntax.name}; {AGAIN}"
        )
    if not packed:
        layout = _layout(header, None)
        _limit(layout, declared)
        return layout, declared, _native(header, layout, syntax, declared)
    plugin = _plugin(syntax)
    streams = _split(header.PixelData, syntax)
    if declared > len(streams):
        raise BadData(f"cut short: {len(streams)} of {declared} frames are there; copy it again")
    layout = _layout(header, None if syntax == uid.RLELossless else stream(streams[0]))
    _limit(layout, len(streams))
    return layout, len(streams), _compressed(streams, layout, syntax, plugin)


def _limit(layout: Layout, frames: int) -> None:
    pixels = layout.rows * layout.columns
    if pixels > MAX_PIXELS:
        raise BadData(f"more than {MAX_PIXELS // 10**6} million pixels in a frame; {AGAIN} as tiles")
    if frames > MAX_FRAMES or pixels * frames > MAX_TOTAL:
        raise BadData(
            f"{frames} frames of {layout.columns} x {layout.rows} pixels; at most {MAX_FRAMES} frames "
            f"and {MAX_TOTAL // 10**6} million pixels are read, so export the fields that are wanted"
        )


def _syntax(header: Dataset) -> uid.UID:
    told = getattr(header, "file_meta", Dataset()).get("TransferSyntaxUID")
    if told:
        if not told.is_transfer_syntax:
            raise BadData(f"unknown transfer syntax {told}; {AGAIN} as Explicit VR Little Endian")
        return uid.UID(told)
    if header["PixelData"].is_undefined_length:
        raise BadData(f"compressed pixels without a transfer syntax; {AGAIN} with its file meta header")
    implicit, little = header.original_encoding
    if implicit:
        return uid.ImplicitVRLittleEndian
    return uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian


def _plugin(syntax: uid.UID) -> str:
    try:
        there = get_decoder(syntax).available_plugins
    except NotImplementedError:
        raise BadData(f"{syntax.name} is not read; {AGAIN} uncompressed, or as JPEG or JPEG 2000") from None
    if not there:
        raise BadData(f"no decoder for {syntax.name}; pip install 'hemofed[edge-smear]', or {AGAIN} uncompressed")
    return next(p for p in (*PLUGINS, *there) if p in there)


def _declared(header: Dataset) -> int:
    try:
        return max(1, int(header.get("NumberOfFrames") or 1))
    except (TypeError, ValueError):
        return 1


def _number(header: Dataset, keyword: str) -> int | None:
    value = header.get(keyword)
    if value is not None and not isinstance(value, int):
        raise BadData(f"{keyword} is {str(value)[:40]!r}, not a number; {AGAIN}")
    return value


def _layout(header: Dataset, seen: Stream | None) -> Layout:
    """The header's word, mended by what the first stream says of itself where that leaves no doubt."""
    told = {key: _number(header, key) for key in ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored")}
    if seen:
        for key, value in (("Rows", seen.rows), ("Columns", seen.columns), ("SamplesPerPixel", seen.samples)):
            if told[key] is None:
                told[key] = value
            elif told[key] != value:
                raise BadData(f"{key} is {told[key]}, but the compressed pixels say {value}; {AGAIN}")
        told["BitsStored"], told["BitsAllocated"] = seen.bits, 8 if seen.bits <= 8 else 16
    rows, columns, samples = told["Rows"], told["Columns"], told["SamplesPerPixel"]
    if samples is None:  # types 1 of the standard, but left out by some cameras
        samples = 3 if header.get("PhotometricInterpretation") in COLOURS else 1
    allocated = told["BitsAllocated"]
    if not rows or not columns or allocated is None:
        raise BadData(f"Rows, Columns or Bits Allocated is missing; {AGAIN}")
    stored = told["BitsStored"] or allocated
    if allocated not in (1, 8, 16) or not 1 <= stored <= allocated or (seen and seen.bits > 16):
        raise BadData(f"{stored} bits in {allocated}; {AGAIN} with 8 to 16 bits a sample")
    high = _number(header, "HighBit")
    if seen is None and high is not None and high != stored - 1:
        raise BadData(f"High Bit is {high} for {stored} bits, so the values are shifted; {AGAIN} as secondary capture")
    colour = _colour(header, samples, seen, rows * columns)
    planar = _number(header, "PlanarConfiguration")
    if samples == 3 and header["PixelData"].is_undefined_length:
        planar = 0  # streams have an order of their own
    if samples == 3 and planar not in (0, 1):
        raise BadData(f"Planar Configuration is {planar}, so the order of the colours is unknown; {AGAIN}")
    if colour.startswith("YBR_FULL") and stored > 8:
        raise BadData(f"{colour} with {stored} bits; {AGAIN} as RGB")
    signed = colour.startswith("MONOCHROME") and _number(header, "PixelRepresentation") == 1
    return Layout(rows, columns, samples, colour, allocated, stored, signed, planar or 0)


def _colour(header: Dataset, samples: int, seen: Stream | None, pixels: int) -> str:
    told = str(header.get("PhotometricInterpretation") or "").strip().upper()
    if samples == 3 and not told:
        if seen:
            return "YBR_FULL" if seen.luma else "RGB"
        return "YBR_FULL_422" if len(header.PixelData) // pixels == 2 else "RGB"
    if samples == 1 and not told:
        raise BadData(f"Photometric Interpretation is missing, so black and white may be swapped; {AGAIN}")
    if told not in (COLOURS if samples == 3 else GREYS):
        raise BadData(f"{told} with {samples} samples a pixel is not read; {AGAIN} as RGB or MONOCHROME2")
    return "RGB" if seen and seen.mixed else told


def _native(header: Dataset, layout: Layout, syntax: uid.UID, frames: int) -> Iterator[np.ndarray]:
    bits = layout.rows * layout.columns * layout.samples * layout.allocated
    if layout.colour == "YBR_FULL_422":
        if layout.columns % 2:
            raise BadData(f"YBR_FULL_422 with {layout.columns} columns, an odd number; {AGAIN} as RGB")
        bits = bits // 3 * 2
    data, wanted = header.PixelData, (bits * frames + 7) // 8
    if len(data) < wanted:
        raise BadData(f"cut short: {len(data)} of {wanted} bytes of pixels are there; copy it again")
    # A byte that makes the length even is usual, and zeros are padding; anything else means a wrong size of the picture.
    if len(data) - wanted > 1 and data[wanted:].strip(b"\0"):
        raise BadData(
            f"{len(data)} bytes of pixels, but {frames} frames of {layout.columns} x {layout.rows} take {wanted}; "
            "correct Number of Frames, Rows and Columns, or export it again"
        )
    decoder = get_decoder(syntax)
    options = layout.options() | {"number_of_frames": frames, "pixel_vr": header["PixelData"].VR}
    for array, _ in decoder.iter_array(data[: wanted + wanted % 2], **options):
        yield array


def _split(data: bytes, syntax: uid.UID) -> list[bytes]:
    fragments = generate_fragments(data)
    next(fragments, b"")  # the offset table
    frames: list[list[bytes]] = []
    for fragment in fragments:
        if syntax == uid.RLELossless or not frames or fragment.startswith(BEGINNINGS):
            frames.append([])
        frames[-1].append(fragment)
    if not frames:
        raise BadData(f"no frame in the pixel data; {AGAIN}")
    return [b"".join(parts) for parts in frames]


def _compressed(streams: Sequence[bytes], layout: Layout, syntax: uid.UID, plugin: str) -> Iterator[np.ndarray]:
    first = None if syntax == uid.RLELossless else stream(streams[0])
    for place, data in enumerate(streams, start=1):
        # Decoders allocate what the stream says, whatever the header said.
        if first and (seen := stream(data)) != first:
            raise BadData(f"frame {place} says {seen}, the first {first}; {AGAIN}")
        if syntax in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit) and layout.stored == 8:
            yield jpeg(data, layout.colour)
            continue
        options = layout.options() | {"number_of_frames": 1}
        array, _ = get_decoder(syntax).as_array(encapsulate([data]), decoding_plugin=plugin, **options)
        yield array
