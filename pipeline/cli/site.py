"""`hemofed site ...`: what a hospital does. Each command's code is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import DataOption, JsonOption, OverridesOption

site_app = typer.Typer(
    help="What a hospital does: look at its images, approve studies, take part.", no_args_is_help=True
)
ledger_app = typer.Typer(help="A site's record of what was spent on its patients.", no_args_is_help=True)
site_app.add_typer(ledger_app, name="ledger")
key_app = typer.Typer(help="Keys: of the site, of its officer, of a second person.", no_args_is_help=True)
site_app.add_typer(key_app, name="key")

HomeArgument = Annotated[Path, typer.Argument(help="The site's home folder; of a simulated site RUN/homes/SITE")]
OptionalOfficerKeyOption = Annotated[Path | None, typer.Option("--officer", help="The officer's private key")]
OfficerKeyOption = Annotated[Path, typer.Option("--officer", help="The officer's private key")]
CosignerKeyOption = Annotated[
    Path | None, typer.Option("--cosigner", help="The second person's private key, where the policy asks")
]


@site_app.command("preview")
def site_preview(
    study: str,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write")] = Path("preview.html"),
    overrides: OverridesOption = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Show each site's cells as it sees them, before anything is trained."""
    from pipeline.cli.commands.study import preview_command

    preview_command(study, overrides or [], data, out, json)


