"""Four runs in different states at six hospitals, for the fake API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.protocol.messages import ClientFailure
from pipeline.records.live_status import LiveStatus
from tests.support.dashboard.fake_api import FakeApi, FakeRun
from tests.support.dashboard.recorded_runs import Json, RecordedRun, time_ago

HOSPITALS = ("charite", "karolinska", "st-james", "uz-leuven", "la-paz", "motol")
SITE_NAMES = {f"site-{number:02d}": name for number, name in enumerate(HOSPITALS, 1)}
# ids of the runs
SLOW = "moons-stragglers-1a2b3c"
TREE = "moons-clusters-77d0e1"
PRIVATE = "moons-private-90fe12"
OFFERED = "smears-c0ffee"


def make_fake_api(recordings: Mapping[str, RecordedRun], site_names: Mapping[str, str] = SITE_NAMES) -> FakeApi:
    slow, tree, private = (recordings[kind].rename_sites(site_names) for kind in ("slow", "tree", "private"))
    first, second, third, fourth = slow.sites
    live = LiveStatus(
        at=time_ago(seconds=41),
        pid=1,
        round=22,
        rounds=30,
        phase="train",
        requested=tuple(slow.sites),
        replied=(first, third),
        failures={fourth: ClientFailure("no_reply", "no reply")},
        unreachable=(fourth,),
    ).to_dict()
    slow_run = _make_run(
        SLOW,
        strategy="fedprox",
        state="running",
        rounds=30,
        sites=[_make_run_site(site, connected=site != fourth, last_seen=time_ago(minutes=7)) for site in slow.sites],
        created=time_ago(hours=2),
        started=time_ago(minutes=96),
        live=live,
    )
    offered_run = _make_run(
        OFFERED,
        strategy="fedavg",
        state="offered",
        rounds=16,
        sites=[
            _make_run_site(first),
            _make_run_site(second, approved=None, expires=None),
            _make_run_site(third, revoked=time_ago(hours=5)),
            _make_run_site(fourth, approved=None, expires=None),
        ],
        created=time_ago(hours=9),
        min_sites=3,
    )
    private_run = _make_run(
        PRIVATE,
        strategy="fedavg",
        state="paused",
        rounds=8,
        sites=[_make_run_site(site) for site in private.sites],
        created=time_ago(days=1),
        started=time_ago(hours=23),
    )
    tree_run = _make_run(
        TREE,
        strategy="similarity_clustering",
        state="finished",
        rounds=16,
        sites=[_make_run_site(site) for site in tree.sites],
        created=time_ago(days=2),
        started=time_ago(days=2),
        finished=time_ago(days=1, hours=20),
    )
    runs = [
        FakeRun(slow_run, slow, num_rounds=22),
        FakeRun(offered_run, tree, num_rounds=0),
        FakeRun(private_run, private, num_rounds=7),
        FakeRun(tree_run, tree, num_rounds=17),
    ]
    sites = [_make_site(name, index, connected=name != fourth) for index, name in enumerate(tree.sites)]
    users: list[Json] = [
        {"name": name, "role": role, "created": time_ago(days=30), "revoked": revoked}
        for name, role, revoked in (
            ("Ada", "lead", None),
            ("Otto", "officer", None),
            ("Eve", "viewer", time_ago(days=1)),
        )
    ]
    log: list[Json] = [
        {"time": time_ago(minutes=9), "level": "info", "event": "enrolled", "site": first, "version": "0.1.0"},
        {
            "time": time_ago(minutes=8),
            "level": "warning",
            "event": "refused",
            "who": "Vera",
            "path": "/api/runs/x/stop",
            "status": 403,
        },
        {"time": time_ago(minutes=7), "level": "error", "event": "site left", "site": fourth},
    ]
    return FakeApi({fake_run.run["id"]: fake_run for fake_run in runs}, sites, users, log)


def _make_run_site(site: str, **fields: Any) -> Json:
    defaults = {"approved": time_ago(days=3), "expires": time_ago(days=-87), "revoked": None}
    return {"site": site, **defaults, "connected": True, "last_seen": time_ago(seconds=2)} | fields


def _make_run(id: str, strategy: str, state: str, rounds: int, sites: list[Json], **fields: Any) -> Json:
    defaults = {
        "id": id,
        "name": id.rpartition("-")[0],
        "strategy": strategy,
        "state": state,
        "desired_state": "run",
        "reason": "",
        "created": None,
        "started": None,
        "finished": None,
        "rounds": rounds,
        "min_sites": 2,
        "sites": sites,
        "live": None,
    }
    return defaults | fields


def _make_site(name: str, index: int, connected: bool) -> Json:
    status = {"state": "connected", "flare": "running", "warnings": int(index == 4), "run": SLOW if index < 2 else None}
    return {
        "site": name,
        "fingerprint": f"{index}b1f-{index}c9e-4d2a-7f60-11aa-9c0e-5d3b-e417",
        "officer": f"{index}77a-0c4d-9e2b-1f35-c0de-44b1-7a90-02ff",
        "enrolled": time_ago(days=20 + index),
        "last_seen": time_ago(seconds=1) if connected else time_ago(minutes=7),
        "connected": connected,
        "version": "0.1.0",
        "status": status | {"disk_free_gb": 1.4 if index == 4 else 210 / (index + 1)},
        "left": None,
    }
