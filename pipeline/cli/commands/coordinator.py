"""`hemofed coordinator init | run | status | begin | pause | resume | stop | invite | remove | users`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from pipeline.cli.output import Rounds, area, console, errors, percent, print_json, table
from pipeline.cli.passphrases import passphrase
from pipeline.core.errors import BadRun, BadService
from pipeline.ops.encrypted_archive import is_sealed
from pipeline.reports.document.formatting import count_of, size
from pipeline.service.runtime.client import Client, connect
from pipeline.service.runtime.run_states import OVER
from pipeline.service.storage.backup import backup, restore
from pipeline.service.storage.home import CoordinatorHome

PAUSE = 2.0  # seconds before a lost connection is tried again


def init_command(home: Path, name: str, host: str, port: int, json: bool) -> None:
    from privacy.ledger import keys

    made = CoordinatorHome.create(home, name, host, port)
    about = {"home": str(home), "url": made.url, "fingerprint": keys.fingerprint(keys.public_bytes(made.key)), "token": str(made.token)}  # fmt: skip
    if json:
        print_json(about)
        return
    console.print(
        f"{name}: {home}\nfingerprint of its key, to be read to sites: {about['fingerprint']}", soft_wrap=True
    )
    console.print(f"the lead's token for the dashboard: {made.token}", soft_wrap=True)
    console.print(f"start it with: hemofed coordinator serve {home}\nthen: hemofed coordinator invite SITE --home {home}", soft_wrap=True)  # fmt: skip


def run_command(
    study: str, sets: list[str], home: Path | None, sites: list[str], fewest: int | None, follow: bool, json: bool
) -> None:
    """The study is read here first, so that a typo is told with its line; the service reads it again."""
    from pipeline.study.schema import load_study
    from pipeline.study.toml_file import find_study, parse_override, to_toml

    read = load_study(find_study(study), dict(map(parse_override, sets)))
    with connect(home) as client:
        run = client.post("/api/runs", {"study": to_toml(read.dump()), "sites": sites or None, "fewest": fewest})
        if not json:
            names = ", ".join(site["site"] for site in run["sites"])
            console.print(f"{run['id']} is offered to {names}; their officers approve it: hemofed site approve", soft_wrap=True)  # fmt: skip
        if follow:
            run = _follow(client, run, quiet=json)
    if json:
        print_json(run)
    elif follow:
        _say_end(run)


def status_command(home: Path | None, run: str | None, json: bool) -> None:
    with connect(home) as client:
        if run is not None:
            one = client.get(f"/api/runs/{run}")
            print_json(one) if json else _show_run(one)
            return
        runs, sites = client.get("/api/runs"), client.get("/api/sites")
    if json:
        print_json({"runs": runs, "sites": sites})
        return
    shown = [[s["site"], _where(s), _time(s["last_seen"]), s["version"], s["fingerprint"]] for s in sites]
    console.print(table(["site", "", "last seen (UTC)", "version", "key"], shown, "Sites", words=5))
    listed = [
        [r["id"], r["state"], r["strategy"], f"{r['round']}/{r['rounds']}", _ready(r), _headline(r), r["reason"]]
        for r in runs
    ]
    console.print(table(["run", "state", "strategy", "round", "approved", "score", ""], listed, "Runs", words=7))


def act_command(home: Path | None, run: str, action: str, json: bool) -> None:
    """`action`: begin, pause, resume or stop."""
    with connect(home) as client:
        told = client.post(f"/api/runs/{run}/{action}")
    print_json(told) if json else console.print(f"{run} is {told['state']}")


def invite_command(home: Path | None, site: str, hours: float, json: bool) -> None:
    with connect(home) as client:
        told = client.post(f"/api/sites/{site}/invite", {"hours": hours})
    if json:
        print_json(told | {"site": site})
        return
    console.print(f"{site} may enrol once until {_time(told['expires'])} UTC with this token:")
    console.print(told["token"], soft_wrap=True)


def remove_command(home: Path | None, site: str, json: bool) -> None:
    with connect(home) as client:
        told = client.post(f"/api/sites/{site}/remove")
    print_json(told) if json else console.print(f"{site} is removed; its credential is void")


def users_command(home: Path | None, add: str | None, role: str, revoke: str | None, json: bool) -> None:
    """The list, after what is to be done."""
    with connect(home) as client:
        made = client.post("/api/users", {"name": add, "role": role}) if add else None
        if revoke:
            client.post(f"/api/users/{revoke}/revoke")
        users = client.get("/api/users")
    if json:
        print_json({"users": users} | ({"made": made} if made else {}))
        return
    rows = [[u["name"], u["role"], _time(u["created"]), _time(u["revoked"])] for u in users]
    console.print(table(["user", "role", "since (UTC)", "revoked"], rows, words=4))
    if made:
        console.print(f"token of {made['name']}, shown this once:\n{made['token']}", soft_wrap=True)


def _follow(client: Client, run: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Until it is over. The run does not need us: Ctrl-C, or a service that restarts, only interrupts the watching."""
    last, said = -1, ""
    try:
        with Rounds(run["name"], run["rounds"], quiet) as watch:
            while True:
                try:
                    for event in client.events(f"/api/runs/{run['id']}/events", last):
                        if event.name == "round":
                            last = event.data["round"]
                            watch(event.data)
                        elif event.name == "run":
                            said = _tell(event.data, said, quiet)
                        elif event.name == "end":
                            told: dict[str, Any] = client.get(f"/api/runs/{run['id']}")
                            return told
                except httpx.TransportError:
                    _tell({"state": "out of sight: the service does not answer; trying again"}, said, quiet)
                time.sleep(PAUSE)
    except KeyboardInterrupt:
        # not by rich: the interrupt may have struck inside its console, which then keeps what it is given
        sys.stderr.write(f"\n{run['id']} goes on. Look at it with: hemofed coordinator status {run['id']}\n")
        raise


