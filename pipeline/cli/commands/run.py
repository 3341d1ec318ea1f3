"""`hemofed run`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from pipeline.cli.output import RoundProgressTable, build_table, console, format_auroc, format_percent, print_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.core.files import free_path
from pipeline.reports.document.formatting import format_bytes
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study, parse_override

DEFAULT_STUDY = "smear-demo"
MAX_SHOWN_SITES = 20


def run_command(
    study_name: str | None,
    out: Path | None,
    resume: Path | None,
    overrides: list[str],
    data: Path | None,
    run_baselines: bool | None,
    site_homes: Path | None,
    quiet: bool,
    json: bool,
) -> None:
    if resume is not None:
        if overrides or out or study_name or site_homes:
            raise StudyError(
                "--resume continues a run with its own settings; give a study, --set, --site-homes and --out to a new run only"
            )
        folder = RunFolder.open(resume)
        study = folder.load_study()
    else:
        study = load_study(find_study(study_name or DEFAULT_STUDY), dict(map(parse_override, overrides)))
        folder = RunFolder.create(out or free_path(Path("runs") / study.name), study)
    results = run_and_report(study, folder, data, run_baselines, quiet or json, site_homes)
    if json:
        print_json(results | {"run": str(folder.path)})
    else:
        print_results(results, folder)


def run_and_report(
    study: Study,
    folder: RunFolder,
    data: Path | None,
    run_baselines: bool | None,
    quiet: bool,
    site_homes: Path | None = None,
) -> dict[str, Any]:
    """Runs the study and its baselines; after Ctrl-C, prints how to resume."""
    from pipeline.runs.run_study import run_study

    try:
        return run_study(
            study,
            folder,
            data,
            lambda s: RoundProgressTable(s.name.removeprefix(f"{study.name}-"), s.rounds, quiet),
            run_baselines,
            site_homes,
        )
    except KeyboardInterrupt:
        finished_rounds = [record["round"] for record in folder.load_rounds()]
        resume_options = (f" --data {shlex.quote(str(data))}" if data else "") + (
            " --baselines" if run_baselines else ""
        )
        last_round = finished_rounds[-1] if finished_rounds else 0
        # not with rich: the interrupt may have come inside its console, which would then hold the text back
        sys.stderr.write(
            f"\nstopped after round {last_round} of {study.rounds}; nothing is lost. "
            f"Continue with: hemofed run --resume {shlex.quote(str(folder.path))}{resume_options}\n"
        )
        raise


def print_results(results: dict[str, Any], folder: RunFolder) -> None:
    """AUROC of the positive class if the study names one, else accuracy."""
    test, baselines = results["test"], results["baselines"]
    metric, format_score = (
        ("positive_auroc", format_auroc) if results["positive_class"] else ("accuracy", format_percent)
    )
    global_metrics = test.get("comparisons", {}).get("global")
    run_columns = (
        [("personalized model", test), ("global model", global_metrics)] if global_metrics else [("federated", test)]
    )
    columns = run_columns + [(name.replace("_", " "), y["test"]) for name, y in baselines.items()]
    pooled_keys = [key for key in ("coordinator", "pooled") if any(key in metrics for _, metrics in columns)]
    rows = [
        [key, *(format_score(_pooled_score(name, metrics.get(key, {}), metric)) for name, metrics in columns)]
        for key in pooled_keys
    ]
    site_scores = {s: m[metric] for s, m in test.get("sites", {}).items() if m.get(metric) is not None}
    worst_site = min(site_scores, key=lambda s: site_scores[s], default="")
    sites = list(test.get("sites", {}))
    rows += [
        [
            f"{s} (worst)" if s == worst_site else s,
            *(format_score(metrics.get("sites", {}).get(s, {}).get(metric)) for _, metrics in columns),
        ]
        for s in sites[:MAX_SHOWN_SITES]
    ]
    if len(sites) > MAX_SHOWN_SITES:
        rows.append([f"… {len(sites) - MAX_SHOWN_SITES} more in the report"] + [""] * len(columns))
    title = f"test AUROC, {results['positive_class']}" if results["positive_class"] else "test accuracy"
    console.print(build_table(["", *(name for name, _ in columns)], rows, title=title))
    if results["void_rounds"]:
        void_text = f"{results['void_rounds']} of {results['rounds']} rounds were void because too few sites replied"
        console.print(void_text, style="yellow")
    traffic = results["traffic"]
    console.print(
        f"round {results['best_round']} of {results['rounds']} ({results['selected_by']}, {results['stop_reason']}); "
        f"up {format_bytes(traffic['up'])}, down {format_bytes(traffic['down'])}; {results['seconds']:.1f} s",
    )
    console.print(f"report: {folder.path / 'report.html'}", soft_wrap=True)
    _print_privacy_spent(folder)


def _print_privacy_spent(folder: RunFolder) -> None:
    study = folder.load_study()
    if study.privacy == PrivacyConfig():
        return
    from pipeline.cli.commands.study import few_sites_warnings

    spent = folder.load_rounds()[-1].get("epsilon")
    if spent:
        worst_site = max(spent, key=lambda site: spent[site])
        console.print(
            f"privacy: at most epsilon {spent[worst_site]:.4g} spent ({worst_site}); audit: hemofed audit {folder.path}"
        )
    for line in few_sites_warnings(study, len(folder.read_json("sites.json")["sites"])):
        console.print(line, style="yellow", soft_wrap=True)


def _pooled_score(name: str, metrics: dict[str, Any], metric: str) -> float | None:
    """None for the AUROC of several models: scores of different models cannot be ranked together."""
    return None if name in ("local only", "personalized model") and metric != "accuracy" else metrics.get(metric)
