"""The service as it is met: TLS on a real port, a site that enrols, the lead's commands."""

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
from tests.support.service_factory import STUDY_TOML, make_enrolment, make_heartbeat

ROUND = {
    "lr": 0.1,
    "asked": ["a"],
    "counted": ["a"],
    "missed": {},
    "bytes": {"up": 1, "down": 1},
    "seconds": {"train": 0.1},
    "void": None,
    "metrics": {"val": {"pooled": {"accuracy": 0.75, "loss": 0.5}}},
}


@dataclass
class Served:
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
def served(tmp_path, capsys):
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    coordinating.init_command(tmp_path / "home", "Test Trust", "localhost", port, json=False)
    said = capsys.readouterr().out
    assert re.search(r"([0-9a-f]{4}-){7}", said)
    home = CoordinatorHome.open(tmp_path / "home")
    assert home.token_path.read_text().strip() not in said
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
    yield Served(home, store, app, ssl.create_default_context(cafile=str(home.path / "ca.pem")))
    app.state.context.event_stream.close()
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive(), "the server does not shut down"
    listening.close()
    store.close()


def enrolled(served, site, capsys):
    coordinating.invite_command(served.home.path, site, 1, json=True)
    token = parse_invitation(json.loads(capsys.readouterr().out)["token"]).token
    with served.client() as web:
        response = web.post("/site/enrol", json=make_enrolment(token, site))
        assert response.status_code == 200, response.text
    return served.client(response.json()["credential"])


def approval(served, run):
    row = served.store.find_run(run)
    return {"run": run, "offer": row.digest, "at": served.store.clock().isoformat(), "officer": "x"}


def test_from_init_to_a_finished_run(served, tmp_path, capsys):
    home = served.home.path
    (tmp_path / "study.toml").write_text(STUDY_TOML)
    with enrolled(served, "a", capsys) as a, enrolled(served, "b", capsys) as b:
        coordinating.run_command(str(tmp_path / "study.toml"), ["rounds=2"], home, [], None, follow=False, json=True)
        run = json.loads(capsys.readouterr().out)["id"]
        (offer,) = a.post("/site/heartbeat", json=make_heartbeat()).json()["offers"]
        assert "rounds = 2" in offer["study_toml"]
        for site in (a, b):
            site.post("/site/heartbeat", json=make_heartbeat(approval(served, run)))
        served.store.set_run_state(run, "running")
        coordinating.action_command(home, run, "pause", json=False)
        assert f"{run} is pausing" in capsys.readouterr().out
        served.store.set_run_state(run, "paused")
        coordinating.action_command(home, run, "resume", json=False)
        served.store.set_run_state(run, "running")
        (served.home.runs_folder / run / "models").mkdir()
        (served.home.runs_folder / run / "models" / "global.safetensors").write_bytes(b"weights")
        served.store.set_run_state(run, "finished")
        assert a.get(f"/site/runs/{run}/models/global").content == b"weights"
        with pytest.raises(ServiceError, match="it is over already"):
            coordinating.action_command(home, run, "stop", json=False)
    with served.client(served.home.token_path.read_text().strip()) as lead:
        files = [file["path"] for file in lead.get(f"/api/runs/{run}/files").json()]
        assert files == ["models/global.safetensors", "study.toml"]
    capsys.readouterr()
    coordinating.status_command(home, None, json=False)
    shown = capsys.readouterr().out
    assert run in shown
    assert "connected" in shown
    coordinating.status_command(home, run, json=False)
    assert "A small study." in capsys.readouterr().out


def test_a_run_is_followed_to_its_end(served, tmp_path, capsys):
    (tmp_path / "study.toml").write_text(STUDY_TOML)
    enrolled(served, "a", capsys).close()

    def work():
        while not (runs := served.store.list_runs()):
            time.sleep(0.02)
        run = runs[0].id
        served.store.set_run_state(run, "running")
        for turn in (1, 2):
            time.sleep(0.2)
            with (served.home.runs_folder / run / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(ROUND | {"round": turn}) + "\n")
        served.store.set_run_state(run, "finished")

    thread = threading.Thread(target=work)
    thread.start()
    coordinating.run_command(str(tmp_path / "study.toml"), [], served.home.path, ["a"], 1, follow=True, json=False)
    thread.join()
    response = capsys.readouterr()
    said = [line.partition(":")[0] for line in response.err.splitlines()]
    assert said[said.index("moons round 1") :] == ["moons round 1", "moons round 2", "finished"]
    assert "is finished; val accuracy 75.00 %" in response.out


