"""Attacks on a federation of real processes: intruders, malicious jobs and false replies are refused, the study finishes."""

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
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.round_record import RoundRecord
from pipeline.study.toml_file import parse_study
from privacy.ledger import keys
from privacy.ledger.receipts import create_receipt_request
from sites.governance.approvals import approve_offer, revoke_approval
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings
from tests.integration.exposure import assert_no_secret_exposed, reachable_from_outside
from tests.integration.flare_federation import FlareFederation, start_federation, wait_until
from tests.integration.run_under_attack import (
    EVIL_FILE,
    AttackedRun,
    prepare_attackers,
    run_under_attack,
    submit_malicious_jobs,
)
from tests.integration.test_engines_agree import STUDY

pytest.importorskip("nvflare")

SITES = ("site-01", "site-02", "site-03")
REPLY_KINDS = ("honest", "replay", "nan", "shape", "name", "oversize", "garbage", "weight")  # of rounds 1, 2, ...


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlareFederation]:
    """The third site sends false replies (malicious_site/sitecustomize.py)."""
    python_path = [str(Path(__file__).with_name("malicious_site")), os.environ.get("PYTHONPATH", "")]
    malicious_env = {"PYTHONPATH": os.pathsep.join(filter(None, python_path)), "FALSE_REPLIES": " ".join(REPLY_KINDS)}
    sites = {site: SiteSettings(simulated_site=site, limits=ResourceLimits(min_free_disk_gb=0.01)) for site in SITES}
    with start_federation(tmp_path_factory.mktemp("security"), sites, {"site-03": malicious_env}) as federation:
        server = federation.server
        assert server is not None
        prepare_attackers(federation)
        wait_until(lambda: server.connected_sites() >= set(SITES), 60)
        yield federation


@pytest.fixture(scope="module")
def attacked_run(federation: FlareFederation) -> AttackedRun:
    offer = federation.offer_study("attacked", parse_study(STUDY, "attacked", {"rounds": len(REPLY_KINDS)}))
    first_home = SiteHome.open(federation.homes["site-01"])
    stolen_request = create_receipt_request(first_home.ledger, first_home.agent_key, offer.coordinator_key)
    (federation.homes["site-03"] / "stolen.json").write_text(stolen_request.model_dump_json())
    return run_under_attack(federation, offer)


def read_server_log(federation: FlareFederation) -> str:
    return (federation.home / "kit" / "log.txt").read_text()


def load_rounds(federation: FlareFederation, attacked_run: AttackedRun) -> list[RoundRecord]:
    return RunFolder.open(federation.home / "runs" / attacked_run.run).load_rounds()


def test_client_without_a_certificate_of_this_federation_is_rejected(federation: FlareFederation) -> None:
    assert federation.server is not None
    without, foreign = (ssl.create_default_context(cafile=str(federation.home / "ca.pem")) for _ in range(2))
    startup = federation.folder / "foreign" / "startup"
    foreign.load_cert_chain(startup / "client.crt", startup / "client.key")
    for context in (without, foreign):
        context.set_alpn_protocols(["h2"])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _open_http2(context, federation.server.port)
    with socket.create_connection(("127.0.0.1", federation.server.port), timeout=5) as unencrypted:
        unencrypted.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200" not in unencrypted.recv(1000)


def _open_http2(context: ssl.SSLContext, port: int) -> None:
    """Sends the connection preface and an empty settings frame; raises if there is no reply."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as tls,
    ):
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        if not tls.recv(1000):
            raise ConnectionResetError


# jobs


@pytest.fixture(scope="module")
def malicious_jobs(federation: FlareFederation) -> dict[str, dict[str, Any]]:
    return submit_malicious_jobs(federation)


def test_job_with_code_is_refused(malicious_jobs: dict[str, dict[str, Any]], federation: FlareFederation) -> None:
    for name in ("code", "code-there"):
        assert "BYOC not permitted" in str(malicious_jobs[name]["job_deploy_detail"])
    assert not (federation.folder / EVIL_FILE).exists()


@pytest.mark.parametrize("name", ["class", "part", "part-there", "nested"])
def test_job_can_instantiate_only_allowed_classes(
    name: str, malicious_jobs: dict[str, dict[str, Any]], federation: FlareFederation
) -> None:
    job = malicious_jobs[name]
    assert job["status"] in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    site_log = federation.homes["site-01"] / "kit" / job["job_id"] / "log.txt"
    log = federation.home / "log" / "flare.log" if name == "part-there" else site_log
    assert "is not in allow_list" in log.read_text()
    assert not (federation.folder / EVIL_FILE).exists()


def test_job_cannot_name_a_folder_outside_the_runs(
    malicious_jobs: dict[str, dict[str, Any]], federation: FlareFederation
) -> None:
    assert malicious_jobs["escape"]["status"] == "FINISHED:EXECUTION_EXCEPTION"
    assert not [*federation.folder.rglob("ended.json"), *federation.folder.rglob("escape/.lock")]


def test_missing_expired_and_revoked_approvals_halt_the_run(
    malicious_jobs: dict[str, dict[str, Any]], federation: FlareFederation
) -> None:
    """The first site has not approved the offer, the second's approval has expired, the third revoked its approval."""
    offer = federation.offer_study("lapsed", parse_study(STUDY, "lapsed", {}), approved=False)
    second, third = (SiteHome.open(federation.homes[site]) for site in SITES[1:])
    second_officer, third_officer = (keys.load_key(home.path / "officer.pem") for home in (second, third))
    now = datetime.now(UTC)
    approve_offer(second, offer, second_officer, expires=now - timedelta(seconds=1), now=now - timedelta(days=1))
    approve_offer(third, offer, third_officer, now + timedelta(days=1))
    revoke_approval(third, offer.run)
    outcome = federation.run_job(offer)
    assert outcome.outcome == "halted"
    reasons = ("is not approved", "approval expired", "approval was revoked")
    for site, reason in zip(SITES, reasons, strict=True):
        assert re.search(rf"{site}: [^;]*{reason}", outcome.reason), outcome.reason
    assert not (federation.home / "runs" / offer.run / "rounds.jsonl").exists()


