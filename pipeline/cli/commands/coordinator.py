"""`hemofed coordinator init | run | status | begin | pause | resume | stop | invite | remove | users | backup | restore`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from pipeline.cli.output import (
    SCORE_DIGITS,
    RoundProgressTable,
    build_table,
    console,
    print_json,
    short_metric_name,
    stderr_console,
)
from pipeline.cli.passphrases import read_passphrase
from pipeline.core.errors import RunFolderError, ServiceError
from pipeline.ops.encrypted_archive import is_encrypted
from pipeline.reports.document.formatting import UNDEFINED_TEXT, format_bytes, format_count, format_score
from pipeline.service.runtime.client import ApiClient, connect
from pipeline.service.runtime.run_states import TERMINAL_STATES
from pipeline.service.storage.expected_officers import expect_officer
from pipeline.service.storage.home import CoordinatorHome

RECONNECT_SECONDS = 2.0


def init_command(home: Path, name: str, host: str, port: int, json: bool) -> None:
    from privacy.ledger import keys

    coordinator_home = CoordinatorHome.create(home, name, host, port)
    home_info = {
        "home": str(home),
        "url": coordinator_home.url,
        "fingerprint": keys.fingerprint(keys.public_bytes(coordinator_home.signing_key)),
        "token": str(coordinator_home.token_path),
    }
    if json:
        print_json(home_info)
        return
    console.print(
        f"{name}: {home}\nfingerprint of its key, for the sites to compare: {home_info['fingerprint']}", soft_wrap=True
    )
    console.print(f"the lead's token for the dashboard: {coordinator_home.token_path}", soft_wrap=True)
    console.print(
        f"start it with: hemofed coordinator serve {home}\nthen: hemofed coordinator invite SITE --home {home}",
        soft_wrap=True,
    )


def run_command(
    study: str,
    overrides: list[str],
    home: Path | None,
    sites: list[str],
    min_sites: int | None,
    follow: bool,
    json: bool,
) -> None:
    """Reads the study before sending it, so that errors name the line of the file; the service reads it again."""
    from pipeline.study.toml_file import find_study, load_study, parse_override, to_toml

    resolved_study = load_study(find_study(study), dict(map(parse_override, overrides)))
    with connect(home) as client:
        run = client.post(
            "/api/runs", {"study": to_toml(resolved_study.to_dict()), "sites": sites or None, "min_sites": min_sites}
        )
        if not json:
            names = ", ".join(site["site"] for site in run["sites"])
            console.print(
                f"{run['id']} is offered to {names}; their officers can approve it: hemofed site approve",
                soft_wrap=True,
            )
        if follow:
            run = _follow_run(client, run, quiet=json)
    if json:
        print_json(run)
    elif follow:
        _print_outcome(run)


def status_command(home: Path | None, run: str | None, json: bool) -> None:
    with connect(home) as client:
        if run is not None:
            run_info = client.get(f"/api/runs/{run}")
            print_json(run_info) if json else _print_run(run_info)
            return
        runs, sites = client.get("/api/runs"), client.get("/api/sites")
    if json:
        print_json({"runs": runs, "sites": sites})
        return
    site_rows = [
        [s["site"], _connection_state(s), _format_time(s["last_seen"]), s["version"], s["fingerprint"]] for s in sites
    ]
    console.print(
        build_table(["site", "state", "last seen (UTC)", "version", "key"], site_rows, "Sites", num_text_columns=5)
    )
    run_rows = [
        [
            r["id"],
            r["state"],
            r["strategy"],
            f"{r['round']}/{r['rounds']}",
            _format_approvals(r),
            _format_headline(r),
            r["reason"],
        ]
        for r in runs
    ]
    console.print(
        build_table(
            ["run", "state", "strategy", "round", "approved", "score", "reason"], run_rows, "Runs", num_text_columns=7
        )
    )


def action_command(home: Path | None, run: str, action: str, json: bool) -> None:
    """`action`: begin, pause, resume or stop."""
    with connect(home) as client:
        reply = client.post(f"/api/runs/{run}/{action}")
    print_json(reply) if json else console.print(f"{run} is {reply['state']}")


def invite_command(home: Path | None, site: str, hours: float, json: bool) -> None:
    with connect(home) as client:
        reply = client.post(f"/api/sites/{site}/invite", {"hours": hours})
    if json:
        print_json(reply | {"site": site})
        return
    console.print(f"{site} may enrol once until {_format_time(reply['expires'])} UTC with this token:")
    console.print(reply["token"], soft_wrap=True)


def remove_command(home: Path | None, site: str, json: bool) -> None:
    with connect(home) as client:
        reply = client.post(f"/api/sites/{site}/remove")
    print_json(reply) if json else console.print(f"{site} is removed, and its credential is void")


def users_command(
    home: Path | None, new_user_name: str | None, role: str, revoked_user_name: str | None, json: bool
) -> None:
    """Adds and revokes users as requested, then prints the list."""
    with connect(home) as client:
        new_user = client.post("/api/users", {"name": new_user_name, "role": role}) if new_user_name else None
        if revoked_user_name:
            client.post(f"/api/users/{revoked_user_name}/revoke")
        users = client.get("/api/users")
    if json:
        print_json({"users": users} | ({"made": new_user} if new_user else {}))
        return
    rows = [[u["name"], u["role"], _format_time(u["created"]), _format_time(u["revoked"])] for u in users]
    console.print(build_table(["user", "role", "since (UTC)", "revoked"], rows, num_text_columns=4))
    if new_user:
        console.print(f"token of {new_user['name']}, shown this once:\n{new_user['token']}", soft_wrap=True)


def _follow_run(client: ApiClient, run: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Prints progress until the run ends. Ctrl-C and a restart of the service interrupt only the display, not the run."""
    from pipeline.records.round_record import RoundRecord

    last_round, last_status = -1, ""
    try:
        with RoundProgressTable(run["name"], run["rounds"], quiet) as progress_table:
            while True:
                try:
                    for event in client.stream_events(f"/api/runs/{run['id']}/events", last_round):
                        if event.name == "round":
                            record = RoundRecord.model_validate(event.data)
                            last_round = record.round
                            progress_table(record)
                        elif event.name == "run":
                            last_status = _print_status_change(event.data, last_status, quiet)
                        elif event.name == "end":
                            final_run: dict[str, Any] = client.get(f"/api/runs/{run['id']}")
                            return final_run
                except httpx.TransportError:
                    _print_status_change(
                        {"state": "no connection: the service does not answer; trying again"}, last_status, quiet
                    )
                time.sleep(RECONNECT_SECONDS)
    except KeyboardInterrupt:
        # not with rich: the interrupt may have come inside its console, which would then hold the text back
        sys.stderr.write(f"\n{run['id']} continues. See its state with: hemofed coordinator status {run['id']}\n")
        raise


