"""Routes for files of runs and for event streams."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, HTTPException, Query, Request
from fastapi.responses import FileResponse, StreamingResponse

from pipeline.service.web.auth import is_still_authorized
from pipeline.service.web.context import ContextDep
from pipeline.service.web.middleware import REPORT_CSP
from pipeline.service.web.routes_dashboard import RunIdPath, require_run
from pipeline.service.web.serializers import ResponseJson

EVENT_STREAM_TYPE = "text/event-stream"
MEDIA_TYPES = {".html": "text/html", ".png": "image/png", ".svg": "image/svg+xml", ".json": "application/json",
         ".pdf": "application/pdf", ".csv": "text/csv", ".toml": "text/plain"}  # fmt: skip
BINARY_TYPE = "application/octet-stream"


def list_files(id: RunIdPath, context: ContextDep) -> list[ResponseJson]:
    require_run(context, id)
    folder = context.home.runs_folder / id
    return [
        {"path": path, "bytes": (folder / path).stat().st_size, "kind": kind}
        for path, kind in context.run_files.list_files(id).items()
    ]


def download_file(id: RunIdPath, path: str, context: ContextDep) -> FileResponse:
    """Sends a listed file. The browser shows reports and plots in a sandbox and saves all other files."""
    require_run(context, id)
    kind = context.run_files.list_files(id).get(path)
    if kind is None:
        raise HTTPException(404, f"{id} has no downloadable file {path!r}; /api/runs/{id}/files lists them")
    file_path = context.home.runs_folder / id / path
    is_inline = kind in ("report", "plot")
    return FileResponse(
        file_path,
        media_type=MEDIA_TYPES.get(file_path.suffix, BINARY_TYPE),
        filename=f"{id}-{path.replace('/', '-')}",
        content_disposition_type="inline" if is_inline else "attachment",
        headers={"content-security-policy": REPORT_CSP} if is_inline else {},
    )


def stream_run_events(
    id: RunIdPath,
    request: Request,
    context: ContextDep,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=-1)] = -1,
) -> StreamingResponse:
    """Events of a run after a round, which a reconnecting browser sends as Last-Event-ID."""
    require_run(context, id)
    has_event_id = last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit()
    after_round = int(last_event_id) if last_event_id is not None and has_event_id else after
    stream = context.event_stream.stream_run(
        lambda: require_run(context, id),
        lambda: context.run_files.load_rounds(id),
        after_round,
        lambda: is_still_authorized(request),
    )
    return StreamingResponse(stream, media_type=EVENT_STREAM_TYPE)


def stream_events(request: Request, context: ContextDep) -> StreamingResponse:
    readers = {"runs": context.serializers.list_runs, "sites": context.serializers.list_sites}
    return StreamingResponse(
        context.event_stream.stream_changes(readers, lambda: is_still_authorized(request)), media_type=EVENT_STREAM_TYPE
    )
