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

from pipeline.core.errors import LedgerError
from pipeline.core.files import write_atomically
from privacy.ledger.append_only_file import lock_file, read_from
from privacy.ledger.entry import LedgerEntry, LedgerPosition, parse_entry, parse_entry_line, parse_strict_json
from privacy.ledger.records import LedgerReceipt
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import export_sections
from privacy.ledger.validation import LedgerState, check_entry, receipt_problems

EXPORT_FORMAT = "hemofed-ledger-export/1"


@dataclass(frozen=True)
class LedgerVerification:
    problems: tuple[str, ...]
    entries: tuple[LedgerEntry, ...]  # up to the first that cannot be read
    state: LedgerState | None  # none if there is no good `open`
    last_receipt: LedgerReceipt | None
    unreceipted_indices: tuple[int, ...]  # entries that no coordinator has seen; receipts themselves aside

    @property
    def is_valid(self) -> bool:
        return not self.problems


def verify_ledger(
    source: Path | Sequence[LedgerEntry],
    anchor: LedgerReceipt | LedgerPosition | None = None,
    coordinator_keys: Collection[str] | None = None,
) -> LedgerVerification:
    """`coordinators` are the public keys (hex) whose receipts are believed; if not given, any that verify are.

    Without an `anchor` a tail that was cut off cannot be found, except that a charge without a receipt must be last,
    nor can what the agent's key wrote anew; with one, only what came after it can be missing or new.
    """
    if not isinstance(source, Path):
        entries, problems = _parse_entries(parse_entry, (entry.to_dict() for entry in source))
        return _verify_entries(entries, problems, anchor, coordinator_keys)
    data = read_locked(source)
    document = _parse_export(data)
    if document is None:
        entries, problems = _parse_lines(data)
        return _verify_entries(entries, problems, anchor, coordinator_keys)
    entries, problems = _parse_entries(parse_entry, document["entries"])
    expected_sections = _export_sections(_verify_entries(entries, problems, None, None))
    mismatched = [
        section
        for section in expected_sections
        if _canonical_text(document[section]) != _canonical_text(expected_sections[section])
    ]
    problems += [f"the export's `{section}` does not follow from its entries" for section in mismatched]
    return _verify_entries(entries, problems, anchor, coordinator_keys)


def export_ledger(path: Path, out_path: Path) -> Path:
    """One JSON file for the officer or an auditor, to be checked by `verify` anywhere."""
    verification = verify_ledger(path)
    if (num_lines := read_locked(path).count(b"\n")) > len(verification.entries):
        raise LedgerError(
            f"{path} holds {num_lines} lines, of which only {len(verification.entries)} can be read; hand over the file itself"
        )
    document = {
        "format": EXPORT_FORMAT,
        "entries": [entry.to_dict() for entry in verification.entries],
    } | _export_sections(verification)
    return write_atomically(
        out_path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    )


def read_locked(path: Path) -> bytes:
    """Not while somebody writes."""
    with lock_file(path, os.O_RDONLY) as file:
        return read_from(file, 0)


def _parse_export(data: bytes) -> dict[str, Any] | None:
    try:
        document = parse_strict_json(data)
    except LedgerError:
        return None
    sections = {"format", "entries", "verdict", "keys", "summary"}
    is_export = isinstance(document, dict) and set(document) == sections and document["format"] == EXPORT_FORMAT
    return document if is_export and isinstance(document["entries"], list) else None


def _parse_lines(data: bytes) -> tuple[list[LedgerEntry], list[str]]:
    *lines, unfinished_line = data.split(b"\n")
    entries, problems = _parse_entries(parse_entry_line, lines)
    if unfinished_line:
        problems.append(
            f"line {len(lines) + 1} has no end: it was cut, or a crash cut it while it was written; then the agent "
            "moves it aside when it next opens the ledger"
        )
    return entries, problems


def _parse_entries(parse: Callable[[Any], LedgerEntry], items: Iterable[Any]) -> tuple[list[LedgerEntry], list[str]]:
    entries: list[LedgerEntry] = []
    for line_number, item in enumerate(items, start=1):
        try:
            entries.append(parse(item))
        except LedgerError as error:
            return entries, [f"line {line_number}: {error}; what comes after it was not checked"]
    return entries, []


def _canonical_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # 1, 1.0 and true are equal in Python, but not here


def _export_sections(verification: LedgerVerification) -> dict[str, Any]:
    return export_sections(verification.entries, verification.state, verification.problems)


def _verify_entries(
    entries: Sequence[LedgerEntry],
    problems: Sequence[str],
    anchor: LedgerReceipt | LedgerPosition | None,
    coordinator_keys: Collection[str] | None,
) -> LedgerVerification:
    all_problems, checked = list(problems), list[LedgerEntry]()
    state: LedgerState | None = None
    for entry in entries:
        state, entry_problems = check_entry(state, checked, entry)
        all_problems += map(str, entry_problems)
        checked.append(entry)
    if not entries:
        all_problems.append("there is no entry: the ledger was never opened, or all of it is gone")
    receipts = [(e.index, r) for e, r in _iter_receipts(entries)]
    if coordinator_keys is not None:
        foreign_receipts = [(index, r) for index, r in receipts if r.coordinator_key not in coordinator_keys]
        all_problems += [
            f"entry {index}: is a receipt by {fingerprint_of(r.coordinator_key)}, which is no coordinator known here"
            for index, r in foreign_receipts
        ]
    if anchor is not None:
        all_problems += _anchor_problems(entries, state, anchor, coordinator_keys)
    last_receipt = receipts[-1][1] if receipts else None
    last_receipted_index = max((r.index for _, r in receipts), default=-1)
    unreceipted_indices = tuple(e.index for e in entries if e.index > last_receipted_index and e.kind != "receipt")
    return LedgerVerification(tuple(all_problems), tuple(entries), state, last_receipt, unreceipted_indices)


def _iter_receipts(entries: Sequence[LedgerEntry]) -> Iterator[tuple[LedgerEntry, LedgerReceipt]]:
    for entry in entries:
        if entry.kind == "receipt":
            try:
                record = entry.record
            except LedgerError:
                continue
            if isinstance(record, LedgerReceipt):
                yield entry, record


def _anchor_problems(
    entries: Sequence[LedgerEntry],
    state: LedgerState | None,
    anchor: LedgerReceipt | LedgerPosition,
    coordinator_keys: Collection[str] | None,
) -> Iterator[str]:
    if anchor.index >= len(entries):
        yield f"the anchor knows entry {anchor.index}, and the ledger ends before it; its end was cut off"
    elif entries[anchor.index].hash != anchor.head:
        yield f"the anchor knows another entry {anchor.index}; what came up to it was written anew"
    elif isinstance(anchor, LedgerReceipt) and state:
        yield from (f"the anchor: {problem}" for problem in receipt_problems(state.opening, entries, anchor))
        if not any(
            r.coordinator_key == anchor.coordinator_key and r.index >= anchor.index for _, r in _iter_receipts(entries)
        ):
            yield (
                f"the coordinator receipted entry {anchor.index}, and the ledger does not hold that receipt; its end was "
                "cut off, or the receipt was lost on its way: the site asks for it again and adds it"
            )
    if (
        isinstance(anchor, LedgerReceipt)
        and coordinator_keys is not None
        and anchor.coordinator_key not in coordinator_keys
    ):
        yield f"the anchor is a receipt by {fingerprint_of(anchor.coordinator_key)}, which is no coordinator known here"
