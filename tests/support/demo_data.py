"""A day at the coordinator: four runs in different states at six hospitals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.fake_api import Play, Stage
from tests.support.recorded_runs import Json, Recording, ago

HOSPITALS = ("charite", "karolinska", "st-james", "uz-leuven", "la-paz", "motol")
NAMES = {f"site-{place:02d}": name for place, name in enumerate(HOSPITALS, 1)}
SLOW, TREE, PRIVATE, OFFERED = (
    "moons-stragglers-1a2b3c",
    "moons-clusters-77d0e1",
    "moons-private-90fe12",
    "smears-c0ffee",
)


def scene(recordings: Mapping[str, Recording], names: Mapping[str, str] = NAMES) -> Stage:
    slow, tree, private = (recordings[kind].renamed(names) for kind in ("slow", "tree", "private"))
    first, second, third, fourth = slow.sites
    live = {
        "at": ago(seconds=41),
        "pid": 1,
        "round": 22,
        "rounds": 30,
        "phase": "train",
        "asked": slow.sites,
        "answered": [first, third],
        "missed": {fourth: {"kind": "no_reply", "text": "no reply"}},
    }
    running = [member(site, connected=site != fourth, last_seen=ago(minutes=7)) for site in slow.sites]
    offered = [
        member(first),
        member(second, approved=None, expires=None),
        member(third, withdrawn=ago(hours=5)),
        member(fourth, approved=None, expires=None),
    ]
    plays = [
        Play(
            _run(SLOW, "fedprox", "running", 30, running, created=ago(hours=2), started=ago(minutes=96), live=live),
            slow,
            22,
        ),
        Play(_run(OFFERED, "fedavg", "offered", 16, offered, created=ago(hours=9), fewest=3), tree, 0),
        Play(
            _run(
                PRIVATE,
                "fedavg",
                "paused",
                8,
                list(map(member, private.sites)),
                created=ago(days=1),
                started=ago(hours=23),
            ),
            private,
            7,
        ),
        Play(
            _run(
                TREE,
                "similarity_clustering",
                "finished",
                16,
                list(map(member, tree.sites)),
                created=ago(days=2),
                started=ago(days=2),
                finished=ago(days=1, hours=20),
            ),
            tree,
            17,
        ),
    ]
    sites = [_site(name, place, name != fourth) for place, name in enumerate(tree.sites)]
    users = [
        {"name": name, "role": role, "created": ago(days=30), "revoked": gone}
        for name, role, gone in (("Ada", "lead", None), ("Otto", "officer", None), ("Eve", "viewer", ago(days=1)))
    ]
    log = [
        {"time": ago(minutes=9), "level": "info", "event": "beat", "site": first, "version": "0.1.0"},
        {
            "time": ago(minutes=8),
            "level": "warning",
            "event": "refused",
            "who": "Vera",
            "path": "/api/runs/x/stop",
            "status": 403,
        },
        {"time": ago(minutes=7), "level": "error", "event": "site lost", "site": fourth},
    ]
    return Stage({play.run["id"]: play for play in plays}, sites, users, log)


def member(site: str, **more: Any) -> Json:
    fields = {"approved": ago(days=3), "expires": ago(days=-87), "withdrawn": None}
    return {"site": site, **fields, "connected": True, "last_seen": ago(seconds=2)} | more


def _run(id: str, strategy: str, state: str, rounds: int, sites: list[Json], **more: Any) -> Json:
    times = {"created": None, "started": None, "finished": None}
    head = {"id": id, "name": id.rpartition("-")[0], "strategy": strategy, "state": state, "want": "run", "reason": ""}
    return head | times | {"rounds": rounds, "fewest": 2, "sites": sites, "live": None} | more


def _site(name: str, place: int, connected: bool) -> Json:
    told = {"state": "connected", "flare": "running", "warnings": int(place == 4), "run": SLOW if place < 2 else None}
    return {
        "site": name,
        "fingerprint": f"{place}b1f-{place}c9e-4d2a-7f60-11aa-9c0e-5d3b-e417",
        "officer": f"{place}77a-0c4d-9e2b-1f35-c0de-44b1-7a90-02ff",
        "enrolled": ago(days=20 + place),
        "last_seen": ago(seconds=1) if connected else ago(minutes=7),
        "connected": connected,
        "version": "0.1.0",
        "status": told | {"disk_free_gb": 1.4 if place == 4 else 210 / (place + 1)},
        "left": None,
    }
