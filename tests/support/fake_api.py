"""A stage for the pages: the API's contract, played from recorded runs. A test moves the scenery."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from tests.support.recorded_runs import KINDS, Json, Recording, ago

WEB = Path(__file__).parents[2] / "pipeline" / "service" / "web" / "static"
CSP = "default-src 'self'"
PEOPLE = {"lead-token": ("Ada", "lead"), "officer-token": ("Otto", "officer"), "viewer-token": ("Vera", "viewer")}
AFTER = {"begin": "starting", "pause": "pausing", "resume": "starting", "stop": "stopping"}
OVER = {"stopped", "finished", "failed"}


@dataclass
class Play:
    """A run as it is told: the first `shown` of its recorded rounds."""

    run: Json
    recording: Recording
    shown: int

    def told(self) -> Json:
        record = self.recording.rounds[self.shown - 1] if self.shown else {"round": 0, "metrics": {}}
        seen = record["metrics"].get("val", {}).get("pooled")
        value = self.recording.results["test"]["pooled"] if self.run["state"] == "finished" else seen
        split = "test" if self.run["state"] == "finished" else "val"
        headline = value and {"split": split, "metric": "accuracy", "value": value["accuracy"]}
        return self.run | {"round": record["round"], "headline": headline}


@dataclass
class Stage:
    plays: dict[str, Play] = field(default_factory=dict)
    sites: list[Json] = field(default_factory=list)
    users: list[Json] = field(default_factory=list)
    log: list[Json] = field(default_factory=list)
    posts: list[tuple[str, str | None, Any]] = field(default_factory=list)  # path, X-Hemofed, body
    deaf: bool = False  # no streams: the line is cut
    refusal: str | None = None  # what the next action is answered with
    url: str = ""
    news: list[tuple[str, str, Any]] = field(default_factory=list)  # topic, event, data

    def tell(self, topic: str, event: str, data: Any) -> None:
        self.news.append((topic, event, data))

    def change(self, run: str, **fields: Any) -> None:
        play = self.plays[run]
        play.run |= fields
        self.tell(run, "run", play.told())
        self.tell("", "runs", self.runs())
        if play.run["state"] in OVER:
            self.tell(run, "end", {"state": play.run["state"]})

    def next_round(self, run: str) -> None:
        play = self.plays[run]
        play.shown += 1
        self.tell(run, "round", play.recording.rounds[play.shown - 1])
        self.change(run)

    def runs(self) -> list[Json]:
        return [play.told() for play in self.plays.values()]

    def approvals(self) -> list[Json]:
        return [
            {
                "run": play.run["id"],
                "site": site["site"],
                "state": next((word for word in ("withdrawn", "approved") if site[word]), "pending"),
                "at": site["approved"],
                "expires": site["expires"],
            }
            for play in self.plays.values()
            for site in play.run["sites"]
        ]

    async def stream(self, topic: str, first: list[tuple[str, Any]], heard: int) -> AsyncIterator[str]:
        """`heard`: counted by who asks, since a generator begins later."""
        for event, data in first:
            yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
        while not self.deaf:
            while heard < len(self.news):
                where, event, data = self.news[heard]
                heard += 1
                if where == topic:
                    yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                if where == topic and event == "end":
                    return
            await asyncio.sleep(0.02)


def app_of(stage: Stage) -> FastAPI:
    app = FastAPI()

    def refuse(status: int, text: str) -> JSONResponse:
        return JSONResponse({"error": text}, status)

    @app.middleware("http")
    async def gate(request: Request, go_on: Any) -> Any:
        path, who = request.url.path, PEOPLE.get(request.cookies.get("hemofed", ""))
        if request.method == "POST":
            body = await request.body()
            stage.posts.append((path, request.headers.get("x-hemofed"), json.loads(body or "null")))
        if path.startswith("/api/") and path != "/api/login" and who is None:
            response = refuse(401, "this needs a token")
        elif request.method == "POST" and path not in ("/api/login", "/api/logout") and who and who[1] != "lead":
            response = refuse(403, f"{who[0]} is {who[1]}, and this is for lead; ask the study lead")
        else:
            response = await go_on(request)
        response.headers["content-security-policy"] = CSP
        return response

    @app.post("/api/login")
    def login(body: Json) -> Any:
        if body["token"] not in PEOPLE:
            return refuse(401, "this token is not known; ask the study lead for a new one")
        name, role = PEOPLE[body["token"]]
        response = JSONResponse({"name": name, "role": role})
        response.set_cookie("hemofed", body["token"], httponly=True, samesite="strict")
        return response

    @app.post("/api/logout")
    def logout() -> Any:
        response = JSONResponse({})
        response.delete_cookie("hemofed")
        return response

    @app.get("/api/me")
    def me(request: Request) -> Json:
        name, role = PEOPLE[request.cookies["hemofed"]]
        there = {"name": "Coordinator of the moon study", "fingerprint": "6f1c 22ab"}
        return {"name": name, "role": role, "version": "0.1.0", "coordinator": there}

    add_runs(app, stage, refuse)
    for path in ("sites", "users", "log"):
        app.get(f"/api/{path}")(lambda path=path: getattr(stage, path))  # type: ignore[misc]
    app.get("/api/approvals")(stage.approvals)
    app.post("/api/sites/{name}/invite")(lambda name: {"token": f"once-{name}"})
    app.post("/api/users")(lambda: {"token": "once-user"})

    @app.post("/api/sites/{name}/remove")
    def remove(name: str) -> Json:
        next(site for site in stage.sites if site["site"] == name)["left"] = ago()
        return {}

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(WEB / "index.html")

    app.mount("/static", StaticFiles(directory=WEB))
    return app


def add_runs(app: FastAPI, stage: Stage, refuse: Any) -> None:
    def live(source: AsyncIterator[str]) -> Any:
        return refuse(503, "busy") if stage.deaf else StreamingResponse(source, media_type="text/event-stream")

    app.get("/api/runs")(stage.runs)

    @app.post("/api/runs")
    def offer() -> Any:
        return refuse(422, stage.refusal) if stage.refusal else next(iter(stage.plays.values())).told()

    @app.get("/api/events")
    def all_events() -> Any:
        return live(stage.stream("", [("runs", stage.runs()), ("sites", stage.sites)], len(stage.news)))

    @app.get("/api/runs/{id}")
    def one(id: str) -> Any:
        if id not in stage.plays:
            return refuse(404, f"there is no run {id}")
        play = stage.plays[id]
        about = ["Sites train a moons_net network on moons data; no image leaves a site."]
        offered = {"plan": play.recording.results["hash"], "version": "0.1.0"}
        return play.told() | {"study": play.recording.study, "offer": offered, "about": about}

    @app.get("/api/runs/{id}/rounds")
    def rounds(id: str, after: int = -1) -> Any:
        play = stage.plays[id]
        return [record for record in play.recording.rounds[: play.shown] if record["round"] > after]

    @app.get("/api/runs/{id}/events")
    def events(id: str) -> Any:
        return live(stage.stream(id, [("run", stage.plays[id].told())], len(stage.news)))

    @app.get("/api/runs/{id}/privacy")
    def privacy(id: str) -> Any:
        return stage.plays[id].recording.privacy or refuse(404, "nothing was promised")

    @app.get("/api/runs/{id}/results")
    def results(id: str) -> Any:
        play = stage.plays[id]
        return play.recording.results if play.run["state"] in OVER else refuse(404, "not yet")

    @app.get("/api/runs/{id}/files")
    def files(id: str) -> list[Json]:
        play = stage.plays[id]
        found = play.recording.files.items() if play.run["state"] in OVER else ()
        return [{"path": p, "bytes": f.stat().st_size, "kind": KINDS[p.split("/")[0]]} for p, f in found]

    @app.get("/api/runs/{id}/files/{path:path}")
    def file(id: str, path: str) -> FileResponse:
        return FileResponse(stage.plays[id].recording.files[path])

    @app.post("/api/runs/{id}/{action}")
    def act(id: str, action: str) -> Any:
        if stage.refusal:
            return refuse(409, stage.refusal)
        stage.change(id, state=AFTER[action])
        return stage.plays[id].told()


@contextmanager
def served(stage: Stage) -> Iterator[Stage]:
    with listening(app_of(stage)) as stage.url:
        try:
            yield stage
        finally:
            stage.deaf = True  # streams end, else the server would wait for them


@contextmanager
def listening(app: FastAPI, **tls: Any) -> Iterator[str]:
    config = uvicorn.Config(
        app, port=0, log_level="error", log_config=None, ws="none", timeout_graceful_shutdown=20, **tls
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
