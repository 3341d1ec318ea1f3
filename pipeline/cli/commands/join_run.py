"""`hemofed join-run`."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.output import build_table, console, format_auroc, format_percent, print_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError
from pipeline.study.toml_file import parse_override


def join_run_command(run: Path, name: str, data: Path | None, overrides: list[str], rounds: int, json: bool) -> None:
    from pipeline.runs.late_join import LateJoiner, join_run

    folder = RunFolder.open(run)
    if name in folder.read_json("sites.json")["sites"]:
        raise StudyError(f"{run} already has a site {name!r}; give the new site another --name")
    results = join_run(folder, LateJoiner(name, data, dict(map(parse_override, overrides)), rounds))
    if json:
        print_json(results)
        return
    metrics_by_model = {
        "global model": results["global_model"],
        "personalized model": results["personalized_model"],
        "local only": results["local_only"],
    }
    available = {kind: metrics for kind, metrics in metrics_by_model.items() if metrics}
    metric, format_score = (
        ("positive_auroc", format_auroc)
        if any("positive_auroc" in m for m in available.values())
        else ("accuracy", format_percent)
    )
    rows = [[kind, format_score(metrics.get(metric)), f"{metrics['loss']:.4f}"] for kind, metrics in available.items()]
    console.print(
        build_table([f"{name}, test examples", "AUROC" if format_score is format_auroc else "accuracy", "loss"], rows)
    )
    if results["cluster"] is not None:
        console.print(
            f"joined cluster {results['cluster']}, whose model fits the site's training examples best", soft_wrap=True
        )
    console.print(f"model: {results['model_file']}", soft_wrap=True)
