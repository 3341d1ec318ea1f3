"""Files of runs, and their live streams."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, HTTPException, Query, Request
from fastapi.responses import FileResponse, StreamingResponse

from pipeline.service.web.auth import still
from pipeline.service.web.context import Held
from pipeline.service.web.middleware import REPORT
from pipeline.service.web.routes_dashboard import RunId, found_run
from pipeline.service.web.serializers import Shown

EVENTS = "text/event-stream"
TYPES = {".html": "text/html", ".png": "image/png", ".svg": "image/svg+xml", ".json": "application/json",
         ".pdf": "application/pdf", ".csv": "text/csv", ".toml": "text/plain"}  # fmt: skip
BYTES = "application/octet-stream"


def files(id: RunId, parts: Held) -> list[Shown]:
    found_run(parts, id)
    folder = parts.home.runs / id
    return [
        {"path": path, "bytes": (folder / path).stat().st_size, "kind": kind}
        for path, kind in parts.folders.files(id).items()
    ]


def file(id: RunId, path: str, parts: Held) -> FileResponse:
    """Only what is listed. A page of ours is shown, in a sandbox; the rest is saved."""
    found_run(parts, id)
    kind = parts.folders.files(id).get(path)
    if kind is None:
        raise HTTPException(404, f"{id} has no file {path!r} to download")
    place = parts.home.runs / id / path
    shown = kind in ("report", "plot")
    return FileResponse(
        place,
        media_type=TYPES.get(place.suffix, BYTES),
        filename=f"{id}-{path.replace('/', '-')}",
        content_disposition_type="inline" if shown else "attachment",
        headers={"content-security-policy": REPORT} if shown else {},
    )


def run_events(
    id: RunId,
    request: Request,
    parts: Held,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=-1)] = -1,
) -> StreamingResponse:
    found_run(parts, id)
    known = (
        int(last_event_id)
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit()
        else after
    )
    stream = parts.streams.run(
        lambda: found_run(parts, id), lambda: parts.folders.rounds(id), known, lambda: still(request)
    )
    return StreamingResponse(stream, media_type=EVENTS)


def events(request: Request, parts: Held) -> StreamingResponse:
    looks = {"runs": parts.views.runs, "sites": parts.views.sites}
    return StreamingResponse(parts.streams.changes(looks, lambda: still(request)), media_type=EVENTS)
