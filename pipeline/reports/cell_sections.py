"""The section of a run's report that shows each site's cells; nothing where the run kept none, as one across hospitals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.reports.lens import Lens
from pipeline.reports.page import Picture
from pipeline.reports.record import Json, Record
from pipeline.reports.sheet import Sheet
from pipeline.reports.words import count_of, joined

PNG = b"\x89PNG"


def cells(sheet: Sheet, record: Record, lens: Lens) -> None:
    found = _index(record.folder / "cells")
    pictures = [_picture(record, lens, site, entry) for site, entry in found.items()]
    shown = [picture for picture in pictures if picture.png]
    if not shown:
        return
    words = "Training images drawn at random at each simulated site, as its own scanner sees them."
    others = len(record.sites) - len(shown)
    if others > 0:
        words += f" Shown: {len(shown)} of {count_of(len(record.sites), 'site')}; {others:,} more took part."
    shows = list(dict.fromkeys(str(entry.get("shows") or "") for entry in found.values()))
    if len(shows) == 1 and shows[0]:
        words += f" {shows[0]} A blank place: the site has no more of that class."
    sheet.page.section("What each site sees").text(words).pictures(shown)


def counts_words(classes: Sequence[str], train: Sequence[int], positive: str | None) -> str:
    """How many images a site trains on: the positive ones, or the commonest where no class is."""
    cells = count_of(sum(train), "training image")
    if positive in classes and len(train) == len(classes):
        share = train[classes.index(positive)]
        return f"{cells}, {share:,} of them {positive}" + (f" ({100 * share / sum(train):.1f} %)" if share else "")
    if len(classes) != len(train) or not sum(train):
        return cells
    common = sorted(range(len(train)), key=lambda at: -train[at])[:3]
    return f"{cells}, most often {joined([f'{classes[at]} ({train[at]:,})' for at in common if train[at]])}"


def _index(folder: Path) -> dict[str, Json]:
    """A damaged index is one without sheets: the report's numbers do not wait for pictures."""
    try:
        found = json.loads((folder / "index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(site): entry for site, entry in found.items() if isinstance(entry, dict)}
        if isinstance(found, dict)
        else {}
    )


def _picture(record: Record, lens: Lens, site: str, entry: Json) -> Picture:
    classes = [str(label) for label in record.data.get("classes") or ()]
    train = ((record.data.get("sites") or {}).get(site) or {}).get("train") or ()
    counts = counts_words(classes, train, lens.positive) if train else ""
    words = [words for words in (str(entry.get("words") or ""), counts) if words]
    alt = f"Training images of {site}. {entry.get('shows') or ''}".strip()
    return Picture(site, _png(record.folder / "cells", str(entry.get("file") or "")), alt, words)


def _png(folder: Path, file: str) -> bytes | None:
    path = folder / Path(file).name
    content = path.read_bytes() if path.is_file() else b""
    return content if content.startswith(PNG) else None
