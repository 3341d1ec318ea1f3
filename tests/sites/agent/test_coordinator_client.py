"""Beats and models over real TLS; and both ways out, HTTPS and gRPC, through a proxy."""

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
from tests.support.connect_proxy import Proxy
from tests.support.fake_coordinator import Stage, authority, served

MODEL = save({"weights": torch.arange(100_000, dtype=torch.float32)})
PROXIES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def port(stage, tmp_path):
    with served(stage.app, tmp_path) as port:
        yield port


def member(port: int, **changed) -> SiteMembership:
    coordinator = CoordinatorInfo(name="stage", key="0" * 64, host="localhost", port=port)
    said = {"url": f"https://localhost:{port}", "site": "north", "credential": "the-credential", "ca": authority().pem}
    return SiteMembership(**(said | changed), coordinator=coordinator)


@pytest.fixture
def link(port):
    with CoordinatorClient(member(port)) as link:
        yield link


def an_offer(run="run-1", **changed) -> dict:
    said = {
        "run": run,
        "study": "",
        "plan": "a" * 64,
        "sites": {"north": "b" * 64},
        "coordinator": "c" * 64,
        "version": "0.1.0",
    }
    return said | changed


def test_a_beat_tells_and_hears(stage, link):
    stage.offers = [an_offer()]
    stage.runs = [{"id": "run-0", "state": "finished", "models": ["global", "group/2"]}]
    heard = link.send_heartbeat({"state": "connected"}, [{"run": "run-0"}], [])
    assert heard.offers == (StudyOffer(**an_offer()),)
    assert heard.runs[0].models == ("global", "group/2")
    assert abs((heard.time - datetime.now(UTC)).total_seconds()) < 10
    (said,) = stage.beats
    assert said["status"] == {"state": "connected"}
    assert said["approvals"] == [{"run": "run-0"}]


def test_an_offer_of_another_version_is_named_and_the_others_are_heard(stage, link):
    stage.offers = [
        an_offer("new", version="9.0", shape="unknown"),
        an_offer("old"),
        {"run": "\x1b[2J", "version": ["x"]},
    ]
    heard = link.send_heartbeat({}, [], [])
    assert [offer.run for offer in heard.offers] == ["old"]
    assert heard.unread == (("new", "9.0"), ("2J", "x"))


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
def test_names_that_lead_elsewhere_are_refused(stage, link, runs):
    stage.runs = runs
    with pytest.raises(MessageError, match="does not understand"):
        link.send_heartbeat({}, [], [])


def test_a_model_arrives_whole(stage, link, tmp_path):
    stage.models["run", "group/2"] = MODEL
    into = model_file(tmp_path, "run", "group/2")
    assert link.model("run", "group/2", into) == into == tmp_path / "models" / "run" / "group" / "2.safetensors"
    assert into.read_bytes() == MODEL


@pytest.mark.parametrize("sent", [b"", b"PK\x03\x04 a zip", MODEL[:-1], MODEL + b"x", b"\x80\x04pickled", save({})])
def test_what_is_no_model_is_thrown_away(stage, link, tmp_path, sent):
    stage.models["run", "global"] = sent
    with pytest.raises(MessageError, match="thrown away"):
        link.model("run", "global", tmp_path / "m" / "global.safetensors")
    assert list((tmp_path / "m").iterdir()) == []


def test_too_large_a_model_is_cut_off_and_a_stop_is_heeded(stage, link, tmp_path, monkeypatch):
    stage.models["run", "global"] = MODEL
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadCancelledError):
        link.model("run", "global", tmp_path / "m" / "x", stop)
    monkeypatch.setattr("sites.agent.coordinator_client.MAX_MODEL_BYTES", 1000)
    with pytest.raises(MessageError, match="more than 1000 bytes"):
        link.model("run", "global", tmp_path / "m" / "x")
    assert list((tmp_path / "m").iterdir()) == []


