"""Decodes a DICOM image frame by frame, after checking the header against the pixel data.

Offset tables are ignored: a frame begins at each fragment with its format's first marker (RLE: at every fragment), so
wrong tables or a wrong Number of Frames in a compressed file have no effect. Uncompressed pixels have no markers, so the
header must match their length exactly.
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

from deploy.imaging.jpeg_headers import STREAM_SIGNATURES, CodestreamHeader, decode_jpeg, read_codestream_header
from pipeline.core.errors import DataError
from sites.data.images import MAX_PIXELS

MAX_FRAMES = 2_000
MAX_TOTAL_PIXELS = 400_000_000  # of all frames
EXPORT_AGAIN_HINT = "export it again"
GRAYSCALE_INTERPRETATIONS = ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR")
COLOR_INTERPRETATIONS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
# One plugin decodes all frames, because plugins may give different pixels. Those that reject damaged streams come first.
DECODER_PLUGINS = ("pyjpegls", "pydicom", "pylibjpeg", "pillow")


@dataclass(frozen=True)
class PixelLayout:
    rows: int
    columns: int
    samples_per_pixel: int
    photometric_interpretation: str
    bits_allocated: int
    bits_stored: int
    is_signed: bool
    planar_configuration: int

    def decoder_options(self) -> dict[str, Any]:
        """Keyword arguments for pydicom's decoders."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "samples_per_pixel": self.samples_per_pixel,
            "photometric_interpretation": self.photometric_interpretation,
            "bits_allocated": self.bits_allocated,
            "bits_stored": self.bits_stored,
            "pixel_representation": int(self.is_signed),
            "planar_configuration": self.planar_configuration,
            "pixel_keyword": "PixelData",
        }


def open_frames(header: Dataset) -> tuple[PixelLayout, int, Iterator[np.ndarray]]:
    """The layout, the number of frames, and a lazy iterator over frames: (H, W), or (H, W, 3) in RGB."""
    syntax, num_declared = _transfer_syntax(header), _declared_num_frames(header)
    is_encapsulated = header["PixelData"].is_undefined_length
    if is_encapsulated != syntax.is_encapsulated:
        raise DataError(
            f"the pixels are {'' if is_encapsulated else 'not '}compressed, but the header says {syntax.name}; {EXPORT_AGAIN_HINT}"
        )
    if not is_encapsulated:
        layout = _read_layout(header, None)
        _check_limits(layout, num_declared)
        return layout, num_declared, _iter_native_frames(header, layout, syntax, num_declared)
    plugin = _select_plugin(syntax)
    streams = _split_streams(header.PixelData, syntax)
    if num_declared > len(streams):
        raise DataError(f"truncated: it has {len(streams)} of {num_declared} frames; copy it again")
    layout = _read_layout(header, None if syntax == uid.RLELossless else read_codestream_header(streams[0]))
    _check_limits(layout, len(streams))
    return layout, len(streams), _iter_compressed_frames(streams, layout, syntax, plugin)


def _check_limits(layout: PixelLayout, num_frames: int) -> None:
    pixels = layout.rows * layout.columns
    if pixels > MAX_PIXELS:
        raise DataError(f"more than {MAX_PIXELS // 10**6} million pixels in a frame; {EXPORT_AGAIN_HINT} as tiles")
    if num_frames > MAX_FRAMES or pixels * num_frames > MAX_TOTAL_PIXELS:
        raise DataError(
            f"{num_frames} frames of {layout.columns} x {layout.rows} pixels; the limit is {MAX_FRAMES} frames "
            f"and {MAX_TOTAL_PIXELS // 10**6} million pixels, so export fewer fields"
        )


def _transfer_syntax(header: Dataset) -> uid.UID:
    declared = getattr(header, "file_meta", Dataset()).get("TransferSyntaxUID")
    if declared:
        if not declared.is_transfer_syntax:
            raise DataError(f"unknown transfer syntax {declared}; {EXPORT_AGAIN_HINT} as Explicit VR Little Endian")
        return uid.UID(declared)
    if header["PixelData"].is_undefined_length:
        raise DataError(f"compressed pixels without a transfer syntax; {EXPORT_AGAIN_HINT} with its file meta header")
    implicit, little = header.original_encoding
    if implicit:
        return uid.ImplicitVRLittleEndian
    return uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian


