"""Verification that a ledger is what its site and its officer wrote: from its file, an export, or entries.

Verification finds every edit, deletion, insertion, reordering and foreign signature, and a charge that follows a charge
without a receipt. It needs outside information for the rest:

- A cut end is found only with an `anchor`: the coordinator's last receipt, or the head of an earlier copy.
- The holder of the agent's key can rewrite what came after the last receipt; an anchor shows a rewrite of what came
  before it.
- A whole ledger forged with other keys is found with an anchor or the officer's fingerprint.
- A training that was never charged cannot be found.
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
from privacy.ledger.entry import (
    LedgerEntry,
    LedgerPosition,
    LedgerVersionError,
    parse_entry,
    parse_entry_line,
    parse_strict_json,
)
from privacy.ledger.records import LEDGER_VERSION, LedgerReceipt
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import export_sections
from privacy.ledger.validation import LedgerState, check_entry, receipt_problems

EXPORT_FORMAT_NAME = "hemofed-ledger-export/"
EXPORT_FORMAT = f"{EXPORT_FORMAT_NAME}{LEDGER_VERSION}"


@dataclass(frozen=True)
class LedgerVerification:
    problems: tuple[str, ...]
    entries: tuple[LedgerEntry, ...]  # up to the first unreadable one
    state: LedgerState | None  # None without a valid `opened` record
    last_receipt: LedgerReceipt | None
    unreceipted_indices: tuple[int, ...]  # entries without a receipt, except receipts

    @property
    def is_valid(self) -> bool:
        return not self.problems


def verify_ledger(
    source: Path | Sequence[LedgerEntry],
    anchor: LedgerReceipt | LedgerPosition | None = None,
    coordinator_keys: Collection[str] | None = None,
) -> LedgerVerification:
    """Problems, entries and state of a ledger file, an export or entries.

    `anchor`: with it, only entries after it can be missing or rewritten. Without it, a cut end and entries that the
    agent's key rewrote are not found, except that a charge without a receipt must be the last.
    `coordinator_keys`: public keys (hex) whose receipts count; by default any.
    """
    if not isinstance(source, Path):
        entries, problems = _parse_entries(parse_entry, (entry.to_dict() for entry in source))
        return _verify_entries(entries, problems, anchor, coordinator_keys)
    data = read_locked(source)
    try:
        document = _parse_export(data)
    except LedgerVersionError as error:
        return LedgerVerification((str(error),), (), None, None, ())
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
    """Writes one JSON file for the officer or an auditor, which `verify_ledger` checks without the site."""
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
    """Reads the file while no process writes to it."""
    with lock_file(path, os.O_RDONLY) as file:
        return read_from(file, 0)


def _parse_export(data: bytes) -> dict[str, Any] | None:
    try:
        document = parse_strict_json(data)
    except LedgerError:
        return None
    export_format = document.get("format") if isinstance(document, dict) else None
    is_other_version = isinstance(export_format, str) and export_format.startswith(EXPORT_FORMAT_NAME)
    if is_other_version and export_format != EXPORT_FORMAT:
        raise LedgerVersionError(
            f"the export has format {export_format} and this hemofed reads {EXPORT_FORMAT}; export the ledger again"
        )
    sections = {"format", "entries", "verdict", "keys", "summary"}
    is_export = isinstance(document, dict) and set(document) == sections and document["format"] == EXPORT_FORMAT
    return document if is_export and isinstance(document["entries"], list) else None


def _parse_lines(data: bytes) -> tuple[list[LedgerEntry], list[str]]:
    *lines, unfinished_line = data.split(b"\n")
    entries, problems = _parse_entries(parse_entry_line, lines)
    if unfinished_line:
        problems.append(
            f"line {len(lines) + 1} is incomplete: it was cut, or a crash interrupted its writing; in that case the agent moves "
            "it aside when it next opens the ledger"
        )
    return entries, problems


def _parse_entries(parse: Callable[[Any], LedgerEntry], items: Iterable[Any]) -> tuple[list[LedgerEntry], list[str]]:
    entries: list[LedgerEntry] = []
    for line_number, item in enumerate(items, start=1):
        try:
            entries.append(parse(item))
        except LedgerVersionError as error:
            return entries, [str(error)]
        except LedgerError as error:
            return entries, [f"line {line_number}: {error}; what comes after it was not checked"]
    return entries, []


def _canonical_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # 1, 1.0 and true are equal in Python but differ here


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
    if not entries and not problems:
        all_problems.append("there is no entry: the ledger was never opened, or all entries are lost")
    receipts = [(e.index, r) for e, r in _iter_receipts(entries)]
    if coordinator_keys is not None:
        foreign_receipts = [(index, r) for index, r in receipts if r.coordinator_key not in coordinator_keys]
        all_problems += [
            f"entry {index}: is a receipt by {fingerprint_of(r.coordinator_key)}, which is not a known coordinator"
            for index, r in foreign_receipts
        ]
    if anchor is not None:
        all_problems += _anchor_problems(entries, state, anchor, coordinator_keys)
    last_receipt = receipts[-1][1] if receipts else None
    last_receipted_index = max((r.index for _, r in receipts), default=-1)
    unreceipted_indices = tuple(
        e.index for e in entries if e.index > last_receipted_index and e.kind != LedgerReceipt.kind
    )
    return LedgerVerification(tuple(all_problems), tuple(entries), state, last_receipt, unreceipted_indices)


def _iter_receipts(entries: Sequence[LedgerEntry]) -> Iterator[tuple[LedgerEntry, LedgerReceipt]]:
    for entry in entries:
        if entry.kind == LedgerReceipt.kind:
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
        yield f"the anchor is entry {anchor.index}, and the ledger ends before it; its end was cut off"
    elif entries[anchor.index].hash != anchor.head:
        yield f"the anchor has another entry {anchor.index}; the entries up to it were rewritten"
    elif isinstance(anchor, LedgerReceipt) and state:
        yield from (f"the anchor: {problem}" for problem in receipt_problems(state.opening, entries, anchor))
        if not any(
            r.coordinator_key == anchor.coordinator_key and r.index >= anchor.index for _, r in _iter_receipts(entries)
        ):
            yield (
                f"the coordinator receipted entry {anchor.index}, and the ledger does not hold that receipt; its end was "
                "cut off, or the receipt was lost on its way: the site requests it again and adds it"
            )
    if (
        isinstance(anchor, LedgerReceipt)
        and coordinator_keys is not None
        and anchor.coordinator_key not in coordinator_keys
    ):
        yield f"the anchor is a receipt by {fingerprint_of(anchor.coordinator_key)}, which is not a known coordinator"
