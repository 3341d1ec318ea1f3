"""The one command. Each room's code is imported only when one of its commands runs, so `--help` stays quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import edge as cli_edge
from pipeline.cli.coordinator import coordinator_app
from pipeline.cli.options import DataOption, JsonOption, OverridesOption, QuietOption
from pipeline.cli.site import site_app
from pipeline.core.errors import HemofedError, MissingExtraError

app = typer.Typer(
    help="Train blood-smear classifiers across hospitals: images stay where they are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(help="Write, check and look at study files.", no_args_is_help=True)
app.add_typer(study_app, name="study")
app.add_typer(site_app, name="site")
app.add_typer(coordinator_app, name="coordinator")
app.command()(cli_edge.export)
app.command()(cli_edge.predict)
app.add_typer(cli_edge.trust_app, name="trust")
app.add_typer(cli_edge.edge_app, name="edge")
demo_app = typer.Typer(help="See it at work, with nothing to prepare.", no_args_is_help=True)
app.add_typer(demo_app, name="demo")

# what a missing package means to a user: module -> extra
EXTRA_BY_MODULE = {"torch": "train", "monai": "train", "albumentations": "train", "sklearn": "train", "scipy": "train",
          "safetensors": "train", "matplotlib": "train", "jinja2": "train", "PIL": "edge",
          "opacus": "privacy", "dp_accounting": "privacy", "cryptography": "edge", "reportlab": "privacy",
          "nvflare": "hospital", "fastapi": "edge-smear", "uvicorn": "edge-smear", "sqlalchemy": "hospital",
          "httpx": "hospital", "psutil": "hospital", "onnxruntime": "edge", "pydicom": "edge", "onnx": "export",
          "onnxscript": "export", "cv2": "edge-smear", "highdicom": "edge-smear"}  # fmt: skip


@app.command()
def run(
    study: Annotated[
        str | None,
        typer.Argument(help="A study file or a packaged study (`hemofed study list`); smear-demo if not given"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/NAME if not given")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue this run folder")] = None,
    overrides: OverridesOption = None,
    data: DataOption = None,
    baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also train local-only and pooled, to compare; if not said, personalised studies train local-only",
        ),
    ] = None,
    site_homes: Annotated[
        Path | None, typer.Option("--site-homes", help="Where simulated sites keep keys and ledgers between runs")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run a study on this machine, all sites simulated, and write a report."""
    from pipeline.cli.commands.run import run_command

    run_command(
        study_name=study,
        out=out,
        resume=resume,
        overrides=overrides or [],
        data=data,
        run_baselines=baselines,
        site_homes=site_homes,
        quiet=quiet,
        json=json,
    )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    band: Annotated[str, typer.Option(help="Width of the band over sites: 68 (one standard deviation) or 95 %")] = "68",
) -> None:
    """Write a run's report.html and plots anew."""
    from pipeline.cli.commands.inspect_runs import report_command

    report_command(run, band)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write")] = Path("compare.html"),
    metric: Annotated[str, typer.Option(help="What to plot and rank by")] = "accuracy",
    json: JsonOption = False,
) -> None:
    """Overlay several runs on one page: curves, results, and the settings in which they differ."""
    from pipeline.cli.commands.inspect_runs import compare_command

    compare_command(runs, out, metric, json)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    data: Annotated[Path | None, typer.Option("--data", help="Where the other data lie")] = None,
    source: Annotated[str | None, typer.Option(help="Kind of data; as in the run's study if not given")] = None,
    model: Annotated[str, typer.Option(help="Which of the run's models")] = "global",
    split: Annotated[
        str | None, typer.Option(help="all, train, val or test; all of other data, test of the study's own")
    ] = None,
    overrides: OverridesOption = None,
    json: JsonOption = False,
) -> None:
    """Score a saved model on other data."""
    from pipeline.cli.commands.inspect_runs import evaluate_command

    evaluate_command(
        run=run,
        data=data,
        source=source,
        model=model,
        split=split or ("all" if data else "test"),
        overrides=overrides or [],
        json=json,
    )


