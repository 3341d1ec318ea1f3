"""Attacks compared with the promised bound. A result below it is consistent with the promise and never proves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
from privacy.audit.document.figures import AttackGauge, plot_attack_gauges
from privacy.audit.interpretation import auc_bound

Json = Mapping[str, Any]
CHAPTER_TITLE = "Attacks compared with the bound"
NO_BOUND_TEXT = "Nothing was promised, so there is no bound to compare these results with."
BOUND_TEXT = (
    "A result below its bound is consistent with the promise and does not prove it: other attacks may do better. A result "
    "above it would refute the promise."
)


def build_attack_chapter(facts: Json, run_folder: Path) -> ReportChapter:
    attack_results = facts["attacks"]
    if not attack_results:
        text = "No attack has been tried on this run. `hemofed audit` with the option --attack tries them and fills this chapter."
        return ReportChapter(CHAPTER_TITLE, [TextBlock([text])])
    has_promise = facts["headline"] or facts["protection"]["client_level_dp"]
    blocks: list[ReportBlock] = [TextBlock([BOUND_TEXT if has_promise else NO_BOUND_TEXT])]
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
    summaries = [
        str(result["summary"])
        for result in attack_results.values()
        if isinstance(result, Mapping) and result.get("summary")
    ]
    if summaries:
        blocks.append(TextBlock(summaries))
    return ReportChapter(CHAPTER_TITLE, [*blocks, *_attack_images(attack_results, run_folder)], starts_new_page=True)


def promised_auc_bound(facts: Json, unit: str | None) -> float | None:
    """The largest AUC that the promise allows an attack on these units; None if it bounds nothing for them.

    A promise to single images bounds nothing for persons.
    """
    headline, client_level_dp = facts["headline"], facts["protection"]["client_level_dp"]
    if headline and headline["epsilon"] and (headline["unit"] != "example" or unit in (None, "example")):
        return auc_bound(headline["epsilon"], headline["delta"])
    if client_level_dp and client_level_dp["spent"]:
        return auc_bound(client_level_dp["spent"], client_level_dp["delta"])
    return None


def attack_gauges(facts: Json) -> Iterator[AttackGauge]:
    """The attacks for which the run promises a bound."""
    attack_results = facts["attacks"] or {}
    if (result := attack_results.get("membership")) and (bound := promised_auc_bound(facts, result.get("unit"))):
        low, high = result.get("auc_low", result["auc"]), result.get("auc_high", result["auc"])
        yield AttackGauge(
            name="Membership",
            chance_level=0.5,
            low=low,
            measured=result["auc"],
            high=high,
            bound=bound,
            summary=f"AUC {result['auc']:.3f}, chance 0.5, bound {_format_auc(bound)}",
        )
    if (result := attack_results.get("canaries")) and result.get("epsilon_promised"):
        low, promised_epsilon = float(result["epsilon_low"]), float(result["epsilon_promised"])
        yield AttackGauge(
            name="Canaries",
            chance_level=0.0,
            low=low,
            measured=low,
            high=low,
            bound=promised_epsilon,
            summary=f"epsilon at least {format_epsilon(low)}, promised {format_epsilon(promised_epsilon)}",
        )


def refuted_promises(facts: Json) -> Iterator[str]:
    """A problem for each attack whose result is above its bound."""
    for gauge in attack_gauges(facts):
        if gauge.low > gauge.bound:
            yield f"the attack “{gauge.name.lower()}” exceeds the promised bound ({gauge.summary})"


def _attack_rows(facts: Json) -> Iterator[list[str]]:
    attack_results = facts["attacks"]
    refuted_attacks = {gauge.name for gauge in attack_gauges(facts) if gauge.low > gauge.bound}

    def interpret(name: str, has_bound: bool) -> str:
        if not has_bound:
            return "no bound"
        return "refutes the promise" if name in refuted_attacks else "consistent with the promise"

    if result := attack_results.get("membership"):
        bound = promised_auc_bound(facts, result.get("unit"))
        interval_text = (
            f" ({result['auc_low']:.3f} to {result['auc_high']:.3f})" if {"auc_low", "auc_high"} <= set(result) else ""
        )
        counts_text = (
            f"; {result['num_members']:,} members, {result['num_nonmembers']:,} nonmembers"
            if {"num_members", "num_nonmembers"} <= set(result)
            else ""
        )
        unit_text = f", by {result['unit']}" if result.get("unit") else ""
        finding = f"AUC {result['auc']:.3f}{interval_text}{unit_text}; 0.5 is chance{counts_text}"
        bound_text = f"AUC {_format_auc(bound)}" if bound else "none"
        yield ["Membership: who was in the training data?", finding, bound_text, interpret("Membership", bool(bound))]
    if result := attack_results.get("canaries"):
        guess_text = (
            f"; {result['num_correct']} of {result['num_guesses']} guesses right, {result['num_canaries']} canaries"
            if {"num_correct", "num_guesses", "num_canaries"} <= set(result)
            else ""
        )
        confidence_text = f" with {100 * result['confidence']:g} % confidence" if result.get("confidence") else ""
        promised_epsilon = result.get("epsilon_promised")
        delta_text = f" at delta {result['delta']:g}" if result.get("delta") else ""
        max_epsilon_low = result.get("max_epsilon_low")
        max_text = f"; with every guess right {format_epsilon(max_epsilon_low)}" if max_epsilon_low else ""
        finding = f"epsilon at least {format_epsilon(result['epsilon_low'])}{confidence_text}{guess_text}{max_text}"
        bound_text = f"epsilon {format_epsilon(promised_epsilon)}{delta_text}" if promised_epsilon else "none"
        question = "Canaries: were planted examples in the training data?"
        yield [question, finding, bound_text, interpret("Canaries", bool(promised_epsilon))]
    if result := attack_results.get("inversion"):
        cases = result.get("cases") or ()
        finding = "; ".join(f"{c['name']}: {_format_similarity(c)}" for c in cases) or "see the images"
        question = "Inversion: can images be reconstructed from updates?"
        yield [question, finding, "none for similarity", "compare the images"]


def _format_similarity(case: Json) -> str:
    parts = [("SSIM", "ssim", ".2f", ""), ("PSNR", "psnr", ".1f", " dB")]
    return ", ".join(
        f"{label} {format(case[key], digits)}{unit}" for label, key, digits, unit in parts if case.get(key) is not None
    )


def _format_auc(value: float) -> str:
    return f"{value:.4f}" if value < 0.9999 else "over 0.9999"


def _attack_images(attack_results: Json, run_folder: Path) -> Iterator[ImageBlock]:
    """Only PNG files inside the run folder: attacks.json must not name any other file."""
    for name, result in attack_results.items():
        if not isinstance(result, Mapping) or not result.get("image"):
            continue
        file = (run_folder / str(result["image"])).resolve()
        if file.is_file() and file.suffix == ".png" and file.is_relative_to(run_folder.resolve()):
            note = "The original, and its reconstructions from updates." if name == "inversion" else ""
            yield ImageBlock(name.capitalize(), file.read_bytes(), str(result.get("caption") or note))
