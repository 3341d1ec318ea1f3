"""`hemofed coordinator ...`: the study lead's commands. The code of a command is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import JsonOption, OverridesOption, StudyArgument

coordinator_app = typer.Typer(help="Run studies across hospitals as their coordinator.", no_args_is_help=True)

HomeArgument = Annotated[Path, typer.Argument(help="Coordinator's home folder")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="HEMOFED_COORDINATOR",
        help="Coordinator's home folder; without it: HEMOFED_URL, HEMOFED_TOKEN, HEMOFED_CA",
    ),
]
RunArgument = Annotated[str, typer.Argument(help="Run, as listed by `coordinator status`")]


@coordinator_app.command("init")
def coordinator_init(
    home: HomeArgument,
    name: Annotated[str, typer.Option(help="Name shown to sites")] = "hemofed",
    host: Annotated[str, typer.Option(help="Host name or address at which sites reach the coordinator")] = "localhost",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port for sites and dashboard, the only one that is opened")
    ] = 8443,
    json: JsonOption = False,
) -> None:
    """Create a coordinator's home: keys, certificates, database and the lead's token."""
    from pipeline.cli.commands.coordinator import init_command

    init_command(home, name, host, port, json)


@coordinator_app.command("serve")
def coordinator_serve(
    home: HomeArgument,
    bind: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1: this machine only")] = "0.0.0.0",
) -> None:
    """Serve sites and the dashboard and execute runs until stopped; interrupted runs are resumed."""
    from pipeline.cli.output import console
    from pipeline.service.runtime.serve import serve_coordinator

    serve_coordinator(home, bind, lambda text: console.print(text, soft_wrap=True))


@coordinator_app.command("run")
def coordinator_run(
    study: StudyArgument,
    home: HomeOption = None,
    overrides: OverridesOption = None,
    sites: Annotated[
        list[str] | None, typer.Option("--site", help="Site to offer the study to; repeatable; default: all")
    ] = None,
    min_sites: Annotated[
        int | None, typer.Option(min=1, help="Minimum number of sites; default: the study's quorum")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show progress until the run ends")] = False,
    json: JsonOption = False,
) -> None:
    """Offer a study to sites; it starts when their officers have approved it."""
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
    run: Annotated[str | None, typer.Argument(help="Run to show; default: all runs and sites")] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show sites, runs and what they wait for."""
    from pipeline.cli.commands.coordinator import status_command

    status_command(home, run, json)


@coordinator_app.command("begin")
def coordinator_begin(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Start a run without waiting for the remaining approvals."""
    _post_action(home, run, "begin", json)


@coordinator_app.command("pause")
def coordinator_pause(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Pause a run after its current round."""
    _post_action(home, run, "pause", json)


@coordinator_app.command("resume")
def coordinator_resume(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Resume a run after its last accepted round."""
    _post_action(home, run, "resume", json)


@coordinator_app.command("stop")
def coordinator_stop(run: RunArgument, home: HomeOption = None, json: JsonOption = False) -> None:
    """Stop a run at once; accepted rounds are kept."""
    _post_action(home, run, "stop", json)


@coordinator_app.command("invite")
def coordinator_invite(
    site: Annotated[str, typer.Argument(help="Name of the new site")],
    home: HomeOption = None,
    hours: Annotated[float, typer.Option(min=0.1, help="Validity of the invitation in hours")] = 48.0,
    json: JsonOption = False,
) -> None:
    """Create a one-time invitation for a hospital."""
    from pipeline.cli.commands.coordinator import invite_command

    invite_command(home, site, hours, json)


@coordinator_app.command("remove")
def coordinator_remove(
    site: Annotated[str, typer.Argument(help="Name of the site")], home: HomeOption = None, json: JsonOption = False
) -> None:
    """Remove a site and void its credential."""
    from pipeline.cli.commands.coordinator import remove_command

    remove_command(home, site, json)


@coordinator_app.command("expect-officer")
def coordinator_expect_officer(
    home: HomeArgument,
    site: Annotated[str, typer.Argument(help="Name of the site")],
    fingerprint: Annotated[str, typer.Argument(help="Fingerprint of the officer's key, as read out by telephone")],
    json: JsonOption = False,
) -> None:
    """Record the key of a site's officer: the only one with which its ledger may be opened, or continued by a new ledger."""
    from pipeline.cli.commands.coordinator import expect_officer_command

    expect_officer_command(home, site, fingerprint, json)


@coordinator_app.command("users")
def coordinator_users(
    home: HomeOption = None,
    add: Annotated[str | None, typer.Option(help="Name of a new user, whose token is shown once")] = None,
    role: Annotated[str, typer.Option(help="Role of the new user: lead, officer or viewer")] = "viewer",
    revoke: Annotated[str | None, typer.Option(help="Name of a user whose token to revoke")] = None,
    json: JsonOption = False,
) -> None:
    """List, add and revoke users of the dashboard."""
    from pipeline.cli.commands.coordinator import users_command

    users_command(home, add, role, revoke, json)


@coordinator_app.command("backup")
def coordinator_backup(
    home: HomeArgument,
    file: Annotated[Path, typer.Argument(help="File to write")],
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt with a passphrase: typed, or HEMOFED_PASSPHRASE")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Back up a coordinator's home to one file, even while it is served."""
    from pipeline.cli.commands.coordinator import backup_command

    backup_command(home, file, encrypt, json)


@coordinator_app.command("restore")
def coordinator_restore(
    file: Annotated[Path, typer.Argument(help="Backup file")], home: HomeArgument, json: JsonOption = False
) -> None:
    """Restore a coordinator's home from a backup; newer receipts in the home are kept."""
    from pipeline.cli.commands.coordinator import restore_command

    restore_command(file, home, json)


def _post_action(home: Path | None, run: str, action: str, json: bool) -> None:
    from pipeline.cli.commands.coordinator import action_command

    action_command(home, run, action, json)
