"""`hemofed demo hospitals`: a whole federation on one machine, through the same commands that hospitals type."""

from __future__ import annotations

import contextlib
import json as texts
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.commands.output import console, print_json
from pipeline.errors import BadService
from pipeline.processes import Kept, sweep
from pipeline.service.client import connect
from pipeline.service.serve import free_ports

SITES = ("site-01", "site-02", "site-03")
SECONDS = 60.0  # for anything but the study itself


def hospitals_command(study: str, sets: list[str], keep: Path | None, stay: bool, json: bool) -> None:
    say: Callable[[str], None] = (lambda text: None) if json else (lambda text: console.print(text, soft_wrap=True))
    with _folder(keep) as folder, _swept(f"demo-{folder.resolve()}") as mark:
        home = folder / "coordinator"
        _told("coordinator", "init", home, "--port", free_ports(1)[0], "--name", "demo")
        kept = _start(mark, folder, "coordinator", "serve", home, "--bind", "127.0.0.1")
        _until(lambda: _answers(home), kept, "the coordinator")
        url, token = _url(home), (home / "lead.token").read_text().strip()
        say(f"coordinator and dashboard: {url}\nthe lead's token for it: {token}")
        for site in SITES:
            _hospital(mark, folder, home, site, url)
            say(f"{site}: has made its keys, enrolled, and its agent is running")
        flags = [part for one in sets for part in ("--set", one)]
        run = str(_told("coordinator", "run", study, "--home", home, *flags)["id"])
        say(f"{run} is offered; each site's officer reads it in plain words and approves")
        for site in SITES:
            place = folder / site
            _until(lambda place=place: any((place / "offers").glob("*.json")), kept, f"the offer at {site}")  # type: ignore[misc]
            _told("site", "approve", place, run, "--officer", place / "officer.pem", "--yes")
        told = _watch(home, run, say)
        ledgers = {site: _told("site", "ledger", "verify", folder / site)["ok"] for site in SITES}
        _until(
            lambda: all(any((folder / site / "models").rglob("*.safetensors")) for site in SITES), kept, "the models"
        )
        if json:
            print_json(told | {"ledgers": ledgers, "folder": str(folder) if keep else None})
        else:
            console.print(
                f"{run} is {told['state']}; the model has reached all three hospitals, and their ledgers verify"
            )
        if stay and not json:
            console.print(f"the dashboard stays at {url} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)


def _hospital(mark: str, folder: Path, coordinator: Path, site: str, url: str) -> None:
    home = folder / site
    _told("site", "init", home, "--site", site, "--dataset", f"{site}-rendered", "--epsilon", 8, "--plays", site)
    invitation = str(_told("coordinator", "invite", site, "--home", coordinator)["token"])
    _start(mark, folder, "site", "join", home, "--coordinator", url, invited=invitation)
    _until(lambda: (home / "membership.json").exists(), None, f"{site} to enrol")


def _watch(home: Path, run: str, say: Callable[[str], None]) -> dict[str, Any]:
    last, state = -1, ""
    with connect(home) as client:
        while True:
            told: dict[str, Any] = client.get(f"/api/runs/{run}")
            if told["state"] != state:
                state = told["state"]
                say(f"{run}: {state}" + (f" ({told['reason']})" if told["reason"] else ""))
            if told["round"] is not None and told["round"] > last and told["headline"]:
                last = told["round"]
                best = told["headline"]
                say(f"  round {last} of {told['rounds']}: {best['split']} {best['metric']} {best['value']:.4f}")
            if state in ("finished", "failed", "stopped"):
                break
            time.sleep(0.5)
    if state != "finished":
        raise BadService(f"{run} {state}: {told['reason']}")
    return told


def _command(*parts: object) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", *map(str, parts)]


def _told(*parts: object) -> dict[str, Any]:
    """What a command of ours prints as JSON."""
    done = subprocess.run(_command(*parts, "--json"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadService(f"hemofed {' '.join(map(str, parts))}: {done.stderr.strip()}")
    found: dict[str, Any] = texts.loads(done.stdout)
    return found


def _start(mark: str, folder: Path, *parts: object, invited: str = "") -> Kept:
    """The invitation goes through the environment: arguments can be read by everybody on the machine."""
    env = {**os.environ, **({"HEMOFED_INVITATION": invited} if invited else {})}
    return Kept.start(_command(*parts), folder, env, folder / f"{Path(str(parts[2])).name}.log", mark)


def _answers(home: Path) -> bool:
    with contextlib.suppress(BadService), connect(home) as client:
        return bool(client.get("/health"))
    return False


def _url(home: Path) -> str:
    from pipeline.service.home import CoordinatorHome

    return CoordinatorHome.open(home).url


def _until(what: Callable[[], bool], child: Kept | None, words: str) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        if child is not None and not child.alive:
            raise BadService(f"the coordinator has ended while we waited for {words}; see {child.log}")
        if time.monotonic() > end:
            raise BadService(f"waited {SECONDS:.0f} s for {words} in vain")
        time.sleep(0.2)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="hemofed-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _swept(mark: str) -> Iterator[str]:
    try:
        yield mark
    finally:
        sweep(mark)
