"""A run that is attacked in several ways at once, malicious jobs, and what can be seen of the run's processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.engines.flare_server import write_kit
from pipeline.flare.provisioning import ADMIN_NAME, build_admin_kit, build_job
from pipeline.ops.certificates import CertificateAuthority
from pipeline.ops.child_processes import MARK_ENV
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.service.storage.accounts import EnrolmentRequest
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.study.offer import StudyOffer
from tests.integration.exposure import ListeningSocket, list_listening_sockets
from tests.integration.flare_attacker import ADMINISTRATOR, SERVER_JOB, read_attack_result, start_attack
from tests.integration.flare_federation import FlareFederation, wait_until

EVIL_FILE = "touched"  # injected code would create it


@dataclass
class AttackedRun:
    run: str
    outcome: AttemptOutcome | None = None
    job: str = ""
    argv: dict[int, list[str]] = field(default_factory=dict)
    sockets: list[ListeningSocket] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set)  # tokens and signatures of FLARE's processes
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> result


def prepare_attackers(federation: FlareFederation) -> None:
    """Writes kits for malicious members, a removed site, a site of another federation, and an insider with the server's key."""
    assert federation.server is not None
    authority, folder = CertificateAuthority.open(federation.home), federation.folder
    (folder / "abroad").mkdir()
    write_attacker_kit(folder / "foreign", CertificateAuthority.create(folder / "abroad", "abroad"), "site-01")
    write_attacker_kit(folder / "mallory", authority, "mallory")
    write_attacker_kit(folder / "mole", authority, "mole")
    write_attacker_kit(folder / "ousted", authority, "ousted")
    store = CoordinatorStore(CoordinatorHome.open(federation.home).database_url)
    invitation = store.accounts.create_invitation("ousted", 1, "lead")[0]
    store.accounts.enrol_site(invitation, EnrolmentRequest("ousted", "0" * 64, "0" * 64, ""))
    store.record_departure("ousted", "lead", removed=True)
    store.close()
    write_kit(folder / "mole", build_admin_kit(federation.server.port))
    for suffix in ("crt", "key"):
        server_file = federation.home / f"kit/startup/server.{suffix}"
        write_kit(folder / "insider", {f"startup/client.{suffix}": server_file.read_text()})
    write_kit(folder / "insider", {"startup/rootCA.pem": authority.pem})


def write_attacker_kit(kit: Path, authority: CertificateAuthority, name: str) -> None:
    issued = authority.issue_client(name)
    files = {"client.crt": issued.certificate_pem, "client.key": issued.key_pem, "rootCA.pem": authority.pem}
    write_kit(kit, {f"startup/{file}": text for file, text in files.items()})


def run_under_attack(federation: FlareFederation, offer: StudyOffer) -> AttackedRun:
    """Runs the job to its end; the attacks start after the first round."""
    attacked_run = AttackedRun(offer.run)

    def attack_once() -> None:
        if not attacked_run.job and (federation.home / "runs" / offer.run / "rounds.jsonl").exists():
            _inspect_processes(federation, attacked_run)
            attacked_run.attacks = _attack(federation, attacked_run.job)

    attacked_run.outcome = federation.run_job(offer, while_waiting=attack_once)
    return attacked_run


def _inspect_processes(federation: FlareFederation, attacked_run: AttackedRun) -> None:
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if federation.mark in env.get(MARK_ENV, ""):
                attacked_run.argv[process.pid] = process.cmdline()
                attacked_run.secrets |= {v for k, v in env.items() if k.startswith("NVFLARE_JOB_") and len(v) > 8}
                attacked_run.sockets += list_listening_sockets(process)
        except psutil.Error:
            continue
    (runner,) = [argv for argv in attacked_run.argv.values() if any("runner_process" in part for part in argv)]
    attacked_run.job = runner[runner.index("-n") + 1]
    # the token of the job's process on the server is the job's name, which is useless without a signature
    attacked_run.secrets.discard(attacked_run.job)


