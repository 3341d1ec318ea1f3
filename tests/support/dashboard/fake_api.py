"""A fake of the coordinator's API for tests of the dashboard: serves recorded runs, whose state a test changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from pipeline.service.web.describe_study import describe_study_file
from tests.support.dashboard.recorded_runs import FILE_KINDS, Json, RecordedRun, time_ago
from tests.support.web_server import serve_app

WEB_FOLDER = Path(__file__).parents[3] / "pipeline" / "service" / "web" / "static"
CONTENT_POLICY = "default-src 'self'"
USER_BY_TOKEN = {
    "lead-token": ("Ada", "lead"),
    "officer-token": ("Otto", "officer"),
    "viewer-token": ("Vera", "viewer"),
}
STATE_AFTER_ACTION = {"begin": "starting", "pause": "pausing", "resume": "starting", "stop": "stopping"}
TERMINAL_STATES = {"stopped", "finished", "failed"}


@dataclass
class FakeRun:
    """A recorded run of which the API shows the first `num_rounds` rounds."""

    run: Json
    recording: RecordedRun
    num_rounds: int

    def to_dict(self) -> Json:
        record = self.recording.rounds[self.num_rounds - 1] if self.num_rounds else {"round": 0, "metrics": {}}
        is_finished = self.run["state"] == "finished"
        validation = record["metrics"].get("val", {}).get("pooled")
        metrics = self.recording.results["test"]["pooled"] if is_finished else validation
        split = "test" if is_finished else "val"
        headline = metrics and {"split": split, "metric": "accuracy", "value": metrics["accuracy"]}
        return self.run | {"round": record["round"], "headline": headline}


@dataclass
class FakeApi:
    runs: dict[str, FakeRun] = field(default_factory=dict)
    sites: list[Json] = field(default_factory=list)
    users: list[Json] = field(default_factory=list)
    log: list[Json] = field(default_factory=list)
    posts: list[tuple[str, str | None, Any]] = field(default_factory=list)  # path, X-Hemofed, body
    is_offline: bool = False  # ends the event streams and refuses new ones
    refusal: str | None = None  # error text for the next actions
    url: str = ""
    events: list[tuple[str, str, Any]] = field(default_factory=list)  # topic, event, data

    def publish(self, topic: str, event: str, data: Any) -> None:
        """`topic`: a run's id, or "" for the stream of all runs."""
        self.events.append((topic, event, data))

    def change_run(self, id: str, **fields: Any) -> None:
        fake_run = self.runs[id]
        fake_run.run |= fields
        self.publish(id, "run", fake_run.to_dict())
        self.publish("", "runs", self.list_runs())
        if fake_run.run["state"] in TERMINAL_STATES:
            self.publish(id, "end", {"state": fake_run.run["state"]})

    def add_round(self, id: str) -> None:
        """Shows the run's next recorded round."""
        fake_run = self.runs[id]
        fake_run.num_rounds += 1
        self.publish(id, "round", fake_run.recording.rounds[fake_run.num_rounds - 1])
        self.change_run(id)

    def list_runs(self) -> list[Json]:
        return [fake_run.to_dict() for fake_run in self.runs.values()]

    def list_approvals(self) -> list[Json]:
        return [
            {
                "run": fake_run.run["id"],
                "site": site["site"],
                "state": next((state for state in ("revoked", "approved") if site[state]), "pending"),
                "at": site["approved"],
                "expires": site["expires"],
            }
            for fake_run in self.runs.values()
            for site in fake_run.run["sites"]
        ]

    async def stream(self, topic: str, first: list[tuple[str, Any]], num_published: int) -> AsyncIterator[str]:
        """Server-sent events: `first`, then those of the topic after the first `num_published` of all.

        The caller counts them, because the body of a generator runs only when it is read.
        """
        for event, data in first:
            yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
        while not self.is_offline:
            while num_published < len(self.events):
                event_topic, event, data = self.events[num_published]
                num_published += 1
                if event_topic == topic:
                    yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                if event_topic == topic and event == "end":
                    return
            await asyncio.sleep(0.02)


