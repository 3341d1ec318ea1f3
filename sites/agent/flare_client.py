"""Starts FLARE's client with a startup kit that the site writes itself, so that the coordinator cannot set its policy."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.core.files import write_atomically
from pipeline.flare.constants import SITE_HOME_ENV
from pipeline.flare.provisioning import build_client_kit
from sites.agent.enrolment import SiteMembership

QUIET_ENV = {"PYTHONWARNINGS": "ignore", "GRPC_VERBOSITY": "NONE", "TOKENIZERS_PARALLELISM": "false"}


def write_startup_kit(home: Path, site: str, host: str, port: int) -> None:
    """Overwrites the kit at every start, which undoes changes. Certificate and key stay."""
    for name, text in build_client_kit(site, host, port).items():
        write_atomically(home / "kit" / name, text.encode())


def prepare_client_argv(home: Path, site: str) -> list[str]:
    membership = SiteMembership.load(home)
    write_startup_kit(home, site, membership.coordinator.host, membership.coordinator.port)
    return client_argv(home, site)


def client_argv(home: Path, site: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pipeline.ops.child_processes",
        "nvflare.private.fed.app.client.client_train",
        "-m",
        str(home / "kit"),
        "-s",
        "fed_client.json",
        "--set",
        "secure_train=true",
        f"uid={site}",
        "org=hemofed",
        "config_folder=config",
        "heart_beat_interval=2",
    ]


def flare_env(home: Path) -> dict[str, str]:
    return {**QUIET_ENV, SITE_HOME_ENV: str(home.resolve())}
