"""Startup kits are hardened: no code, no shell, no other class, no public port."""

import inspect
import json

import pytest

pytest.importorskip("nvflare")

from pipeline.flare.constants import CONTROLLER_PATH, DATA_SUMMARY_TASK, EXCHANGE_TASK, EXECUTOR_PATH
from pipeline.flare.provisioning import FLARE_ROLES, build_admin_kit, build_client_kit, build_job, build_server_kit
from pipeline.service.runtime.flare_job import FlareController

SERVER, CLIENT = build_server_kit("/work", 1234), build_client_kit("north", "fl.example.org", 8443)


@pytest.mark.parametrize("kit", [SERVER, CLIENT])
def test_kit_grants_no_role_code_or_shell(kit):
    rights = json.loads(kit["local/authorization.json"])["permissions"]
    assert set(rights) == set(FLARE_ROLES)
    for role, granted in rights.items():
        assert {granted[right] for right in ("byoc", "shell_commands", "operate", "download_job", "clone_job")} == {
            "none"
        }
        if role != "project_admin":
            assert set(granted.values()) == {"none"}


@pytest.mark.parametrize(("kit", "ours"), [(SERVER, CONTROLLER_PATH), (CLIENT, EXECUTOR_PATH)])
def test_kit_allows_only_our_class(kit, ours):
    resources = json.loads(kit["local/resources.json"])
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["class_allow_list"] == [ours]


def test_server_kit_listens_on_the_loopback_and_stores_jobs_in_its_folder():
    start = json.loads(SERVER["startup/fed_server.json"])["servers"][0]
    assert start["service"]["target"] == "127.0.0.1:1234"
    assert start["connection_security"] == "mtls"
    assert "/tmp" not in SERVER["local/resources.json"]


def test_client_kit_streams_no_logs_and_knows_one_server():
    assert json.loads(CLIENT["local/resources.json"])["allow_log_streaming"] is False
    start = json.loads(CLIENT["startup/fed_client.json"])
    assert start["servers"][0]["service"]["target"] == "fl.example.org:8443"
    assert start["client"]["connection_security"] == "mtls"


def test_kits_hold_no_private_key():
    for kit in (SERVER, CLIENT, build_admin_kit(1)):
        assert not any("PRIVATE" in text for text in kit.values())


def test_job_holds_only_configuration():
    made = build_job("run-1", "ab" * 32, ["north", "south"], 2)
    assert all(name.endswith(".json") for name in made)
    client = json.loads(made["app/config/config_fed_client.json"])
    assert client["executors"][0]["executor"] == {"path": EXECUTOR_PATH, "args": {"run": "run-1", "digest": "ab" * 32}}
    assert client["executors"][0]["tasks"] == [DATA_SUMMARY_TASK, EXCHANGE_TASK]
    (workflow,) = json.loads(made["app/config/config_fed_server.json"])["workflows"]
    inspect.signature(FlareController).bind(**workflow["args"])  # FLARE builds the class with these arguments
    assert json.loads(made["meta.json"])["deploy_map"] == {"app": ["server", "north", "south"]}
