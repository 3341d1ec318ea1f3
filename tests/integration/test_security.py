"""Whoever is not let in, asks for too much or lies is refused, and the study goes on: with real processes and certificates."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import MessageError
from pipeline.flare.constants import SITE_HOME_ENV
from pipeline.study.toml_file import parse_study
from privacy.ledger import keys
from privacy.ledger.receipts import create_receipt_request
from sites.governance.approvals import approve_offer, revoke_approval
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings
from tests.integration.exposure import betrays_nothing, outside
from tests.integration.flare_federation import Stage, federation, until
from tests.integration.run_under_attack import EVIL, Storm, arm, judged, weathered
from tests.integration.test_engines_agree import BASE

pytest.importorskip("nvflare")

SITES = ("site-01", "site-02", "site-03")
LIES = ("honest", "replay", "nan", "shape", "name", "oversize", "garbage", "weight")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The third site lies (tests/across/hostile)."""
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).with_name("malicious_site")), os.environ.get("PYTHONPATH", "")])
    )
    hostile = {"site-03": {"PYTHONPATH": path, "LIES": " ".join(LIES)}}
    sites = {site: SiteSettings(simulated_site=site, limits=ResourceLimits(min_free_disk_gb=0.01)) for site in SITES}
    with federation(tmp_path_factory.mktemp("security"), sites, hostile) as made:
        arm(made)
        until(lambda: made.server is not None and made.server.connected_sites() >= set(SITES), 60)
        yield made


@pytest.fixture(scope="module")
def storm(stage: Stage) -> Storm:
    made = stage.offered("storm", parse_study(BASE, "storm", {"rounds": len(LIES)}))
    first = SiteHome.open(stage.homes["site-01"])
    stolen = create_receipt_request(first.ledger, first.agent_key, made.coordinator_key)
    (stage.homes["site-03"] / "stolen.json").write_text(stolen.model_dump_json())
    return weathered(stage, made)


def logged(stage: Stage) -> str:
    return (stage.home / "kit" / "log.txt").read_text()


def test_a_node_without_a_certificate_of_ours_is_not_let_in(stage: Stage) -> None:
    assert stage.server is not None
    stranger, abroad = (ssl.create_default_context(cafile=str(stage.home / "ca.pem")) for _ in range(2))
    abroad.load_cert_chain(*(stage.folder / "foreign" / "startup" / name for name in ("client.crt", "client.key")))
    for context in (stranger, abroad):
        context.set_alpn_protocols(["h2"])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _greet(context, stage.server.port)
    with socket.create_connection(("127.0.0.1", stage.server.port), timeout=5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200" not in plain.recv(1000)


def _greet(context: ssl.SSLContext, port: int) -> None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as over,
    ):
        over.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        if not over.recv(1000):
            raise ConnectionResetError


# jobs


@pytest.fixture(scope="module")
def jobs(stage: Stage) -> dict[str, dict[str, Any]]:
    return judged(stage)


def test_a_job_brings_no_code(jobs: dict[str, dict[str, Any]], stage: Stage) -> None:
    assert all("BYOC not permitted" in str(jobs[name]["job_deploy_detail"]) for name in ("code", "code-there"))
    assert not (stage.folder / EVIL).exists()


@pytest.mark.parametrize("name", ["class", "part", "part-there", "nested"])
def test_a_job_builds_nothing_but_our_two_classes(name: str, jobs: dict[str, dict[str, Any]], stage: Stage) -> None:
    assert jobs[name]["status"] in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    site = stage.homes["site-01"] / "kit" / jobs[name]["job_id"] / "log.txt"
    log = stage.home / "log" / "flare.log" if name == "part-there" else site
    assert "is not in allow_list" in log.read_text()
    assert not (stage.folder / EVIL).exists()


def test_a_job_names_no_other_folder(jobs: dict[str, dict[str, Any]], stage: Stage) -> None:
    assert jobs["escape"]["status"] == "FINISHED:EXECUTION_EXCEPTION"
    assert not [*stage.folder.rglob("ended.json"), *stage.folder.rglob("escape/.lock")]


def test_no_work_without_an_approval_that_stands(jobs: dict[str, dict[str, Any]], stage: Stage) -> None:
    """Offered to all; the first has not approved it, the second's approval has ended, the third took it back."""
    made = stage.offered("lapsed", parse_study(BASE, "lapsed", {}), approved=False)
    second, third = (SiteHome.open(stage.homes[site]) for site in SITES[1:])
    now = datetime.now(UTC)
    past = {"expires": now - timedelta(seconds=1), "now": now - timedelta(days=1)}
    approve_offer(second, made, keys.load_key(second.path / "officer.pem"), **past)
    approve_offer(third, made, keys.load_key(third.path / "officer.pem"), now + timedelta(days=1))
    revoke_approval(third, made.run)
    ended = stage.run(made)
    assert ended["how"] == "halted"
    for site, why in zip(SITES, ("is not approved", "approval expired", "approval was withdrawn"), strict=True):
        assert re.search(rf"{site}: [^;]*{why}", ended["why"]), ended["why"]
    assert not (stage.home / "runs" / made.run / "rounds.jsonl").exists()


