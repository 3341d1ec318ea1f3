"""`hemofed run`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from pipeline.cli.output import RoundProgressTable, build_table, console, format_auroc, format_percent, print_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.reports.document.formatting import format_bytes
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study, parse_override

DEFAULT_STUDY = "smear-demo"


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
                "--resume continues a run as it was; a study, --set, --site-homes and --out go with a new run"
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
    """Ctrl-C leaves a run that can be resumed, and says so. The report does not wait for the yardsticks.

    Of a personalised run nobody can judge the gain without knowing what each site reaches alone: measured unless refused.
    """
    from pipeline.reports.run.report import write_report
    from pipeline.runs.simulation import run_simulation

    try:
        with RoundProgressTable(study.name, study.rounds, quiet) as progress_table:
            results = run_simulation(study, folder, data, progress_table, homes_folder=site_homes)
        write_report(folder.path)
        baseline_names = None if run_baselines else {"local_only"}
        should_measure = study.strategy.personalized if run_baselines is None else run_baselines
        if should_measure and not results["baselines"].keys() >= (baseline_names or {"local_only", "centralized"}):
            from pipeline.runs.baselines import run_baselines as train_baselines

            results["baselines"] = train_baselines(
                study,
                folder,
                data,
                lambda s: RoundProgressTable(s.name.removeprefix(f"{study.name}-"), s.rounds, quiet),
                baseline_names,
            )
            folder.write_json("results.json", results)
            write_report(folder.path)
    except KeyboardInterrupt:
        finished_rounds = [record["round"] for record in folder.load_rounds()]
        flags = (f" --data {shlex.quote(str(data))}" if data else "") + (" --baselines" if run_baselines else "")
        reached = (
            f"stopped after round {finished_rounds[-1] if finished_rounds else 0} of {study.rounds}; nothing is lost."
        )
        # not by rich: the interrupt may have struck inside its console, which then keeps what it is given
        sys.stderr.write(f"\n{reached} Continue with: hemofed run --resume {shlex.quote(str(folder.path))}{flags}\n")
        raise
    return results


def print_results(results: dict[str, Any], folder: RunFolder) -> None:
    """Led by the class that matters, where the study names one."""
    test, baselines = results["test"], results["baselines"]
    metric, format_score = ("positive_auroc", format_auroc) if results["positive"] else ("accuracy", format_percent)
    global_metrics = test.get("views", {}).get("global")
    run_columns = [("own model", test), ("common model", global_metrics)] if global_metrics else [("federated", test)]
    columns = run_columns + [(name.replace("_", " "), y["test"]) for name, y in baselines.items()]
    pooled_keys = [w for w in ("coordinator", "pooled") if any(w in t for _, t in columns)]
    rows = [[w, *(format_score(_pooled_score(name, t.get(w, {}), metric)) for name, t in columns)] for w in pooled_keys]
    site_scores = {s: m[metric] for s, m in test.get("sites", {}).items() if m.get(metric) is not None}
    worst_site = min(site_scores, key=lambda s: site_scores[s], default="")
    sites = list(test.get("sites", {}))
    rows += [
        [
            f"{s} (worst)" if s == worst_site else s,
            *(format_score(t.get("sites", {}).get(s, {}).get(metric)) for _, t in columns),
        ]
        for s in sites[:20]
    ]
    if len(sites) > 20:
        rows.append([f"… {len(sites) - 20} more in the report"] + [""] * len(columns))
    title = f"test AUROC, {results['positive']}" if results["positive"] else "test accuracy"
    console.print(build_table(["", *(name for name, _ in columns)], rows, title=title))
    if results["void_rounds"]:
        void_text = f"{results['void_rounds']} of {results['rounds']} rounds were void: too few sites answered"
        console.print(void_text, style="yellow")
    traffic = results["traffic"]
    console.print(
        f"round {results['best_round']} of {results['rounds']} ({results['chosen_by']}, {results['stopped']}); "
        f"up {format_bytes(traffic['up'])}, down {format_bytes(traffic['down'])}; {results['seconds']:.1f} s",
    )
    console.print(f"report: {folder.path / 'report.html'}", soft_wrap=True)
    _print_privacy_spent(folder)


def _print_privacy_spent(folder: RunFolder) -> None:
    """What the run cost its patients, in one line."""
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
    """Sites that train alone have a model each: their scores cannot be put in one order."""
    return None if name in ("local_only", "own model") and metric != "accuracy" else metrics.get(metric)


def free_path(path: Path) -> Path:
    """runs/NAME, or runs/NAME-2, ... if that is taken."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
