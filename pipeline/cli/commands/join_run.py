"""`hemofed join-run`."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.output import SCORE_DIGITS, build_table, console, print_json, short_metric_name
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.records.sites_record import SitesRecord
from pipeline.reports.document.formatting import format_score
from pipeline.study.toml_file import parse_override


def join_run_command(run: Path, name: str, data: Path | None, overrides: list[str], rounds: int, json: bool) -> None:
    from pipeline.runs.late_join import LateJoiner, join_run

    folder = RunFolder.open(run)
    if name in SitesRecord.read(folder.path).sites:
        raise StudyError(f"{run} already has a site {name!r}; give the new site another --name")
    results = join_run(folder, LateJoiner(name, data, dict(map(parse_override, overrides)), rounds))
    if json:
        print_json(results.to_dict())
        return
    metrics_by_model = {
        "global model": results.global_model,
        "personalized model": results.personalized_model,
        "local only": results.local_only,
    }
    available = {kind: metrics for kind, metrics in metrics_by_model.items() if metrics}
    metric = next((metrics.headline_metric for metrics in available.values()), "accuracy")
    rows = [
        [kind, *(format_score(m, metrics.value(m), SCORE_DIGITS) for m in (metric, "loss"))]
        for kind, metrics in available.items()
    ]
    console.print(build_table([f"{name}, test examples", short_metric_name(metric), "loss"], rows))
    if results.cluster is not None:
        console.print(
            f"joined cluster {results.cluster}, whose model fits the site's training examples best", soft_wrap=True
        )
    console.print(f"model: {results.model_file}", soft_wrap=True)