@pytest.mark.parametrize("digest", ["../agent", "../../../etc/passwd", "0" * 64, "/" * 64, "", "é" * 64])
def test_a_digest_is_no_path(digest: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from sites.worker.flare_executor import SiteExecutor

    monkeypatch.setenv(SITE_HOME_ENV, str(stage.homes["site-01"]))
    with pytest.raises(MessageError, match="was not offered"):
        SiteExecutor("run", digest)._load_offer()


# a run under attack


def test_the_study_finishes_all_the_same(storm: Storm, stage: Stage) -> None:
    assert storm.ended == {"how": "finished", "why": ""}
    assert [r["round"] for r in rounds(stage, storm)] == list(range(len(LIES) + 1))


def rounds(stage: Stage, storm: Storm) -> list[dict[str, Any]]:
    return RunFolder.open(stage.home / "runs" / storm.run).load_rounds()


LIE = {
    "replay": "replied to round 1 (train) when asked for round 2",
    "nan": "is not finite",
    "shape": "where others sent",
    "name": "replied in the name of 'site-01'",
    "oversize": "more than 67108864",
    "garbage": "damaged or cut short",
    "weight": "claims a weight of 1e+08",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_quarantined(lie: str, storm: Storm, stage: Stage) -> None:
    record = rounds(stage, storm)[1 + LIES.index(lie)]
    honest = lie == "honest"
    assert sorted(record["counted"]) == sorted(SITES if honest else SITES[:2])
    if not honest:
        assert record["missed"]["site-03"]["kind"] == "quarantined"
        assert LIE[lie] in record["missed"]["site-03"]["text"]


@pytest.mark.parametrize("who", ["foreign", "posing", "naming", "serving", "administrator", "ousted"])
def test_a_node_is_who_its_certificate_says(who: str, storm: Storm, stage: Stage) -> None:
    assert storm.attacks[who]["in"] is False
    told = {
        "posing": "authenticated as 'mole' but claimed endpoint 'site-01'",
        "serving": "authenticated as 'mole' but claimed endpoint 'server.",
        "ousted": "ousted: refused: it has left, or was removed",
    }
    assert told.get(who, "") in logged(stage)


def test_sites_cannot_speak_to_each_other(storm: Storm, stage: Stage) -> None:
    assert storm.attacks["commands"]["in"] is True  # it is a member, after all
    assert {said.partition(":")[0] for said in storm.attacks["commands"]["tries"]} == {"timeout"}
    for what in (
        "a message to site-01;",
        f"a message to site-01.{storm.job};",
        "get_clients on",
        "cells on",
        "get_run_info on",
    ):
        assert f"mallory: refused: {what}" in logged(stage)


def test_nor_can_the_coordinator_read_files_or_bring_code(storm: Storm, stage: Stage) -> None:
    """With the server's own key, past the server's rules, straight to the site."""
    assert storm.attacks["insider"]["in"] is True
    *files, code = storm.attacks["insider"]["tries"]
    assert files == ["ok: invalid_request"] * 3
    assert "BYOC not permitted" in code
    assert not (stage.folder / EVIL).exists()


def test_a_receipt_is_for_who_asks(storm: Storm, stage: Stage) -> None:
    garbage, stolen, posing = json.loads((stage.homes["site-03"] / "heard.json").read_text())
    assert "this is no request for a receipt" in garbage
    assert "site-03 asks for a receipt in the name of site-01" in stolen
    assert "this is no request for a receipt" in posing
    assert not list((stage.home / "receipts").glob("*.json"))
    assert not any("epsilon" in record for record in rounds(stage, storm))  # it was told 99, for another site


def test_only_the_loopback_is_listened_on(storm: Storm) -> None:
    assert len(storm.argv) == 8  # a server, three clients, and the job's process at each
    assert len(storm.listening) >= 4
    assert not outside(storm.listening)


def test_no_secret_is_in_a_log_or_an_argument(storm: Storm, stage: Stage) -> None:
    assert len(storm.secrets) >= 7  # tokens of three sites, signatures of four processes
    betrays_nothing(stage.folder, storm.argv.values(), storm.secrets)
