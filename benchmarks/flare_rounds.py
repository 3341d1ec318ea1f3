"""Overhead of a round across processes: 28 MB to and from two sites, with hemofed and with unmodified FLARE.

    .venv/bin/python benchmarks/flare_rounds.py [--json] [--rounds 8]

Both run one after the other, as real processes with mTLS on the loopback interface. Unmodified FLARE: kits from `nvflare
provision`, its own ScatterAndGather and NPTrainer, which only adds a number to the same 28 MB. hemofed: through the
coordinator's service on one port, and the sites' agents. The overhead of a round is its time minus the work of the slowest
site; the result is the median of all rounds except the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cli.local_federation import LocalFederation
from pipeline.coordinator.run_folder import RunFolder
from pipeline.ops.child_processes import ChildProcess, kill_by_mark
from pipeline.service.runtime.serve import find_free_ports

NUM_PARAMETERS = 7_000_000  # 28 MB
SITES = ("site-01", "site-02")
STUDY = """
name = "heavy"
rounds = {rounds}
data = {{ name = "moons", points = 60 }}
model = {{ name = "mlp", hidden = [2644, 2644] }}
sites = {{ count = 2 }}
local = {{ steps = 1, batch_size = 8, lr = 0.01 }}
evaluation = {{ evaluate_at = "sites", every = 1000 }}
"""


def measure_hemofed(folder: Path, rounds: int) -> list[float]:
    study_path = folder / "study.toml"
    study_path.write_text(STUDY.format(rounds=rounds))
    with closing(LocalFederation(folder)) as federation:
        federation.start_coordinator()
        for site in SITES:
            federation.enrol_site(site, "--simulate-site", site)
        run = federation.offer_study(str(study_path), [])
        for site in SITES:
            federation.approve_run(run, site)
        federation.wait_until(lambda: federation.get_run(run)["state"] in ("finished", "failed"), "the run", 600)
        records = RunFolder(federation.home / "runs" / run).load_rounds()
    return [r.seconds.train - max(w.seconds for w in r.work.values()) for r in records[2:]]


def measure_flare(folder: Path, rounds: int) -> list[float]:
    (port,) = find_free_ports(1)
    mark = f"bench-{folder}"
    kits = provision_kits(folder, port)
    np.save(folder / "model.npy", np.zeros(NUM_PARAMETERS, np.float32))
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "GRPC_VERBOSITY": "NONE"}
    options = ["--set", "secure_train=true", "org=hemofed", "config_folder=config"]
    app = "nvflare.private.fed.app"
    commands = {"localhost": [f"{app}.server.server_train", "-s", "fed_server.json", *options]}
    commands |= {s: [f"{app}.client.client_train", "-s", "fed_client.json", *options, f"uid={s}"] for s in SITES}
    try:
        for name, (module, *rest) in commands.items():
            kit = kits / name
            ChildProcess.start(
                [sys.executable, "-m", module, "-m", str(kit), *rest], kit, env, folder / f"{name}.log", mark
            )
        return run_scatter_and_gather(folder, kits, rounds)
    finally:
        kill_by_mark(mark)


def provision_kits(folder: Path, port: int) -> Path:
    project = {
        "api_version": 3,
        "name": "raw",
        "participants": [
            {"name": "localhost", "type": "server", "org": "hemofed", "fed_learn_port": port},
            *({"name": site, "type": "client", "org": "hemofed"} for site in SITES),
            {"name": "admin@hemofed.org", "type": "admin", "org": "hemofed", "role": "project_admin"},
        ],
        "builders": [
            {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder"},
            {
                "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": "grpc"},
            },
            {"path": "nvflare.lighter.impl.cert.CertBuilder"},
        ],
    }
    (folder / "project.yml").write_text(json.dumps(project))  # JSON is YAML
    nvflare = Path(sys.executable).with_name("nvflare")
    subprocess.run([nvflare, "provision", "-p", "project.yml", "-w", "ws"], cwd=folder, check=True, capture_output=True)
    kits = folder / "ws" / "raw" / "prod_00"
    resources = (kits / "localhost" / "local" / "resources.json.default").read_text()
    # the default stores in /tmp would be shared with other federations on this machine
    (kits / "localhost" / "local" / "resources.json").write_text(resources.replace("/tmp/nvflare", f"{folder}/store"))
    return kits


def run_scatter_and_gather(folder: Path, kits: Path, rounds: int) -> list[float]:
    """Seconds of rounds 1, 2, ..., from FLARE's log."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    job = folder / "job"
    app_common = "nvflare.app_common"
    server = {
        "format_version": 2,
        "components": [
            {
                "id": "persistor",
                "path": f"{app_common}.np.np_model_persistor.NPModelPersistor",
                "args": {"source_ckpt_file_full_name": str(folder / "model.npy")},
            },
            {
                "id": "generator",
                "path": f"{app_common}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
                "args": {},
            },
            {
                "id": "aggregator",
                "path": f"{app_common}.aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator",
                "args": {"expected_data_kind": "WEIGHTS"},
            },
        ],
        "workflows": [
            {
                "id": "fedavg",
                "path": f"{app_common}.workflows.scatter_and_gather.ScatterAndGather",
                "args": {
                    "min_clients": 2,
                    "num_rounds": rounds,
                    "start_round": 0,
                    "wait_time_after_min_received": 0,
                    "aggregator_id": "aggregator",
                    "persistor_id": "persistor",
                    "shareable_generator_id": "generator",
                    "train_task_name": "train",
                    "train_timeout": 0,
                },
            }
        ],
    }
    client = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["train"],
                "executor": {"path": f"{app_common}.np.np_trainer.NPTrainer", "args": {"delta": 1, "sleep_time": 0}},
            }
        ],
        "components": [],
    }
    meta = {"name": "job", "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}, "min_clients": 2}
    (job / "app" / "config").mkdir(parents=True)
    for name, content in (
        ("app/config/config_fed_server.json", server),
        ("app/config/config_fed_client.json", client),
        ("meta.json", meta),
    ):
        (job / name).write_text(json.dumps(content))
    session = None
    deadline = time.monotonic() + 300
    while session is None and time.monotonic() < deadline:
        try:
            session = new_secure_session("admin@hemofed.org", str(kits / "admin@hemofed.org"), timeout=5)
            if len(session.get_system_info().client_info) < len(SITES):
                session.close()
                session = None
        except Exception:
            session = None
        time.sleep(1)
    assert session is not None, f"FLARE did not start; logs are in {folder}"
    try:
        job_id = session.submit_job(str(job))
        log = kits / "localhost" / job_id / "log.txt"
        round_pattern = re.compile(r"^(\S+ \S+?) - ScatterAndGather.* Round (\d+) (?:started|finished)", re.M)
        while time.monotonic() < deadline:
            times = round_pattern.findall(log.read_text()) if log.exists() else []
            if len({number for _, number in times}) >= rounds:
                break
            time.sleep(1)
    finally:
        session.close()
    starts: dict[int, datetime] = {}
    for text, number in times:
        starts.setdefault(int(number), datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f"))
    return [(starts[n + 1] - starts[n]).total_seconds() for n in range(1, rounds - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for engine, measure in (("hemofed", measure_hemofed), ("FLARE as it comes", measure_flare)):
            folder = Path(name) / engine.partition(" ")[0]
            folder.mkdir()
            report[engine] = statistics.median(measure(folder, arguments.rounds))
    report["ratio"] = report["hemofed"] / report["FLARE as it comes"]
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"overhead of a round with 28 MB to and from two sites: hemofed {report['hemofed']:.2f} s, "
        f"unmodified FLARE {report['FLARE as it comes']:.2f} s ({report['ratio']:.2f}x)"
    )


if __name__ == "__main__":
    main()