@site_app.command("init")
def site_init(
    home: HomeArgument,
    site: Annotated[str, typer.Option(help="What the site is called")],
    dataset: Annotated[str, typer.Option(help="The data set's own name, given once and for good")],
    epsilon: Annotated[float, typer.Option(help="What all studies together may spend of it")],
    delta: Annotated[float, typer.Option(help="The chance that the promise does not hold")] = 1e-5,
    unit: Annotated[str, typer.Option(help="Whom the budget protects")] = "patient",
    data: Annotated[Path | None, typer.Option("--data", help="Where the site's images lie")] = None,
    simulate_site: Annotated[
        str | None, typer.Option("--simulate-site", help="In a rehearsal: the simulated site whose examples it takes")
    ] = None,
    officer_key: OptionalOfficerKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Make a site's key and settings, and open its privacy ledger."""
    from pipeline.cli.commands.site.ledger import init_command

    init_command(
        home=home,
        site=site,
        dataset_id=dataset,
        privacy_unit=unit,
        epsilon=epsilon,
        delta=delta,
        data=data,
        simulate_site=simulate_site,
        officer_key_path=officer_key,
        json=json,
    )


@site_app.command("exclude-patient")
def site_exclude_patient(
    home: HomeArgument,
    patient: Annotated[str, typer.Argument(help="The patient (or other unit) as the data name it")],
    reason: Annotated[str, typer.Option(help="For the record; no name, please")] = "",
    json: JsonOption = False,
) -> None:
    """A patient withdraws: nothing of him is read any more, and the ledger says so."""
    from pipeline.cli.commands.site.ledger import exclude_patient_command

    exclude_patient_command(home, patient, reason, json)


@site_app.command("budget")
def site_budget(
    home: HomeArgument,
    epsilon: Annotated[float, typer.Argument(help="The new budget")],
    officer_key: OfficerKeyOption,
    delta: Annotated[float | None, typer.Option(help="As before if not given")] = None,
) -> None:
    """The officer changes what may be spent."""
    from pipeline.cli.commands.site.ledger import budget_command

    budget_command(home, epsilon, delta, officer_key)


@ledger_app.command("show")
def ledger_show(home: HomeArgument, json: JsonOption = False) -> None:
    """What was spent on the site's data, by which study, and what is left."""
    from pipeline.cli.commands.site.ledger import show_command

    show_command(home, json)


@ledger_app.command("verify")
def ledger_verify(
    ledger: Annotated[Path, typer.Argument(help="A home, a ledger file or an export")],
    anchor: Annotated[
        Path | None, typer.Option(help="The coordinator's receipts, e.g. RUN/coordinator/receipts: finds a cut end")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check every hash and signature."""
    from pipeline.cli.commands.site.ledger import verify_command

    verify_command(ledger, anchor, json)


@ledger_app.command("export")
def ledger_export(
    ledger: Annotated[Path, typer.Argument(help="A home or a ledger file")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write")] = Path("ledger.json"),
) -> None:
    """One file for an auditor, which `verify` checks anywhere."""
    from pipeline.cli.commands.site.ledger import export_command

    export_command(ledger, out)


@key_app.command("rotate")
def key_rotate(home: HomeArgument, officer_key: OptionalOfficerKeyOption = None) -> None:
    """A new key for the site: signed by the old one, or, if that is lost, by the officer."""
    from pipeline.cli.commands.site.ledger import rotate_command

    rotate_command(home, officer_key)


@key_app.command("revoke")
def key_revoke(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    after: Annotated[int, typer.Option(help="The last entry that is to be believed")],
    reason: Annotated[str, typer.Option(help="For the record")] = "",
) -> None:
    """The officer declares what a stolen key has signed since to be void."""
    from pipeline.cli.commands.site.ledger import revoke_command

    revoke_command(home, officer_key, after, reason)


@site_app.command("check")
def site_check(
    home: HomeArgument,
    study: Annotated[str | None, typer.Option(help="A study file, a packaged study or an offered run")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Where the images lie; as in site.toml if not given")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write; HOME/check.html if not given")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look at the site's images before any study does: counts, quality, duplicates, names in files. Nothing leaves."""
    from pipeline.cli.commands.site.check import check_command

    check_command(home, study, data, out, json)


@site_app.command("offers")
def site_offers(home: HomeArgument, json: JsonOption = False) -> None:
    """What is offered, approved, expired or withdrawn."""
    from pipeline.cli.commands.site.approve import offers_command

    offers_command(home, json)


@site_app.command("approve")
def site_approve(
    home: HomeArgument,
    run: Annotated[str | None, typer.Argument(help="Run, or an offer's digest; the list if not given")] = None,
    officer_key: OptionalOfficerKeyOption = None,
    cosigner_key: CosignerKeyOption = None,
    days: Annotated[int, typer.Option(min=1, max=730, help="How long the approval stands")] = 90,
    assume_yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    json: JsonOption = False,
) -> None:
    """Show an offered study in plain words, and with the officer's key approve it."""
    from pipeline.cli.commands.site.approve import approve_command

    approve_command(
        home=home,
        run=run,
        officer_key_path=officer_key,
        cosigner_key_path=cosigner_key,
        days=days,
        assume_yes=assume_yes,
        json=json,
    )


@site_app.command("revoke-approval")
def site_revoke_approval(
    home: HomeArgument,
    run: Annotated[str, typer.Argument(help="Run, or an offer's digest")],
    officer_key: OptionalOfficerKeyOption = None,
    reason: Annotated[str, typer.Option(help="For the record")] = "",
    json: JsonOption = False,
) -> None:
    """End an approval, from the next message on; the site's own key is enough."""
    from pipeline.cli.commands.site.approve import revoke_approval_command

    revoke_approval_command(home, run, officer_key, reason, json)


@site_app.command("require-cosigner")
def site_require_cosigner(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    cosigner: Annotated[
        str | None, typer.Option(help="Public key, or key file, of who must sign too; nobody if not given")
    ] = None,
    current_cosigner: Annotated[Path | None, typer.Option(help="Private key of who had to sign until now")] = None,
) -> None:
    """Say whether approvals take a second person."""
    from pipeline.cli.commands.site.approve import require_cosigner_command

    require_cosigner_command(home, officer_key, cosigner, current_cosigner)


@site_app.command("join")
def site_join(
    home: HomeArgument,
    coordinator: Annotated[str | None, typer.Option(help="Its address, e.g. https://fl.example.org:8443")] = None,
    site: Annotated[
        str | None, typer.Option(help="What the coordinator calls this site; as the home says if not given")
    ] = None,
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a systemd unit, and do nothing else")] = False,
    once: Annotated[bool, typer.Option("--once", help="Enrol, and do not run the agent")] = False,
    json: JsonOption = False,
) -> None:
    """Enrol with an invitation (asked for, or HEMOFED_INVITATION), then run the site's agent until it is stopped."""
    from pipeline.cli.commands.site.join import join_command

    join_command(home, coordinator, site, systemd, once, json)


@site_app.command("status")
def site_status(home: HomeArgument, json: JsonOption = False) -> None:
    """What the agent does, what is offered, what was spent."""
    from pipeline.cli.commands.site.join import status_command

    status_command(home, json)


@site_app.command("leave")
def site_leave(home: HomeArgument, json: JsonOption = False) -> None:
    """Leave the federation; keys, ledger and models stay."""
    from pipeline.cli.commands.site.join import leave_command

    leave_command(home, json)


@site_app.command("backup")
def site_backup(
    home: HomeArgument,
    file: Annotated[Path, typer.Argument(help="The file to write")],
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Passphrase: typed in, or HEMOFED_PASSPHRASE")] = False,
    json: JsonOption = False,
) -> None:
    """The home in one file, without images."""
    from pipeline.cli.commands.site.backup import backup_command

    backup_command(home, file, encrypt, json)


@site_app.command("restore")
def site_restore(
    file: Annotated[Path, typer.Argument(help="The backup")], home: HomeArgument, json: JsonOption = False
) -> None:
    """Bring a backup back; a newer ledger stays."""
    from pipeline.cli.commands.site.backup import restore_command

    restore_command(file, home, json)


@ledger_app.command("recover")
def ledger_recover(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    ledger: Annotated[str | None, typer.Option(help="The old ledger, as the coordinator's refusal names it")] = None,
    index: Annotated[int | None, typer.Option(help="Its last entry")] = None,
    head: Annotated[str | None, typer.Option(help="Hash of that entry")] = None,
    lost_charges: Annotated[
        int | None, typer.Option(min=0, help="Charges in the lost end; the most possible if not given")
    ] = None,
    lost_epsilon: Annotated[float, typer.Option(min=0, help="Of studies that this copy does not know")] = 0.0,
    drop_cosigner: Annotated[bool, typer.Option("--drop-cosigner", help="The second person's key is lost")] = False,
    json: JsonOption = False,
) -> None:
    """Open a new ledger that continues an older copy, as the coordinator's refusal says."""
    from pipeline.cli.commands.site.backup import recover_command

    recover_command(
        home=home,
        officer_key_path=officer_key,
        ledger_id=ledger,
        last_index=index,
        last_hash=head,
        lost_charges=lost_charges,
        lost_epsilon=lost_epsilon,
        drop_cosigner=drop_cosigner,
        json=json,
    )


@key_app.command("new")
def key_new(
    file: Annotated[Path, typer.Argument(help="The file to write")],
    protect: Annotated[bool, typer.Option("--protect", help="With a passphrase")] = False,
    json: JsonOption = False,
) -> None:
    """Make a key, for an officer or a second person."""
    from pipeline.cli.commands.site.backup import create_key_command

    create_key_command(file, protect, json)


@key_app.command("officer")
def key_officer(
    home: HomeArgument,
    old: Annotated[Path, typer.Option(help="The officer's key until now")],
    new: Annotated[Path, typer.Option(help="The new one; made there if there is none")],
) -> None:
    """A new key for the officer."""
    from pipeline.cli.commands.site.backup import replace_officer_key_command

    replace_officer_key_command(home, old, new)
