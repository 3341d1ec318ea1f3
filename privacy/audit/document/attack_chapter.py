"""Attacks beside the bound. A result below it is consistent with the promise, and never proof of it."""

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
NO_BOUND_TEXT = "Nothing was promised, so there is no bound to hold these results against."
BOUND_TEXT = (
    "A result below its bound is consistent with the promise and does not prove it: other attacks may do better. A result "
    "above it would refute the promise."
)


def build_attack_chapter(facts: Json, run_folder: Path) -> ReportChapter:
    attack_results = facts["attacks"]
    if not attack_results:
        text = "No attack has been tried on this run. The option --attack of `hemofed audit` tries them and fills this chapter."
        return ReportChapter("Attacks beside the bound", [TextBlock([text])])
    has_promise = facts["headline"] or facts["protection"]["client_level_dp"]
    blocks: list[ReportBlock] = [TextBlock([BOUND_TEXT if has_promise else NO_BOUND_TEXT])]
    if gauge_list := list(attack_gauges(facts)):
        blocks.append(
            FigureBlock(
                "attacks",
                plot_attack_gauges(gauge_list),
                "What attacks found, between chance and what the promise allows.",
            )
        )
    blocks.append(
        TableBlock(
            [
                TableColumn("Attack"),
                TableColumn("Found", is_text=True),
                TableColumn("Bound of the promise"),
                TableColumn("Reading"),
            ],
            list(_attack_rows(facts)),
            column_shares=(0.17, 0.45, 0.2, 0.18),
        )
    )
    if summaries := [
        str(attack_results[name]["words"])
        for name in attack_results
        if isinstance(attack_results[name], Mapping) and attack_results[name].get("words")
    ]:
        blocks.append(TextBlock(summaries))
    return ReportChapter(
        "Attacks beside the bound", [*blocks, *_attack_images(attack_results, run_folder)], starts_new_page=True
    )


def promised_auc_bound(facts: Json, unit: str | None) -> float | None:
    """The most that an attack on these units may reach. A promise to single images bounds nothing of people."""
    headline, client_level_dp = facts["headline"], facts["protection"]["client_level_dp"]
    if headline and headline["epsilon"] and (headline["unit"] != "example" or unit in (None, "example")):
        return auc_bound(headline["epsilon"], headline["delta"])
    return (
        auc_bound(client_level_dp["spent"], client_level_dp["delta"])
        if client_level_dp and client_level_dp["spent"]
        else None
    )


def attack_gauges(facts: Json) -> Iterator[AttackGauge]:
    attack_results = facts["attacks"] or {}
    if (result := attack_results.get("membership")) and (bound := promised_auc_bound(facts, result.get("unit"))):
        low, high = result.get("low", result["auc"]), result.get("high", result["auc"])
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
    for gauge in attack_gauges(facts):
        if gauge.low > gauge.bound:
            yield f"the attack “{gauge.name.lower()}” finds more than the promise allows ({gauge.summary})"


def _attack_rows(facts: Json) -> Iterator[list[str]]:
    attack_results = facts["attacks"]
    refuted_attacks = {result.name for result in attack_gauges(facts) if result.low > result.bound}

    def format_reading(name: str, has_bound: bool) -> str:
        return (
            "no bound"
            if not has_bound
            else "refutes the promise"
            if name in refuted_attacks
            else "consistent with the promise"
        )

    if result := attack_results.get("membership"):
        bound = promised_auc_bound(facts, result.get("unit"))
        interval_text = f" ({result['low']:.3f} to {result['high']:.3f})" if {"low", "high"} <= set(result) else ""
        counts_text = (
            f"; {result['members']:,} members, {result['others']:,} others"
            if {"members", "others"} <= set(result)
            else ""
        )
        unit_text = f", by {result['unit']}" if result.get("unit") else ""
        finding = f"AUC {result['auc']:.3f}{interval_text}{unit_text}; 0.5 is chance{counts_text}"
        yield [
            "Membership: who was trained on?",
            finding,
            f"AUC {_format_auc(bound)}" if bound else "none",
            format_reading("Membership", bool(bound)),
        ]
    if result := attack_results.get("canaries"):
        guess_text = (
            f"; {result['correct']} of {result['guesses']} guesses right, {result['m']} planted"
            if {"correct", "guesses", "m"} <= set(result)
            else ""
        )
        confidence_text = f" with {100 * result['confidence']:g} % confidence" if result.get("confidence") else ""
        promised_epsilon = result.get("epsilon_promised")
        delta_text = f" at delta {result['delta']:g}" if result.get("delta") else ""
        max_text = f"; with every guess right {format_epsilon(result['most'])}" if result.get("most") else ""
        finding = f"epsilon at least {format_epsilon(result['epsilon_low'])}{confidence_text}{guess_text}{max_text}"
        yield [
            "Canaries: were planted examples trained on?",
            finding,
            f"epsilon {format_epsilon(promised_epsilon)}{delta_text}" if promised_epsilon else "none",
            format_reading("Canaries", bool(promised_epsilon)),
        ]
    if result := attack_results.get("inversion"):
        cases = result.get("cases") or ()
        finding = "; ".join(f"{c['name']}: {_format_similarity(c)}" for c in cases) or "see the pictures"
        yield ["Inversion: can images be rebuilt from updates?", finding, "none on likeness", "for the eye"]


def _format_similarity(case: Json) -> str:
    parts = [("SSIM", "ssim", ".2f", ""), ("PSNR", "psnr", ".1f", " dB")]
    return ", ".join(
        f"{label} {format(case[key], digits)}{unit}" for label, key, digits, unit in parts if case.get(key) is not None
    )


def _format_auc(value: float) -> str:
    return f"{value:.4f}" if value < 0.9999 else "over 0.9999"


def _attack_images(attack_results: Json, run_folder: Path) -> Iterator[ImageBlock]:
    """Only what lies in the run folder."""
    for name, result in attack_results.items():
        if not isinstance(result, Mapping) or not result.get("picture"):
            continue
        file = (run_folder / str(result["picture"])).resolve()
        if file.is_file() and file.suffix == ".png" and file.is_relative_to(run_folder.resolve()):
            note = "The original, and what was found of it in updates." if name == "inversion" else ""
            yield ImageBlock(name.capitalize(), file.read_bytes(), str(result.get("caption") or note))