def _print_status_change(run: Mapping[str, Any], last_status: str, quiet: bool) -> str:
    """Prints the run's state if it changed, and returns it."""
    waiting_sites = [s["site"] for s in run.get("sites", []) if not s["approved"]] if run["state"] == "offered" else []
    waiting_text = f", waiting for {', '.join(waiting_sites)}" if waiting_sites else ""
    status = f"{run['state']}{waiting_text}" + (f": {run['reason']}" if run.get("reason") else "")
    if status != last_status and not quiet:
        stderr_console.print(status, soft_wrap=True)
    return status


def _print_outcome(run: Mapping[str, Any]) -> None:
    if run["state"] == "failed":
        raise ServiceError(f"{run['id']} failed: {run['reason'] or 'see the log'}")
    console.print(f"{run['id']} is {run['state']}; {_format_headline(run)}", soft_wrap=True)


def _print_run(run: Mapping[str, Any]) -> None:
    console.print(f"{run['id']}: {run['state']}" + (f" ({run['reason']})" if run["reason"] else ""), soft_wrap=True)
    for line in run["study_summary"]:
        console.print(line, soft_wrap=True)
    rows = [
        [
            s["site"],
            _connection_state(s),
            _format_time(s["approved"]),
            _format_time(s["expires"]),
            _format_time(s["revoked"]),
        ]
        for s in run["sites"]
    ]
    console.print(build_table(["site", "state", "approved (UTC)", "until", "revoked"], rows, num_text_columns=5))
    live = run["live"] if run["state"] not in TERMINAL_STATES else None
    phase_text = (
        f", {live['phase']}: {len(live['replied'])} of {len(live['requested'])} sites have replied" if live else ""
    )
    console.print(f"round {run['round']} of {run['rounds']}{phase_text}; {_format_headline(run)}", soft_wrap=True)


