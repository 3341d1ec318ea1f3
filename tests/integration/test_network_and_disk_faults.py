"""A slow connection, a proxy, full disks, a jumping clock, a revoked approval, and kills during private training."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from pipeline.cli.local_federation import run_cli_json
from sites.governance.home import SiteHome
from tests.integration.chaos_federation import ROUNDS, RUNNER, SITES, WORKER, ChaosFederation
from tests.integration.slow_network import open_slow_connection
from tests.support.connect_proxy import ConnectProxy
from tests.support.machine import mount_small_disk

pytestmark = pytest.mark.slow
SITE = "site-02"


@contextlib.contextmanager
def connect_through(federation: ChaosFederation, site: str, port: int) -> Iterator[None]:
    """The site connects to its coordinator through another port."""
    file = federation.local.folder / site / "membership.json"
    before = file.read_text()
    membership = json.loads(before)
    membership["url"] = f"https://localhost:{port}"
    membership["coordinator"]["port"] = port
    file.write_text(json.dumps(membership))
    try:
        federation.restart_agent(site)
        yield
    finally:
        file.write_text(before)
        federation.restart_agent(site)


def test_run_with_a_slow_connection(federation: ChaosFederation, tmp_path: Path) -> None:
    coordinator_port = int(federation.local.url.rpartition(":")[2])
    with open_slow_connection(coordinator_port, rate=100_000, delay=0.02) as connection:
        with connect_through(federation, SITE, connection.port):
            run = federation.start_run()
            federation.wait_for_end(run, 400)
        assert connection.num_bytes > 100_000
    federation.assert_equals_undisturbed_run(run, tmp_path)
    federation.assert_no_leftover_processes()


def test_run_through_an_http_proxy(federation: ChaosFederation, tmp_path: Path) -> None:
    """After enrolment all traffic, heartbeats and FLARE's messages, goes through CONNECT."""
    with ConnectProxy() as proxy:
        federation.restart_agent(SITE, HTTPS_PROXY=f"http://127.0.0.1:{proxy.port}", NO_PROXY="", no_proxy="")
        try:
            run = federation.start_run()
            federation.wait_for_end(run)
            assert len(proxy.request_lines) >= 3  # the agent, FLARE's client, its job
        finally:
            federation.restart_agent(SITE)
    federation.assert_equals_undisturbed_run(run, tmp_path)


def fill_until_full(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))


def test_run_resumes_after_a_full_disk_at_a_site(federation: ChaosFederation, tmp_path: Path) -> None:
    local = federation.local
    with mount_small_disk(local.folder / SITE / "runs", "512k") as disk:
        run = federation.start_run()
        federation.wait_for_round(run, 2)
        fill_until_full(disk / "filling")
        local.wait_until(
            lambda: "no space left" in local.get_run(run)["reason"], "the reason to name the full disk", 120
        )
        (disk / "filling").unlink()
        federation.wait_for_end(run)
        federation.assert_equals_undisturbed_run(run, tmp_path)
    federation.assert_no_leftover_processes()


def test_run_resumes_after_a_full_disk_at_the_coordinator(federation: ChaosFederation, tmp_path: Path) -> None:
    local = federation.local
    with mount_small_disk(local.home / "runs", "2m") as disk:
        run = federation.start_run()
        federation.wait_for_round(run, 2)
        fill_until_full(disk / "filling")
        local.wait_until(lambda: local.get_run(run)["state"] in ("failed", "waiting"), "the run to halt", 120)
        (disk / "filling").unlink()
        if local.get_run(run)["state"] == "failed":
            assert "no space left" in local.get_run(run)["reason"]
            run_cli_json("coordinator", "resume", run, "--home", local.home)
        federation.wait_for_end(run)
        federation.assert_equals_undisturbed_run(run, tmp_path)
    federation.assert_no_leftover_processes()


@pytest.fixture(scope="module")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shifts the wall clock of the processes that preload it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a jumping clock needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("jump", [5 * 3600, -5 * 3600], ids=["ahead", "back"])
def test_run_survives_a_clock_jump_at_a_site(
    jump: int, federation: ChaosFederation, tmp_path: Path, clock_shim: Path
) -> None:
    local = federation.local
    clock_file = tmp_path / "clock"
    clock_file.write_text("0")
    federation.restart_agent(SITE, LD_PRELOAD=str(clock_shim), FAKE_CLOCK=str(clock_file))
    try:
        run = federation.start_run()
        federation.wait_for_round(run, 3)
        clock_file.write_text(str(jump))
        local.wait_until(lambda: "clock" in str(run_cli_json("site", "status", local.folder / SITE)), "the warning", 60)
        federation.wait_for_end(run)
        federation.assert_equals_undisturbed_run(run, tmp_path)
        federation.assert_ledgers_verify()
    finally:
        clock_file.write_text("0")
        federation.restart_agent(SITE)


def test_killed_dp_sgd_run_counts_only_charged_rounds(federation: ChaosFederation) -> None:
    """Budgets hold, and ledgers verify and match their receipts, although processes die between charge and reply."""
    run = federation.start_run("privacy.dp_sgd.epsilon=2.0", "privacy.dp_sgd.privacy_unit=example", "rounds=8")
    for round_number, killed in ((1, (WORKER, SITE)), (3, (RUNNER, None)), (5, (WORKER, "site-03"))):
        federation.wait_for_round(run, round_number)
        federation.kill_processes(*killed)
    federation.wait_for_end(run, 400)
    federation.assert_ledgers_verify()
    lines = (federation.run_path(run) / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["round"] for record in records] == list(range(9))
    for site in SITES:
        charges = SiteHome.open(federation.local.folder / site).ledger.list_charges()
        charged_rounds = [charge.round for charge in charges]
        counted_rounds = [record["round"] for record in records if site in record["accepted"]]
        assert set(counted_rounds) <= set(charged_rounds) <= set(range(1, 9))
        assert len(counted_rounds) >= 5
        assert len(charged_rounds) <= 8  # a round killed after its charge is charged twice, so a later one is missing
        assert charges[-1].total_epsilon <= 2.0
        assert records[-1]["epsilon"][site] == pytest.approx(charges[-1].total_epsilon)


def test_revoked_approval_stops_the_run_at_the_next_message(federation: ChaosFederation) -> None:
    local = federation.local
    run = federation.start_run()
    federation.wait_for_round(run, 1)
    run_cli_json("site", "revoke-approval", local.folder / SITE, run)
    local.wait_until(lambda: local.get_run(run)["state"] == "waiting", "the run to wait", 90)
    reason = local.get_run(run)["reason"]
    assert "revoked" in reason or f"{SITE} has not approved" in reason
    last_round = federation.last_round(run)
    time.sleep(5)
    assert federation.last_round(run) == last_round < ROUNDS
    run_cli_json("coordinator", "stop", run, "--home", local.home)
