"""Heartbeats and model downloads over real TLS; HTTPS and gRPC through a proxy."""

import json
import os
import threading
from concurrent import futures
from datetime import UTC, datetime

import grpc
import pytest
import torch
from safetensors.torch import save

from pipeline.core.errors import MessageError, ServiceError
from pipeline.study.offer import StudyOffer
from sites.agent.coordinator_client import CoordinatorClient, DownloadCancelledError, model_file
from sites.agent.enrolment import CoordinatorInfo, SiteMembership
from sites.agent.environment import child_environment, find_disk_space_problem, proxy_for
from sites.agent.http import AccessDeniedError, UnreachableError, call_with_retries
from sites.governance.settings import ResourceLimits
from tests.support.connect_proxy import ConnectProxy
from tests.support.fake_coordinator import FakeCoordinator, certificate_authority, serve_tls

MODEL = save({"weights": torch.arange(100_000, dtype=torch.float32)})
PROXY_VARIABLES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def coordinator():
    return FakeCoordinator()


@pytest.fixture
def port(coordinator, tmp_path):
    with serve_tls(coordinator.app, tmp_path) as port:
        yield port


def make_membership(port: int, **changes) -> SiteMembership:
    coordinator = CoordinatorInfo(name="test-coordinator", key="0" * 64, host="localhost", port=port)
    fields = {
        "url": f"https://localhost:{port}",
        "site": "north",
        "credential": "the-credential",
        "ca": certificate_authority().pem,
    }
    return SiteMembership(**(fields | changes), coordinator=coordinator)


@pytest.fixture
def client(port):
    with CoordinatorClient(make_membership(port)) as client:
        yield client


def make_offer(run="run-1", **changes) -> dict:
    fields = {
        "run": run,
        "study_toml": "",
        "study_hash": "a" * 64,
        "site_keys": {"north": "b" * 64},
        "coordinator_key": "c" * 64,
        "version": "0.1.0",
    }
    return fields | changes


def test_heartbeat_sends_status_and_receives_offers_and_runs(coordinator, client):
    coordinator.offers = [make_offer()]
    coordinator.runs = [{"id": "run-0", "state": "finished", "models": ["global", "cluster/2"]}]
    reply = client.send_heartbeat({"state": "connected"}, [{"run": "run-0"}], [])
    assert reply.offers == (StudyOffer(**make_offer()),)
    assert reply.runs[0].models == ("global", "cluster/2")
    assert abs((reply.coordinator_time - datetime.now(UTC)).total_seconds()) < 10
    (payload,) = coordinator.heartbeats
    assert payload["status"] == {"state": "connected"}
    assert payload["approvals"] == [{"run": "run-0"}]


def test_offers_of_another_version_are_reported_as_unreadable(coordinator, client):
    coordinator.offers = [
        make_offer("new", version="9.0", shape="unknown"),
        make_offer("old"),
        {"run": "\x1b[2J", "version": ["x"]},
    ]
    reply = client.send_heartbeat({}, [], [])
    assert [offer.run for offer in reply.offers] == ["old"]
    assert reply.unreadable_offers == (("new", "9.0"), ("2J", "x"))


@pytest.mark.parametrize(
    "runs",
    [
        [{"id": "../up", "state": "finished", "models": []}],
        [{"id": "run", "state": "finished", "models": ["../../agent.pem"]}],
        [{"id": "run", "state": "finished", "models": [".hidden"]}],
        [{"id": "run", "state": "finished", "models": ["a//b"]}],
        [{"id": "run", "state": "finished", "models": ["/etc/passwd"]}],
        "none",
    ],
)
def test_path_traversal_in_run_and_model_names_is_refused(coordinator, client, runs):
    coordinator.runs = runs
    with pytest.raises(MessageError, match="does not understand"):
        client.send_heartbeat({}, [], [])


def test_download_model(coordinator, client, tmp_path):
    coordinator.models["run", "cluster/2"] = MODEL
    target = model_file(tmp_path, "run", "cluster/2")
    assert (
        client.download_model("run", "cluster/2", target)
        == target
        == tmp_path / "models" / "run" / "cluster" / "2.safetensors"
    )
    assert target.read_bytes() == MODEL


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", MODEL[:-1], MODEL + b"x", b"\x80\x04pickled", save({})])
def test_a_download_that_is_not_a_safetensors_file_is_deleted(coordinator, client, tmp_path, content):
    coordinator.models["run", "global"] = content
    with pytest.raises(MessageError, match="was deleted"):
        client.download_model("run", "global", tmp_path / "m" / "global.safetensors")
    assert list((tmp_path / "m").iterdir()) == []


def test_download_stops_at_the_size_limit_and_on_cancel(coordinator, client, tmp_path, monkeypatch):
    coordinator.models["run", "global"] = MODEL
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadCancelledError):
        client.download_model("run", "global", tmp_path / "m" / "x", stop)
    monkeypatch.setattr("sites.agent.coordinator_client.MAX_MODEL_BYTES", 1000)
    with pytest.raises(MessageError, match="more than 1000 bytes"):
        client.download_model("run", "global", tmp_path / "m" / "x")
    assert list((tmp_path / "m").iterdir()) == []


