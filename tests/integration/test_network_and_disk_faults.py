"""A slow line, a full disk, a clock that jumps, a proxy, and kills in the middle of private training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from pipeline.cli.local_federation import run_cli_json
from sites.governance.home import SiteHome
from tests.integration.chaos_federation import ROUNDS, RUNNER, SITES, WORKER, World
from tests.integration.slow_network import slow_line
from tests.support.connect_proxy import ConnectProxy

pytestmark = pytest.mark.slow
SITE = "site-02"


def again(world: World, site: str, **env: str) -> None:
    """The site's agent, started anew."""
    world.small.children[site].stop(5)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        world.small.start_agent(site)


@contextlib.contextmanager
def reached_through(world: World, site: str, port: int) -> Iterator[None]:
    """The site knows its coordinator by another port."""
    file = world.small.folder / site / "membership.json"
    before = file.read_text()
    member = json.loads(before)
    member["url"] = f"https://localhost:{port}"
    member["coordinator"]["port"] = port
    file.write_text(json.dumps(member))
    try:
        again(world, site)
        yield
    finally:
        file.write_text(before)
        again(world, site)


def test_a_slow_line(world: World, tmp_path: Path) -> None:
    with slow_line(int(world.small.url.rpartition(":")[2]), 100_000, 0.02) as line:
        with reached_through(world, SITE, line.port):
            run = world.begin()
            world.finish(run, 400)
        assert line.passed > 100_000
    world.as_if_nothing_had_happened(run, tmp_path)
    world.nothing_is_left_over()


def test_through_an_http_proxy(world: World, tmp_path: Path) -> None:
    """Everything: enrolled before, beats and FLARE's messages go through CONNECT."""
    with ConnectProxy() as proxy:
        again(world, SITE, HTTPS_PROXY=f"http://127.0.0.1:{proxy.port}", NO_PROXY="", no_proxy="")
        try:
            run = world.begin()
            world.finish(run)
            assert len(proxy.request_lines) >= 3  # the agent, FLARE's client, its job
        finally:
            again(world, SITE)
    world.as_if_nothing_had_happened(run, tmp_path)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yields the file that fills it when it is written."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("a file system of a few kilobytes needs root to be mounted")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if done.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder / "filler"
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))


def test_a_full_disk_at_a_site(world: World, tmp_path: Path) -> None:
    with small_disk(world.small.folder / SITE / "runs", "512k") as filler:
        run = world.begin()
        world.reach(run, 2)
        fill(filler)
        world.small.wait_until(
            lambda: "no space left" in world.small.get_run(run)["reason"], "the full disk to be named", 120
        )
        filler.unlink()
        world.finish(run)
        world.as_if_nothing_had_happened(run, tmp_path)
    world.nothing_is_left_over()


def test_a_full_disk_at_the_coordinator(world: World, tmp_path: Path) -> None:
    with small_disk(world.small.home / "runs", "2m") as filler:
        run = world.begin()
        world.reach(run, 2)
        fill(filler)
        world.small.wait_until(
            lambda: world.small.get_run(run)["state"] in ("failed", "waiting"), "the run to rest", 120
        )
        filler.unlink()
        if world.small.get_run(run)["state"] == "failed":
            assert "no space left" in world.small.get_run(run)["reason"]
            run_cli_json("coordinator", "resume", run, "--home", world.small.home)
        world.finish(run)
        world.as_if_nothing_had_happened(run, tmp_path)
    world.nothing_is_left_over()


@pytest.fixture(scope="module")
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that moves the wall clock of the processes it is preloaded into."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a clock that jumps needs a C compiler")
    made = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.mark.parametrize("jump", [5 * 3600, -5 * 3600], ids=["ahead", "back"])
def test_a_clock_that_jumps(jump: int, world: World, tmp_path: Path, wall_clock: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    again(world, SITE, LD_PRELOAD=str(wall_clock), FAKE_CLOCK=str(clock))
    try:
        run = world.begin()
        world.reach(run, 3)
        clock.write_text(str(jump))
        world.small.wait_until(
            lambda: "clock" in str(run_cli_json("site", "status", world.small.folder / SITE)), "the warning", 60
        )
        world.finish(run)
        world.as_if_nothing_had_happened(run, tmp_path)
        world.ledgers_verify()
    finally:
        clock.write_text("0")
        again(world, SITE)


def test_private_training_that_is_killed_counts_nothing_that_was_not_paid_for(world: World) -> None:
    """Budgets hold, ledgers verify and follow their receipts, whoever dies between charge and answer."""
    private = ["privacy.dp_sgd.epsilon=2.0", "privacy.dp_sgd.privacy_unit=example", "rounds=8"]
    run = world.begin(*private)
    for round, victim in ((1, (WORKER, SITE)), (3, (RUNNER, None)), (5, (WORKER, "site-03"))):
        world.reach(run, round)
        world.kill(*victim)
    world.finish(run, 400)
    world.ledgers_verify()
    folder = world.small.home / "runs" / run
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(9))
    for site in SITES:
        ledger = SiteHome.open(world.small.folder / site).ledger
        paid = [c.round for c in ledger.list_charges()]
        counted = [line["round"] for line in lines if site in line["counted"]]
        assert set(counted) <= set(paid) <= set(range(1, 9))
        assert len(counted) >= 5
        assert len(paid) <= 8  # a turn that died after its charge was paid twice, and is missing at the end
        assert ledger.list_charges()[-1].total_epsilon <= 2.0
        assert lines[-1]["epsilon"][site] == pytest.approx(ledger.list_charges()[-1].total_epsilon)


def test_a_withdrawn_approval_takes_effect_at_the_next_message(world: World) -> None:
    run = world.begin()
    world.reach(run, 1)
    run_cli_json("site", "revoke-approval", world.small.folder / SITE, run)
    world.small.wait_until(lambda: world.small.get_run(run)["state"] == "waiting", "the run to wait", 90)
    seen = world.small.get_run(run)
    assert "withdrawn" in seen["reason"] or f"{SITE} has not approved" in seen["reason"]
    before = world.round(run)
    time.sleep(5)
    assert world.round(run) == before < ROUNDS
    run_cli_json("coordinator", "stop", run, "--home", world.small.home)
