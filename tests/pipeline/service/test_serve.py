"""The service over TLS on a real port: enrolment of sites, and the lead's commands."""

import json
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from pipeline.cli.commands import coordinator as coordinating
from pipeline.core.errors import ServiceError
from pipeline.protocol.invitations import parse_invitation
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web.app import create_app
from tests.support.run_folder_factory import make_record
from tests.support.service_factory import STUDY_TOML, make_enrolment, make_heartbeat


def make_evaluated_record(round_number):
    return make_record(round_number, {"a": None}, metrics={"val": {"pooled": {"n": 8, "accuracy": 0.75, "loss": 0.5}}})


@dataclass
class RunningService:
    home: CoordinatorHome
    store: CoordinatorStore
    app: object
    context: ssl.SSLContext

    def client(self, token=""):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(
            base_url=f"https://localhost:{self.home.port}", verify=self.context, headers=headers, trust_env=False
        )


@pytest.fixture
def running_service(tmp_path, capsys):
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    coordinating.init_command(tmp_path / "home", "Test Trust", "localhost", port, json=False)
    output = capsys.readouterr().out
    assert re.search(r"([0-9a-f]{4}-){7}", output)
    home = CoordinatorHome.open(tmp_path / "home")
    assert home.token_path.read_text().strip() not in output
    store = CoordinatorStore(home.database_url)
    app = create_app(home, store)
    app.state.context.event_stream.poll_seconds = 0.05
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_certfile=home.path / "web.crt",
            ssl_keyfile=home.path / "web.key",
            log_level="error",
            log_config=None,  # logging.config would close absl's handler, and with it the stream that pytest captures
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield RunningService(home, store, app, ssl.create_default_context(cafile=str(home.path / "ca.pem")))
    app.state.context.event_stream.close()
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive(), "the server does not shut down"
    listening.close()
    store.close()


def enrol_site(running_service, site, capsys):
    coordinating.invite_command(running_service.home.path, site, 1, json=True)
    token = parse_invitation(json.loads(capsys.readouterr().out)["token"]).token
    with running_service.client() as web:
        response = web.post("/site/enrol", json=make_enrolment(token, site))
        assert response.status_code == 200, response.text
    return running_service.client(response.json()["credential"])


def make_approval(running_service, run):
    row = running_service.store.find_run(run)
    return {"run": run, "offer": row.digest, "at": running_service.store.clock().isoformat(), "officer": "x"}


def test_commands_from_init_to_a_finished_run(running_service, tmp_path, capsys):
    home = running_service.home.path
    (tmp_path / "study.toml").write_text(STUDY_TOML)
    with enrol_site(running_service, "a", capsys) as a, enrol_site(running_service, "b", capsys) as b:
        coordinating.run_command(str(tmp_path / "study.toml"), ["rounds=2"], home, [], None, follow=False, json=True)
        run = json.loads(capsys.readouterr().out)["id"]
        (offer,) = a.post("/site/heartbeat", json=make_heartbeat()).json()["offers"]
        assert "rounds = 2" in offer["study_toml"]
        for site in (a, b):
            site.post("/site/heartbeat", json=make_heartbeat(make_approval(running_service, run)))
        running_service.store.set_run_state(run, "running")
        coordinating.action_command(home, run, "pause", json=False)
        assert f"{run} is pausing" in capsys.readouterr().out
        running_service.store.set_run_state(run, "paused")
        coordinating.action_command(home, run, "resume", json=False)
        running_service.store.set_run_state(run, "running")
        (running_service.home.runs_folder / run / "models").mkdir()
        (running_service.home.runs_folder / run / "models" / "global.safetensors").write_bytes(b"weights")
        running_service.store.set_run_state(run, "finished")
        assert a.get(f"/site/runs/{run}/models/global").content == b"weights"
        with pytest.raises(ServiceError, match="it has already ended"):
            coordinating.action_command(home, run, "stop", json=False)
    with running_service.client(running_service.home.token_path.read_text().strip()) as lead:
        files = [file["path"] for file in lead.get(f"/api/runs/{run}/files").json()]
        assert files == ["models/global.safetensors", "study.toml"]
    capsys.readouterr()
    coordinating.status_command(home, None, json=False)
    output = capsys.readouterr().out
    assert run in output
    assert "connected" in output
    coordinating.status_command(home, run, json=False)
    assert "A small study." in capsys.readouterr().out


