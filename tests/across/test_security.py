"""Whoever is not let in, asks for too much or lies is refused, and the study goes on: with real processes and certificates."""

from __future__ import annotations

import json
import os
import socket
import ssl
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.engines.server import put
from pipeline.kits import ADMIN, admin_kit, job
from pipeline.service.tls import Authority
from pipeline.study_file import read_study
from privacy import keys
from privacy.receipts import request
from sites.home import Home
from sites.settings import Limits, Settings
from tests.across.attackers import ADMINISTRATOR, attack, outcome
from tests.across.stage import Stage, federation, until
from tests.across.test_engines_agree import BASE

pytest.importorskip("nvflare")

SITES = ("site-01", "site-02", "site-03")
LIES = ("honest", "replay", "nan", "shape", "name", "oversize", "garbage", "weight")
EVIL = "touch"  # a file that code from outside would leave


@dataclass
class Storm:
    """A run under attack, and what was seen of it meanwhile."""

    run: str
    ended: dict[str, str] = field(default_factory=dict)
    job: str = ""
    argv: dict[int, list[str]] = field(default_factory=dict)
    listening: list[tuple[int, str, int]] = field(default_factory=list)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def certified(kit: Path, authority: Authority, name: str, role: str | None = None) -> Path:
    issued = authority.issue_client(name, role)
    put(kit, {"startup/client.crt": issued.certificate, "startup/client.key": issued.key, "startup/rootCA.pem": authority.pem})
    return kit


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("security")
    path = os.pathsep.join(filter(None, [str(Path(__file__).with_name("hostile")), os.environ.get("PYTHONPATH", "")]))
    hostile = {"site-03": {"PYTHONPATH": path, "LIES": " ".join(LIES)}}
    with federation(folder, {site: Settings(plays=site, limits=Limits(disk_gb=0.01)) for site in SITES}, hostile) as made:
        assert made.server is not None
        own, port = Authority.open(made.home), made.server.port
        (folder / "abroad").mkdir()
        certified(folder / "mallory", own, "mallory")
        certified(folder / "foreign", Authority.create(folder / "abroad", "abroad"), "site-01")
        put(folder / "mallory", admin_kit(port))
        certified(folder / "insider", own, ADMIN, "project_admin")
        until(lambda: made.server is not None and made.server.connected() >= set(SITES), 60)
        yield made


