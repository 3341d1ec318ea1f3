"""`hemofed report | compare | evaluate | strategies`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.cli.output import console, percent, print_json, table
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStudy
from pipeline.core.registry import Component, choices
from pipeline.reports.document.formatting import size
from pipeline.strategies.base import Strategy
from pipeline.study.toml_file import parse_override


def report_command(run: Path, band: str) -> None:
    from pipeline.reports.run.report import write_report

    if band not in ("68", "95"):
        raise BadStudy(f"--band {band}: valid: 68, 95")
    path = write_report(RunFolder.open(run).path, "95" if band == "95" else "68")
    console.print(f"wrote {path}", soft_wrap=True)


def compare_command(runs: list[Path], out: Path, metric: str, json: bool) -> None:
    from pipeline.reports.compare import write_compare

    path, rows = write_compare([RunFolder.open(run).path for run in runs], out, metric)
    if json:
        print_json(rows)
        return
    columns = [c for c in rows[0] if c != "judged_on"]
    console.print(table([c.replace("_", " ") for c in columns], [[_cell(c, row[c]) for c in columns] for row in rows]))
    console.print(f"wrote {path}", soft_wrap=True)


def _cell(column: str, value: object) -> str:
    if column == "traffic" and isinstance(value, int):
        return size(value)
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def evaluate_command(
    run: Path, data: Path | None, source: str | None, model: str, split: str, sets: list[str], json: bool
) -> None:
    from pipeline.runs.score_saved_model import score_saved

    results = score_saved(RunFolder.open(run), data, source, model, split, dict(map(parse_override, sets)))
    if json:
        print_json(results)
        return
    shown = {k: v for k, v in results.items() if isinstance(v, float | int | None)}
    rows = [
        [k.replace("_", " "), str(v) if k == "n" else f"{v:.4f}" if k == "loss" else percent(v)]
        for k, v in shown.items()
    ]
    console.print(table([f"{model} on {results['data']}", split], rows))
    classes, confusion = results["classes"], results["confusion"]
    if len(classes) <= 12:
        console.print(
            table(
                ["truth \\ answer", *classes], [[c, *map(str, row)] for c, row in zip(classes, confusion, strict=True)]
            )
        )


def strategies_command(json: bool) -> None:
    found = {"strategies": _strategies(), "codecs": _parts("codecs"), "combines": _parts("combines")}
    if json:
        print_json(found)
        return
    rows = [
        [r["name"], r["sees"], f"{r['holds']}; at a site: {r['remembered']}", f"{r['about']}{_cited(r)}"]
        for r in found["strategies"]
    ]
    console.print(table(["strategy", "sees", "keeps", "about"], rows, words=4))
    rows = [[r["name"], "up, down" if r["downward"] else "up", f"{r['about']}{_cited(r)}"] for r in found["codecs"]]
    console.print(table(["codec", "way", "about"], rows, words=3))
    rows = [[r["name"], r["sees"], f"{r['about']}{_cited(r)}"] for r in found["combines"]]
    console.print(table(["combine", "sees", "about"], rows, words=3))


def _cited(row: dict[str, Any]) -> str:
    return f" [{row['paper']}]" if row["paper"] and row["paper"] not in row["about"] else ""


def _strategies() -> list[dict[str, Any]]:
    rows = []
    for name, cls in choices("strategies").items():
        assert issubclass(cls, Strategy)
        doc = (sys.modules[cls.__module__].__doc__ or "").strip().splitlines()
        one = cls(name=name)
        rows.append({"name": name, "sees": one.sees, "paper": cls.paper, "holds": cls.holds, "remembered": cls.remembered,
                     "partial": cls.partial, "remembers": cls.remembers, "personalised": cls.personalised,
                     "settings": _settings(cls), "about": doc[0] if doc else ""})  # fmt: skip
    return rows


def _parts(kind: str) -> list[dict[str, Any]]:
    """Codecs and combines: the first line of what each says of itself."""
    rows = []
    for name, cls in choices(kind).items():
        words = getattr(cls, "about", None) or (cls.__doc__ or "").strip().splitlines()[0]
        rows.append({"name": name, "paper": getattr(cls, "paper", ""), "sees": getattr(cls, "sees", None),
                     "downward": getattr(cls, "downward", None), "settings": _settings(cls), "about": words})  # fmt: skip
    return rows


def _settings(cls: type[Component]) -> dict[str, Any]:
    return {
        k: None if f.is_required() else f.get_default(call_default_factory=True)
        for k, f in cls.model_fields.items()
        if k != "name"
    }