def _select_plugin(syntax: uid.UID) -> str:
    try:
        available = get_decoder(syntax).available_plugins
    except NotImplementedError:
        raise DataError(
            f"{syntax.name} is not supported; {EXPORT_AGAIN_HINT} uncompressed, or as JPEG or JPEG 2000"
        ) from None
    if not available:
        raise DataError(
            f"no decoder for {syntax.name}; pip install 'hemofed[edge-smear]', or {EXPORT_AGAIN_HINT} uncompressed"
        )
    return next(p for p in (*DECODER_PLUGINS, *available) if p in available)


def _declared_num_frames(header: Dataset) -> int:
    try:
        return max(1, int(header.get("NumberOfFrames") or 1))
    except (TypeError, ValueError):
        return 1


def _read_int(header: Dataset, keyword: str) -> int | None:
    value = header.get(keyword)
    if value is not None and not isinstance(value, int):
        raise DataError(f"{keyword} is {str(value)[:40]!r}, not a number; {EXPORT_AGAIN_HINT}")
    return value


def _read_layout(header: Dataset, stream_header: CodestreamHeader | None) -> PixelLayout:
    """The layout from the header; what is missing there comes from the first stream's header if it is unambiguous."""
    attributes = {
        key: _read_int(header, key) for key in ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored")
    }
    if stream_header:
        for key, value in (
            ("Rows", stream_header.rows),
            ("Columns", stream_header.columns),
            ("SamplesPerPixel", stream_header.samples_per_pixel),
        ):
            if attributes[key] is None:
                attributes[key] = value
            elif attributes[key] != value:
                raise DataError(
                    f"{key} is {attributes[key]}, but the compressed pixels say {value}; {EXPORT_AGAIN_HINT}"
                )
        attributes["BitsStored"], attributes["BitsAllocated"] = (
            stream_header.bits_per_sample,
            8 if stream_header.bits_per_sample <= 8 else 16,
        )
    rows, columns, samples_per_pixel = attributes["Rows"], attributes["Columns"], attributes["SamplesPerPixel"]
    if samples_per_pixel is None:  # type 1 in the standard, but some cameras leave it out
        samples_per_pixel = 3 if header.get("PhotometricInterpretation") in COLOR_INTERPRETATIONS else 1
    bits_allocated = attributes["BitsAllocated"]
    if not rows or not columns or bits_allocated is None:
        raise DataError(f"Rows, Columns or Bits Allocated is missing; {EXPORT_AGAIN_HINT}")
    bits_stored = attributes["BitsStored"] or bits_allocated
    if (
        bits_allocated not in (1, 8, 16)
        or not 1 <= bits_stored <= bits_allocated
        or (stream_header and stream_header.bits_per_sample > 16)
    ):
        raise DataError(f"{bits_stored} bits in {bits_allocated}; {EXPORT_AGAIN_HINT} with 8 to 16 bits a sample")
    high_bit = _read_int(header, "HighBit")
    if stream_header is None and high_bit is not None and high_bit != bits_stored - 1:
        raise DataError(
            f"High Bit is {high_bit} for {bits_stored} bits (shifted values); {EXPORT_AGAIN_HINT} as secondary capture"
        )
    photometric_interpretation = _photometric_interpretation(header, samples_per_pixel, stream_header, rows * columns)
    planar_configuration = _read_int(header, "PlanarConfiguration")
    if samples_per_pixel == 3 and header["PixelData"].is_undefined_length:
        planar_configuration = 0  # the stream defines the order
    if samples_per_pixel == 3 and planar_configuration not in (0, 1):
        raise DataError(
            f"Planar Configuration is {planar_configuration}, so the order of the color channels is unknown; {EXPORT_AGAIN_HINT}"
        )
    if photometric_interpretation.startswith("YBR_FULL") and bits_stored > 8:
        raise DataError(f"{photometric_interpretation} with {bits_stored} bits; {EXPORT_AGAIN_HINT} as RGB")
    is_signed = photometric_interpretation.startswith("MONOCHROME") and _read_int(header, "PixelRepresentation") == 1
    return PixelLayout(
        rows=rows,
        columns=columns,
        samples_per_pixel=samples_per_pixel,
        photometric_interpretation=photometric_interpretation,
        bits_allocated=bits_allocated,
        bits_stored=bits_stored,
        is_signed=is_signed,
        planar_configuration=planar_configuration or 0,
    )


