"""One site's page: budget, spent, left, round by round; what left it; its ledger, its keys, its approvals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.reports.document.blocks import Block, Chapter, Drawing, Table, Tiles, Words, answers, eps
from pipeline.reports.document.formatting import count_of, whole
from pipeline.reports.document.page import Cell, Column
from privacy.accounting.privacy_filter import FILTER
from privacy.audit.document.figures import spending
from privacy.ledger.records import Approve

Json = Mapping[str, Any]


def site_chapter(number: int, site: str, found: Json, facts: Json) -> Chapter:
    return Chapter(f"Site {site}", list(_blocks(number, site, found, facts)), page=True)


def _blocks(number: int, site: str, found: Json, facts: Json) -> Iterator[Block]:
    if found["problems"]:
        yield Words([f"Not in order: {'; '.join(found['problems'])}."])
    if found.get("budget"):
        yield Tiles(list(_amounts(found)))
    if found.get("curve"):
        before = f"; {eps(found['before'])} had been spent before" if found["before"] else ""
        caption = f"Epsilon spent on the data of {site} after each round of this study{before}."
        yield Drawing(f"spending-{number}", spending(found), caption)
    if found.get("recount"):
        yield _recounted(found)
    if found.get("charges"):
        yield _charged(found["charges"])
    yield _sent(found, facts)
    if found["ledger"]:
        yield answers(list(_ledger(found)), "Ledger and approvals")


def _amounts(found: Json) -> Iterator[tuple[str, Cell]]:
    budget, promise = found["budget"], found["promise"]
    yield "Budget (epsilon)", (eps(budget["epsilon"]), f"delta {budget['delta']:g}")
    yield "Spent", eps(found["spent"])
    yield "Left", eps(found["left"])
    if promise:
        yield f"{promise['unit']}s trained on".capitalize(), whole(promise["units"])
        yield "Noise", (f"{promise['noise']:.3f}", f"times the clip of {promise['clip']:g}")
        yield "Chance to be in a step", f"{promise['rate']:.3f}"


def _recounted(found: Json) -> Table:
    again = found["recount"]
    rows: list[list[Cell]] = [
        [("The ledger's own figure", "as written at the last charge"), eps(found["spent"])],
        [("The same rule again", f"from the charges alone ({again['how']})"), eps(again["again"])],
        [("Privacy loss distributions", "of dp_accounting"), eps(again["pld"])],
        [("Rényi divergences", "of Opacus, converted here"), eps(again["rdp"])],
        [("Rényi divergences, by others", "dp_accounting's own accountant"), eps(again["dp_accounting"])],
    ]
    agreed = "They agree" if not again["problems"] else f"They do not agree: {'; '.join(again['problems'])}"
    caption = f"Epsilon of all charges, recomputed. {agreed}; Rényi figures are looser bounds on the same loss."
    if again["how"] == FILTER:
        caption += (
            " Studies that follow each other, each knowing what came before, need a filter, which proves less: the lower "
            "figures would hold only had all charges been fixed beforehand."
        )
    return Table([Column("Accountant"), Column("Epsilon", True)], rows, caption, (0.76, 0.24))


def _charged(charges: Sequence[Json]) -> Table:
    """Charges alike, one after the other, in one row."""
    alike = ("study", "plan", "noise", "rate", "steps", "mechanism")
    runs: list[list[Json]] = []
    for charge in charges:
        if runs and all(runs[-1][-1][key] == charge[key] for key in alike):
            runs[-1].append(charge)
        else:
            runs.append([charge])
    numbers = [Column(title, True) for title in ("Noise", "Rate", "Steps each", "Epsilon after")]
    columns = [Column("Study"), Column("Rounds"), Column("Mechanism", words=True), *numbers]
    caption = "Charges, each made and receipted before the training that it pays for"
    return Table(
        columns,
        [_charge_row(one, len({c["plan"] for c in charges}) > 1) for one in runs],
        caption,
        (0.16, 0.13, 0.31, 0.09, 0.09, 0.1, 0.12),
    )


def _charge_row(one: Sequence[Json], named: bool) -> list[Cell]:
    first, last = one[0], one[-1]
    span = str(first["turn"]) if len(one) == 1 else f"{first['turn']} to {last['turn']}"
    turns = span if len(one) == last["turn"] - first["turn"] + 1 else f"{span} ({len(one)} times)"
    numbers = [f"{first['noise']:.3f}", f"{first['rate']:.3f}", whole(first["steps"]), eps(last["epsilon"])]
    study = (first["study"], f"plan {first['plan'][:8]}") if named else first["study"]
    return [study, turns, first["mechanism"], *numbers]


def _sent(found: Json, facts: Json) -> Table:
    took = found["took"]
    counts = dict.fromkeys(("update", "weight", "work", "loss", "group"), len(took["counted"]))
    counts["excuse"] = len(took["sat_out"])
    counts["profile"] = 2
    at_end = {"test": 1} if facts["released"] else {}
    for split in ("train", "val", "test"):
        counts[f"scores/{split}"] = took["judged"].get(split, 0) + at_end.get(split, 0)
    rows = [
        [row["what"], whole(counts[row["key"]]), row["short"]] for row in facts["disclosures"] if counts.get(row["key"])
    ]
    columns = [Column("What left this site"), Column("Times", True), Column("Protected by", words=True)]
    return Table(columns, rows, widths=(0.5, 0.1, 0.4))


def _ledger(found: Json) -> Iterator[tuple[str, str]]:
    about = found["ledger"]
    if about["ok"]:
        end = "it ends where the coordinator last signed for it"
        open_end = "the coordinator holds no receipt of it, so that a cut end would not be seen"
        yield (
            "Verification",
            f"{about['entries']} entries, chained and signed; {end if about['anchored'] else open_end}",
        )
    else:
        yield "Verification", "; ".join(about["problems"])
    yield "Last entry", f"{about['head']} ({about['to']})"
    if receipt := about["receipt"]:
        yield "Last receipt", f"for entry {receipt['index']}, {receipt['time']}, by coordinator {receipt['key']}"
    simulated = " (simulated: the officer's key lies beside the agent's)" if about["officer_is_here"] else ""
    yield "Keys", f"agent {about['agent']}, officer {about['officer']}{simulated}"
    yield (
        "Approvals",
        "; ".join(map(_approval, found.get("approvals") or ()))
        or f"none recorded{' (a simulation)' if simulated else ''}",
    )
    for data in (found.get("data") or ())[-1:]:
        amount = f"{count_of(data['examples'], 'training image')} of {count_of(data['units'], str(found['unit']))}"
        yield "Data", f"{about['dataset_id']}: {amount}, fingerprint {data['fingerprint']}"
    if refused := found.get("refusals"):
        last = refused[-1]
        yield (
            "Refused",
            f"{count_of(len(refused), 'time')}; last: {last['study']}, round {last['turn']}: {last['reason']}",
        )
    if found.get("forgotten"):
        yield "Withdrawals", f"{count_of(found['forgotten'], 'unit')}, left out since"


def _approval(one: Json) -> str:
    did = "approved" if one["kind"] == Approve.kind else "withdrew approval of"
    who = f"officer {one['officer']}" if one["officer"] else "the agent"
    return f"{one['time']}: {who} {did} plan {one['plan'][:16]}"
