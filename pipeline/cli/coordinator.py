"""`hemofed coordinator ...`: what a study lead does across hospitals. Each command's code is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import JsonOption, OverridesOption

coordinator_app = typer.Typer(help="Run studies across hospitals.", no_args_is_help=True)

HomeArgument = Annotated[Path, typer.Argument(help="The coordinator's home folder")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="HEMOFED_COORDINATOR", help="The coordinator's home; else HEMOFED_URL, _TOKEN and _CA"
    ),
]
RunArgument = Annotated[str, typer.Argument(help="The run, as `status` names it")]


@coordinator_app.command("init")
def coordinator_init(
    home: HomeArgument,
    name: Annotated[str, typer.Option(help="What sites see it called")] = "hemofed",
    host: Annotated[str, typer.Option(help="Name or address at which sites reach it")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The one port that it opens")] = 8443,
    json: JsonOption = False,
) -> None:
    """Make a coordinator's home: keys, certificates, database, the lead's token."""
    from pipeline.cli.commands.coordinator import init_command

    init_command(home, name, host, port, json)


@coordinator_app.command("serve")
def coordinator_serve(
    home: HomeArgument,
    bind: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 for this machine alone")] = "0.0.0.0",
) -> None:
    """Serve sites and the dashboard, and run what is to be run, until it is stopped. Goes on where it was killed."""
    from pipeline.cli.output import console
    from pipeline.service.runtime.serve import serve_coordinator

    serve_coordinator(home, bind, lambda text: console.print(text, soft_wrap=True))


@coordinator_app.command("run")
def coordinator_run(
    study: Annotated[str, typer.Argument(help="A study file or a packaged study")],
    home: HomeOption = None,
    overrides: OverridesOption = None,
    sites: Annotated[
        list[str] | None, typer.Option("--site", help="A site to ask, as often as needed; all if not given")
    ] = None,
    min_sites: Annotated[int | None, typer.Option(min=1, help="Sites without which it does not run")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch it to its end")] = False,
    json: JsonOption = False,
) -> None:
    """Offer a study to the sites; it runs once their officers have approved it."""
    from pipeline.cli.commands.coordinator import run_command

    run_command(
        study=study,
        overrides=overrides or [],
        home=home,
        sites=sites or [],
        min_sites=min_sites,
        follow=follow,
        json=json,
    )


@coordinator_app.command("status")
def coordinator_status(
    run: Annotated[str | None, typer.Argument(help="A run; all runs and sites if not given")] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Sites, runs, and what they wait for."""
    from pipeline.cli.commands.coordinator import status_command

    status_command(home, run, json)


@coordinator_app.command("begin")
def coordinator_begin(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Do not wait for the last approvals."""
    _post_action(home, run, "begin", json)


@coordinator_app.command("pause")
def coordinator_pause(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Rest after the round that is under way."""
    _post_action(home, run, "pause", json)


@coordinator_app.command("resume")
def coordinator_resume(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Go on from the last round that counted."""
    _post_action(home, run, "resume", json)


@coordinator_app.command("stop")
def coordinator_stop(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """End at once; rounds that counted stay."""
    _post_action(home, run, "stop", json)


@coordinator_app.command("invite")
def coordinator_invite(
    site: Annotated[str, typer.Argument(help="What the site will be called")],
    home: HomeOption = None,
    hours: Annotated[float, typer.Option(min=0.1, help="How long the invitation is good")] = 48.0,
    json: JsonOption = False,
) -> None:
    """A one-time invitation for a hospital."""
    from pipeline.cli.commands.coordinator import invite_command

    invite_command(home, site, hours, json)


@coordinator_app.command("remove")
def coordinator_remove(
    site: Annotated[str, typer.Argument(help="The site")], home: HomeOption = None, json: JsonOption = False
) -> None:
    """A site's credential is void from now on."""
    from pipeline.cli.commands.coordinator import remove_command

    remove_command(home, site, json)


@coordinator_app.command("users")
def coordinator_users(
    home: HomeOption = None,
    add: Annotated[str | None, typer.Option(help="Make a user of this name; the token is shown once")] = None,
    role: Annotated[str, typer.Option(help="lead, officer or viewer")] = "viewer",
    revoke: Annotated[str | None, typer.Option(help="This user's token is void from now on")] = None,
    json: JsonOption = False,
) -> None:
    """Who may look at the dashboard, and who may act."""
    from pipeline.cli.commands.coordinator import users_command

    users_command(home, add, role, revoke, json)


@coordinator_app.command("backup")
def coordinator_backup(
    home: HomeArgument,
    file: Annotated[Path, typer.Argument(help="The file to write")],
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Passphrase: typed in, or HEMOFED_PASSPHRASE")] = False,
    json: JsonOption = False,
) -> None:
    """The home in one file; also while it is served."""
    from pipeline.cli.commands.coordinator import backup_command

    backup_command(home, file, encrypt, json)


@coordinator_app.command("restore")
def coordinator_restore(
    file: Annotated[Path, typer.Argument(help="The backup")], home: HomeArgument, json: JsonOption = False
) -> None:
    """Bring a backup back; newer receipts of sites' ledgers stay."""
    from pipeline.cli.commands.coordinator import restore_command

    restore_command(file, home, json)


def _post_action(home: Path | None, run: str, action: str, json: bool) -> None:
    from pipeline.cli.commands.coordinator import action_command

    action_command(home, run, action, json)
