"""`hemofed site join | status | leave`: a site's membership in a federation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.core.errors import HemofedError, RunFolderError, ServiceError
from sites.governance.home import SiteHome

INVITATION_VARIABLE = "HEMOFED_INVITATION"


def join_command(
    home: Path, coordinator_url: str | None, site: str | None, systemd: bool, once: bool, json: bool
) -> None:
    """Enrols the site unless it is enrolled already, then runs the agent until it is stopped."""
    from sites.agent.enrolment import enrol_site, has_membership, membership_summary

    site_home = SiteHome.open(home)
    site_name = site_home.ledger.state.opening.site
    if systemd:
        print_systemd_unit(home, site_name, json)
        return
    if not has_membership(home):
        if coordinator_url is None:
            raise RunFolderError(
                f"{home} is not enrolled with a coordinator yet; give its address: hemofed site join {home} --coordinator https://HOST:PORT"
            )
        membership = enrol_site(site_home, coordinator_url.rstrip("/"), site or site_name, _read_invitation())
        membership_info = membership_summary(membership)
        _print_line(
            f"{site_name} is enrolled with {membership_info['coordinator']}; fingerprint of its key: {membership_info['coordinator_key']}",
            json,
        )
    else:
        _check_same_membership(home, coordinator_url, site)
    os.environ.pop(INVITATION_VARIABLE, None)
    _run_agent(home, once, json)


def _check_same_membership(home: Path, coordinator_url: str | None, site: str | None) -> None:
    from sites.agent.enrolment import SiteMembership

    membership = SiteMembership.load(home)
    if coordinator_url is not None and coordinator_url.rstrip("/") != membership.url:
        raise RunFolderError(
            f"{home} is enrolled with {membership.url}; leave it with `hemofed site leave {home}` before joining another coordinator"
        )
    if site is not None and site != membership.site:
        raise RunFolderError(f"{home} is the home of {membership.site}, not of {site}")


def _read_invitation() -> str:
    """From the environment, a prompt or standard input; never from arguments, which other users can read."""
    if text := os.environ.get(INVITATION_VARIABLE):
        return text
    if sys.stdin.isatty():
        import getpass

        return getpass.getpass("invitation (from the study lead, not shown): ")
    return sys.stdin.readline()


def _run_agent(home: Path, once: bool, json: bool) -> None:
    from sites.agent.agent import SiteAgent

    with _catch_stop_signals() as stop_event:
        agent = SiteAgent(home, print_line=lambda line: _print_line(line, json))
        if not once:
            _print_line(f"the agent of {agent.status.site} is running; stop it with Ctrl-C", json)
        agent.run(stop_event, once)
    if once and json:
        print_json(_collect_status(home))


@contextmanager
def _catch_stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. A second signal has no effect while child processes are being stopped."""
    stop_event = threading.Event()
    previous_handlers = {
        number: signal.signal(number, lambda *_: stop_event.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop_event
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _print_line(text: str, json: bool) -> None:
    (stderr_console if json else console).print(f"{datetime.now(UTC):%H:%M:%S}  {text}", soft_wrap=True)


def print_systemd_unit(home: Path, site: str, json: bool) -> None:
    from sites.agent.systemd_unit import UNIT_NAME, render_unit
    from sites.governance.settings import SiteSettings

    text = render_unit(home, site, max_cores=SiteSettings.load(home).limits.max_cores)
    if json:
        print_json({"name": UNIT_NAME, "text": text})
        return
    sys.stdout.write(text)
    stderr_console.print(
        f"Write this to /etc/systemd/system/{UNIT_NAME}, then run: systemctl enable --now {UNIT_NAME}", soft_wrap=True
    )


def status_command(home: Path, json: bool) -> None:
    status = _collect_status(home)
    if json:
        print_json(status)
        return
    agent, ledger = status["agent"], status["ledger"]
    rows = [[name, text] for name, text in _status_rows(agent)]
    console.print(build_table(["", ""], rows, f"{ledger['site']}: {ledger['dataset_id']}", num_text_columns=2))
    console.print(
        f"spent epsilon {ledger['spent']:.4g} of {ledger['budget']:g} at delta {ledger['delta']:g} per {ledger['unit']}"
    )
    if status["offers"]:
        offers = [[offer["run"], offer["state"], offer["reason"]] for offer in status["offers"]]
        console.print(build_table(["offered", "approval", "reason"], offers, num_text_columns=3))
    for text in agent.get("warnings", []):
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)


def _collect_status(home: Path) -> dict[str, Any]:
    from pipeline.cli.commands.site.ledger import summarize_ledger
    from sites.agent.enrolment import SiteMembership, has_membership, membership_summary
    from sites.agent.status import is_agent_running, read_status
    from sites.governance.approvals import check_approval
    from sites.governance.offers import list_offers

    site_home = SiteHome.open(home)
    membership = membership_summary(SiteMembership.load(home)) if has_membership(home) else None
    agent_status = read_status(home) if membership else None
    offers_with_status = (
        [(offer, check_approval(site_home, offer)) for offer in list_offers(home)] if membership else []
    )
    offers = [
        {
            "run": offer.run,
            "offer": offer.digest,
            "version": offer.version,
            "state": status.state,
            "reason": status.reason,
        }
        for offer, status in offers_with_status
    ]
    return {
        "membership": membership,
        "agent": asdict(agent_status) | {"running": is_agent_running(agent_status)}
        if agent_status
        else {"running": False},
        "ledger": summarize_ledger(site_home.ledger),
        "offers": offers,
        "models": sorted(p.relative_to(home).as_posix() for p in (home / "models").rglob("*.safetensors")),
    }


def _status_rows(agent: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "url" not in agent:
        yield "agent", "running" if agent["running"] else "never started"
        return
    yield (
        "agent",
        f"running, process {agent['pid']}" if agent["running"] else f"not running (last status {agent['written_at']})",
    )
    yield "coordinator", f"{agent['coordinator']}, {agent['url']}"
    if agent["running"]:
        yield "connection", agent["state"] + (f" since {agent['connected_since']}" if agent["connected_since"] else "")
        yield "run", agent["run"] or "none"
        yield "FLARE client", agent["flare"]
    if agent["problem"]:
        yield "problem", agent["problem"]
    yield "last heartbeat", agent["last_heartbeat"] or "never"
    yield "disk", f"{agent['disk_free_gb']:g} GB free"
    yield "versions", ", ".join(f"{name} {number}" for name, number in agent["versions"].items())


def leave_command(home: Path, json: bool) -> None:
    """Deletes the membership, also if the coordinator cannot be reached. Keys, ledger and models are kept."""
    from sites.agent.agent import exclusive_agent_lock
    from sites.agent.coordinator_client import CoordinatorClient
    from sites.agent.enrolment import SiteMembership, delete_membership
    from sites.agent.status import delete_status

    membership, failure = SiteMembership.load(home), ""
    with exclusive_agent_lock(home):
        try:
            with CoordinatorClient(membership) as coordinator_client:
                coordinator_client.leave_federation()
        except HemofedError as error:
            failure = str(error)
        delete_membership(home)
        delete_status(home)
    if json:
        print_json({"left": membership.url, "told": not failure, "why": failure})
        return
    console.print(
        f"{membership.site} has left {membership.coordinator.name}; ledger, keys and models are still in {home}",
        soft_wrap=True,
    )
    if failure:
        raise ServiceError(
            f"the coordinator could not be notified ({failure}); ask the study lead to remove the site there"
        )
