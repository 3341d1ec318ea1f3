"""`hemofed personalise`."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.output import area, console, percent, print_json, table
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStudy
from pipeline.study.toml_file import parse_override


def personalise_command(run: Path, name: str, data: Path | None, sets: list[str], turns: int, json: bool) -> None:
    from pipeline.runs.late_join import Newcomer, join

    folder = RunFolder.open(run)
    if name in folder.read_json("sites.json")["sites"]:
        raise BadStudy(f"{run} has a site {name!r} already; give the new one another --name")
    results = join(folder, Newcomer(name, data, dict(map(parse_override, sets)), turns))
    if json:
        print_json(results)
        return
    kinds = {"the run's model": results["global"], "its own model": results["own"], "trained alone": results["alone"]}
    known = {kind: found for kind, found in kinds.items() if found}
    metric, show = (
        ("positive_auroc", area) if any("positive_auroc" in m for m in known.values()) else ("accuracy", percent)
    )
    rows = [[kind, show(found.get(metric)), f"{found['loss']:.4f}"] for kind, found in known.items()]
    console.print(table([f"{name}, its test examples", "AUROC" if show is area else "accuracy", "loss"], rows))
    if results["group"] is not None:
        console.print(f"joined group {results['group']}, whose model fits its training examples best", soft_wrap=True)
    console.print(f"model: {results['model']}", soft_wrap=True)
