"""`hemofed run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.commands.output import Rounds, console, errors, megabytes, percent, print_json, table
from pipeline.errors import BadStudy
from pipeline.run_folder import RunFolder
from pipeline.study import Study, load_study
from pipeline.study_file import find_study, parse_override


def run_command(
    name: str,
    out: Path | None,
    resume: Path | None,
    sets: list[str],
    data: Path | None,
    yardsticks: bool,
    quiet: bool,
    json: bool,
) -> None:
    if resume is not None:
        if sets or out:
            raise BadStudy("--resume continues a run as it was; --set and --out go with a new run")
        folder = RunFolder.open(resume)
        study = folder.study()
    else:
        study = load_study(find_study(name), dict(map(parse_override, sets)))
        folder = RunFolder.create(out or free_path(Path("runs") / study.name), study)
    results = run_and_report(study, folder, data, yardsticks, quiet or json)
    if json:
        print_json(results | {"run": str(folder.path)})
    else:
        show_results(results, folder)


def run_and_report(study: Study, folder: RunFolder, data: Path | None, yardsticks: bool, quiet: bool) -> dict[str, Any]:
    """Ctrl-C leaves a run that can be resumed, and says so."""
    from pipeline.simulate import run

    try:
        with Rounds(study.name, study.rounds, quiet) as watch:
            results = run(study, folder, data, watch)
        if yardsticks and not results["yardsticks"]:
            from pipeline.yardsticks import measure

            results["yardsticks"] = measure(study, folder, data, quiet)
            folder.write_json("results.json", results)
    except KeyboardInterrupt:
        done = [record["round"] for record in folder.rounds()]
        errors.print(
            f"\nstopped after round {done[-1] if done else 0} of {study.rounds}; nothing is lost. "
            f"Continue with: hemofed run --resume {folder.path}", highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise
    from pipeline.reports.run_report import write_report

    write_report(folder.path)
    return results


def show_results(results: dict[str, Any], folder: RunFolder) -> None:
    test, yard = results["test"], results["yardsticks"]
    columns = [("federated", test)] + [(name, y["test"]) for name, y in yard.items()]
    who = [w for w in ("coordinator", "pooled") if any(w in t for _, t in columns)]
    rows = [[w, *(percent(t.get(w, {}).get("accuracy")) for _, t in columns)] for w in who]
    sites = list(test.get("sites", {}))
    worst = (results["worst"] or {}).get("site")
    rows += [
        [
            f"{s} (worst)" if s == worst else s,
            *(percent(t.get("sites", {}).get(s, {}).get("accuracy")) for _, t in columns),
        ]
        for s in sites[:20]
    ]
    if len(sites) > 20:
        rows.append([f"… {len(sites) - 20} more in the report"] + [""] * len(columns))
    console.print(table(["test accuracy", *(name for name, _ in columns)], rows))
    if results["void_rounds"]:
        console.print(
            f"[yellow]{results['void_rounds']} of {results['rounds']} rounds were void: too few sites answered[/]"
        )
    traffic = results["traffic"]
    console.print(
        f"round {results['best_round']} of {results['rounds']} ({results['chosen_by']}, {results['stopped']}); "
        f"up {megabytes(traffic['up'])}, down {megabytes(traffic['down'])}; {results['seconds']:.1f} s", highlight=False,
    )  # fmt: skip
    console.print(f"report: {folder.path / 'report.html'}", highlight=False, soft_wrap=True)


def free_path(path: Path) -> Path:
    """runs/NAME, or runs/NAME-2, ... if that is taken."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