@pytest.fixture(scope="module")
def storm(stage: Stage) -> Storm:
    made = stage.offered("storm", read_study(BASE, "storm", {"rounds": len(LIES)}))
    first = Home.open(stage.homes["site-01"])
    stolen = request(first.ledger, first.key, keys.public_hex(keys.load(stage.home / "key.pem")))
    (stage.homes["site-03"] / "stolen.json").write_text(stolen.model_dump_json())
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
            if stage.mark in process.environ().get("HEMOFED_MARK", ""):
                seen.argv[process.pid] = process.cmdline()
                found = process.net_connections(kind="inet")
                seen.listening += [(process.pid, *c.laddr) for c in found if c.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
    (runner,) = [argv for argv in seen.argv.values() if any("runner_process" in part for part in argv)]
    seen.job = runner[runner.index("-n") + 1]


def _attacked(stage: Stage, job: str) -> dict[str, dict[str, Any]]:
    """All at once."""
    assert stage.server is not None
    port, folder = stage.server.port, stage.folder
    secret = stage.homes["site-01"] / "agent.pem"
    commands = [
        ["admin", "site-01", "sys.shell", f"cat {secret}"],
        ["admin", "site-01", "sys.info", ""],
        ["send", "site-01", "_net_manager", "process_info"],
        ["send", f"site-01.{job}", "client_command", "check_status"],
        ["send", "server", "server_parent_listener", "get_clients"],
        ["send", "server", "_net_manager", "cells"],
        ["send", f"server.{job}", "server_command", "get_run_info"],
    ]
    under_way = {
        "foreign": attack(folder / "foreign", port, "site-01", "site-01"),
        "posing": attack(folder / "mallory", port, "site-01", "site-01"),
        "naming": attack(folder / "mallory", port, "mallory", "site-01"),
        "serving": attack(folder / "mallory", port, f"server.{job}", "mallory"),
        "administrator": attack(folder / "mallory", port, ADMINISTRATOR, ADMIN),
        "commands": attack(folder / "mallory", port, "mallory", "mallory", *commands),
        "insider": attack(folder / "insider", port, f"_admin_{uuid.uuid4()}", ADMIN, ["admin", "site-01", "sys.shell", f"cat {secret}"]),
    }
    return {name: outcome(process) for name, process in under_way.items()}


def logged(stage: Stage) -> str:
    return (stage.home / "kit" / "log.txt").read_text()


def test_a_node_without_a_certificate_of_ours_is_not_let_in(stage: Stage) -> None:
    assert stage.server is not None
    context = ssl.create_default_context(cafile=str(stage.home / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    for paper in (None, stage.folder / "foreign" / "startup"):
        if paper is not None:
            context.load_cert_chain(paper / "client.crt", paper / "client.key")
        with socket.create_connection(("127.0.0.1", stage.server.port), timeout=5) as raw, pytest.raises(OSError):
            with context.wrap_socket(raw, server_hostname="localhost") as speaking:
                speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                if not speaking.recv(1000):
                    raise ConnectionResetError


# jobs


def submitted(stage: Stage, name: str, **changes: Any) -> str:
    """The administrator's own session, with a job that it should never have made. The job's id."""
    kit = job(changes.pop("run", "none"), changes.pop("digest", "0" * 64), ["site-01"], 1)
    folder = stage.home / "admin" / "transfer" / name
    for end in ("server", "client"):
        path = f"app/config/config_fed_{end}.json"
        kit[path] = json.dumps(json.loads(kit[path]) | changes.pop(end, {}))
    put(folder, kit | changes)
    assert stage.server is not None
    return str(stage.server._admin().submit_job(str(folder)))


@pytest.fixture(scope="module")
def jobs(stage: Stage) -> dict[str, dict[str, Any]]:
    """What became of each."""
    evil = stage.folder / EVIL
    code = f"from nvflare.apis.executor import Executor\nopen({str(evil)!r}, 'w')\nclass Evil(Executor): pass\n"
    popen = {"path": "subprocess.Popen", "args": {"args": ["touch", str(evil)]}}
    ours = json.loads(job("none", "0" * 64, [], 1)["app/config/config_fed_client.json"])["executors"][0]
    numbers = "nvflare.app_common.np.np_trainer.NPTrainer"
    given = {
        "code": submitted(stage, "code", **{"app/custom/evil.py": code}, client={"executors": [_doing("evil.Evil")]}),
        "code-there": submitted(stage, "code-there", **{"app/custom/evil.py": code}, server={"workflows": [{"id": "x", "path": "evil.Evil"}]}),
        "class": submitted(stage, "class", client={"executors": [_doing(numbers)]}),
        "part": submitted(stage, "part", client={"components": [{"id": "x", **popen}]}),
        "part-there": submitted(stage, "part-there", server={"components": [{"id": "x", **popen}]}),
        "nested": submitted(stage, "nested", client={"executors": [ours | {"executor": ours["executor"] | {"args": {"run": "none", "digest": popen}}}]}),
        "escape": submitted(stage, "escape", run="../../escape"),
    }  # fmt: skip
    server = stage.server
    assert server is not None
    until(lambda: all(server.over(one) for one in given.values()), 90)
    return {name: server._admin().get_job_meta(one) for name, one in given.items()}


def _doing(path: str) -> dict[str, Any]:
    return {"tasks": ["about", "ask"], "executor": {"path": path, "args": {}}}


def test_jobs(jobs, stage):
    for k, v in jobs.items():
        print(k, {a: b for a, b in v.items() if a in ("status","job_deploy_detail","schedule_history")})
    print(list(stage.folder.rglob("ended.json")), (stage.folder/EVIL).exists())
    print(logged(stage)[-6000:])
    for f in (stage.homes["site-01"]/"kit").rglob("*log*.txt"): print(f, f.read_text()[-3000:])
    assert 0
