"""The chapter of one site: budget and spending round by round, disclosures, ledger, keys and approvals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from pipeline.protocol.messages import DECLINE_KINDS
from pipeline.records.privacy_record import PrivacyPlanRecord
from pipeline.reports.document.blocks import (
    FigureBlock,
    ReportBlock,
    ReportChapter,
    TableBlock,
    TextBlock,
    TileBlock,
    format_epsilon,
    question_table,
)
from pipeline.reports.document.formatting import format_count, format_integer
from pipeline.reports.document.page import TableCell, TableColumn
from pipeline.study.disclosures import PROTECTION_LABELS, DisclosureKind
from privacy.accounting.privacy_filter import RDP_FILTER
from privacy.audit.document.figures import plot_spending
from privacy.audit.facts import (
    ApprovalFacts,
    AuditFacts,
    LedgerFacts,
    ParticipationFacts,
    RecomputedEpsilon,
    SiteFacts,
    SpendingFacts,
)
from privacy.ledger.records import LedgerBudget, PrivacyCharge, StudyApproved

EVERY_ROUND_KINDS: tuple[DisclosureKind, ...] = ("update", "norm_stats", "loss", "weight", "work", "cluster", "masks")


def build_site_chapter(number: int, site: str, site_facts: SiteFacts, facts: AuditFacts) -> ReportChapter:
    """`number` makes the key of the figure unique in the report."""
    return ReportChapter(f"Site {site}", list(_site_blocks(number, site, site_facts, facts)), starts_new_page=True)


def _site_blocks(number: int, site: str, site_facts: SiteFacts, facts: AuditFacts) -> Iterator[ReportBlock]:
    if site_facts.problems:
        yield TextBlock([f"Not in order: {'; '.join(site_facts.problems)}."])
    spending, budget = site_facts.spending, site_facts.budget
    if spending and budget:
        yield TileBlock(list(_budget_tiles(spending, budget, site_facts.privacy_plan)))
    if spending and budget and spending.curve:
        earlier_text = (
            f"; {format_epsilon(spending.spent_before)} had been spent earlier" if spending.spent_before else ""
        )
        caption = f"Epsilon spent on the data of {site} after each round of this study{earlier_text}."
        yield FigureBlock(f"spending-{number}", plot_spending(spending, budget), caption)
    if spending and spending.recomputed:
        yield _recomputed_table(spending.spent, spending.recomputed)
    if spending and spending.charges:
        yield _charge_table(spending.charges)
    yield _disclosure_table(site_facts, facts)
    if site_facts.ledger:
        yield question_table(list(_ledger_answers(site_facts.ledger, spending)), "Ledger and approvals")


def _budget_tiles(
    spending: SpendingFacts, budget: LedgerBudget, privacy_plan: PrivacyPlanRecord | None
) -> Iterator[tuple[str, TableCell]]:
    yield "Budget (epsilon)", (format_epsilon(budget.epsilon), f"delta {budget.delta:g}")
    yield "Spent", format_epsilon(spending.spent)
    yield "Left", format_epsilon(spending.left)
    if privacy_plan:
        yield f"Training {privacy_plan.privacy_unit}s", format_integer(privacy_plan.num_units)
        noise_text = f"{privacy_plan.noise_multiplier:.3f}"
        yield "Noise multiplier", (noise_text, f"times the clipping bound of {privacy_plan.max_grad_norm:g}")
        yield "Sampling rate", (f"{privacy_plan.sampling_rate:.3f}", "probability to be in a step")


def _recomputed_table(ledger_epsilon: float, recomputed: RecomputedEpsilon) -> TableBlock:
    by_accountant = recomputed.by_accountant
    rows: list[list[TableCell]] = [
        [("The ledger's own figure", "as recorded with the last charge"), format_epsilon(ledger_epsilon)],
        [
            ("The ledger's rule, recomputed", f"from the charges alone ({recomputed.accountant})"),
            format_epsilon(recomputed.epsilon),
        ],
        [("Privacy loss distributions", "by dp_accounting"), format_epsilon(by_accountant.pld)],
        [("Rényi divergences", "by Opacus, converted here"), format_epsilon(by_accountant.rdp)],
        [
            ("Rényi divergences, by other authors", "dp_accounting's own accountant"),
            format_epsilon(by_accountant.dp_accounting),
        ],
    ]
    agreement = (
        "The figures agree"
        if not recomputed.problems
        else f"The figures do not agree: {'; '.join(recomputed.problems)}"
    )
    caption = f"Epsilon of all charges, recomputed. {agreement}; Rényi divergences give looser bounds on the same loss."
    if recomputed.accountant == RDP_FILTER:
        caption += (
            " Studies that follow each other, each planned with knowledge of the earlier ones, need a privacy filter, which "
            "proves a weaker bound: the lower figures would hold only if all charges had been fixed beforehand."
        )
    return TableBlock([TableColumn("Accountant"), TableColumn("Epsilon", True)], rows, caption, (0.76, 0.24))


def _charge_table(charges: Sequence[PrivacyCharge]) -> TableBlock:
    """One row for consecutive charges that differ only in their round."""
    same = attrgetter("study", "study_hash", "noise_multiplier", "sampling_rate", "steps", "mechanism")
    charge_runs: list[list[PrivacyCharge]] = []
    for charge in charges:
        if charge_runs and same(charge_runs[-1][-1]) == same(charge):
            charge_runs[-1].append(charge)
        else:
            charge_runs.append([charge])
    number_columns = [TableColumn(title, True) for title in ("Noise", "Rate", "Steps each", "Epsilon after")]
    columns = [TableColumn("Study"), TableColumn("Rounds"), TableColumn("Mechanism", is_text=True), *number_columns]
    caption = "Charges, each recorded and receipted before the training that it pays for"
    show_study_hash = len({charge.study_hash for charge in charges}) > 1
    rows = [_charge_row(charge_run, show_study_hash) for charge_run in charge_runs]
    return TableBlock(columns, rows, caption, (0.16, 0.13, 0.31, 0.09, 0.09, 0.1, 0.12))


def _charge_row(charge_run: Sequence[PrivacyCharge], show_study_hash: bool) -> list[TableCell]:
    first, last = charge_run[0], charge_run[-1]
    rounds_text = str(first.round) if len(charge_run) == 1 else f"{first.round} to {last.round}"
    if len(charge_run) != last.round - first.round + 1:
        rounds_text += f" ({len(charge_run)} times)"
    numbers = [
        f"{first.noise_multiplier:.3f}",
        f"{first.sampling_rate:.3f}",
        format_integer(first.steps),
        format_epsilon(last.total_epsilon),
    ]
    study = (first.study, f"hash {first.study_hash[:8]}") if show_study_hash else first.study
    return [study, rounds_text, first.mechanism, *numbers]


def _disclosure_table(site_facts: SiteFacts, facts: AuditFacts) -> TableBlock:
    counts = _disclosure_counts(site_facts.participation, facts.released is not None)
    rows = [
        [disclosure.content, format_integer(counts[disclosure.kind]), PROTECTION_LABELS[disclosure.protected_by]]
        for disclosure in facts.disclosures
        if counts.get(disclosure.kind)
    ]
    columns = [
        TableColumn("What left this site"),
        TableColumn("Times", True),
        TableColumn("Protected by", is_text=True),
    ]
    return TableBlock(columns, rows, column_shares=(0.5, 0.1, 0.4))


def _disclosure_counts(participation: ParticipationFacts, is_finished: bool) -> Mapping[DisclosureKind, int]:
    """How often the site sent what is sent in rounds and at the end."""
    num_accepted, evaluated = len(participation.accepted), participation.evaluated
    return {
        **dict.fromkeys(EVERY_ROUND_KINDS, num_accepted),
        "decline": sum(failure.kind in DECLINE_KINDS for failure in participation.failures.values()),
        "scores/train": evaluated.get("train", 0),
        "scores/val": evaluated.get("val", 0),
        "scores/test": evaluated.get("test", 0) + is_finished,
        "profile": 2,
    }


def _ledger_answers(ledger: LedgerFacts, spending: SpendingFacts | None) -> Iterator[tuple[str, str]]:
    if ledger.ok:
        end_text = "it ends where the coordinator last countersigned it"
        open_end_text = "the coordinator holds no receipt for it, so a missing end would not be noticed"
        yield (
            "Verification",
            f"{ledger.entries} entries, chained and signed; {end_text if ledger.anchored else open_end_text}",
        )
    else:
        yield "Verification", "; ".join(ledger.problems)
    yield "Last entry", f"{ledger.head} ({ledger.last_time})"
    if receipt := ledger.receipt:
        yield "Last receipt", f"for entry {receipt.index}, {receipt.time}, by coordinator {receipt.key}"
    simulated = " (simulated: the officer's key is stored next to the agent's)" if ledger.officer_is_here else ""
    yield "Keys", f"agent {ledger.agent}, officer {ledger.officer}{simulated}"
    yield (
        "Approvals",
        "; ".join(map(_describe_approval, spending.approvals if spending else ()))
        or f"none recorded{' (a simulation)' if simulated else ''}",
    )
    if spending is None:
        return
    for dataset in spending.data[-1:]:
        examples_text = format_count(dataset.num_examples, "training image")
        units_text = format_count(dataset.num_units, spending.unit)
        yield "Data", f"{ledger.dataset_id}: {examples_text} of {units_text}, fingerprint {dataset.fingerprint}"
    if spending.refusals:
        last_refusal = spending.refusals[-1]
        refusals_text = format_count(len(spending.refusals), "time")
        last_text = f"{last_refusal.study}, round {last_refusal.round}: {last_refusal.reason}"
        yield "Charges refused", f"{refusals_text}; last: {last_text}"
    if spending.num_withdrawn:
        yield "Withdrawals", f"{format_count(spending.num_withdrawn, 'unit')}, excluded since"


def _describe_approval(approval: ApprovalFacts) -> str:
    action = "approved" if approval.kind == StudyApproved.kind else "revoked the approval of"
    signer = f"officer {approval.officer}" if approval.officer else "the agent"
    return f"{approval.time}: {signer} {action} study {approval.study_hash[:16]}"