def test_who_is_waited_for_is_told_once(capsys):
    run = {
        "state": "offered",
        "sites": [{"site": "a", "approved": None}, {"site": "b", "approved": "2026"}],
        "reason": "",
    }
    said = coordinating._print_status_change(run, "", quiet=False)
    assert coordinating._print_status_change(run, said, quiet=False) == said == "offered, waiting for a"
    coordinating._print_status_change({"state": "waiting", "reason": "b is away"}, said, quiet=False)
    assert capsys.readouterr().err.splitlines() == ["offered, waiting for a", "waiting: b is away"]


def test_streams_resume_where_a_browser_was(served, capsys):
    enrolled(served, "a", capsys).close()
    with served.client(served.home.token_path.read_text().strip()) as lead:
        run = lead.post("/api/runs", json={"study": STUDY_TOML}, timeout=60).json()["id"]
        lines = "".join(json.dumps(ROUND | {"round": n}) + "\n" for n in range(3))
        (served.home.runs_folder / run / "rounds.jsonl").write_text(lines)
        served.store.set_run_state(run, "stopped")
        with lead.stream("GET", f"/api/runs/{run}/events", headers={"last-event-id": "0"}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            ids = [line for line in stream.iter_lines() if line.startswith("id")]
        assert ids == ["id: 1", "id: 2"]
        with lead.stream("GET", "/api/events") as stream:  # left open by who goes away
            assert next(stream.iter_lines()) == "event: runs"


def test_only_the_federations_own_service_is_believed(served, tmp_path, monkeypatch):
    url = f"https://localhost:{served.home.port}"
    with pytest.raises(httpx.ConnectError), httpx.Client(trust_env=False) as stranger:
        stranger.get(url)
    monkeypatch.setenv("HEMOFED_URL", url)
    monkeypatch.delenv("HEMOFED_TOKEN", raising=False)
    with pytest.raises(ServiceError, match="HEMOFED_TOKEN"):
        coordinating.status_command(None, None, json=True)
    monkeypatch.setenv("HEMOFED_TOKEN", "wrong")
    monkeypatch.setenv("HEMOFED_CA", str(served.home.path / "ca.pem"))
    with pytest.raises(ServiceError, match="needs a token"):
        coordinating.status_command(None, None, json=True)
    monkeypatch.setenv("HEMOFED_TOKEN", served.home.token_path.read_text().strip())
    coordinating.status_command(None, None, json=True)


def test_people_are_added_and_revoked(served, capsys):
    coordinating.users_command(served.home.path, "eva", "viewer", None, json=True)
    token = json.loads(capsys.readouterr().out)["made"]["token"]
    with served.client(token) as eva:
        assert eva.get("/api/me").json()["role"] == "viewer"
        coordinating.users_command(served.home.path, None, "viewer", "eva", json=False)
        assert eva.get("/api/me").status_code == 401
    assert "eva" in capsys.readouterr().out


def test_a_service_that_is_not_there_is_told_with_the_cure(coordinator_home):
    with pytest.raises(ServiceError, match=f"hemofed coordinator serve {coordinator_home}"):
        coordinating.status_command(coordinator_home, None, json=True)
    with pytest.raises(ServiceError, match="HEMOFED_URL"):
        coordinating.status_command(None, None, json=True)


def test_ctrl_c_leaves_the_run_going_and_says_so(served, tmp_path, capsys, monkeypatch):
    def interrupted(self, path, after):
        raise KeyboardInterrupt

    (tmp_path / "study.toml").write_text(STUDY_TOML)
    enrolled(served, "a", capsys).close()
    monkeypatch.setattr("pipeline.service.runtime.client.ApiClient.stream_events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinating.run_command(str(tmp_path / "study.toml"), [], served.home.path, [], None, follow=True, json=False)
    (run,) = served.store.list_runs()
    assert run.state == "offered"
    assert f"{run.id} goes on" in capsys.readouterr().err
