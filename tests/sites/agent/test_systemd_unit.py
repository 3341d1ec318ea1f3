"""The systemd unit; where systemd is installed, `systemd-analyze verify` checks it."""

import configparser
import getpass
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import RunFolderError
from sites.agent.systemd_unit import UNIT_NAME, render_unit

ANALYZE = shutil.which("systemd-analyze")


def parse_unit(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str
    parser.read_string(text)
    return parser


@pytest.mark.parametrize("cores", [None, 4])
def test_systemd_unit_is_hardened_and_restarts(tmp_path, cores):
    home = tmp_path / "home"
    service = parse_unit(render_unit(home, "north", max_cores=cores))["Service"]
    assert service["ExecStart"] == f"{Path(sys.executable).parent / 'hemofed'} site join {home}"
    assert (service["User"], service["Restart"], service["ReadWritePaths"]) == (getpass.getuser(), "always", str(home))
    assert service.get("CPUQuota") == (None if cores is None else "400%")
    for name in ("NoNewPrivileges", "PrivateTmp", "RestrictSUIDSGID", "ProtectKernelModules"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed: apt-get install systemd")
@pytest.mark.parametrize("folder", ["home", "a home", "100% home"])
def test_systemd_analyze_accepts_the_unit(tmp_path, folder):
    (tmp_path / folder).mkdir()
    command = tmp_path / "hemofed"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    file = tmp_path / UNIT_NAME
    file.write_text(render_unit(tmp_path / folder, "north", "root", command, 2))
    completed = subprocess.run([ANALYZE, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False)
    problems = [line for line in completed.stderr.splitlines() if UNIT_NAME in line]
    assert problems == []
    assert completed.returncode == 0, completed.stderr


def test_home_path_with_characters_that_a_unit_cannot_contain_is_refused(tmp_path):
    for name in ('a"b', "a\nUser=root", "a$b"):
        with pytest.raises(RunFolderError, match="cannot contain"):
            render_unit(tmp_path / name, "north")
