"""Who was quarantined, in which rounds and why; part of the section on who took part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeline.reports.page import Cell, Column
from pipeline.reports.record import Json
from pipeline.reports.sheet import Sheet
from pipeline.reports.words import count_of

KIND = "quarantined"
Reasons = Mapping[int, str]  # by round


def quarantine(sheet: Sheet, lines: Sequence[Json], sites: Sequence[str]) -> None:
    cases = quarantined(lines)
    if not cases:
        return
    order = {site: place for place, site in enumerate(sites)}
    rows: list[list[Cell]] = [
        [site, ranges(list(reasons)), _reason(reasons)]
        for (site, _), reasons in sorted(
            cases.items(), key=lambda case: (order.get(case[0][0], len(order)), min(case[1]))
        )
    ]
    who = count_of(len({site for site, _ in cases}), "site")
    caption = f"Quarantined: {who} whose answers were not believed, in the rounds named"
    sheet.page.table([Column("Site"), Column("Rounds"), Column("Why", words=True)], rows, caption)


def quarantined(lines: Sequence[Json]) -> dict[tuple[str, str], dict[int, str]]:
    """(site, the reason without its numbers) -> round -> the reason."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        for site, given in (line.get("missed") or {}).items():
            kind, _, reason = str(given).partition(":")
            if kind.strip() == KIND:
                reason = reason.strip().removeprefix(f"{site}: ")
                found.setdefault((site, re.sub(r"[\d.e+-]*\d", "#", reason)), {})[int(line["round"])] = reason
    return found


def _reason(reasons: Reasons) -> Cell:
    turns = sorted(reasons)
    first = reasons[turns[0]]
    alike = len(set(reasons.values())) == 1
    return first if alike else (first, f"as in round {turns[0]}; in the others the same with other numbers")


def ranges(turns: Sequence[int]) -> str:
    """1, 2, 3, 7 -> 1–3, 7"""
    found: list[list[int]] = []
    for turn in sorted(turns):
        if found and turn == found[-1][-1] + 1:
            found[-1].append(turn)
        else:
            found.append([turn])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