def _attack(federation: FlareFederation, job: str) -> dict[str, dict[str, Any]]:
    assert federation.server is not None
    port, folder = federation.server.port, federation.folder
    read_files = [
        ["admin", "site-01", "sys.shell", f"cat {federation.homes['site-01'] / 'agent.pem'}"],
        ["admin", "site-01", "sys.info", ""],
    ]
    reach_others = [
        ["send", "site-01", "_net_manager", "process_info"],
        ["send", f"site-01.{job}", "client_command", "check_status"],
        ["send", f"site-01.{job}", "client_command", "abort"],
        ["send", "server", "server_parent_listener", "get_clients"],
        ["send", "server", "_net_manager", "cells"],
        ["send", "server", "_net_manager", "stop_cell"],
        ["send", f"server.{job}", "server_command", "get_run_info"],
        ["send", f"server.{job}", "server_command", "abort"],
    ]
    deploy_code = [["admin", "site-01", "train.delete_run", ""], ["deploy", "site-01", str(folder / EVIL_FILE)]]
    attacks = {
        "foreign": start_attack(folder / "foreign", port, "site-01", "site-01"),
        "posing": start_attack(folder / "mole", port, "site-01", "site-01"),
        "naming": start_attack(folder / "mole", port, "mole", "site-01"),
        "serving": start_attack(folder / "mole", port, f"server.{job}", "mole"),
        "ousted": start_attack(folder / "ousted", port, "ousted", "ousted"),
        "administrator": start_attack(folder / "mole", port, ADMINISTRATOR, ADMIN_NAME),
        "commands": start_attack(folder / "mallory", port, "mallory", "mallory", *read_files, *reach_others),
        "insider": start_attack(folder / "insider", port, "server.evil", SERVER_JOB, *read_files, *deploy_code),
    }
    return {name: read_attack_result(process) for name, process in attacks.items()}


def _submit_job(federation: FlareFederation, name: str, **changes: Any) -> str:
    """Submits a changed job through the administrator's own session, and returns its id."""
    job_files = build_job(changes.pop("run", "none"), changes.pop("digest", "0" * 64), ["site-01"], 1)
    folder = federation.home / "admin" / "transfer" / name
    for side in ("server", "client"):
        path = f"app/config/config_fed_{side}.json"
        job_files[path] = json.dumps(json.loads(job_files[path]) | changes.pop(side, {}))
    write_kit(folder, job_files | changes)
    assert federation.server is not None
    return str(federation.server._admin_session().submit_job(str(folder)))


def submit_malicious_jobs(federation: FlareFederation) -> dict[str, dict[str, Any]]:
    """Submits jobs that must be refused, waits for their ends, and returns FLARE's metadata of each."""
    evil_path = federation.folder / EVIL_FILE
    code = f"from nvflare.apis.executor import Executor\nopen({str(evil_path)!r}, 'w')\nclass Evil(Executor): pass\n"
    code_files = {"app/custom/evil.py": code}
    popen = {"path": "subprocess.Popen", "args": {"args": ["touch", str(evil_path)]}}
    component = {"components": [{"id": "x", **popen}]}
    executor = json.loads(build_job("none", "0" * 64, [], 1)["app/config/config_fed_client.json"])["executors"][0]
    nested_args = {"args": {"run": "none", "digest": popen}}
    nested_executor = executor | {"executor": executor["executor"] | nested_args}
    foreign_executor = _make_executor("nvflare.app_common.np.np_trainer.NPTrainer")
    evil_workflow = {"workflows": [{"id": "x", "path": "evil.Evil"}]}
    job_ids = {
        "code": _submit_job(federation, "code", **code_files, client={"executors": [_make_executor("evil.Evil")]}),
        "code-there": _submit_job(federation, "code-there", **code_files, server=evil_workflow),
        "class": _submit_job(federation, "class", client={"executors": [foreign_executor]}),
        "part": _submit_job(federation, "part", client=component),
        "part-there": _submit_job(federation, "part-there", server=component),
        "nested": _submit_job(federation, "nested", client={"executors": [nested_executor]}),
        "escape": _submit_job(federation, "escape", run="../../escape"),
    }
    server = federation.server
    assert server is not None
    wait_until(lambda: all(server.has_ended(job_id) for job_id in job_ids.values()), 90)
    return {name: server._admin_session().get_job_meta(job_id) for name, job_id in job_ids.items()}


def _make_executor(path: str) -> dict[str, Any]:
    return {"tasks": ["data_summary", "exchange"], "executor": {"path": path, "args": {}}}
