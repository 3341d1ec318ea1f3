"""The sections of a run's report about the federation: who took part, data, traffic, how it was made.

Each adds itself to the sheet, or nothing where the run has nothing to say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.reports.document.formatting import SPLITS, UNDEFINED, count_of, duration, size, whole
from pipeline.reports.document.page import COORDINATOR, Cell, Column, Sheet
from pipeline.reports.run import curves as figures
from pipeline.reports.run.communication import chains, saved, travel_words
from pipeline.reports.run.record import Json, Record, bytes_of, number


def participation(sheet: Sheet, record: Record) -> None:
    trained = [line for line in record.rounds if line.get("asked")]
    if not trained:
        return
    sites = record.sites
    share = [[_done_share(line, site) for line in trained] for site in sites]
    missed = {
        (row, turn)
        for turn, line in enumerate(trained)
        for row, site in enumerate(sites)
        if site in (line.get("missed") or {})
    }
    partial = any(value is not None and value < 1 for values in share for value in values)
    sheet.page.section("Who took part")
    clocks = [clock for line in trained if (clock := number(line.get("clock"))) is not None]
    clock_words = f" The virtual clock stands at {duration(clocks[-1])}." if clocks else ""
    if not missed and not partial:
        sheet.page.text(f"Every site that was asked finished its work in every round.{clock_words}")
    else:
        turns = [int(line["round"]) for line in trained]
        words = f"{count_of(len(missed), 'answer')} of {_asked_in_all(trained):,} asked for did not count.{clock_words}"
        sheet.page.text(words)
        caption = (
            "Work done, a row a site: the fainter, the fewer of the asked steps; blank where a site was not asked."
        )
        sheet.draw("stragglers", figures.stragglers(sites, turns, share, missed), caption)
        _missed_table(sheet, trained, sites)
        quarantine(sheet, trained, sites)
    if voids := [[str(line["round"]), str(line["void"])] for line in record.rounds if line.get("void")]:
        columns = [Column("Void round"), Column("Reason")]
        sheet.page.table(columns, voids, "Rounds that changed nothing because too few sites answered")


def _done_share(line: Json, site: str) -> float | None:
    """None: not asked."""
    if site not in line["asked"]:
        return None
    work = (line.get("work") or {}).get(site) or {}
    asked, done = number(work.get("asked")), number(work.get("done"))
    if not asked or done is None:
        return 1.0 if site in (line.get("counted") or ()) else 0.0
    return done / asked


def _asked_in_all(lines: Sequence[Json]) -> int:
    return sum(len(line["asked"]) for line in lines)


def _missed_table(sheet: Sheet, lines: Sequence[Json], sites: Sequence[str]) -> None:
    """Counts by the kind of reason: what stands before its colon."""
    why: dict[str, Counter[str]] = {site: Counter() for site in sites}
    for line in lines:
        for site, reason in (line.get("missed") or {}).items():
            why.setdefault(site, Counter())[str(reason).split(":")[0].strip()] += 1
    kinds = sorted({kind for reasons in why.values() for kind in reasons})
    if not kinds:
        return
    asked = Counter(site for line in lines for site in line["asked"])
    counted = Counter(site for line in lines for site in line.get("counted") or ())
    touched = [site for site in sites if why[site]]
    rows = [
        [site, whole(asked[site]), whole(counted[site]), *(whole(why[site][kind]) for kind in kinds)]
        for site in touched
    ]
    columns = [Column("Site"), Column("Asked", True), Column("Counted", True)]
    columns += [Column(kind[:1].upper() + kind[1:], True) for kind in kinds]
    never = len(sites) - len(touched)
    caption = "Answers that did not count, by reason" + (f"; {count_of(never, 'site')} missed none" if never else "")
    sheet.page.table(columns, rows, caption)


def data(sheet: Sheet, record: Record) -> None:
    found = record.data
    sites: Json = found.get("sites") or {}
    classes = [str(label) for label in found.get("classes") or ()]
    if not sites and not found.get("fingerprint"):
        return
    sheet.page.section("Data")
    if found.get("fingerprint"):
        sheet.page.text(f"Fingerprint of the data: {found['fingerprint']}")
    if classes and all(len(split.get("train") or ()) == len(classes) for split in sites.values()) and sites:
        counts = {site: split["train"] for site, split in sites.items()}
        sheet.draw(
            "class_counts", figures.class_counts(classes, counts), "Training examples of every class at each site."
        )
    held = {**sites, COORDINATOR: found["coordinator"]} if found.get("coordinator") else sites
    splits = [split for split in ("train", "val", "test") if any((counts or {}).get(split) for counts in held.values())]
    rows = [[name, *(whole(sum((counts or {}).get(split) or ())) for split in splits)] for name, counts in held.items()]
    if rows and splits:
        columns = [Column("Held by"), *(Column(SPLITS[split].capitalize(), True) for split in splits)]
        sheet.page.table(columns, rows, "Examples")
    if skipped := found.get("skipped"):
        listed = "\n".join(_plain(one) for one in skipped)
        sheet.page.details(f"{count_of(len(skipped), 'file')} skipped", listed)


def _plain(value: Any) -> str:
    return ": ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)


def communication(sheet: Sheet, record: Record) -> None:
    up, down = record.traffic("up"), record.traffic("down")
    if not up and not down:
        return
    sheet.page.section("Traffic")
    rounds = [int(line["round"]) for line in record.rounds]
    ways = [[bytes_of(line, way) for line in record.rounds] for way in ("up", "down")]
    sheet.draw("traffic", figures.traffic(rounds, *ways), "Megabytes moved so far, all sites together.")
    trained = max(record.last_round, 1)
    rows = [
        [words, size(total), size(total / trained)]
        for words, total in (("Up, sites to coordinator", up), ("Down", down))
    ]
    columns = [Column("Way"), Column("In all", True), Column("A round", True)]
    encoded = chains(record)
    spared = [saved(record, way) for way in ("up", "down")] if encoded else []
    if any(spared):
        columns += [Column("As float32", True), Column("Against float32", True)]
        rows = [[*row, *(found or (UNDEFINED, UNDEFINED))] for row, found in zip(rows, spared, strict=True)]
    sheet.page.table(columns, rows)
    if encoded:
        words = travel_words(encoded)
        if any(spared):
            words += " As float32: four bytes a parameter for every answer that counted (up) or was asked for (down)."
        sheet.page.text(words)


def provenance(sheet: Sheet, record: Record) -> None:
    software: Json = (record.results or {}).get("software") or {}
    if not software and not record.study:
        return
    sheet.page.section("How this was made")
    if software:
        sheet.page.table(
            [Column("Software"), Column("Version")], [[name, str(value)] for name, value in software.items()]
        )
    if record.study:
        sheet.page.details("The study file, as resolved", record.study)


# Who was quarantined, in which rounds and why; part of the section on who took part.

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
