"""A slide's report as one self-contained HTML page, written without a template engine, which edge machines lack."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.inference.runtime import ModelInfo
from deploy.slide.image_result import ImageFailure
from deploy.slide.slide_result import SlideResult
from deploy.slide.slide_text import build_rows, format_headline, verdict_tone

PAGE_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#16212b;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}.notice{background:#fff4d6;border:1px solid #d9a400;padding:.4rem .8rem;border-radius:.3rem}
.verdict{font-size:1.3rem;font-weight:600;padding:.8rem 1rem;border-radius:.3rem;border-left:.5rem solid;margin:1rem 0;background:#f2f5f8}
.above{border-color:#d0202c}.below{border-color:#2b7d4f}.open{border-color:#d68600}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #d5dde4;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%;border:1px solid #d5dde4}figcaption{color:#51606d}
"""


def render_page(
    slide: SlideResult,
    model: ModelInfo,
    montage: NDArray[np.uint8] | None,
    overlays: Sequence[tuple[str, NDArray[np.uint8]]],
    failures: Sequence[ImageFailure],
    num_more_overlays: int = 0,
) -> str:
    """`num_more_overlays`: overlays that are files next to the page instead of a part of it."""
    rows = "".join(
        f"<tr><th scope='row'>{escape(label)}</th><td>{escape(value)}</td></tr>"
        for label, value in build_rows(slide, model)
    )
    images = [("Most suspicious cells", montage)] if montage is not None else []
    images += [(f"{name}: red boxes flagged, blue counted, orange rejected, grey excluded", p) for name, p in overlays]
    figures = "".join(
        f'<figure><img alt="{escape(name)}" src="{_encode_data_url(p)}"><figcaption>{escape(name)}</figcaption></figure>'
        for name, p in images
    )
    failure_items = "".join(f"<li>{escape(failure.name)}: {escape(failure.reason)}</li>" for failure in failures)
    cautions = "".join(
        f'<p class="notice">{escape(_capitalize_first(warning_text))}</p>'
        for warning_text in (*slide.reliability_warnings, *slide.notes)
    )
    more_text = (
        f"<p>{num_more_overlays} more fields: see the files overlay-*.png in this folder.</p>"
        if num_more_overlays
        else ""
    )
    failure_section = f"<h2>Not read</h2><ul>{failure_items}</ul>" if failure_items else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Slide report</title><style>{PAGE_STYLE}</style><main><h1>Slide report</h1>'
        f'<p class="notice">{RESEARCH_USE_NOTICE.capitalize()}. A trained person must look at the cells.</p>'
        f'<p class="verdict {verdict_tone(slide)}">{escape(_capitalize_first(format_headline(slide)))}</p>{cautions}<table>{rows}</table>{figures}{more_text}{failure_section}<p>{escape(creation_note())}</p></main></html>\n'
    )


def _capitalize_first(text: str) -> str:
    """Only the first letter changes: the rest may hold a file name."""
    return text[:1].upper() + text[1:]


def creation_note() -> str:
    """Tells two printed pages apart."""
    return f"Made {datetime.now(UTC):%Y-%m-%d %H:%M UTC} by hemofed {version('hemofed')}."


def _encode_data_url(pixels: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
