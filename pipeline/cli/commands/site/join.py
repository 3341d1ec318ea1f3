"""`hemofed site join`, `site status` and `site leave`: a site's life in a federation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.cli.output import console, errors, print_json, table
from pipeline.core.errors import BadRun, BadService, HemofedError
from sites.governance.home import Home

INVITATION = "HEMOFED_INVITATION"


def join_command(
    home: Path, coordinator_url: str | None, site: str | None, systemd: bool, once: bool, json: bool
) -> None:
    """Enrols if the home is in no federation yet, then runs the agent until it is stopped."""
    from sites.agent.enrolment import about, enrol, joined

    own = Home.open(home)
    name = own.ledger.standing.opening.site
    if systemd:
        print_unit(home, name, json)
        return
    if not joined(home):
        if coordinator_url is None:
            raise BadRun(
                f"{home} belongs to no coordinator yet; name it: hemofed site join {home} --coordinator https://HOST:PORT"
            )
        member = enrol(own, coordinator_url.rstrip("/"), site or name, _invitation())
        shown = about(member)
        _line(
            f"{name} is enrolled with {shown['coordinator']}; fingerprint of its key: {shown['coordinator_key']}", json
        )
    else:
        _same(home, coordinator_url, site)
    os.environ.pop(INVITATION, None)
    _run(home, once, json)


def _same(home: Path, url: str | None, site: str | None) -> None:
    from sites.agent.enrolment import Membership

    member = Membership.load(home)
    if url is not None and url.rstrip("/") != member.url:
        raise BadRun(
            f"{home} belongs to {member.url}; leave it with `hemofed site leave {home}` before joining another"
        )
    if site is not None and site != member.site:
        raise BadRun(f"{home} is the home of {member.site}, not of {site}")


def _invitation() -> str:
    """Never on the command line, where others could read it."""
    if text := os.environ.get(INVITATION):
        return text
    if sys.stdin.isatty():
        import getpass

        return getpass.getpass("invitation (from the study lead, not shown): ")
    return sys.stdin.readline()


def _run(home: Path, once: bool, json: bool) -> None:
    from sites.agent.agent import Agent

    with _signals() as stop:
        agent = Agent(home, say=lambda line: _line(line, json))
        if not once:
            _line(f"the agent of {agent.status.site} runs; stop it with Ctrl-C", json)
        agent.run(stop, once)
    if once and json:
        print_json(_about(home))


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT. A second one changes nothing: the children are being ended."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(text: str, json: bool) -> None:
    (errors if json else console).print(f"{datetime.now(UTC):%H:%M:%S}  {text}", soft_wrap=True)


def print_unit(home: Path, site: str, json: bool) -> None:
    from sites.agent.systemd_unit import NAME, unit_text
    from sites.governance.settings import Settings

    text = unit_text(home, site, cores=Settings.load(home).limits.cores)
    if json:
        print_json({"name": NAME, "text": text})
        return
    sys.stdout.write(text)
    errors.print(f"Write this to /etc/systemd/system/{NAME}, then: systemctl enable --now {NAME}", soft_wrap=True)


def status_command(home: Path, json: bool) -> None:
    about = _about(home)
    if json:
        print_json(about)
        return
    agent, ledger = about["agent"], about["ledger"]
    rows = [[name, text] for name, text in _rows(agent)]
    console.print(table(["", ""], rows, f"{ledger['site']}: {ledger['dataset_id']}", words=2))
    console.print(
        f"spent epsilon {ledger['spent']:.4g} of {ledger['budget']:g} at delta {ledger['delta']:g} per {ledger['unit']}"
    )
    if about["offers"]:
        offers = [[offer["run"], offer["state"], offer["reason"]] for offer in about["offers"]]
        console.print(table(["offered", "approval", ""], offers, words=3))
    for text in agent.get("warnings", []):
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)


def _about(home: Path) -> dict[str, Any]:
    from pipeline.cli.commands.site.ledger import summary
    from sites.agent.enrolment import Membership, about, joined
    from sites.agent.status import read_status, runs_now
    from sites.governance.approvals import standing
    from sites.governance.offers import offers_in

    own = Home.open(home)
    member = about(Membership.load(home)) if joined(home) else None
    said = read_status(home) or {}
    verdicts = [(offer, standing(own, offer)) for offer in offers_in(home)] if member else []
    offers = [
        {"run": o.run, "offer": o.digest, "version": o.version, "state": v.state, "reason": v.reason}
        for o, v in verdicts
    ]
    return {
        "membership": member,
        "agent": said | {"running": runs_now(said)} if member else {"running": False},
        "ledger": summary(own.ledger),
        "offers": offers,
        "models": sorted(p.relative_to(home).as_posix() for p in (home / "models").rglob("*.safetensors")),
    }


def _rows(agent: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "url" not in agent:
        yield "agent", "never ran" if not agent["running"] else "runs"
        return
    yield "agent", f"runs, process {agent['pid']}" if agent["running"] else f"does not run (last seen {agent['at']})"
    yield "coordinator", f"{agent['coordinator']}, {agent['url']}"
    if agent["running"]:
        yield "connection", agent["state"] + (f" since {agent['connected_since']}" if agent["connected_since"] else "")
        yield "run", agent["run"] or "none"
        yield "FLARE's client", agent["flare"]
    if agent["problem"]:
        yield "problem", agent["problem"]
    yield "last beat", agent["last_beat"] or "never"
    yield "disk", f"{agent['disk_free_gb']:g} GB free"
    yield "versions", ", ".join(f"{name} {number}" for name, number in agent["versions"].items())


def leave_command(home: Path, json: bool) -> None:
    """Keys, ledger and models stay: they are the site's."""
    from sites.agent.agent import alone
    from sites.agent.coordinator_client import Link
    from sites.agent.enrolment import Membership, forget

    member, why = Membership.load(home), ""
    with alone(home):
        try:
            with Link(member) as link:
                link.leave()
        except HemofedError as error:
            why = str(error)
        forget(home)
        (home / "status.json").unlink(missing_ok=True)
    if json:
        print_json({"left": member.url, "told": not why, "why": why})
        return
    console.print(
        f"{member.site} has left {member.coordinator.name}; ledger, keys and models stay in {home}", soft_wrap=True
    )
    if why:
        raise BadService(f"the coordinator could not be told ({why}); tell the lead, who removes the site there")
