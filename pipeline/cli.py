"""The one command. Each room's code is imported only when one of its commands runs, so `--help` stays quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import HemofedError, MissingExtra

app = typer.Typer(
    help="Train blood-smear classifiers across hospitals: images stay where they are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(help="Write, check and look at study files.", no_args_is_help=True)
app.add_typer(study_app, name="study")
site_app = typer.Typer(help="What a site does with its own images.", no_args_is_help=True)
app.add_typer(site_app, name="site")
ledger_app = typer.Typer(help="A site's record of what was spent on its patients.", no_args_is_help=True)
site_app.add_typer(ledger_app, name="ledger")
key_app = typer.Typer(help="The key with which a site signs.", no_args_is_help=True)
site_app.add_typer(key_app, name="key")

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. local.lr=0.1")]
Data = Annotated[Path | None, typer.Option("--data", envvar="HEMOFED_DATA", help="Where data sets lie")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress")]

# what a missing package means to a user: module -> extra
EXTRAS = {"torch": "train", "monai": "train", "albumentations": "train", "sklearn": "train", "scipy": "train",
          "safetensors": "train", "matplotlib": "train", "jinja2": "train", "PIL": "train",
          "opacus": "privacy", "dp_accounting": "privacy", "cryptography": "privacy", "reportlab": "privacy",
          "onnxruntime": "edge", "pydicom": "edge"}  # fmt: skip


@app.command()
def run(
    study: Annotated[
        str | None,
        typer.Argument(help="A study file or a packaged study (`hemofed study list`); smear-demo if not given"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/NAME if not given")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue this run folder")] = None,
    sets: Sets = None,
    data: Data = None,
    yardsticks: Annotated[
        bool | None,
        typer.Option(
            "--yardsticks/--no-yardsticks",
            help="Also train local-only and pooled, to compare; if not said, personalised studies train local-only",
        ),
    ] = None,
    homes: Annotated[
        Path | None, typer.Option("--homes", help="Where simulated sites keep keys and ledgers between runs")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run a study on this machine, all sites simulated, and write a report."""
    from pipeline.commands.running import run_command

    run_command(study, out, resume, sets or [], data, yardsticks, homes, quiet, json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    band: Annotated[str, typer.Option(help="Width of the band over sites: 68 (one standard deviation) or 95 %")] = "68",
) -> None:
    """Write a run's report.html and plots anew."""
    from pipeline.commands.looking import report_command

    report_command(run, band)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write")] = Path("compare.html"),
    metric: Annotated[str, typer.Option(help="What to plot and rank by")] = "accuracy",
    json: Json = False,
) -> None:
    """Overlay several runs on one page: curves, results, and the settings in which they differ."""
    from pipeline.commands.looking import compare_command

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
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Score a saved model on other data."""
    from pipeline.commands.looking import evaluate_command

    evaluate_command(run, data, source, model, split or ("all" if data else "test"), sets or [], json)


@app.command()
def personalise(
    run: Annotated[Path, typer.Argument(help="Finished run folder")],
    name: Annotated[str, typer.Option(help="What the new site is called")] = "new-site",
    data: Annotated[Path | None, typer.Option("--data", help="Where the new site's data lie")] = None,
    sets: Sets = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of local training at the new site")] = 5,
    json: Json = False,
) -> None:
    """Let a new site join a finished run: it finds its group, trains its own part and keeps its model."""
    from pipeline.commands.joining import personalise_command

    personalise_command(run, name, data, sets or [], turns, json)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Which table; without it, the list")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; runs/reproduce-NAME if not given")] = None,
    data: Data = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run packaged studies and print our numbers beside the published ones."""
    from pipeline.commands.reproducing import reproduce_command

    reproduce_command(name, out, data, quiet, json)


@app.command()
def strategies(json: Json = False) -> None:
    """The algorithms: name, paper, what each must see of the sites."""
    from pipeline.commands.looking import strategies_command

    strategies_command(json)


@study_app.command("new")
def study_new(
    path: Annotated[Path, typer.Argument(help="The file to write")] = Path("study.toml"),
    like: Annotated[str, typer.Option("--like", help="A packaged study or a file to start from")] = "smear-demo",
) -> None:
    """Write a study file to edit."""
    from pipeline.commands.studies import new_command

    new_command(path, like)


@study_app.command("check")
def study_check(study: str, sets: Sets = None, data: Data = None, json: Json = False) -> None:
    """Read a study and its data, build its model, and say what would run; nothing is trained."""
    from pipeline.commands.studies import check_command

    check_command(study, sets or [], data, json)


@study_app.command("show")
def study_show(study: str, sets: Sets = None, json: Json = False) -> None:
    """The study with every default written out."""
    from pipeline.commands.studies import show_command

    show_command(study, sets or [], json)


