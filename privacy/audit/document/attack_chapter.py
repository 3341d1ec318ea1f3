"""Attacks beside the bound. A result below it is consistent with the promise, and never proof of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.reports.document.blocks import Block, Chapter, Drawing, Photo, Table, Words, eps
from pipeline.reports.document.page import Column
from privacy.audit.document.figures import Gauge, beside_bound
from privacy.audit.interpretation import largest_auc

Json = Mapping[str, Any]
UNBOUNDED = "Nothing was promised, so there is no bound to hold these results against."
PROOF = (
    "A result below its bound is consistent with the promise and does not prove it: other attacks may do better. A result "
    "above it would refute the promise."
)


def attacks(facts: Json, run: Path) -> Chapter:
    tried = facts["attacks"]
    if not tried:
        words = "No attack has been tried on this run. The option --attack of `hemofed audit` tries them and fills this chapter."
        return Chapter("Attacks beside the bound", [Words([words])])
    promised = facts["headline"] or facts["protection"]["at_coordinator"]
    blocks: list[Block] = [Words([PROOF if promised else UNBOUNDED])]
    if scales := list(gauges(facts)):
        blocks.append(Drawing("attacks", beside_bound(scales), "What attacks found, between chance and what the promise allows."))  # fmt: skip
    blocks.append(Table([Column("Attack"), Column("Found", words=True), Column("Bound of the promise"), Column("Reading")], list(_rows(facts)), widths=(0.17, 0.45, 0.2, 0.18)))  # fmt: skip
    if said := [
        str(tried[name]["words"]) for name in tried if isinstance(tried[name], Mapping) and tried[name].get("words")
    ]:
        blocks.append(Words(said))
    return Chapter("Attacks beside the bound", [*blocks, *_pictures(tried, run)], page=True)


def bound_auc(facts: Json, unit: str | None) -> float | None:
    """The most that an attack on these units may reach. A promise to single images bounds nothing of people."""
    lead, noised = facts["headline"], facts["protection"]["at_coordinator"]
    if lead and lead["epsilon"] and (lead["unit"] != "example" or unit in (None, "example")):
        return largest_auc(lead["epsilon"], lead["delta"])
    return largest_auc(noised["spent"], noised["delta"]) if noised and noised["spent"] else None


def gauges(facts: Json) -> Iterator[Gauge]:
    tried = facts["attacks"] or {}
    if (one := tried.get("membership")) and (bound := bound_auc(facts, one.get("unit"))):
        low, high = one.get("low", one["auc"]), one.get("high", one["auc"])
        yield Gauge("Membership", 0.5, low, one["auc"], high, bound, f"AUC {one['auc']:.3f}, chance 0.5, bound {_auc(bound)}")  # fmt: skip
    if (one := tried.get("canaries")) and one.get("epsilon_promised"):
        low, top = float(one["epsilon_low"]), float(one["epsilon_promised"])
        yield Gauge("Canaries", 0.0, low, low, low, top, f"epsilon at least {eps(low)}, promised {eps(top)}")


def refuted(facts: Json) -> Iterator[str]:
    for one in gauges(facts):
        if one.low > one.bound:
            yield f"the attack “{one.name.lower()}” finds more than the promise allows ({one.words})"


def _rows(facts: Json) -> Iterator[list[str]]:
    tried = facts["attacks"]
    beaten = {one.name for one in gauges(facts) if one.low > one.bound}

    def reading(name: str, known: bool) -> str:
        return "no bound" if not known else "refutes the promise" if name in beaten else "consistent with the promise"

    if one := tried.get("membership"):
        bound = bound_auc(facts, one.get("unit"))
        span = f" ({one['low']:.3f} to {one['high']:.3f})" if {"low", "high"} <= set(one) else ""
        of = f"; {one['members']:,} members, {one['others']:,} others" if {"members", "others"} <= set(one) else ""
        unit = f", by {one['unit']}" if one.get("unit") else ""
        found = f"AUC {one['auc']:.3f}{span}{unit}; 0.5 is chance{of}"
        yield ["Membership: who was trained on?", found, f"AUC {_auc(bound)}" if bound else "none", reading("Membership", bool(bound))]  # fmt: skip
    if one := tried.get("canaries"):
        guessed = f"; {one['correct']} of {one['guesses']} guesses right, {one['m']} planted" if {"correct", "guesses", "m"} <= set(one) else ""  # fmt: skip
        sure = f" with {100 * one['confidence']:g} % confidence" if one.get("confidence") else ""
        top = one.get("epsilon_promised")
        at = f" at delta {one['delta']:g}" if one.get("delta") else ""
        most = f"; with every guess right {eps(one['most'])}" if one.get("most") else ""
        found = f"epsilon at least {eps(one['epsilon_low'])}{sure}{guessed}{most}"
        yield ["Canaries: were planted examples trained on?", found, f"epsilon {eps(top)}{at}" if top else "none", reading("Canaries", bool(top))]  # fmt: skip
    if one := tried.get("inversion"):
        cases = one.get("cases") or ()
        found = "; ".join(f"{c['name']}: {_likeness(c)}" for c in cases) or "see the pictures"
        yield ["Inversion: can images be rebuilt from updates?", found, "none on likeness", "for the eye"]


def _likeness(case: Json) -> str:
    parts = [("SSIM", "ssim", ".2f", ""), ("PSNR", "psnr", ".1f", " dB")]
    return ", ".join(f"{word} {format(case[key], digits)}{unit}" for word, key, digits, unit in parts if case.get(key) is not None)  # fmt: skip


def _auc(value: float) -> str:
    return f"{value:.4f}" if value < 0.9999 else "over 0.9999"


def _pictures(tried: Json, run: Path) -> Iterator[Photo]:
    """Only what lies in the run folder."""
    for name, one in tried.items():
        if not isinstance(one, Mapping) or not one.get("picture"):
            continue
        file = (run / str(one["picture"])).resolve()
        if file.is_file() and file.suffix == ".png" and file.is_relative_to(run.resolve()):
            note = "The original, and what was found of it in updates." if name == "inversion" else ""
            yield Photo(name.capitalize(), file.read_bytes(), str(one.get("caption") or note))
