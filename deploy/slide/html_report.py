"""A slide's report as one self-contained page; no template engine, for a bedside machine has none."""

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

from deploy.slide.prevalence import ABOVE, BELOW, ENOUGH, LINE, NOTICE

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#16212b;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}.notice{background:#fff4d6;border:1px solid #d9a400;padding:.4rem .8rem;border-radius:.3rem}
.verdict{font-size:1.3rem;font-weight:600;padding:.8rem 1rem;border-radius:.3rem;border-left:.5rem solid;margin:1rem 0;background:#f2f5f8}
.above{border-color:#d0202c}.below{border-color:#2b7d4f}.open{border-color:#d68600}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #d5dde4;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%;border:1px solid #d5dde4}figcaption{color:#51606d}
"""


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def rows_of(slide: Mapping[str, Any], bundle: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a report says, line by line; the same on a terminal and on a page."""
    positive, point = slide["positive"] or "positive", slide["operating_point"]
    reached = f"{ENOUGH:,} were reached" if slide["enough"] else f"{ENOUGH:,} were not reached"
    lines = [
        ("cells found", f"{slide['found']:,}"),
        ("counted", f"{slide['counted']:,} ({reached})"),
        *((f"not counted: {why}", f"{n:,}") for why, n in slide["excluded"].items()),
        (f"called {positive}", f"{slide['flagged']:,} ({percent(slide['share'])} of those counted)"),
    ]
    if point:
        rates = ", ".join(_rate(point, k) for k in ("sensitivity", "specificity") if point[k] is not None)
        lines.append(
            ("operating point", f"{point['name'] or 'chosen'}: probability {point['probability']:.4f}; {rates}")
        )
    if slide["prevalence"] is not None:
        interval = f"{percent(slide['low'])} to {percent(slide['high'])}"
        lines.append((f"{positive} corrected for these errors", f"{percent(slide['prevalence'])} (95 %: {interval})"))
    if slide["drift"] is not None:
        words = "unlike" if slide["drifted"] else "like"
        lines.append(
            ("drift", f"{slide['drift']:.2f}: the cells look {words} those it was validated on (1 is the limit)")
        )
    lines.append(("model", f"{bundle['title']}, signed by {bundle['signer']}, {bundle['precision']}"))
    lines.append(("calibrated on", bundle["calibrated"]))
    return lines


def _rate(point: Mapping[str, Any], which: str) -> str:
    spread = point[f"{which}_spread"]
    return f"{which} {point[which]:.4f}" + (f" (±{spread:.2g} between sites)" if spread else "")


def headline(slide: Mapping[str, Any]) -> str:
    if slide["verdict"] in (ABOVE, BELOW):
        return f"{slide['verdict'].replace('the line', f'the line of {100 * LINE:g} %')}: {slide['why']}"
    look = f"; the estimate itself is at or above {100 * LINE:g} %: have a person look" if slide["look"] else ""
    return f"{slide['verdict']}: {slide['why']}{look}"


def page(
    slide: Mapping[str, Any],
    bundle: Mapping[str, Any],
    montage: NDArray[np.uint8] | None,
    overlays: Sequence[tuple[str, NDArray[np.uint8]]],
    failed: Sequence[tuple[str, str]],
    more: int = 0,
) -> str:
    """`more` overlays lie beside the page, not in it."""
    kind = {ABOVE: "above", BELOW: "below"}.get(slide["verdict"], "open")
    rows = "".join(f"<tr><th>{escape(what)}</th><td>{escape(said)}</td></tr>" for what, said in rows_of(slide, bundle))
    pictures = [("Most suspicious cells", montage)] if montage is not None else []
    pictures += [
        (f"{name}: red boxes flagged, blue counted, orange not answered for, grey set apart", p) for name, p in overlays
    ]
    figures = "".join(
        f'<figure><img alt="{escape(name)}" src="{_inline(p)}"><figcaption>{escape(name)}</figcaption></figure>'
        for name, p in pictures
    )
    broken = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in failed)
    cautions = "".join(
        f'<p class="notice">{escape(_capital(words))}</p>' for words in (*slide["doubts"], *slide["notes"])
    )
    rest = f"<p>{more} more fields: the files overlay-*.png beside this page.</p>" if more else ""
    told = f"<h2>Not read</h2><ul>{broken}</ul>" if broken else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Slide report</title><style>{STYLE}</style><h1>Slide report</h1>'
        f'<p class="notice">{NOTICE.capitalize()}. A trained person has to look at the cells.</p>'
        f'<p class="verdict {kind}">{escape(_capital(headline(slide)))}</p>{cautions}<table>{rows}</table>{figures}{rest}{told}<p>{escape(made())}</p></html>\n'
    )


def _capital(words: str) -> str:
    """The rest keeps its letters: they may be a file's name."""
    return words[:1].upper() + words[1:]


def made() -> str:
    """So that two printed pages can be told apart."""
    return f"Made {datetime.now(UTC):%Y-%m-%d %H:%M UTC} by hemofed {version('hemofed')}."


def _inline(pixels: NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