def create_fake_app(fake_api: FakeApi) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def authorize(request: Request, call_next: Any) -> Any:
        path, user = request.url.path, USER_BY_TOKEN.get(request.cookies.get("hemofed", ""))
        if request.method == "POST":
            body = await request.body()
            fake_api.posts.append((path, request.headers.get("x-hemofed"), json.loads(body or "null")))
        if path.startswith("/api/") and path != "/api/login" and user is None:
            response = _error_response(401, "this needs a token")
        elif request.method == "POST" and path not in ("/api/login", "/api/logout") and user and user[1] != "lead":
            response = _error_response(403, f"{user[0]} is {user[1]}, and this is for lead; ask the study lead")
        else:
            response = await call_next(request)
        response.headers["content-security-policy"] = CONTENT_POLICY
        return response

    @app.post("/api/login")
    def login(body: Json) -> Any:
        if body["token"] not in USER_BY_TOKEN:
            return _error_response(401, "this token is not known; ask the study lead for a new one")
        name, role = USER_BY_TOKEN[body["token"]]
        response = JSONResponse({"name": name, "role": role})
        response.set_cookie("hemofed", body["token"], httponly=True, samesite="strict")
        return response

    @app.post("/api/logout")
    def logout() -> Any:
        response = JSONResponse({})
        response.delete_cookie("hemofed")
        return response

    @app.get("/api/me")
    def get_current_user(request: Request) -> Json:
        name, role = USER_BY_TOKEN[request.cookies["hemofed"]]
        coordinator = {"name": "Coordinator of the moon study", "fingerprint": "6f1c 22ab"}
        return {"name": name, "role": role, "version": "0.1.0", "coordinator": coordinator}

    _add_run_routes(app, fake_api)
    for path in ("sites", "users", "log"):
        app.get(f"/api/{path}")(lambda path=path: getattr(fake_api, path))  # type: ignore[misc]
    app.get("/api/approvals")(fake_api.list_approvals)
    app.post("/api/sites/{name}/invite")(lambda name: {"token": f"once-{name}"})
    app.post("/api/users")(lambda: {"token": "once-user"})

    @app.post("/api/sites/{name}/remove")
    def remove_site(name: str) -> Json:
        next(site for site in fake_api.sites if site["site"] == name)["left"] = time_ago()
        return {}

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(WEB_FOLDER / "index.html")

    app.mount("/static", StaticFiles(directory=WEB_FOLDER))
    return app


def _error_response(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


def _add_run_routes(app: FastAPI, fake_api: FakeApi) -> None:
    def respond_with_stream(source: AsyncIterator[str]) -> Any:
        if fake_api.is_offline:
            return _error_response(503, "busy")
        return StreamingResponse(source, media_type="text/event-stream")

    app.get("/api/runs")(fake_api.list_runs)

    @app.post("/api/runs")
    def offer_run() -> Any:
        if fake_api.refusal:
            return _error_response(422, fake_api.refusal)
        return next(iter(fake_api.runs.values())).to_dict()

    @app.get("/api/events")
    def stream_all_events() -> Any:
        first = [("runs", fake_api.list_runs()), ("sites", fake_api.sites)]
        return respond_with_stream(fake_api.stream("", first, len(fake_api.events)))

    @app.get("/api/runs/{id}")
    def get_run(id: str) -> Any:
        if id not in fake_api.runs:
            return _error_response(404, f"there is no run {id}")
        fake_run = fake_api.runs[id]
        offer = {"plan": fake_run.recording.results["study_hash"], "version": "0.1.0"}
        study = fake_run.recording.study
        return fake_run.to_dict() | {"study": study, "offer": offer} | describe_study_file(study)

    @app.get("/api/runs/{id}/rounds")
    def list_rounds(id: str, after: int = -1) -> Any:
        fake_run = fake_api.runs[id]
        return [record for record in fake_run.recording.rounds[: fake_run.num_rounds] if record["round"] > after]

    @app.get("/api/runs/{id}/events")
    def stream_run_events(id: str) -> Any:
        first = [("run", fake_api.runs[id].to_dict())]
        return respond_with_stream(fake_api.stream(id, first, len(fake_api.events)))

    @app.get("/api/runs/{id}/privacy")
    def get_privacy(id: str) -> Any:
        return fake_api.runs[id].recording.privacy or _error_response(404, "this run has no privacy plan")

    @app.get("/api/runs/{id}/results")
    def get_results(id: str) -> Any:
        fake_run = fake_api.runs[id]
        if fake_run.run["state"] not in TERMINAL_STATES:
            return _error_response(404, "this run has no results yet")
        return fake_run.recording.results

    @app.get("/api/runs/{id}/files")
    def list_files(id: str) -> list[Json]:
        fake_run = fake_api.runs[id]
        files = fake_run.recording.files if fake_run.run["state"] in TERMINAL_STATES else {}
        return [
            {"path": path, "bytes": file.stat().st_size, "kind": FILE_KINDS[path.split("/")[0]]}
            for path, file in files.items()
        ]

    @app.get("/api/runs/{id}/files/{path:path}")
    def send_file(id: str, path: str) -> FileResponse:
        return FileResponse(fake_api.runs[id].recording.files[path])

    @app.post("/api/runs/{id}/{action}")
    def act(id: str, action: str) -> Any:
        if fake_api.refusal:
            return _error_response(409, fake_api.refusal)
        fake_api.change_run(id, state=STATE_AFTER_ACTION[action])
        return fake_api.runs[id].to_dict()


@contextmanager
def serve_fake_api(fake_api: FakeApi) -> Iterator[FakeApi]:
    with serve_app(create_fake_app(fake_api)) as fake_api.url:
        try:
            yield fake_api
        finally:
            fake_api.is_offline = True  # the server would wait for open streams
