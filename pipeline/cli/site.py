"""`hemofed site ...`: a hospital's commands. The code of a command is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import DataOption, JsonOption, OverridesOption, StudyArgument

site_app = typer.Typer(help="Check images, approve studies and take part as a hospital.", no_args_is_help=True)
ledger_app = typer.Typer(help="Show, verify, export and recover a site's privacy ledger.", no_args_is_help=True)
site_app.add_typer(ledger_app, name="ledger")
key_app = typer.Typer(
    help="Create, replace and revoke keys of a site, its officer and a cosigner.", no_args_is_help=True
)
site_app.add_typer(key_app, name="key")

HomeArgument = Annotated[Path, typer.Argument(help="Site's home folder; of a simulated site: RUN/homes/SITE")]
OptionalOfficerKeyOption = Annotated[Path | None, typer.Option("--officer", help="Officer's private key")]
OfficerKeyOption = Annotated[Path, typer.Option("--officer", help="Officer's private key")]
CosignerKeyOption = Annotated[
    Path | None, typer.Option("--cosigner", help="Cosigner's private key, if approvals require one")
]


@site_app.command("preview")
def site_preview(
    study: StudyArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write")] = Path("preview.html"),
    overrides: OverridesOption = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Write a page with each site's images as it sees them, before any training."""
    from pipeline.cli.commands.study import preview_command

    preview_command(study, overrides or [], data, out, json)


