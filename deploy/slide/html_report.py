"""A slide's report as one self-contained HTML page, written without a template engine, which edge machines lack."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deploy.slide.verdict import (
    RECOMMENDED_CELLS,
    RESEARCH_USE_NOTICE,
    SUSPICION_THRESHOLD,
    VERDICT_ABOVE,
    VERDICT_BELOW,
)

PAGE_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#16212b;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}.notice{background:#fff4d6;border:1px solid #d9a400;padding:.4rem .8rem;border-radius:.3rem}
.verdict{font-size:1.3rem;font-weight:600;padding:.8rem 1rem;border-radius:.3rem;border-left:.5rem solid;margin:1rem 0;background:#f2f5f8}
.above{border-color:#d0202c}.below{border-color:#2b7d4f}.open{border-color:#d68600}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #d5dde4;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%;border:1px solid #d5dde4}figcaption{color:#51606d}
"""


def format_percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.2f} %"


def build_rows(slide_record: Mapping[str, Any], model_info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of the report: (label, value), the same on a terminal and on a page."""
    positive_class, operating_point = slide_record["positive_class"] or "positive", slide_record["operating_point"]
    reached_text = (
        f"{RECOMMENDED_CELLS:,} were reached"
        if slide_record["has_enough_cells"]
        else f"{RECOMMENDED_CELLS:,} were not reached"
    )
    flagged_text = format_percent(slide_record["flagged_fraction"])
    rows = [
        ("cells found", f"{slide_record['num_found']:,}"),
        ("counted", f"{slide_record['num_counted']:,} ({reached_text})"),
        *((f"not counted: {reason}", f"{num_cells:,}") for reason, num_cells in slide_record["excluded"].items()),
        (f"called {positive_class}", f"{slide_record['num_flagged']:,} ({flagged_text} of those counted)"),
    ]
    if operating_point:
        rates = ", ".join(
            _format_rate(operating_point, k) for k in ("sensitivity", "specificity") if operating_point[k] is not None
        )
        rows.append(
            (
                "operating point",
                f"{operating_point['name'] or 'chosen'}: probability {operating_point['probability']:.4f}; {rates}",
            )
        )
    if slide_record["prevalence"] is not None:
        interval = (
            f"{format_percent(slide_record['prevalence_low'])} to {format_percent(slide_record['prevalence_high'])}"
        )
        rows.append(
            (
                f"{positive_class} corrected for these errors",
                f"{format_percent(slide_record['prevalence'])} (95 %: {interval})",
            )
        )
    if slide_record["drift"] is not None:
        likeness = "unlike" if slide_record["has_drifted"] else "like"
        rows.append(
            ("drift", f"{slide_record['drift']:.2f} (limit 1): the cells look {likeness} the validation images")
        )
    rows.append(("model", f"{model_info['title']}, signed by {model_info['signer']}, {model_info['precision']}"))
    rows.append(("calibrated on", model_info["calibrated_on"]))
    return rows


def _format_rate(operating_point: Mapping[str, Any], rate_name: str) -> str:
    spread = operating_point[f"{rate_name}_spread"]
    return f"{rate_name} {operating_point[rate_name]:.4f}" + (f" (±{spread:.2g} between sites)" if spread else "")


def format_headline(slide_record: Mapping[str, Any]) -> str:
    if slide_record["verdict"] in (VERDICT_ABOVE, VERDICT_BELOW):
        return f"{slide_record['verdict']} of {100 * SUSPICION_THRESHOLD:g} %: {slide_record['reason']}"
    review_text = (
        f"; the estimate is at or above {100 * SUSPICION_THRESHOLD:g} %: have a person look at the slide"
        if slide_record["needs_review"]
        else ""
    )
    return f"{slide_record['verdict']}: {slide_record['reason']}{review_text}"


def render_page(
    slide_record: Mapping[str, Any],
    model_info: Mapping[str, Any],
    montage: NDArray[np.uint8] | None,
    overlays: Sequence[tuple[str, NDArray[np.uint8]]],
    failures: Sequence[tuple[str, str]],
    num_more_overlays: int = 0,
) -> str:
    """`num_more_overlays`: overlays that are files next to the page instead of a part of it."""
    tone = {VERDICT_ABOVE: "above", VERDICT_BELOW: "below"}.get(slide_record["verdict"], "open")
    rows = "".join(
        f"<tr><th scope='row'>{escape(label)}</th><td>{escape(value)}</td></tr>"
        for label, value in build_rows(slide_record, model_info)
    )
    images = [("Most suspicious cells", montage)] if montage is not None else []
    images += [(f"{name}: red boxes flagged, blue counted, orange rejected, grey excluded", p) for name, p in overlays]
    figures = "".join(
        f'<figure><img alt="{escape(name)}" src="{_encode_data_url(p)}"><figcaption>{escape(name)}</figcaption></figure>'
        for name, p in images
    )
    failure_items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in failures)
    cautions = "".join(
        f'<p class="notice">{escape(_capitalize_first(warning_text))}</p>'
        for warning_text in (*slide_record["reliability_warnings"], *slide_record["notes"])
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
        f'<p class="verdict {tone}">{escape(_capitalize_first(format_headline(slide_record)))}</p>{cautions}<table>{rows}</table>{figures}{more_text}{failure_section}<p>{escape(creation_note())}</p></main></html>\n'
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
