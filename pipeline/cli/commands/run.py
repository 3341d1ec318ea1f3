"""`hemofed run`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from pipeline.cli.output import Rounds, area, console, percent, print_json, table
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStudy
from pipeline.reports.document.formatting import size
from pipeline.study.privacy import Privacy
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study, parse_override

DEFAULT = "smear-demo"


def run_command(
    name: str | None,
    out: Path | None,
    resume: Path | None,
    sets: list[str],
    data: Path | None,
    yardsticks: bool | None,
    homes: Path | None,
    quiet: bool,
    json: bool,
) -> None:
    if resume is not None:
        if sets or out or name or homes:
            raise BadStudy("--resume continues a run as it was; a study, --set, --homes and --out go with a new run")
        folder = RunFolder.open(resume)
        study = folder.study()
    else:
        study = load_study(find_study(name or DEFAULT), dict(map(parse_override, sets)))
        folder = RunFolder.create(out or free_path(Path("runs") / study.name), study)
    results = run_and_report(study, folder, data, yardsticks, quiet or json, homes)
    if json:
        print_json(results | {"run": str(folder.path)})
    else:
        show_results(results, folder)


def run_and_report(
    study: Study,
    folder: RunFolder,
    data: Path | None,
    yardsticks: bool | None,
    quiet: bool,
    homes: Path | None = None,
) -> dict[str, Any]:
    """Ctrl-C leaves a run that can be resumed, and says so. The report does not wait for the yardsticks.

    Of a personalised run nobody can judge the gain without knowing what each site reaches alone: measured unless refused.
    """
    from pipeline.reports.run.report import write_report
    from pipeline.runs.simulation import run

    try:
        with Rounds(study.name, study.rounds, quiet) as watch:
            results = run(study, folder, data, watch, homes=homes)
        write_report(folder.path)
        only = None if yardsticks else {"local"}
        wanted = study.strategy.personalised if yardsticks is None else yardsticks
        if wanted and not results["yardsticks"].keys() >= (only or {"local", "central"}):
            from pipeline.runs.baselines import measure

            results["yardsticks"] = measure(
                study, folder, data, lambda s: Rounds(s.name.removeprefix(f"{study.name}-"), s.rounds, quiet), only
            )
            folder.write_json("results.json", results)
            write_report(folder.path)
    except KeyboardInterrupt:
        done = [record["round"] for record in folder.rounds()]
        flags = (f" --data {shlex.quote(str(data))}" if data else "") + (" --yardsticks" if yardsticks else "")
        reached = f"stopped after round {done[-1] if done else 0} of {study.rounds}; nothing is lost."
        # not by rich: the interrupt may have struck inside its console, which then keeps what it is given
        sys.stderr.write(f"\n{reached} Continue with: hemofed run --resume {shlex.quote(str(folder.path))}{flags}\n")
        raise
    return results


def show_results(results: dict[str, Any], folder: RunFolder) -> None:
    """Led by the class that matters, where the study names one."""
    test, yard = results["test"], results["yardsticks"]
    metric, show = ("positive_auroc", area) if results["positive"] else ("accuracy", percent)
    common = test.get("views", {}).get("global")
    ours = [("own model", test), ("common model", common)] if common else [("federated", test)]
    columns = ours + [(name.replace("_", " "), y["test"]) for name, y in yard.items()]
    who = [w for w in ("coordinator", "pooled") if any(w in t for _, t in columns)]
    rows = [[w, *(show(_whole(name, t.get(w, {}), metric)) for name, t in columns)] for w in who]
    known = {s: m[metric] for s, m in test.get("sites", {}).items() if m.get(metric) is not None}
    worst = min(known, key=lambda s: known[s], default="")
    sites = list(test.get("sites", {}))
    rows += [
        [
            f"{s} (worst)" if s == worst else s,
            *(show(t.get("sites", {}).get(s, {}).get(metric)) for _, t in columns),
        ]
        for s in sites[:20]
    ]
    if len(sites) > 20:
        rows.append([f"… {len(sites) - 20} more in the report"] + [""] * len(columns))
    title = f"test AUROC, {results['positive']}" if results["positive"] else "test accuracy"
    console.print(table(["", *(name for name, _ in columns)], rows, title=title))
    if results["void_rounds"]:
        void = f"{results['void_rounds']} of {results['rounds']} rounds were void: too few sites answered"
        console.print(void, style="yellow")
    traffic = results["traffic"]
    console.print(
        f"round {results['best_round']} of {results['rounds']} ({results['chosen_by']}, {results['stopped']}); "
        f"up {size(traffic['up'])}, down {size(traffic['down'])}; {results['seconds']:.1f} s",
    )  # fmt: skip
    console.print(f"report: {folder.path / 'report.html'}", soft_wrap=True)
    _show_spending(folder)


def _show_spending(folder: RunFolder) -> None:
    """What the run cost its patients, in one line."""
    study = folder.study()
    if study.privacy == Privacy():
        return
    from pipeline.cli.commands.study import few_sites

    spent = folder.rounds()[-1].get("epsilon")
    if spent:
        most = max(spent, key=lambda site: spent[site])
        console.print(f"privacy: at most epsilon {spent[most]:.4g} spent ({most}); audit: hemofed audit {folder.path}")
    for line in few_sites(study, len(folder.read_json("sites.json")["sites"])):
        console.print(line, style="yellow", soft_wrap=True)


def _whole(name: str, found: dict[str, Any], metric: str) -> float | None:
    """Sites that train alone have a model each: their scores cannot be put in one order."""
    return None if name in ("local", "own model") and metric != "accuracy" else found.get(metric)


def free_path(path: Path) -> Path:
    """runs/NAME, or runs/NAME-2, ... if that is taken."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