def test_run_command_follows_the_run_to_its_end(running_service, tmp_path, capsys):
    (tmp_path / "study.toml").write_text(STUDY_TOML)
    enrol_site(running_service, "a", capsys).close()

    def run_two_rounds():
        while not (runs := running_service.store.list_runs()):
            time.sleep(0.02)
        run = runs[0].id
        running_service.store.set_run_state(run, "running")
        for round_number in (1, 2):
            time.sleep(0.2)
            with (running_service.home.runs_folder / run / "rounds.jsonl").open("a") as file:
                file.write(make_evaluated_record(round_number).to_line())
        running_service.store.set_run_state(run, "finished")

    thread = threading.Thread(target=run_two_rounds)
    thread.start()
    coordinating.run_command(
        str(tmp_path / "study.toml"), [], running_service.home.path, ["a"], 1, follow=True, json=False
    )
    thread.join()
    output = capsys.readouterr()
    labels = [line.partition(":")[0] for line in output.err.splitlines()]
    assert labels[labels.index("moons round 1") :] == ["moons round 1", "moons round 2", "finished"]
    assert "is finished; val accuracy 75.00 %" in output.out


def test_changes_of_status_are_printed_once(capsys):
    run = {
        "state": "offered",
        "sites": [{"site": "a", "approved": None}, {"site": "b", "approved": "2026"}],
        "reason": "",
    }
    status = coordinating._print_status_change(run, "", quiet=False)
    assert coordinating._print_status_change(run, status, quiet=False) == status == "offered, waiting for a"
    coordinating._print_status_change({"state": "waiting", "reason": "b is away"}, status, quiet=False)
    assert capsys.readouterr().err.splitlines() == ["offered, waiting for a", "waiting: b is away"]


def test_event_stream_resumes_after_the_last_event_id(running_service, capsys):
    enrol_site(running_service, "a", capsys).close()
    with running_service.client(running_service.home.token_path.read_text().strip()) as lead:
        run = lead.post("/api/runs", json={"study": STUDY_TOML}, timeout=60).json()["id"]
        lines = "".join(make_evaluated_record(n).to_line() for n in range(3))
        (running_service.home.runs_folder / run / "rounds.jsonl").write_text(lines)
        running_service.store.set_run_state(run, "stopped")
        with lead.stream("GET", f"/api/runs/{run}/events", headers={"last-event-id": "0"}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            ids = [line for line in stream.iter_lines() if line.startswith("id")]
        assert ids == ["id: 1", "id: 2"]
        with lead.stream("GET", "/api/events") as stream:  # the client closes it
            assert next(stream.iter_lines()) == "event: runs"


def test_client_verifies_the_certificate_and_needs_a_token(running_service, tmp_path, monkeypatch):
    url = f"https://localhost:{running_service.home.port}"
    with pytest.raises(httpx.ConnectError), httpx.Client(trust_env=False) as client_without_ca:
        client_without_ca.get(url)
    monkeypatch.setenv("HEMOFED_URL", url)
    monkeypatch.delenv("HEMOFED_TOKEN", raising=False)
    with pytest.raises(ServiceError, match="HEMOFED_TOKEN"):
        coordinating.status_command(None, None, json=True)
    monkeypatch.setenv("HEMOFED_TOKEN", "wrong")
    monkeypatch.setenv("HEMOFED_CA", str(running_service.home.path / "ca.pem"))
    with pytest.raises(ServiceError, match="needs a token"):
        coordinating.status_command(None, None, json=True)
    monkeypatch.setenv("HEMOFED_TOKEN", running_service.home.token_path.read_text().strip())
    coordinating.status_command(None, None, json=True)


def test_users_are_added_and_revoked(running_service, capsys):
    coordinating.users_command(running_service.home.path, "eva", "viewer", None, json=True)
    token = json.loads(capsys.readouterr().out)["made"]["token"]
    with running_service.client(token) as eva:
        assert eva.get("/api/me").json()["role"] == "viewer"
        coordinating.users_command(running_service.home.path, None, "viewer", "eva", json=False)
        assert eva.get("/api/me").status_code == 401
    assert "eva" in capsys.readouterr().out


def test_unreachable_service_is_reported_with_a_remedy(coordinator_home):
    with pytest.raises(ServiceError, match=f"hemofed coordinator serve {coordinator_home}"):
        coordinating.status_command(coordinator_home, None, json=True)
    with pytest.raises(ServiceError, match="HEMOFED_URL"):
        coordinating.status_command(None, None, json=True)


def test_ctrl_c_stops_following_but_not_the_run(running_service, tmp_path, capsys, monkeypatch):
    def interrupt(self, path, after):
        raise KeyboardInterrupt

    (tmp_path / "study.toml").write_text(STUDY_TOML)
    enrol_site(running_service, "a", capsys).close()
    monkeypatch.setattr("pipeline.service.runtime.client.ApiClient.stream_events", interrupt)
    with pytest.raises(KeyboardInterrupt):
        coordinating.run_command(
            str(tmp_path / "study.toml"), [], running_service.home.path, [], None, follow=True, json=False
        )
    (run,) = running_service.store.list_runs()
    assert run.state == "offered"
    assert f"{run.id} continues" in capsys.readouterr().err