def _photometric_interpretation(
    header: Dataset, samples_per_pixel: int, stream_header: CodestreamHeader | None, num_pixels: int
) -> str:
    declared = str(header.get("PhotometricInterpretation") or "").strip().upper()
    if samples_per_pixel == 3 and not declared:
        if stream_header:
            return "YBR_FULL" if stream_header.is_ycbcr else "RGB"
        return "YBR_FULL_422" if len(header.PixelData) // num_pixels == 2 else "RGB"
    if samples_per_pixel == 1 and not declared:
        raise DataError(
            f"Photometric Interpretation is missing, so black and white may be swapped; {EXPORT_AGAIN_HINT}"
        )
    if declared not in (COLOR_INTERPRETATIONS if samples_per_pixel == 3 else GRAYSCALE_INTERPRETATIONS):
        raise DataError(
            f"{declared} with {samples_per_pixel} samples per pixel is not supported; {EXPORT_AGAIN_HINT} as RGB or MONOCHROME2"
        )
    return "RGB" if stream_header and stream_header.has_color_transform else declared


def _iter_native_frames(header: Dataset, layout: PixelLayout, syntax: uid.UID, num_frames: int) -> Iterator[np.ndarray]:
    num_bits = layout.rows * layout.columns * layout.samples_per_pixel * layout.bits_allocated
    if layout.photometric_interpretation == "YBR_FULL_422":
        if layout.columns % 2:
            raise DataError(f"YBR_FULL_422 with {layout.columns} columns, an odd number; {EXPORT_AGAIN_HINT} as RGB")
        num_bits = num_bits // 3 * 2
    data, num_expected_bytes = header.PixelData, (num_bits * num_frames + 7) // 8
    if len(data) < num_expected_bytes:
        raise DataError(f"truncated: it has {len(data)} of {num_expected_bytes} bytes of pixels; copy it again")
    # One byte may pad to an even length, and zeros are padding; anything else means a wrong image size.
    if len(data) - num_expected_bytes > 1 and data[num_expected_bytes:].strip(b"\0"):
        raise DataError(
            f"{len(data)} bytes of pixels, but {num_frames} frames of {layout.columns} x {layout.rows} need {num_expected_bytes}; "
            "correct Number of Frames, Rows and Columns, or export it again"
        )
    decoder = get_decoder(syntax)
    options = layout.decoder_options() | {"number_of_frames": num_frames, "pixel_vr": header["PixelData"].VR}
    for array, _ in decoder.iter_array(data[: num_expected_bytes + num_expected_bytes % 2], **options):
        yield array


def _split_streams(data: bytes, syntax: uid.UID) -> list[bytes]:
    fragments = generate_fragments(data)
    next(fragments, b"")  # the offset table
    frames: list[list[bytes]] = []
    for fragment in fragments:
        if syntax == uid.RLELossless or not frames or fragment.startswith(STREAM_SIGNATURES):
            frames.append([])
        frames[-1].append(fragment)
    if not frames:
        raise DataError(f"no frame in the pixel data; {EXPORT_AGAIN_HINT}")
    return [b"".join(parts) for parts in frames]


def _iter_compressed_frames(
    streams: Sequence[bytes], layout: PixelLayout, syntax: uid.UID, plugin: str
) -> Iterator[np.ndarray]:
    first_header = None if syntax == uid.RLELossless else read_codestream_header(streams[0])
    for frame_number, data in enumerate(streams, start=1):
        # Decoders allocate the size in the stream's header, so check it for each frame.
        if first_header and (stream_header := read_codestream_header(data)) != first_header:
            raise DataError(
                f"frame {frame_number} has {stream_header}, the first frame {first_header}; {EXPORT_AGAIN_HINT}"
            )
        if syntax in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit) and layout.bits_stored == 8:
            yield decode_jpeg(data, layout.photometric_interpretation)
            continue
        options = layout.decoder_options() | {"number_of_frames": 1}
        array, _ = get_decoder(syntax).as_array(encapsulate([data]), decoding_plugin=plugin, **options)
        yield array
