"""A run's report on privacy, in short: epsilon spent of each site's budget, or that nothing is protected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.core.errors import BadRun
from pipeline.protocol.messages import BUDGET
from pipeline.reports.document.formatting import UNDEFINED, whole
from pipeline.reports.document.page import Cell, Column, Sheet
from pipeline.reports.run.record import Json, Record, number

BARE = (
    "Nothing protects the people behind the images: updates and models carry neither noise nor masks. Images stayed at "
    "the sites; what a model or an update tells of a single person is not bounded."
)
MORE = "What that means, what it leaves out and whether the ledgers verify: hemofed audit."


def privacy(sheet: Sheet, record: Record) -> None:
    if not record.rounds:
        return
    told = _read(record.folder / "privacy.json")
    promises: Json = told.get("at_site") or {}
    noised, masked = told.get("at_coordinator"), told.get("secure_sum")
    sheet.page.section("Privacy")
    if not (promises or noised or masked):
        sheet.page.text(BARE)
        return
    words = []
    if promises:
        unit = next(iter(promises.values()))["unit"]
        words.append(
            f"Differential privacy at the sites, with the {unit} as unit: DP-SGD, charged to each site's ledger."
        )
        if unit == "example":
            words.append("A person with many images is promised next to nothing by this.")
    if noised:
        words.append(
            f"Differential privacy of whole sites, by noise at the coordinator: epsilon {noised['epsilon']:.2f} at delta "
            f"{noised['delta']:g} after {noised['turns']} rounds. The coordinator itself is not held off by it."
        )
    if masked:
        words.append(
            f"Secure sums: the coordinator saw sums over at least {masked['threshold']} sites, no single update."
        )
    if not promises and not noised:
        words.append("Without noise the sums and the models are not protected themselves.")
    sheet.page.text(" ".join([*words, MORE]))
    if promises:
        columns = [
            Column("Site"),
            *(Column(t, True) for t in ("Spent", "Budget", "Delta", "Noise", "Units", "Sat out")),
        ]
        caption = "Epsilon spent on each site's data, over all studies, of its budget; noise in clipping norms"
        sheet.page.table(columns, [_row(site, promises[site], record) for site in promises], caption)


def _row(site: str, promise: Json, record: Record) -> list[Cell]:
    spent = next(
        (found[site] for line in reversed(record.rounds) if site in (found := line.get("epsilon") or {})), None
    )
    out = sum(str((line.get("missed") or {}).get(site, "")).startswith(BUDGET) for line in record.rounds)
    return [
        site, _epsilon(number(spent)), _epsilon(_budget(record.folder, site)), f"{promise['delta']:g}",
        f"{promise['noise']:.3f}", whole(promise["units"]), whole(out),
    ]  # fmt: skip


def _epsilon(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.2f}"


def _budget(run: Path, site: str) -> float | None:
    """As the site's ledger has it now; `hemofed audit` checks the ledger, this only reads it."""
    homes = run / "homes.json"
    where = Path(json.loads(homes.read_text("utf-8"))) if homes.exists() else run / "homes"
    file = where / quote(site, safe="") / "ledger.jsonl"
    found = None
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
            match entry["kind"]:
                case "open":
                    found = number(entry["body"]["budget"]["epsilon"])
                case "budget":
                    found = number(entry["body"]["epsilon"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    except ValueError as error:
        raise BadRun(f"{file}: {error}; restore what the run wrote") from error
    return found if isinstance(found, dict) else {}