def _format_headline(run: Mapping[str, Any]) -> str:
    headline = run["headline"]
    if headline is None:
        return "no score yet"
    metric = headline["metric"]
    return f"{headline['split']} {short_metric_name(metric)} {format_score(metric, headline['value'], SCORE_DIGITS)}"


def _format_approvals(run: Mapping[str, Any]) -> str:
    return f"{sum(bool(s['approved'] and not s['revoked']) for s in run['sites'])}/{len(run['sites'])}"


def _connection_state(site: Mapping[str, Any]) -> str:
    return "left" if site.get("left") else "connected" if site["connected"] else "away"


def _format_time(iso: str | None) -> str:
    return UNDEFINED_TEXT if iso is None else iso[:19].replace("T", " ")


def expect_officer_command(home: Path, site: str, fingerprint: str, json: bool) -> None:
    recorded = expect_officer(CoordinatorHome.open(home), site, fingerprint)
    if json:
        print_json({"site": site, "officer": recorded})
        return
    console.print(f"{site}: a new ledger is countersigned if its officer has key {recorded}", soft_wrap=True)


def backup_command(home: Path, file: Path, encrypt: bool, json: bool) -> None:
    from pipeline.service.storage.backup import backup_home

    backup_info = backup_home(home, file, read_passphrase("the backup", confirm=True) if encrypt else None)
    if json:
        print_json(backup_info | {"encrypted": encrypt})
        return
    console.print(f"wrote {file} ({format_bytes(backup_info['bytes'])})", soft_wrap=True)
    if not encrypt:
        console.print(
            "It contains the federation's private keys and the lead's token unencrypted: store it where only its owner can read it, or use --encrypt."
        )


def restore_command(file: Path, home: Path, json: bool) -> None:
    from pipeline.service.storage.backup import restore_home

    if not file.is_file():
        raise RunFolderError(f"{file} does not exist; name a file that `hemofed coordinator backup` wrote")
    result = restore_home(file, home, read_passphrase(str(file), confirm=False) if is_encrypted(file) else None)
    if json:
        print_json(
            {
                "name": result.name,
                "made": result.backup_time,
                "files": result.num_files,
                "database": result.is_database_restored,
                "runs": list(result.restored_runs),
                "receipts": result.num_receipts,
                "newer_receipts": result.num_newer_receipts,
            }
        )
        return
    console.print(
        f"{result.name}: {format_count(result.num_files, 'file')} restored to {home}, as of {result.backup_time[:19].replace('T', ' ')} UTC",
        soft_wrap=True,
    )
    console.print(
        f"from the backup: {format_count(len(result.restored_runs), 'run')} and "
        f"{format_count(result.num_receipts, 'receipt')}; kept because as new or newer: "
        f"{format_count(result.num_newer_receipts, 'receipt')}"
    )
    if not result.is_database_restored:
        console.print("The existing database is as new or newer, and is kept.")
        return
    console.print(
        "Users revoked and sites removed after the backup are valid again: check `hemofed coordinator users` and "
        "`coordinator status` before sites connect. Open invitations are void; invite again."
    )