@pytest.mark.parametrize("digest", ["../agent", "../../../etc/passwd", "0" * 64, "/" * 64, "", "é" * 64])
def test_offer_digest_is_not_used_as_a_path(
    digest: str, federation: FlareFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sites.worker.flare_executor import SiteExecutor

    monkeypatch.setenv(SITE_HOME_ENV, str(federation.homes["site-01"]))
    with pytest.raises(MessageError, match="has no offer of the study"):
        SiteExecutor("run", digest)._load_offer()


# a run under attack


def test_study_finishes_under_attack(attacked_run: AttackedRun, federation: FlareFederation) -> None:
    assert attacked_run.outcome == AttemptOutcome(outcome="finished", reason="")
    assert [r.round for r in load_rounds(federation, attacked_run)] == list(range(len(REPLY_KINDS) + 1))


QUARANTINE_REASONS = {
    "replay": "replied to round 1 (train) when asked for round 2",
    "nan": "is not finite",
    "shape": "where others sent",
    "name": "replied in the name of 'site-01'",
    "oversize": "more than 67108864",
    "garbage": "damaged or cut short",
    "weight": "claims a weight of 1e+08",
}


@pytest.mark.parametrize("kind", REPLY_KINDS)
def test_false_reply_is_quarantined(kind: str, attacked_run: AttackedRun, federation: FlareFederation) -> None:
    record = load_rounds(federation, attacked_run)[1 + REPLY_KINDS.index(kind)]
    is_honest = kind == "honest"
    assert sorted(record.accepted) == sorted(SITES if is_honest else SITES[:2])
    if not is_honest:
        assert record.failures["site-03"].kind == "quarantined"
        assert QUARANTINE_REASONS[kind] in record.failures["site-03"].text


@pytest.mark.parametrize("attacker", ["foreign", "posing", "naming", "serving", "administrator", "ousted"])
def test_node_is_bound_to_its_certificates_name(
    attacker: str, attacked_run: AttackedRun, federation: FlareFederation
) -> None:
    assert attacked_run.attacks[attacker]["is_admitted"] is False
    logged = {
        "posing": "authenticated as 'mole' but claimed endpoint 'site-01'",
        "serving": "authenticated as 'mole' but claimed endpoint 'server.",
        "ousted": "ousted: refused: it has left, or was removed",
    }
    assert logged.get(attacker, "") in read_server_log(federation)


def test_sites_cannot_send_messages_to_each_other(attacked_run: AttackedRun, federation: FlareFederation) -> None:
    commands = attacked_run.attacks["commands"]
    assert commands["is_admitted"] is True  # it is a member
    assert {reply.partition(":")[0] for reply in commands["replies"]} == {"timeout"}
    for refused in (
        "a message to site-01;",
        f"a message to site-01.{attacked_run.job};",
        "get_clients on",
        "cells on",
        "get_run_info on",
    ):
        assert f"mallory: refused: {refused}" in read_server_log(federation)


def test_coordinator_cannot_read_a_sites_files_or_deploy_code(
    attacked_run: AttackedRun, federation: FlareFederation
) -> None:
    """With the server's own key, past the server's rules, directly to the site."""
    assert attacked_run.attacks["insider"]["is_admitted"] is True
    *file_replies, deploy_reply = attacked_run.attacks["insider"]["replies"]
    assert file_replies == ["ok: invalid_request"] * 3
    assert "BYOC not permitted" in deploy_reply
    assert not (federation.folder / EVIL_FILE).exists()


def test_site_gets_receipts_only_for_its_own_ledger(attacked_run: AttackedRun, federation: FlareFederation) -> None:
    garbage, stolen, posing = json.loads((federation.homes["site-03"] / "receipt_replies.json").read_text())
    assert "this is not a receipt request" in garbage
    assert "site-03 asked for a receipt in the name of site-01" in stolen
    assert "this is not a receipt request" in posing
    assert not list((federation.home / "receipts").glob("*.json"))
    # the epsilon of 99 in the requests is not recorded
    assert not any(record.epsilon for record in load_rounds(federation, attacked_run))


def test_federation_listens_on_the_loopback_interface_only(attacked_run: AttackedRun) -> None:
    assert len(attacked_run.argv) == 8  # a server, three clients, and the job's process at each
    assert len(attacked_run.sockets) >= 4
    assert not reachable_from_outside(attacked_run.sockets)


def test_no_secret_is_in_a_log_or_an_argument(attacked_run: AttackedRun, federation: FlareFederation) -> None:
    assert len(attacked_run.secrets) >= 7  # tokens of three sites, signatures of four processes
    assert_no_secret_exposed(federation.folder, attacked_run.argv.values(), attacked_run.secrets)
