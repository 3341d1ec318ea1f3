"""Whether a ledger is what its site and its officer wrote: from its file, from an export, or from entries.

Found is every edit, deletion, insertion, change of order and foreign signature, and a charge that follows one which no
coordinator receipted. Three things need help from outside. A tail that was cut off is found only against an `anchor`:
the last receipt that the coordinator holds, or the head of an earlier copy. The agent's own key can write anew what
came after the last receipt; what came before it an anchor tells. A whole ledger made anew with other keys is told by an
anchor too, or by the officer's fingerprint. A training that was never charged leaves nothing to be found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import BadLedger
from pipeline.core.files import write_atomically
from privacy.ledger.append_only_file import locked, read_from
from privacy.ledger.entry import Entry, Mark, read_entry, read_json, read_line
from privacy.ledger.records import Receipt
from privacy.ledger.signatures import show
from privacy.ledger.summary import derived
from privacy.ledger.validation import Standing, bad_receipt, check

FORMAT = "hemofed-ledger-export/1"


@dataclass(frozen=True)
class Verdict:
    problems: tuple[str, ...]
    entries: tuple[Entry, ...]  # up to the first that cannot be read
    standing: Standing | None  # none if there is no good `open`
    last_receipt: Receipt | None
    unreceipted: tuple[int, ...]  # entries that no coordinator has seen; receipts themselves aside

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    source: Path | Sequence[Entry], anchor: Receipt | Mark | None = None, coordinators: Collection[str] | None = None
) -> Verdict:
    """`coordinators` are the public keys (hex) whose receipts are believed; if not given, any that verify are.

    Without an `anchor` a tail that was cut off cannot be found, except that a charge without a receipt must be last,
    nor can what the agent's key wrote anew; with one, only what came after it can be missing or new.
    """
    if not isinstance(source, Path):
        entries, problems = _read(read_entry, (entry.raw() for entry in source))
        return _judged(entries, problems, anchor, coordinators)
    data = read_shared(source)
    document = _export_in(data)
    if document is None:
        entries, problems = _read_lines(data)
        return _judged(entries, problems, anchor, coordinators)
    entries, problems = _read(read_entry, document["entries"])
    right = _derived(_judged(entries, problems, None, None))
    wrong = [part for part in right if _text(document[part]) != _text(right[part])]
    problems += [f"the export's `{part}` does not follow from its entries" for part in wrong]
    return _judged(entries, problems, anchor, coordinators)


def export(path: Path, out: Path) -> Path:
    """One JSON file for the officer or an auditor, to be checked by `verify` anywhere."""
    verdict = verify(path)
    if (lines := read_shared(path).count(b"\n")) > len(verdict.entries):
        raise BadLedger(
            f"{path} holds {lines} lines, of which only {len(verdict.entries)} can be read; hand over the file itself"
        )
    document = {"format": FORMAT, "entries": [entry.raw() for entry in verdict.entries]} | _derived(verdict)
    return write_atomically(out, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_shared(path: Path) -> bytes:
    """Not while somebody writes."""
    with locked(path, os.O_RDONLY) as file:
        return read_from(file, 0)


def _export_in(data: bytes) -> dict[str, Any] | None:
    try:
        document = read_json(data)
    except BadLedger:
        return None
    parts = {"format", "entries", "verdict", "keys", "summary"}
    whole = isinstance(document, dict) and set(document) == parts and document["format"] == FORMAT
    return document if whole and isinstance(document["entries"], list) else None


def _read_lines(data: bytes) -> tuple[list[Entry], list[str]]:
    *lines, rest = data.split(b"\n")
    entries, problems = _read(read_line, lines)
    if rest:
        problems.append(
            f"line {len(lines) + 1} has no end: it was cut, or a crash cut it while it was written; then the agent "
            "moves it aside when it next opens the ledger"
        )
    return entries, problems


def _read(reader: Callable[[Any], Entry], pieces: Iterable[Any]) -> tuple[list[Entry], list[str]]:
    entries: list[Entry] = []
    for place, piece in enumerate(pieces, start=1):
        try:
            entries.append(reader(piece))
        except BadLedger as error:
            return entries, [f"line {place}: {error}; what comes after it was not checked"]
    return entries, []


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # 1, 1.0 and true are equal in Python, but not here


def _derived(verdict: Verdict) -> dict[str, Any]:
    return derived(verdict.entries, verdict.standing, verdict.problems)


def _judged(
    entries: Sequence[Entry],
    problems: Sequence[str],
    anchor: Receipt | Mark | None,
    coordinators: Collection[str] | None,
) -> Verdict:
    found, seen = list(problems), list[Entry]()
    standing: Standing | None = None
    for entry in entries:
        standing, wrong = check(standing, seen, entry)
        found += map(str, wrong)
        seen.append(entry)
    if not entries:
        found.append("there is no entry: the ledger was never opened, or all of it is gone")
    receipts = [(e.index, r) for e, r in _receipts(entries)]
    if coordinators is not None:
        strange = [(at, r) for at, r in receipts if r.key not in coordinators]
        found += [f"entry {at}: is a receipt by {show(r.key)}, which is no coordinator known here" for at, r in strange]
    if anchor is not None:
        found += _adrift(entries, standing, anchor, coordinators)
    last = receipts[-1][1] if receipts else None
    seen_to = max((r.index for _, r in receipts), default=-1)
    unseen = tuple(e.index for e in entries if e.index > seen_to and e.kind != "receipt")
    return Verdict(tuple(found), tuple(entries), standing, last, unseen)


def _receipts(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Receipt]]:
    for entry in entries:
        if entry.kind == "receipt":
            try:
                body = entry.what
            except BadLedger:
                continue
            if isinstance(body, Receipt):
                yield entry, body


def _adrift(
    entries: Sequence[Entry], standing: Standing | None, anchor: Receipt | Mark, coordinators: Collection[str] | None
) -> Iterator[str]:
    if anchor.index >= len(entries):
        yield f"the anchor knows entry {anchor.index}, and the ledger ends before it; its end was cut off"
    elif entries[anchor.index].hash != anchor.head:
        yield f"the anchor knows another entry {anchor.index}; what came up to it was written anew"
    elif isinstance(anchor, Receipt) and standing:
        yield from (f"the anchor: {text}" for text in bad_receipt(standing.opening, entries, anchor))
        if not any(r.key == anchor.key and r.index >= anchor.index for _, r in _receipts(entries)):
            yield (
                f"the coordinator receipted entry {anchor.index}, and the ledger does not hold that receipt; its end was "
                "cut off, or the receipt was lost on its way: the site asks for it again and adds it"
            )
    if isinstance(anchor, Receipt) and coordinators is not None and anchor.key not in coordinators:
        yield f"the anchor is a receipt by {show(anchor.key)}, which is no coordinator known here"
