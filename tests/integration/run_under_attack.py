"""A run under attack from all sides at once, and what can be seen of its processes meanwhile."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.engines.flare_server import write_kit
from pipeline.flare.provisioning import ADMIN_NAME, build_admin_kit, build_job
from pipeline.ops.certificates import CertificateAuthority
from pipeline.service.storage.accounts import EnrolmentRequest
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.study.offer import StudyOffer
from tests.integration.exposure import listening_of
from tests.integration.flare_attacker import ADMINISTRATOR, SERVER_JOB, attack, outcome
from tests.integration.flare_federation import Stage, until

EVIL = "touched"  # a file that code from outside would leave


@dataclass
class Storm:
    run: str
    ended: dict[str, str] = field(default_factory=dict)
    job: str = ""
    argv: dict[int, list[str]] = field(default_factory=dict)
    listening: list[tuple[int, str, int]] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set)  # by which FLARE's processes know each other
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def arm(stage: Stage) -> None:
    """Certificates for: members with a grudge, one that was removed, somebody of another federation, and whoever has the server's key."""
    assert stage.server is not None
    own, folder = CertificateAuthority.open(stage.home), stage.folder
    (folder / "abroad").mkdir()
    certified(folder / "foreign", CertificateAuthority.create(folder / "abroad", "abroad"), "site-01")
    certified(folder / "mallory", own, "mallory")
    certified(folder / "mole", own, "mole")
    certified(folder / "ousted", own, "ousted")
    store = CoordinatorStore(CoordinatorHome.open(stage.home).database_url)
    invitation = store.accounts.create_invitation("ousted", 1, "lead")[0]
    store.accounts.enrol_site(invitation, EnrolmentRequest("ousted", "0" * 64, "0" * 64, ""))
    store.record_departure("ousted", "lead", removed=True)
    store.close()
    write_kit(folder / "mole", build_admin_kit(stage.server.port))
    for name in ("crt", "key"):
        write_kit(
            folder / "insider", {f"startup/client.{name}": (stage.home / f"kit/startup/server.{name}").read_text()}
        )
    write_kit(folder / "insider", {"startup/rootCA.pem": own.pem})


def certified(kit: Path, authority: CertificateAuthority, name: str) -> None:
    made = authority.issue_client(name)
    papers = {"client.crt": made.certificate_pem, "client.key": made.key_pem, "rootCA.pem": authority.pem}
    write_kit(kit, {f"startup/{file}": text for file, text in papers.items()})


def weathered(stage: Stage, made: StudyOffer) -> Storm:
    """The run to its end; the attacks begin with its first round."""
    seen = Storm(made.run)

    def look() -> None:
        if not seen.job and (stage.home / "runs" / made.run / "rounds.jsonl").exists():
            _notice(stage, seen)
            seen.attacks = _attacked(stage, seen.job)

    seen.ended = stage.run(made, meanwhile=look)
    return seen


def _notice(stage: Stage, seen: Storm) -> None:
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if stage.mark in env.get("HEMOFED_MARK", ""):
                seen.argv[process.pid] = process.cmdline()
                seen.secrets |= {v for k, v in env.items() if k.startswith("NVFLARE_JOB_") and len(v) > 8}
                seen.listening += listening_of(process)
        except psutil.Error:
            continue
    (runner,) = [argv for argv in seen.argv.values() if any("runner_process" in part for part in argv)]
    seen.job = runner[runner.index("-n") + 1]
    seen.secrets.discard(seen.job)  # the token of its process on the server: a name, nothing without its signature


def _attacked(stage: Stage, of: str) -> dict[str, dict[str, Any]]:
    assert stage.server is not None
    port, folder = stage.server.port, stage.folder
    files = [
        ["admin", "site-01", "sys.shell", f"cat {stage.homes['site-01'] / 'agent.pem'}"],
        ["admin", "site-01", "sys.info", ""],
    ]
    others = [
        ["send", "site-01", "_net_manager", "process_info"],
        ["send", f"site-01.{of}", "client_command", "check_status"],
        ["send", f"site-01.{of}", "client_command", "abort"],
        ["send", "server", "server_parent_listener", "get_clients"],
        ["send", "server", "_net_manager", "cells"],
        ["send", "server", "_net_manager", "stop_cell"],
        ["send", f"server.{of}", "server_command", "get_run_info"],
        ["send", f"server.{of}", "server_command", "abort"],
    ]
    more = [["admin", "site-01", "train.delete_run", ""], ["deploy", "site-01", str(folder / EVIL)]]
    under_way = {
        "foreign": attack(folder / "foreign", port, "site-01", "site-01"),
        "posing": attack(folder / "mole", port, "site-01", "site-01"),
        "naming": attack(folder / "mole", port, "mole", "site-01"),
        "serving": attack(folder / "mole", port, f"server.{of}", "mole"),
        "ousted": attack(folder / "ousted", port, "ousted", "ousted"),
        "administrator": attack(folder / "mole", port, ADMINISTRATOR, ADMIN_NAME),
        "commands": attack(folder / "mallory", port, "mallory", "mallory", *files, *others),
        "insider": attack(folder / "insider", port, "server.evil", SERVER_JOB, *files, *more),
    }
    return {name: outcome(process) for name, process in under_way.items()}


def _submitted(stage: Stage, name: str, **changes: Any) -> str:
    """By the administrator's own session. The job's id."""
    kit = build_job(changes.pop("run", "none"), changes.pop("digest", "0" * 64), ["site-01"], 1)
    folder = stage.home / "admin" / "transfer" / name
    for end in ("server", "client"):
        path = f"app/config/config_fed_{end}.json"
        kit[path] = json.dumps(json.loads(kit[path]) | changes.pop(end, {}))
    write_kit(folder, kit | changes)
    assert stage.server is not None
    return str(stage.server._admin_session().submit_job(str(folder)))


def judged(stage: Stage) -> dict[str, dict[str, Any]]:
    """Jobs that should never be made, and what became of each."""
    evil = stage.folder / EVIL
    code = f"from nvflare.apis.executor import Executor\nopen({str(evil)!r}, 'w')\nclass Evil(Executor): pass\n"
    popen = {"path": "subprocess.Popen", "args": {"args": ["touch", str(evil)]}}
    ours = json.loads(build_job("none", "0" * 64, [], 1)["app/config/config_fed_client.json"])["executors"][0]
    numbers = "nvflare.app_common.np.np_trainer.NPTrainer"
    given = {
        "code": _submitted(stage, "code", **{"app/custom/evil.py": code}, client={"executors": [_doing("evil.Evil")]}),
        "code-there": _submitted(
            stage,
            "code-there",
            **{"app/custom/evil.py": code},
            server={"workflows": [{"id": "x", "path": "evil.Evil"}]},
        ),
        "class": _submitted(stage, "class", client={"executors": [_doing(numbers)]}),
        "part": _submitted(stage, "part", client={"components": [{"id": "x", **popen}]}),
        "part-there": _submitted(stage, "part-there", server={"components": [{"id": "x", **popen}]}),
        "nested": _submitted(
            stage,
            "nested",
            client={"executors": [ours | {"executor": ours["executor"] | {"args": {"run": "none", "digest": popen}}}]},
        ),
        "escape": _submitted(stage, "escape", run="../../escape"),
    }
    server = stage.server
    assert server is not None
    until(lambda: all(server.has_ended(one) for one in given.values()), 90)
    return {name: server._admin_session().get_job_meta(one) for name, one in given.items()}


def _doing(path: str) -> dict[str, Any]:
    return {"tasks": ["data_summary", "exchange"], "executor": {"path": path, "args": {}}}
