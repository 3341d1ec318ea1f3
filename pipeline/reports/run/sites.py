"""Report sections on the federation: participation, data, communication and provenance.

A section adds nothing if the run has no data for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from pipeline.protocol.tasks import Split
from pipeline.records.round_record import RoundRecord
from pipeline.reports.document.formatting import (
    SPLIT_LABELS,
    UNDEFINED_TEXT,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
)
from pipeline.reports.document.page import COORDINATOR_LABEL, ReportWriter, TableCell, TableColumn
from pipeline.reports.run import curves as figures
from pipeline.reports.run.communication import compression_chains, describe_compression, describe_savings
from pipeline.reports.run.record import RunRecord


def add_participation_section(writer: ReportWriter, record: RunRecord) -> None:
    trained_rounds = [round_record for round_record in record.round_records if round_record.sampled_clients]
    if not trained_rounds:
        return
    sites = record.sites
    done_fractions = [[_done_fraction(round_record, site) for round_record in trained_rounds] for site in sites]
    missed = {
        (row, round_index)
        for round_index, round_record in enumerate(trained_rounds)
        for row, site in enumerate(sites)
        if site in round_record.failures
    }
    has_partial_work = any(value is not None and value < 1 for values in done_fractions for value in values)
    writer.page.add_section("Participation")
    clock = next((record.clock for record in reversed(trained_rounds) if record.clock is not None), None)
    clock_text = "" if clock is None else f" Simulated time: {format_duration(clock)}."
    if not missed and not has_partial_work:
        writer.page.add_text(f"Every sampled site finished its work in every round.{clock_text}")
    else:
        round_numbers = [round_record.round for round_record in trained_rounds]
        text = (
            f"{format_count(len(missed), 'update')} of {_num_requests(trained_rounds):,} requested missing.{clock_text}"
        )
        writer.page.add_text(text)
        caption = "Completed work by site (rows) and round: fainter means fewer of the requested steps; blank means not sampled."
        writer.add_figure("stragglers", figures.plot_stragglers(sites, round_numbers, done_fractions, missed), caption)
        _add_missed_table(writer, trained_rounds, sites)
        add_quarantine_table(writer, trained_rounds, sites)
    if void_rows := [[str(line.round), line.void] for line in record.round_records if line.void]:
        columns = [TableColumn("Void round"), TableColumn("Reason")]
        writer.page.add_table(columns, void_rows, "Rounds that left the model unchanged because too few sites replied")


def _done_fraction(round_record: RoundRecord, site: str) -> float | None:
    """Completed fraction of the requested steps; None if the site was not sampled."""
    if site not in round_record.sampled_clients:
        return None
    work = round_record.work.get(site)
    if work is None or not work.steps_requested:
        return 1.0 if site in round_record.accepted else 0.0
    return work.steps_done / work.steps_requested


def _num_requests(round_records: Sequence[RoundRecord]) -> int:
    return sum(len(round_record.sampled_clients) for round_record in round_records)


def _add_missed_table(writer: ReportWriter, round_records: Sequence[RoundRecord], sites: Sequence[str]) -> None:
    """Counts by kind of failure."""
    reason_counts: dict[str, Counter[str]] = {site: Counter() for site in sites}
    for round_record in round_records:
        for site, failure in round_record.failures.items():
            reason_counts.setdefault(site, Counter())[failure.kind.replace("_", " ")] += 1
    kinds = sorted({kind for reasons in reason_counts.values() for kind in reasons})
    if not kinds:
        return
    num_requested = Counter(site for round_record in round_records for site in round_record.sampled_clients)
    num_accepted = Counter(site for round_record in round_records for site in round_record.accepted)
    affected_sites = [site for site in sites if reason_counts[site]]
    rows = [
        [
            site,
            format_integer(num_requested[site]),
            format_integer(num_accepted[site]),
            *(format_integer(reason_counts[site][kind]) for kind in kinds),
        ]
        for site in affected_sites
    ]
    columns = [TableColumn("Site"), TableColumn("Sampled", True), TableColumn("Accepted", True)]
    columns += [TableColumn(kind[:1].upper() + kind[1:], True) for kind in kinds]
    num_unaffected = len(sites) - len(affected_sites)
    caption = "Missing updates by reason" + (
        f"; {format_count(num_unaffected, 'site')} without missing updates" if num_unaffected else ""
    )
    writer.page.add_table(columns, rows, caption)


def add_data_section(writer: ReportWriter, record: RunRecord) -> None:
    site_data = record.site_data
    sites, classes = site_data.sites, site_data.classes
    if not sites and not site_data.fingerprint:
        return
    writer.page.add_section("Data")
    if site_data.fingerprint:
        writer.page.add_text(f"Data fingerprint: {site_data.fingerprint}")
    if classes and sites and all(len(counts.get("train", ())) == len(classes) for counts in sites.values()):
        counts = {site: counts["train"] for site, counts in sites.items()}
        writer.add_figure(
            "class_counts", figures.plot_class_counts(classes, counts), "Training examples of every class at each site."
        )
    counts_by_holder = {**sites, COORDINATOR_LABEL: site_data.coordinator} if site_data.coordinator else sites
    splits = [split for split in get_args(Split) if any(counts.get(split) for counts in counts_by_holder.values())]
    rows = [
        [name, *(format_integer(sum(counts.get(split, ()))) for split in splits)]
        for name, counts in counts_by_holder.items()
    ]
    if rows and splits:
        columns = [TableColumn("Held by"), *(TableColumn(SPLIT_LABELS[split].capitalize(), True) for split in splits)]
        writer.page.add_table(columns, rows, "Examples")
    if skipped := site_data.skipped:
        writer.page.add_details(f"{format_count(len(skipped), 'file')} skipped", "\n".join(skipped))


def add_communication_section(writer: ReportWriter, record: RunRecord) -> None:
    uplink_bytes, downlink_bytes = record.uplink_bytes, record.downlink_bytes
    if not uplink_bytes and not downlink_bytes:
        return
    writer.page.add_section("Communication")
    figure = figures.plot_traffic(
        rounds=[line.round for line in record.round_records],
        uplink_bytes=[line.bytes.up for line in record.round_records],
        downlink_bytes=[line.bytes.down for line in record.round_records],
    )
    writer.add_figure("traffic", figure, "Cumulative megabytes of all sites.")
    num_trained_rounds = max(record.last_round, 1)
    rows = [
        [description, format_bytes(total), format_bytes(total / num_trained_rounds)]
        for description, total in (("Uplink (sites to coordinator)", uplink_bytes), ("Downlink", downlink_bytes))
    ]
    columns = [TableColumn("Direction"), TableColumn("Total", True), TableColumn("Per round", True)]
    chains = compression_chains(record)
    savings = [describe_savings(record, "up"), describe_savings(record, "down")] if chains else []
    if any(savings):
        columns += [TableColumn("As float32", True), TableColumn("Compared with float32", True)]
        rows = [
            [*row, *(saving or (UNDEFINED_TEXT, UNDEFINED_TEXT))] for row, saving in zip(rows, savings, strict=True)
        ]
    writer.page.add_table(columns, rows)
    if chains:
        description = describe_compression(chains)
        if any(savings):
            description += (
                " As float32: four bytes per parameter for every accepted reply (uplink) or request (downlink)."
            )
        writer.page.add_text(description)


def add_provenance_section(writer: ReportWriter, record: RunRecord) -> None:
    software = record.results.software if record.results else {}
    if not software and not record.study_toml:
        return
    writer.page.add_section("Provenance")
    if software:
        writer.page.add_table(
            [TableColumn("Software"), TableColumn("Version")], [[name, str(value)] for name, value in software.items()]
        )
    if record.study_toml:
        writer.page.add_details("Resolved study file", record.study_toml)


# Quarantined sites, a table of the section on participation

ReasonByRound = Mapping[int, str]


def add_quarantine_table(writer: ReportWriter, round_records: Sequence[RoundRecord], sites: Sequence[str]) -> None:
    cases = find_quarantined(round_records)
    if not cases:
        return
    site_order = {site: index for index, site in enumerate(sites)}
    rows: list[list[TableCell]] = [
        [site, format_round_ranges(list(reasons)), _format_reason(reasons)]
        for (site, _), reasons in sorted(
            cases.items(), key=lambda case: (site_order.get(case[0][0], len(site_order)), min(case[1]))
        )
    ]
    sites_text = format_count(len({site for site, _ in cases}), "site")
    caption = f"Quarantined updates: {sites_text}"
    writer.page.add_table(
        [TableColumn("Site"), TableColumn("Rounds"), TableColumn("Reason", is_text=True)], rows, caption
    )


def find_quarantined(round_records: Sequence[RoundRecord]) -> dict[tuple[str, str], dict[int, str]]:
    """(site, reason with its numbers replaced by #) -> round -> reason."""
    cases: dict[tuple[str, str], dict[int, str]] = {}
    for round_record in round_records:
        for site, failure in round_record.failures.items():
            if failure.kind == "quarantined":
                pattern = re.sub(r"[\d.e+-]*\d", "#", failure.text)
                cases.setdefault((site, pattern), {})[round_record.round] = failure.text
    return cases


def _format_reason(reason_by_round: ReasonByRound) -> TableCell:
    round_numbers = sorted(reason_by_round)
    first_reason = reason_by_round[round_numbers[0]]
    is_same_reason = len(set(reason_by_round.values())) == 1
    return (
        first_reason
        if is_same_reason
        else (first_reason, f"in round {round_numbers[0]}; in the other rounds with different numbers")
    )


def format_round_ranges(round_numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> 1–3, 7"""
    runs: list[list[int]] = []
    for round_number in sorted(round_numbers):
        if runs and round_number == runs[-1][-1] + 1:
            runs[-1].append(round_number)
        else:
            runs.append([round_number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