def _tell(run: Mapping[str, Any], said: str, quiet: bool) -> str:
    """What changed beside the rounds."""
    waiting = [s["site"] for s in run.get("sites", []) if not s["approved"]] if run["state"] == "offered" else []
    missing = f", waiting for {', '.join(waiting)}" if waiting else ""
    now = f"{run['state']}{missing}" + (f": {run['reason']}" if run.get("reason") else "")
    if now != said and not quiet:
        errors.print(now, soft_wrap=True)
    return now


def _say_end(run: Mapping[str, Any]) -> None:
    if run["state"] == "failed":
        raise BadService(f"{run['id']} failed: {run['reason'] or 'the log says why'}")
    console.print(f"{run['id']} is {run['state']}; {_headline(run)}", soft_wrap=True)


def _show_run(run: Mapping[str, Any]) -> None:
    console.print(f"{run['id']}: {run['state']}" + (f" ({run['reason']})" if run["reason"] else ""), soft_wrap=True)
    for line in run["about"]:
        console.print(line, soft_wrap=True)
    rows = [[s["site"], _where(s), _time(s["approved"]), _time(s["expires"]), _time(s["withdrawn"])] for s in run["sites"]]  # fmt: skip
    console.print(table(["site", "", "approved (UTC)", "until", "withdrawn"], rows, words=5))
    live = run["live"] if run["state"] not in OVER else None
    doing = f", {live['phase']}: {len(live['answered'])} of {len(live['asked'])} sites have answered" if live else ""
    console.print(f"round {run['round']} of {run['rounds']}{doing}; {_headline(run)}", soft_wrap=True)


def _headline(run: Mapping[str, Any]) -> str:
    best = run["headline"]
    if best is None:
        return "no score yet"
    if best["metric"] == "positive_auroc":
        return f"{best['split']} AUROC {area(best['value'])}"
    return f"{best['split']} {best['metric']} {percent(best['value'])}"


def _ready(run: Mapping[str, Any]) -> str:
    return f"{sum(bool(s['approved'] and not s['withdrawn']) for s in run['sites'])}/{len(run['sites'])}"


def _where(site: Mapping[str, Any]) -> str:
    return "left" if site.get("left") else "connected" if site["connected"] else "away"


def _time(iso: str | None) -> str:
    return "–" if iso is None else iso[:19].replace("T", " ")


# `hemofed coordinator backup` and `coordinator restore`.


def backup_command(home: Path, file: Path, encrypt: bool, json: bool) -> None:
    made = backup(home, file, passphrase("the backup", new=True) if encrypt else None)
    if json:
        print_json(made | {"encrypted": encrypt})
        return
    console.print(f"written: {file} ({size(made['bytes'])})", soft_wrap=True)
    if not encrypt:
        console.print("It holds the federation's private keys and the lead's token in the clear: keep it where only its owner reads it, or use --encrypt.")  # fmt: skip


def restore_command(file: Path, home: Path, json: bool) -> None:
    if not file.is_file():
        raise BadRun(f"there is no backup {file}; name the file that `hemofed coordinator backup` wrote")
    made = restore(file, home, passphrase(str(file), new=False) if is_sealed(file) else None)
    if json:
        print_json(
            {"name": made.name, "made": made.made, "files": made.files, "database": made.database,
             "runs": list(made.runs), "receipts": made.receipts, "newer_receipts": made.newer}
        )  # fmt: skip
        return
    console.print(f"{made.name}: {count_of(made.files, 'file')} restored to {home}, as of {made.made[:19].replace('T', ' ')} UTC", soft_wrap=True)  # fmt: skip
    console.print(
        f"{count_of(len(made.runs), 'run')} and {count_of(made.receipts, 'receipt')} came from it; "
        + (
            f"{count_of(made.newer, 'receipt')} here were as new or newer, and stayed"
            if made.newer
            else "none was here"
        )
    )
    if not made.database:
        console.print("The database that was here is as new or newer, and stays.")
        return
    console.print(
        "Users revoked and sites removed since then count again: look at `hemofed coordinator users` and `coordinator "
        "status` before sites are let in. Open invitations are void; invite again."
    )