@app.command()
def join_run(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    name: Annotated[str, typer.Option(help="What the new site is called")] = "new-site",
    data: Annotated[Path | None, typer.Option("--data", help="Where the new site's data lie")] = None,
    overrides: OverridesOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of local training at the new site")] = 5,
    json: JsonOption = False,
) -> None:
    """Let a new site join a finished run: it finds its group, trains its own part and keeps its model."""
    from pipeline.cli.commands.join_run import join_run_command

    join_run_command(run, name, data, overrides or [], rounds, json)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Which table; without it, the list")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; runs/reproduce-NAME if not given")] = None,
    data: DataOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run packaged studies and print our numbers beside the published ones."""
    from pipeline.cli.commands.reproduce import reproduce_command

    reproduce_command(name, out, data, quiet, json)


@app.command()
def strategies(json: JsonOption = False) -> None:
    """The algorithms: name, paper, what each must see of the sites."""
    from pipeline.cli.commands.inspect_runs import strategies_command

    strategies_command(json)


@study_app.command("new")
def study_new(
    path: Annotated[Path, typer.Argument(help="The file to write")] = Path("study.toml"),
    template: Annotated[str, typer.Option("--like", help="A packaged study or a file to start from")] = "smear-demo",
) -> None:
    """Write a study file to edit."""
    from pipeline.cli.commands.study import new_command

    new_command(path, template)


@study_app.command("check")
def study_check(
    study: str, overrides: OverridesOption = None, data: DataOption = None, json: JsonOption = False
) -> None:
    """Read a study and its data, build its model, and say what would run; nothing is trained."""
    from pipeline.cli.commands.study import check_command

    check_command(study, overrides or [], data, json)


@study_app.command("show")
def study_show(study: str, overrides: OverridesOption = None, json: JsonOption = False) -> None:
    """The study with every default written out."""
    from pipeline.cli.commands.study import show_command

    show_command(study, overrides or [], json)


@study_app.command("list")
def study_list(json: JsonOption = False) -> None:
    """The packaged studies."""
    from pipeline.cli.commands.study import list_command

    list_command(json)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    attack: Annotated[bool, typer.Option("--attack", help="Also attack the run's model, as evidence")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; RUN/audit if not given")] = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """What was promised and spent, who saw what, and whether an attack succeeds: HTML, PDF and JSON."""
    from pipeline.cli.commands.audit import audit_command

    audit_command(run, attack, out, data, json)


@demo_app.command("hospitals")
def demo_hospitals(
    keep_folder: Annotated[
        Path | None, typer.Option("--keep", help="Put everything into this folder, and leave it there")
    ] = None,
    keep_serving: Annotated[
        bool, typer.Option("--stay", help="Leave the dashboard up when the study is over, until Ctrl-C")
    ] = False,
    study: Annotated[
        str, typer.Option(help="What to run; its sites are called site-01, site-02, site-03")
    ] = "hospitals",
    overrides: OverridesOption = None,
    json: JsonOption = False,
) -> None:
    """A coordinator, three hospitals and a dashboard on this machine, and a short study across them."""
    from pipeline.cli.commands.demo_hospitals import hospitals_command

    hospitals_command(study, overrides or [], keep_folder, keep_serving, json)


@demo_app.command("slide")
def demo_slide(
    out: Annotated[Path, typer.Argument(help="Folder to make")] = Path("slide"),
    cells: Annotated[int, typer.Option(min=1, max=100_000, help="Red cells on the slide")] = 1000,
    schistocytes: Annotated[float, typer.Option(min=0, max=1, help="Share of broken ones")] = 0.03,
    seed: Annotated[int, typer.Option(min=0, help="Another patient")] = 0,
    scanner: Annotated[
        str | None, typer.Option(help="Seen through this scanner, as in a study's [feature_skew]")
    ] = None,
    dicom: Annotated[bool, typer.Option("--dicom", help="DICOM files instead of PNG")] = False,
    json: JsonOption = False,
) -> None:
    """Render the fields of one made-up patient's slide, with what is on them in truth.csv."""
    from pipeline.cli.commands.demo_slide import slide_command

    slide_command(
        out=out, num_cells=cells, schistocyte_fraction=schistocytes, seed=seed, scanner=scanner, dicom=dicom, json=json
    )


@demo_app.command("edge")
def demo_edge(
    run: Annotated[Path | None, typer.Argument(help="Finished run folder; the newest in runs/ if not given")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; RUN/bedside if not given")] = None,
) -> None:
    """From a finished run to a slide report: export, trust, a rendered slide, predict."""
    from pipeline.cli.commands.demo_edge import edge_command

    edge_command(run, out)


def main() -> None:
    """Errors meant for a person are printed without a traceback; anything else is a bug and keeps it."""
    try:
        app()
    except HemofedError as error:
        _exit_with_error(str(error), 2)
    except OSError as error:
        _exit_with_error(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
    except ModuleNotFoundError as error:
        extra = EXTRA_BY_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _exit_with_error(
            str(MissingExtraError(f"this command needs {error.name}; install it with: pip install 'hemofed[{extra}]'")),
            2,
        )


def _exit_with_error(text: str, code: int) -> None:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
