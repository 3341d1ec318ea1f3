"""`hemofed report | compare | evaluate | strategies`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.cli.output import SCORE_DIGITS, build_table, console, print_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.core.registry import Component, registered_components
from pipeline.reports.document.formatting import METRIC_LABELS, UNDEFINED_TEXT, format_bytes, format_score
from pipeline.strategies.base import Strategy
from pipeline.study.toml_file import parse_override


def report_command(run: Path, band: str) -> None:
    from pipeline.reports.run.report import write_report

    if band not in ("68", "95"):
        raise StudyError(f"--band {band} is not valid; valid: 68, 95")
    path = write_report(RunFolder.open(run).path, "95" if band == "95" else "68")
    console.print(f"wrote {path}", soft_wrap=True)


def compare_command(runs: list[Path], out: Path, metric: str, json: bool) -> None:
    from pipeline.reports.compare import write_comparison

    path, rows = write_comparison([RunFolder.open(run).path for run in runs], out, metric)
    if json:
        print_json(rows)
        return
    columns = [c for c in rows[0] if c != "judged_on"]
    console.print(
        build_table(
            [c.replace("_", " ") for c in columns], [[_format_cell(c, row[c]) for c in columns] for row in rows]
        )
    )
    console.print(f"wrote {path}", soft_wrap=True)


def _format_cell(column: str, value: object) -> str:
    if column == "traffic" and isinstance(value, int):
        return format_bytes(value)
    return UNDEFINED_TEXT if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def evaluate_command(
    run: Path, data: Path | None, source: str | None, model: str, split: str | None, overrides: list[str], json: bool
) -> None:
    from pipeline.runs.score_saved_model import score_saved_model

    results = score_saved_model(RunFolder.open(run), data, source, model, split, dict(map(parse_override, overrides)))
    if json:
        print_json(results.to_dict())
        return
    metrics = results.metrics
    rows = [["n", str(metrics.n)]] + [
        [metric.replace("_", " "), format_score(metric, metrics.value(metric), SCORE_DIGITS)]
        for metric in METRIC_LABELS
        if metric in metrics.model_fields_set
    ]
    console.print(build_table([f"{model} on {results.data}", results.split], rows))
    if metrics.confusion is not None and len(results.classes) <= 12:
        console.print(
            build_table(
                ["true \\ predicted", *results.classes],
                [[c, *map(str, row)] for c, row in zip(results.classes, metrics.confusion, strict=True)],
            )
        )


def strategies_command(json: bool) -> None:
    catalog = {
        "strategies": _describe_strategies(),
        "codecs": _describe_components("codecs"),
        "aggregation_rules": _describe_components("aggregation_rules"),
    }
    if json:
        print_json(catalog)
        return
    rows = [
        [
            r["name"],
            r["visibility"],
            f"{r['server_state']}; at a site: {r['client_state']}",
            f"{r['description']}{_format_citation(r)}",
        ]
        for r in catalog["strategies"]
    ]
    console.print(build_table(["strategy", "visibility", "state", "description"], rows, num_text_columns=4))
    rows = [
        [r["name"], "up, down" if r["downward"] else "up", f"{r['description']}{_format_citation(r)}"]
        for r in catalog["codecs"]
    ]
    console.print(build_table(["codec", "direction", "description"], rows, num_text_columns=3))
    rows = [
        [r["name"], r["visibility"], f"{r['description']}{_format_citation(r)}"] for r in catalog["aggregation_rules"]
    ]
    console.print(build_table(["aggregation rule", "visibility", "description"], rows, num_text_columns=3))


def _format_citation(row: dict[str, Any]) -> str:
    return f" [{row['paper']}]" if row["paper"] and row["paper"] not in row["description"] else ""


def _describe_strategies() -> list[dict[str, Any]]:
    rows = []
    for name, cls in registered_components("strategies").items():
        assert issubclass(cls, Strategy)
        strategy = cls(name=name)
        rows.append(
            {
                "name": name,
                "visibility": strategy.visibility,
                "paper": cls.paper,
                "server_state": cls.server_state_text,
                "client_state": cls.client_state_text,
                "partial_updates": cls.partial_updates,
                "result_in_client_states": cls.result_in_client_states,
                "personalized": cls.personalized,
                "settings": _default_settings(cls),
                "description": cls.describe_component(),
            }
        )
    return rows


def _describe_components(kind: str) -> list[dict[str, Any]]:
    """Rows of codecs or aggregation rules."""
    rows = []
    for name, cls in registered_components(kind).items():
        rows.append(
            {
                "name": name,
                "paper": getattr(cls, "paper", ""),
                "visibility": getattr(cls, "visibility", None),
                "downward": getattr(cls, "supports_downlink", None),
                "settings": _default_settings(cls),
                "description": cls.describe_component(),
            }
        )
    return rows


def _default_settings(cls: type[Component]) -> dict[str, Any]:
    return {
        k: None if f.is_required() else f.get_default(call_default_factory=True)
        for k, f in cls.model_fields.items()
        if k != "name"
    }
