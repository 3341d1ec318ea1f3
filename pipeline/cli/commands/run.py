"""`hemofed run`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.output import SCORE_DIGITS, RoundProgressTable, build_table, console, print_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.core.files import free_path
from pipeline.reports.document.formatting import format_bytes, format_score
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study
from pipeline.study.toml_file import find_study, load_study, parse_override

if TYPE_CHECKING:
    from pipeline.records.run_results import RunResults
    from pipeline.records.scores import EvaluatedAt, ModelMetrics

DEFAULT_STUDY = "smear-demo"
MAX_SHOWN_SITES = 20
EVALUATED_AT: tuple[EvaluatedAt, ...] = ("coordinator", "pooled")


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
        print_json(results.to_dict() | {"run": str(folder.path)})
    else:
        print_results(results, folder)


def run_and_report(
    study: Study,
    folder: RunFolder,
    data: Path | None,
    run_baselines: bool | None,
    quiet: bool,
    site_homes: Path | None = None,
) -> RunResults:
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
        finished_rounds = [record.round for record in folder.load_rounds()]
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


def print_results(results: RunResults, folder: RunFolder) -> None:
    """AUROC of the positive class if the study names one, else accuracy."""
    from pipeline.records.scores import headline_metric

    metric = headline_metric(results.positive_class)
    title = f"test AUROC, {results.positive_class}" if results.positive_class else "test accuracy"
    _print_scores(results, metric, title)
    if results.void_rounds:
        void_text = f"{results.void_rounds} of {results.rounds} rounds were void because too few sites replied"
        console.print(void_text, style="yellow")
    console.print(
        f"round {results.best_round} of {results.rounds} ({results.selected_by}, {results.stop_reason}); "
        f"up {format_bytes(results.traffic.up)}, down {format_bytes(results.traffic.down)}; {results.seconds:.1f} s",
    )
    console.print(f"report: {folder.path / 'report.html'}", soft_wrap=True)
    _print_privacy_spent(folder)


def _print_scores(results: RunResults, metric: str, title: str) -> None:
    """A column for each model, a row for all data and for each site."""
    from pipeline.records.scores import metric_by_site

    test, global_scores = results.test, results.test.comparisons.get("global")
    run_columns = (
        [("personalized model", test), ("global model", global_scores)] if global_scores else [("federated", test)]
    )
    columns = run_columns + [(name.replace("_", " "), baseline.test) for name, baseline in results.baselines.items()]
    rows = [
        [where, *(_format_pooled(name, scores.overall(where), metric) for name, scores in columns)]
        for where in EVALUATED_AT
        if any(scores.overall(where) for _, scores in columns)
    ]
    site_scores = metric_by_site(test.sites, metric)
    worst_site = min(site_scores, key=lambda s: site_scores[s], default="")
    for site in [*test.sites][:MAX_SHOWN_SITES]:
        values = (metric_by_site(scores.sites, metric).get(site) for _, scores in columns)
        label = f"{site} (worst)" if site == worst_site else site
        rows.append([label, *(format_score(metric, value, SCORE_DIGITS) for value in values)])
    if len(test.sites) > MAX_SHOWN_SITES:
        rows.append([f"… {len(test.sites) - MAX_SHOWN_SITES} more in the report"] + [""] * len(columns))
    console.print(build_table(["", *(name for name, _ in columns)], rows, title=title))


def _format_pooled(name: str, metrics: ModelMetrics | None, metric: str) -> str:
    """Undefined for the AUROC of several models: scores of different models cannot be ranked together."""
    is_undefined = name in ("local only", "personalized model") and metric != "accuracy"
    return format_score(metric, metrics.value(metric) if metrics and not is_undefined else None, SCORE_DIGITS)


def _print_privacy_spent(folder: RunFolder) -> None:
    study = folder.load_study()
    if study.privacy == PrivacyConfig():
        return
    from pipeline.cli.commands.study import few_sites_warnings
    from pipeline.records.sites_record import SitesRecord

    spent = folder.load_rounds()[-1].epsilon
    if spent:
        worst_site = max(spent, key=lambda site: spent[site])
        console.print(
            f"privacy: at most epsilon {spent[worst_site]:.4g} spent ({worst_site}); audit: hemofed audit {folder.path}"
        )
    for line in few_sites_warnings(study, len(SitesRecord.read(folder.path).sites)):
        console.print(line, style="yellow", soft_wrap=True)