@study_app.command("list")
def study_list(json: Json = False) -> None:
    """The packaged studies."""
    from pipeline.commands.studies import list_command

    list_command(json)


@site_app.command("preview")
def site_preview(
    study: str,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write")] = Path("preview.html"),
    sets: Sets = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Show each site's cells as it sees them, before anything is trained."""
    from pipeline.commands.previewing import preview_command

    preview_command(study, sets or [], data, out, json)


Home = Annotated[Path, typer.Argument(help="The site's home folder; of a simulated site RUN/homes/SITE")]
Officer = Annotated[Path | None, typer.Option("--officer", help="The officer's private key")]


@site_app.command("init")
def site_init(
    home: Home,
    site: Annotated[str, typer.Option(help="What the site is called")],
    dataset: Annotated[str, typer.Option(help="The data set's own name, given once and for good")],
    epsilon: Annotated[float, typer.Option(help="What all studies together may spend of it")],
    delta: Annotated[float, typer.Option(help="The chance that the promise does not hold")] = 1e-5,
    unit: Annotated[str, typer.Option(help="Whom the budget protects")] = "patient",
    officer: Officer = None,
    json: Json = False,
) -> None:
    """Make a site's key and open its privacy ledger."""
    from pipeline.commands.ledgers import init_command

    init_command(home, site, dataset, unit, epsilon, delta, officer, json)


@site_app.command("forget")
def site_forget(
    home: Home,
    patient: Annotated[str, typer.Argument(help="The patient (or other unit) as the data name it")],
    reason: Annotated[str, typer.Option(help="For the record; no name, please")] = "",
    json: Json = False,
) -> None:
    """A patient withdraws: nothing of him is read any more, and the ledger says so."""
    from pipeline.commands.ledgers import forget_command

    forget_command(home, patient, reason, json)


@site_app.command("budget")
def site_budget(
    home: Home,
    epsilon: Annotated[float, typer.Argument(help="The new budget")],
    officer: Annotated[Path, typer.Option("--officer", help="The officer's private key")],
    delta: Annotated[float | None, typer.Option(help="As before if not given")] = None,
) -> None:
    """The officer changes what may be spent."""
    from pipeline.commands.ledgers import budget_command

    budget_command(home, epsilon, delta, officer)


@ledger_app.command("show")
def ledger_show(home: Home, json: Json = False) -> None:
    """What was spent on the site's data, by which study, and what is left."""
    from pipeline.commands.ledgers import show_command

    show_command(home, json)


@ledger_app.command("verify")
def ledger_verify(
    ledger: Annotated[Path, typer.Argument(help="A home, a ledger file or an export")],
    anchor: Annotated[
        Path | None, typer.Option(help="The coordinator's receipts, e.g. RUN/coordinator/receipts: finds a cut end")
    ] = None,
    json: Json = False,
) -> None:
    """Check every hash and signature."""
    from pipeline.commands.ledgers import verify_command

    verify_command(ledger, anchor, json)


@ledger_app.command("export")
def ledger_export(
    ledger: Annotated[Path, typer.Argument(help="A home or a ledger file")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write")] = Path("ledger.json"),
) -> None:
    """One file for an auditor, which `verify` checks anywhere."""
    from pipeline.commands.ledgers import export_command

    export_command(ledger, out)


@key_app.command("rotate")
def key_rotate(home: Home, officer: Officer = None) -> None:
    """A new key for the site: signed by the old one, or, if that is lost, by the officer."""
    from pipeline.commands.ledgers import rotate_command

    rotate_command(home, officer)


@key_app.command("revoke")
def key_revoke(
    home: Home,
    officer: Annotated[Path, typer.Option("--officer", help="The officer's private key")],
    after: Annotated[int, typer.Option(help="The last entry that is to be believed")],
    reason: Annotated[str, typer.Option(help="For the record")] = "",
) -> None:
    """The officer declares what a stolen key has signed since to be void."""
    from pipeline.commands.ledgers import revoke_command

    revoke_command(home, officer, after, reason)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    attack: Annotated[bool, typer.Option("--attack", help="Also attack the run's model, as evidence")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; RUN/audit if not given")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """What was promised and spent, who saw what, and whether an attack succeeds: HTML, PDF and JSON."""
    from pipeline.commands.auditing import audit_command

    audit_command(run, attack, out, data, json)


def main() -> None:
    """Errors meant for a person are printed without a traceback; anything else is a bug and keeps it."""
    try:
        app()
    except HemofedError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(str(MissingExtra(f"this command needs {error.name}; install it with: pip install 'hemofed[{extra}]'")), 2)


def _fail(text: str, code: int) -> None:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)