def test_only_temporary_errors_are_retried(coordinator, client, tmp_path, monkeypatch):
    delays = []
    monkeypatch.setattr("time.sleep", delays.append)
    coordinator.models["run", "global"] = MODEL
    coordinator.error_statuses = [503, 429, 500]
    client.download_model("run", "global", tmp_path / "x")
    assert len(delays) == 3
    assert delays[0] < delays[2]
    coordinator.error_statuses = [403, 500]
    with pytest.raises(AccessDeniedError, match="a test ordered this error"):
        client.download_model("run", "global", tmp_path / "x")
    coordinator.error_statuses = [404]
    with pytest.raises(ServiceError, match="404"):
        client.download_model("run", "global", tmp_path / "x")
    coordinator.error_statuses = [500] * 4
    with pytest.raises(UnreachableError, match="500"):
        call_with_retries(client.leave_federation, attempts=1)


def test_wrong_credential_wrong_ca_and_no_server(coordinator, port):
    with (
        CoordinatorClient(make_membership(port, credential="wrong-credential")) as client,
        pytest.raises(AccessDeniedError, match="the credential is missing or wrong") as raised,
    ):
        client.send_heartbeat({}, [], [])
    assert "wrong-credential" not in str(raised.value)
    with (
        CoordinatorClient(make_membership(port, ca=certificate_authority("foreign").pem)) as client,
        pytest.raises(UnreachableError, match="connection may be intercepted"),
    ):
        client.send_heartbeat({}, [], [])
    with CoordinatorClient(make_membership(1)) as client, pytest.raises(UnreachableError):
        client.send_heartbeat({}, [], [])
    for url in ("http://localhost:1", "https://", "https://user:pw@host", "https://host/path"):
        with pytest.raises(ServiceError, match="not a coordinator's address"):
            CoordinatorClient(make_membership(port, url=url))


def test_leave_federation(coordinator, client):
    client.leave_federation()
    assert coordinator.has_left


def test_heartbeats_go_through_a_proxy(coordinator, port, monkeypatch):
    with ConnectProxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")  # a common form without a scheme
        with CoordinatorClient(make_membership(port)) as client:
            client.send_heartbeat({}, [], [])
        assert proxy.request_lines == [f"CONNECT localhost:{port} HTTP/1.1"]
        monkeypatch.setenv("NO_PROXY", "*")
        with CoordinatorClient(make_membership(port)) as client:
            client.send_heartbeat({}, [], [])
        assert len(proxy.request_lines) == 1
    assert len(coordinator.heartbeats) == 2


@pytest.fixture
def grpc_port(tmp_path):
    certificate, key = certificate_authority().write_server_certificate(tmp_path)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    reverse = grpc.unary_unary_rpc_method_handler(lambda data, context: data[::-1])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"reverse": reverse})])
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    )
    server.start()
    yield port
    server.stop(0).wait()


def call_reverse(port: int) -> bytes:
    with grpc.secure_channel(
        f"localhost:{port}", grpc.ssl_channel_credentials(certificate_authority().pem.encode())
    ) as channel:
        return channel.unary_unary("/test/reverse")(b"abc", timeout=10)


@pytest.mark.parametrize(
    ("variables", "uses_proxy"),
    [
        ({"HTTPS_PROXY": "http://nurse:p%40ss@127.0.0.1:{}"}, True),  # gRPC itself does not read this name
        ({"https_proxy": "127.0.0.1:{}"}, True),  # or this form
        ({"ALL_PROXY": "http://127.0.0.1:{}", "NO_PROXY": "example.org"}, True),
        ({"https_proxy": "http://127.0.0.1:{}", "NO_PROXY": "*"}, False),  # gRPC does not know `*`
        ({"https_proxy": "http://127.0.0.1:{}", "no_proxy": "localhost"}, False),
        ({"http_proxy": "http://127.0.0.1:{}"}, False),  # for http:// only, and gRPC would take it
    ],
)
def test_grpc_uses_the_same_proxy_as_https(grpc_port, monkeypatch, variables, uses_proxy):
    with ConnectProxy() as proxy:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(proxy.port))
        for name, value in child_environment(f"https://localhost:{grpc_port}", ResourceLimits()).items():
            if "grpc" in name:
                monkeypatch.setenv(name, value)
        assert call_reverse(grpc_port) == b"cba"
        assert proxy.request_lines == ([f"CONNECT localhost:{grpc_port} HTTP/1.1"] if uses_proxy else [])
        assert (
            not uses_proxy
            or "p%40ss" not in variables.get("HTTPS_PROXY", "")
            or any("Basic" in h for h in proxy.last_headers)
        )


def test_an_unsupported_proxy_scheme_is_refused(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "socks5://10.0.0.1:1080")
    with pytest.raises(ServiceError, match="socks5://"):
        proxy_for("https://fl.example.org:8443")
    monkeypatch.setenv("NO_PROXY", ".example.org")
    assert proxy_for("https://fl.example.org:8443") is None


def test_child_environment_has_limits_and_no_secrets(tmp_path):
    base = {"HEMOFED_INVITATION": "secret", "PATH": os.environ["PATH"]}
    env = child_environment("https://h:1", ResourceLimits(max_cores=3, max_gpu_memory_gb=2.5), base)
    assert "secret" not in json.dumps(env)
    assert (env["OMP_NUM_THREADS"], env["HEMOFED_CORES"], env["HEMOFED_GPU_MEMORY_GB"]) == ("3", "3", "2.5")
    assert env["PYTHONSAFEPATH"] == "1"
    assert "OMP_NUM_THREADS" not in child_environment("https://h:1", ResourceLimits(), base)
    assert find_disk_space_problem(tmp_path, ResourceLimits(min_free_disk_gb=1e-6)) is None
    assert "must stay free" in str(find_disk_space_problem(tmp_path, ResourceLimits(min_free_disk_gb=1e9)))