def test_what_may_pass_is_tried_again_and_what_will_not_is_not(stage, link, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    stage.models["run", "global"] = MODEL
    stage.fail = [503, 429, 500]
    link.model("run", "global", tmp_path / "x")
    assert len(slept) == 3
    assert slept[0] < slept[2]
    stage.fail = [403, 500]
    with pytest.raises(AccessDeniedError, match="as the test wants"):
        link.model("run", "global", tmp_path / "x")
    stage.fail = [404]
    with pytest.raises(ServiceError, match="404"):
        link.model("run", "global", tmp_path / "x")
    stage.fail = [500] * 4
    with pytest.raises(UnreachableError, match="500"):
        call_with_retries(link.leave, attempts=1)


def test_a_foreign_credential_a_foreign_server_and_nobody(stage, port):
    with (
        CoordinatorClient(member(port, credential="wrong-credential")) as link,
        pytest.raises(AccessDeniedError, match="who are you") as told,
    ):
        link.send_heartbeat({}, [], [])
    assert "wrong-credential" not in str(told.value)
    with (
        CoordinatorClient(member(port, ca=authority("foreign").pem)) as link,
        pytest.raises(UnreachableError, match="Somebody may sit"),
    ):
        link.send_heartbeat({}, [], [])
    with CoordinatorClient(member(1)) as link, pytest.raises(UnreachableError):
        link.send_heartbeat({}, [], [])
    for url in ("http://localhost:1", "https://", "https://user:pw@host", "https://host/path"):
        with pytest.raises(ServiceError, match="no coordinator's address"):
            CoordinatorClient(member(port, url=url))


def test_leaving_is_told(stage, link):
    link.leave()
    assert stage.left


def test_beats_go_through_a_proxy(stage, port, monkeypatch):
    with Proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")  # many write it so
        with CoordinatorClient(member(port)) as link:
            link.send_heartbeat({}, [], [])
        assert proxy.asked == [f"CONNECT localhost:{port} HTTP/1.1"]
        monkeypatch.setenv("NO_PROXY", "*")
        with CoordinatorClient(member(port)) as link:
            link.send_heartbeat({}, [], [])
        assert len(proxy.asked) == 1
    assert len(stage.beats) == 2


@pytest.fixture
def echo(tmp_path):
    certificate, key = authority().server(tmp_path)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    turn = grpc.unary_unary_rpc_method_handler(lambda data, context: data[::-1])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"turn": turn})])
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    )
    server.start()
    yield port
    server.stop(0).wait()


def call(port: int) -> bytes:
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(authority().pem.encode())) as channel:
        return channel.unary_unary("/test/turn")(b"abc", timeout=10)


@pytest.mark.parametrize(
    ("said", "through"),
    [
        ({"HTTPS_PROXY": "http://nurse:p%40ss@127.0.0.1:{}"}, True),  # gRPC itself does not read this name
        ({"https_proxy": "127.0.0.1:{}"}, True),  # nor this form
        ({"ALL_PROXY": "http://127.0.0.1:{}", "NO_PROXY": "example.org"}, True),
        ({"https_proxy": "http://127.0.0.1:{}", "NO_PROXY": "*"}, False),  # nor this star
        ({"https_proxy": "http://127.0.0.1:{}", "no_proxy": "localhost"}, False),
        ({"http_proxy": "http://127.0.0.1:{}"}, False),  # for http:// only, and gRPC would take it
    ],
)
def test_grpc_takes_the_same_way_out(echo, monkeypatch, said, through):
    with Proxy() as proxy:
        for name, value in said.items():
            monkeypatch.setenv(name, value.format(proxy.port))
        for name, value in child_environment(f"https://localhost:{echo}", ResourceLimits()).items():
            if "grpc" in name:
                monkeypatch.setenv(name, value)
        assert call(echo) == b"cba"
        assert proxy.asked == ([f"CONNECT localhost:{echo} HTTP/1.1"] if through else [])
        assert not through or "p%40ss" not in said.get("HTTPS_PROXY", "") or any("Basic" in h for h in proxy.sent)


def test_a_proxy_that_training_cannot_use_is_named(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "socks5://10.0.0.1:1080")
    with pytest.raises(ServiceError, match="socks5://"):
        proxy_for("https://fl.example.org:8443")
    monkeypatch.setenv("NO_PROXY", ".example.org")
    assert proxy_for("https://fl.example.org:8443") is None


def test_the_child_gets_limits_and_no_secrets(tmp_path):
    given = {"HEMOFED_INVITATION": "secret", "PATH": os.environ["PATH"]}
    made = child_environment("https://h:1", ResourceLimits(max_cores=3, max_gpu_memory_gb=2.5), given)
    assert "secret" not in json.dumps(made)
    assert (made["OMP_NUM_THREADS"], made["HEMOFED_CORES"], made["HEMOFED_GPU_MEMORY_GB"]) == ("3", "3", "2.5")
    assert made["PYTHONSAFEPATH"] == "1"
    assert "OMP_NUM_THREADS" not in child_environment("https://h:1", ResourceLimits(), given)
    assert find_disk_space_problem(tmp_path, ResourceLimits(min_free_disk_gb=1e-6)) is None
    assert "must stay free" in str(find_disk_space_problem(tmp_path, ResourceLimits(min_free_disk_gb=1e9)))