@site_app.command("init")
def site_init(
    home: HomeArgument,
    site: Annotated[str, typer.Option(help="Name of the site")],
    dataset: Annotated[str, typer.Option(help="Name of the data set, which cannot be changed later")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the data set, for all studies together")],
    delta: Annotated[float, typer.Option(help="Probability that the privacy loss exceeds epsilon")] = 1e-5,
    unit: Annotated[str, typer.Option(help="Privacy unit that the budget protects")] = "patient",
    data: Annotated[Path | None, typer.Option("--data", help="Folder of the site's images")] = None,
    simulate_site: Annotated[
        str | None, typer.Option("--simulate-site", help="Simulated site whose examples to use, in a rehearsal")
    ] = None,
    officer_key: OptionalOfficerKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Create a site's home: key, settings and privacy ledger."""
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
    patient: Annotated[str, typer.Argument(help="Patient (or other privacy unit) as named in the data")],
    reason: Annotated[str, typer.Option(help="Reason for the record, without names")] = "",
    json: JsonOption = False,
) -> None:
    """Record a patient's withdrawal; later runs do not read the patient's data."""
    from pipeline.cli.commands.site.ledger import exclude_patient_command

    exclude_patient_command(home, patient, reason, json)


@site_app.command("budget")
def site_budget(
    home: HomeArgument,
    epsilon: Annotated[float, typer.Argument(help="New epsilon budget")],
    officer_key: OfficerKeyOption,
    delta: Annotated[float | None, typer.Option(help="New delta; default: unchanged")] = None,
) -> None:
    """Change the privacy budget, with the officer's key."""
    from pipeline.cli.commands.site.ledger import set_budget_command

    set_budget_command(home, epsilon, delta, officer_key)


@ledger_app.command("show")
def ledger_show(home: HomeArgument, json: JsonOption = False) -> None:
    """Show what each study spent of the privacy budget, and what is left."""
    from pipeline.cli.commands.site.ledger import show_ledger_command

    show_ledger_command(home, json)


@ledger_app.command("verify")
def ledger_verify(
    ledger: Annotated[Path, typer.Argument(help="Home folder, ledger file or export")],
    anchor: Annotated[
        Path | None, typer.Option(help="Folder of the coordinator's receipts, to detect a truncated ledger")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Verify every hash and signature of a ledger."""
    from pipeline.cli.commands.site.ledger import verify_ledger_command

    verify_ledger_command(ledger, anchor, json)


@ledger_app.command("export")
def ledger_export(
    ledger: Annotated[Path, typer.Argument(help="Home folder or ledger file")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write")] = Path("ledger.json"),
) -> None:
    """Export a ledger to one file that an auditor can verify anywhere."""
    from pipeline.cli.commands.site.ledger import export_ledger_command

    export_ledger_command(ledger, out)


@key_app.command("rotate")
def key_rotate(home: HomeArgument, officer_key: OptionalOfficerKeyOption = None) -> None:
    """Replace the site's key, signed by the old key or, if that is lost, by the officer."""
    from pipeline.cli.commands.site.ledger import rotate_key_command

    rotate_key_command(home, officer_key)


@key_app.command("revoke")
def key_revoke(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    after: Annotated[int, typer.Option(help="Index of the last trusted entry")],
    reason: Annotated[str, typer.Option(help="Reason for the record")] = "",
) -> None:
    """Revoke a stolen site key, and void the entries that it signed since."""
    from pipeline.cli.commands.site.ledger import revoke_key_command

    revoke_key_command(home, officer_key, after, reason)


@site_app.command("check")
def site_check(
    home: HomeArgument,
    study: Annotated[
        str | None, typer.Option(help="Study file, packaged study or offered run; default: the newest offer")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the images; default: that in site.toml")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write; default: HOME/check.html")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check the site's images on this machine: counts, quality, duplicates, identifying information."""
    from pipeline.cli.commands.site.check import check_command

    check_command(home, study, data, out, json)


@site_app.command("offers")
def site_offers(home: HomeArgument, json: JsonOption = False) -> None:
    """List offered studies and the state of their approvals."""
    from pipeline.cli.commands.site.approve import offers_command

    offers_command(home, json)


@site_app.command("approve")
def site_approve(
    home: HomeArgument,
    run: Annotated[str | None, typer.Argument(help="Run or offer digest; default: list the offers")] = None,
    officer_key: OptionalOfficerKeyOption = None,
    cosigner_key: CosignerKeyOption = None,
    days: Annotated[int, typer.Option(min=1, max=730, help="Validity of the approval in days")] = 90,
    assume_yes: Annotated[bool, typer.Option("--yes", help="Approve without confirmation")] = False,
    json: JsonOption = False,
) -> None:
    """Show an offered study in plain words, and approve it with the officer's key."""
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
    run: Annotated[str, typer.Argument(help="Run or offer digest")],
    officer_key: OptionalOfficerKeyOption = None,
    reason: Annotated[str, typer.Option(help="Reason for the record")] = "",
    json: JsonOption = False,
) -> None:
    """Revoke an approval from the next message on; the site's own key is enough."""
    from pipeline.cli.commands.site.approve import revoke_approval_command

    revoke_approval_command(home, run, officer_key, reason, json)


@site_app.command("require-cosigner")
def site_require_cosigner(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    cosigner: Annotated[
        str | None, typer.Option(help="Public key or key file of the cosigner; default: no cosigner")
    ] = None,
    current_cosigner: Annotated[Path | None, typer.Option(help="Private key of the current cosigner")] = None,
) -> None:
    """Require a cosigner for approvals, or stop requiring one."""
    from pipeline.cli.commands.site.approve import require_cosigner_command

    require_cosigner_command(home, officer_key, cosigner, current_cosigner)


@site_app.command("join")
def site_join(
    home: HomeArgument,
    coordinator: Annotated[
        str | None, typer.Option(help="Coordinator's address, e.g. https://fl.example.org:8443")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Name of this site at the coordinator; default: the home's")] = None,
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a systemd unit and exit")] = False,
    once: Annotated[bool, typer.Option("--once", help="Enrol, fetch offers and models once, and exit")] = False,
    json: JsonOption = False,
) -> None:
    """Enrol with an invitation (typed, or HEMOFED_INVITATION), then run the site's agent until stopped."""
    from pipeline.cli.commands.site.join import join_command

    join_command(home, coordinator, site, systemd, once, json)


@site_app.command("status")
def site_status(home: HomeArgument, json: JsonOption = False) -> None:
    """Show the agent's state, the offers and the spent budget."""
    from pipeline.cli.commands.site.join import status_command

    status_command(home, json)


@site_app.command("leave")
def site_leave(home: HomeArgument, json: JsonOption = False) -> None:
    """Leave the federation; keys, ledger and models are kept."""
    from pipeline.cli.commands.site.join import leave_command

    leave_command(home, json)


@site_app.command("backup")
def site_backup(
    home: HomeArgument,
    file: Annotated[Path, typer.Argument(help="File to write")],
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt with a passphrase: typed, or HEMOFED_PASSPHRASE")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Back up a site's home to one file, without images."""
    from pipeline.cli.commands.site.backup import backup_command

    backup_command(home, file, encrypt, json)


@site_app.command("restore")
def site_restore(
    file: Annotated[Path, typer.Argument(help="Backup file")], home: HomeArgument, json: JsonOption = False
) -> None:
    """Restore a site's home from a backup; a newer ledger in the home is kept."""
    from pipeline.cli.commands.site.backup import restore_command

    restore_command(file, home, json)


@ledger_app.command("recover")
def ledger_recover(
    home: HomeArgument,
    officer_key: OfficerKeyOption,
    ledger: Annotated[str | None, typer.Option(help="Id of the old ledger, from the coordinator's message")] = None,
    index: Annotated[
        int | None, typer.Option(help="Index of the old ledger's last entry, from the coordinator's message")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Hash of the old ledger's last entry, from the coordinator's message")
    ] = None,
    lost_charges: Annotated[
        int | None, typer.Option(min=0, help="Number of charges among the lost entries; default: the most possible")
    ] = None,
    lost_epsilon: Annotated[
        float, typer.Option(min=0, help="Epsilon spent by studies that are missing in this copy")
    ] = 0.0,
    drop_cosigner: Annotated[bool, typer.Option("--drop-cosigner", help="Remove a cosigner whose key is lost")] = False,
    json: JsonOption = False,
) -> None:
    """Open a new ledger that continues an outdated copy, when the coordinator refuses that copy."""
    from pipeline.cli.commands.site.backup import recover_ledger_command

    recover_ledger_command(
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
    file: Annotated[Path, typer.Argument(help="File to write")],
    protect: Annotated[bool, typer.Option("--protect", help="Encrypt the key with a passphrase")] = False,
    json: JsonOption = False,
) -> None:
    """Create a key for an officer or a cosigner."""
    from pipeline.cli.commands.site.backup import create_key_command

    create_key_command(file, protect, json)


@key_app.command("officer")
def key_officer(
    home: HomeArgument,
    old: Annotated[Path, typer.Option(help="Officer's current private key")],
    new: Annotated[Path, typer.Option(help="Officer's new private key; created if the file does not exist")],
) -> None:
    """Replace the officer's key."""
    from pipeline.cli.commands.site.backup import replace_officer_key_command

    replace_officer_key_command(home, old, new)
