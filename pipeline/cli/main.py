"""The `hemofed` command. The code of a command is imported only when it runs, so that `--help` stays fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import edge as cli_edge
from pipeline.cli.coordinator import coordinator_app
from pipeline.cli.options import DataOption, JsonOption, OverridesOption, QuietOption, StudyArgument
from pipeline.cli.site import site_app
from pipeline.core.errors import HemofedError
from pipeline.core.extras import missing_extra


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(version("hemofed"))
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(help="Write, check and show study files.", no_args_is_help=True)
app.add_typer(study_app, name="study")
app.add_typer(site_app, name="site")
app.add_typer(coordinator_app, name="coordinator")
app.add_typer(cli_edge.trust_app, name="trust")
app.add_typer(cli_edge.edge_app, name="edge")
demo_app = typer.Typer(help="Run demonstrations that need no preparation.", no_args_is_help=True)
app.add_typer(demo_app, name="demo")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit")
    ] = False,
) -> None:
    """Train blood-smear classifiers across hospitals without moving their images."""


@app.command()
def run(
    study: Annotated[
        str | None,
        typer.Argument(help="Study file or packaged study (see `hemofed study list`); default: smear-demo"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder to create; default: runs/NAME")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Run folder to continue")] = None,
    overrides: OverridesOption = None,
    data: DataOption = None,
    baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            help="Train the baselines local-only and centralized; default: local-only, for personalized studies",
        ),
    ] = None,
    site_homes: Annotated[
        Path | None,
        typer.Option("--site-homes", help="Folder of the simulated sites' keys and ledgers, kept between runs"),
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run a study with simulated sites on this machine, and write a report."""
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
    band: Annotated[str, typer.Option(help="Band over sites in percent: 68 (one standard deviation) or 95")] = "68",
) -> None:
    """Write a run's report.html and plots again."""
    from pipeline.cli.commands.inspect_runs import report_command

    report_command(run, band)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write")] = Path("compare.html"),
    metric: Annotated[str, typer.Option(help="Metric to plot and rank by")] = "accuracy",
    json: JsonOption = False,
) -> None:
    """Compare runs on one page: curves, results, and the settings in which they differ."""
    from pipeline.cli.commands.inspect_runs import compare_command

    compare_command(runs, out, metric, json)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    data: Annotated[Path | None, typer.Option("--data", help="Folder or file of the other data")] = None,
    source: Annotated[str | None, typer.Option(help="Kind of data; default: that of the run's study")] = None,
    model: Annotated[str, typer.Option(help="Name of one of the run's models")] = "global",
    split: Annotated[
        str | None, typer.Option(help="all, train, val or test; default: all with --data, test without")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override of a key of the study's data, e.g. corrupt=skip; repeatable"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Evaluate a saved model on other data."""
    from pipeline.cli.commands.inspect_runs import evaluate_command

    evaluate_command(
        run=run,
        data=data,
        source=source,
        model=model,
        split=split,
        overrides=overrides or [],
        json=json,
    )


@app.command()
def join_run(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    name: Annotated[str, typer.Option(help="Name of the new site")] = "new-site",
    data: Annotated[Path | None, typer.Option("--data", help="Folder of the new site's data")] = None,
    overrides: OverridesOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of local training at the new site")] = 5,
    json: JsonOption = False,
) -> None:
    """Add a site to a finished run: assign it to a cluster and train its personalized model."""
    from pipeline.cli.commands.join_run import join_run_command

    join_run_command(run, name, data, overrides or [], rounds, json)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Reproduction to run; default: list all")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output folder; default: runs/reproduce-NAME")] = None,
    data: DataOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run packaged studies and print our results next to the published ones."""
    from pipeline.cli.commands.reproduce import reproduce_command

    reproduce_command(name, out, data, quiet, json)


@app.command()
def strategies(json: JsonOption = False) -> None:
    """List strategies, codecs and aggregation rules with their papers and what they see of the sites."""
    from pipeline.cli.commands.inspect_runs import strategies_command

    strategies_command(json)


@study_app.command("new")
def study_new(
    path: Annotated[Path, typer.Argument(help="File to write")] = Path("study.toml"),
    template: Annotated[str, typer.Option("--like", help="Packaged study or study file to copy")] = "smear-demo",
) -> None:
    """Write a study file to edit."""
    from pipeline.cli.commands.study import new_command

    new_command(path, template)


@study_app.command("check")
def study_check(
    study: StudyArgument, overrides: OverridesOption = None, data: DataOption = None, json: JsonOption = False
) -> None:
    """Check a study, its data and its model, and print what would run, without training."""
    from pipeline.cli.commands.study import check_command

    check_command(study, overrides or [], data, json)


@study_app.command("show")
def study_show(study: StudyArgument, overrides: OverridesOption = None, json: JsonOption = False) -> None:
    """Print a study with all defaults."""
    from pipeline.cli.commands.study import show_command

    show_command(study, overrides or [], json)


@study_app.command("list")
def study_list(json: JsonOption = False) -> None:
    """List the packaged studies."""
    from pipeline.cli.commands.study import list_command

    list_command(json)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    attack: Annotated[bool, typer.Option("--attack", help="Attack the run's model too, as evidence")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output folder; default: RUN/audit")] = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Audit a run's privacy: write what was promised, spent and disclosed as HTML, PDF and JSON."""
    from pipeline.cli.commands.audit import audit_command

    audit_command(run, attack, out, data, json)


