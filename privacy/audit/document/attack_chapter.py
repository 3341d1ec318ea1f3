"""Attacks compared with the promised bound. A result below it is consistent with the promise and never proves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.reports.document.blocks import (
    FigureBlock,
    ImageBlock,
    ReportBlock,
    ReportChapter,
    TableBlock,
    TextBlock,
    format_epsilon,
)
from pipeline.reports.document.page import TableColumn
from privacy.audit.attack_findings import AttackFindings, CanaryFinding, InversionCase, MembershipFinding
from privacy.audit.document.figures import AttackGauge, plot_attack_gauges
from privacy.audit.facts import AuditFacts

CHAPTER_TITLE = "Attacks compared with the bound"
NO_BOUND_TEXT = "Nothing was promised, so there is no bound to compare these results with."
BOUND_TEXT = (
    "A result below its bound is consistent with the promise and does not prove it: other attacks may do better. A result "
    "above it would refute the promise."
)


def build_attack_chapter(facts: AuditFacts, run_folder: Path) -> ReportChapter:
    findings = facts.attacks
    if findings is None:
        text = "No attack has been tried on this run. `hemofed audit` with the option --attack tries them and fills this chapter."
        return ReportChapter(CHAPTER_TITLE, [TextBlock([text])])
    blocks: list[ReportBlock] = [TextBlock([BOUND_TEXT if facts.spent else NO_BOUND_TEXT])]
    if gauges := list(attack_gauges(facts)):
        caption = "Results of the attacks, between chance and the promised bound."
        blocks.append(FigureBlock("attacks", plot_attack_gauges(gauges), caption))
    columns = [
        TableColumn("Attack"),
        TableColumn("Found", is_text=True),
        TableColumn("Promised bound"),
        TableColumn("Interpretation"),
    ]
    blocks.append(TableBlock(columns, list(_attack_rows(facts)), column_shares=(0.17, 0.45, 0.2, 0.18)))
    if summaries := [finding.summary for finding in findings.tried if finding.summary]:
        blocks.append(TextBlock(summaries))
    return ReportChapter(CHAPTER_TITLE, [*blocks, *_inversion_image(findings, run_folder)], starts_new_page=True)


def promised_auc_bound(facts: AuditFacts, unit: str | None) -> float | None:
    """The largest AUC that the promise allows an attack on these units; None if it bounds nothing for them.

    A promise to single images bounds nothing for persons.
    """
    headline, client_level_dp = facts.headline, facts.protection.client_level_dp
    if headline and headline.spent.epsilon and (headline.unit != "example" or unit in (None, "example")):
        return headline.spent.auc
    if client_level_dp and client_level_dp.spent.epsilon:
        return client_level_dp.spent.auc
    return None


def attack_gauges(facts: AuditFacts) -> Iterator[AttackGauge]:
    """The attacks for which the run promises a bound."""
    findings = facts.attacks or AttackFindings()
    if (membership := findings.membership) and (bound := promised_auc_bound(facts, membership.unit)):
        yield AttackGauge(
            name="Membership",
            chance_level=0.5,
            low=membership.auc if membership.auc_low is None else membership.auc_low,
            measured=membership.auc,
            high=membership.auc if membership.auc_high is None else membership.auc_high,
            bound=bound,
            summary=f"AUC {membership.auc:.3f}, chance 0.5, bound {_format_auc(bound)}",
        )
    if (canaries := findings.canaries) and canaries.epsilon_promised:
        low, promised_epsilon = canaries.epsilon_low, canaries.epsilon_promised
        yield AttackGauge(
            name="Canaries",
            chance_level=0.0,
            low=low,
            measured=low,
            high=low,
            bound=promised_epsilon,
            summary=f"epsilon at least {format_epsilon(low)}, promised {format_epsilon(promised_epsilon)}",
        )


def refuted_promises(facts: AuditFacts) -> Iterator[str]:
    """A problem for each attack whose result is above its bound."""
    for gauge in attack_gauges(facts):
        if gauge.low > gauge.bound:
            yield f"the attack “{gauge.name.lower()}” exceeds the promised bound ({gauge.summary})"


def _attack_rows(facts: AuditFacts) -> Iterator[list[str]]:
    findings = facts.attacks or AttackFindings()
    refuted_attacks = {gauge.name for gauge in attack_gauges(facts) if gauge.low > gauge.bound}

    def interpret(name: str, has_bound: bool) -> str:
        if not has_bound:
            return "no bound"
        return "refutes the promise" if name in refuted_attacks else "consistent with the promise"

    if findings.membership:
        bound = promised_auc_bound(facts, findings.membership.unit)
        bound_text = f"AUC {_format_auc(bound)}" if bound else "none"
        question = "Membership: who was in the training data?"
        finding = _describe_membership(findings.membership)
        yield [question, finding, bound_text, interpret("Membership", bool(bound))]
    if canaries := findings.canaries:
        delta_text = f" at delta {canaries.delta:g}" if canaries.delta else ""
        promised_epsilon = canaries.epsilon_promised
        bound_text = f"epsilon {format_epsilon(promised_epsilon)}{delta_text}" if promised_epsilon else "none"
        question = "Canaries: were planted examples in the training data?"
        yield [question, _describe_canaries(canaries), bound_text, interpret("Canaries", bool(promised_epsilon))]
    if findings.inversion:
        cases = findings.inversion.cases
        finding = "; ".join(f"{case.name}: {_format_similarity(case)}" for case in cases) or "see the images"
        question = "Inversion: can images be reconstructed from updates?"
        yield [question, finding, "none for similarity", "compare the images"]


def _describe_membership(finding: MembershipFinding) -> str:
    interval_text = (
        ""
        if finding.auc_low is None or finding.auc_high is None
        else f" ({finding.auc_low:.3f} to {finding.auc_high:.3f})"
    )
    unit_text = f", by {finding.unit}" if finding.unit else ""
    counts_text = (
        ""
        if finding.num_members is None or finding.num_nonmembers is None
        else f"; {finding.num_members:,} members, {finding.num_nonmembers:,} nonmembers"
    )
    return f"AUC {finding.auc:.3f}{interval_text}{unit_text}; 0.5 is chance{counts_text}"


def _describe_canaries(finding: CanaryFinding) -> str:
    confidence_text = f" with {100 * finding.confidence:g} % confidence" if finding.confidence else ""
    guess_text = (
        ""
        if None in (finding.num_correct, finding.num_guesses, finding.num_canaries)
        else f"; {finding.num_correct} of {finding.num_guesses} guesses right, {finding.num_canaries} canaries"
    )
    max_text = f"; with every guess right {format_epsilon(finding.max_epsilon_low)}" if finding.max_epsilon_low else ""
    return f"epsilon at least {format_epsilon(finding.epsilon_low)}{confidence_text}{guess_text}{max_text}"


def _format_similarity(case: InversionCase) -> str:
    ssim_text = "" if case.ssim is None else f"SSIM {case.ssim:.2f}"
    psnr_text = "" if case.psnr is None else f"PSNR {case.psnr:.1f} dB"
    return ", ".join(filter(None, (ssim_text, psnr_text)))


def _format_auc(value: float) -> str:
    return f"{value:.4f}" if value < 0.9999 else "over 0.9999"


def _inversion_image(findings: AttackFindings, run_folder: Path) -> Iterator[ImageBlock]:
    """Only a PNG file inside the run folder: attacks.json must not name any other file."""
    if not (findings.inversion and findings.inversion.image):
        return
    file = (run_folder / findings.inversion.image).resolve()
    if file.is_file() and file.suffix == ".png" and file.is_relative_to(run_folder.resolve()):
        yield ImageBlock("Inversion", file.read_bytes(), "The original, and its reconstructions from updates.")