app.command()(cli_edge.export)
app.command()(cli_edge.predict)


@demo_app.command("hospitals")
def demo_hospitals(
    keep_folder: Annotated[
        Path | None, typer.Option("--keep", help="Folder for all files; default: a temporary one, deleted at the end")
    ] = None,
    keep_serving: Annotated[
        bool, typer.Option("--stay", help="Keep the dashboard running after the study, until Ctrl-C")
    ] = False,
    study: Annotated[str, typer.Option(help="Study with the sites site-01, site-02 and site-03")] = "hospitals",
    overrides: OverridesOption = None,
    json: JsonOption = False,
) -> None:
    """Run a short study with a coordinator, a dashboard and three hospitals on this machine."""
    from pipeline.cli.commands.demo_hospitals import demo_hospitals_command

    demo_hospitals_command(study, overrides or [], keep_folder, keep_serving, json)


@demo_app.command("slide")
def demo_slide(
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty")] = Path("slide"),
    cells: Annotated[int, typer.Option(min=1, max=100_000, help="Number of red cells on the slide")] = 1000,
    schistocytes: Annotated[float, typer.Option(min=0, max=1, help="Fraction of schistocytes among them")] = 0.03,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; every seed is another patient")] = 0,
    scanner: Annotated[
        str | None, typer.Option(help="Scanner profile, as in a study's feature_skew; default: none")
    ] = None,
    dicom: Annotated[bool, typer.Option("--dicom", help="Write DICOM files instead of PNG")] = False,
    json: JsonOption = False,
) -> None:
    """Render the fields of a synthetic patient's slide, with the true cell types in truth.csv."""
    from pipeline.cli.commands.demo_slide import demo_slide_command

    demo_slide_command(
        out=out, num_cells=cells, schistocyte_fraction=schistocytes, seed=seed, scanner=scanner, dicom=dicom, json=json
    )


@demo_app.command("edge")
def demo_edge(
    run: Annotated[Path | None, typer.Argument(help="Finished run folder; default: the newest in runs/")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output folder; default: RUN/edge")] = None,
) -> None:
    """Turn a finished run into a slide report: export, trust, render a slide, predict."""
    from pipeline.cli.commands.demo_edge import demo_edge_command

    demo_edge_command(run, out)


def main() -> None:
    """Prints expected errors without a traceback. Any other exception is a bug and keeps its traceback."""
    try:
        app()
    except HemofedError as error:
        _exit_with_error(str(error), 2)
    except OSError as error:
        _exit_with_error(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _exit_with_error(str(missing), 2)


def _exit_with_error(text: str, code: int) -> None:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)
