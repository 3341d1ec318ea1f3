"""The page for the bedside as a web service: its files, three routes, and how errors are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deploy.app.handlers import Counts, Desk
from deploy.app.local_only import Gate
from deploy.inference.runtime import Runtime
from pipeline.core.errors import HemofedError

MOST_BYTES = 200_000_000
WEB = Path(__file__).parent / "static"
# not by the machine's own table, which may call a script plain text: browsers then refuse it
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def app_for(runtime: Runtime, most: int = MOST_BYTES) -> FastAPI:
    """`most`: bytes of a picture."""
    desk = Desk(runtime, most)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.over = desk.over  # whoever ends the service sets it first
    app.add_middleware(Gate, most=most)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(HemofedError)
    async def unread(_: Request, error: HemofedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    @app.get("/api/about")
    def about() -> JSONResponse:
        return JSONResponse(desk.about())

    @app.post("/api/read")
    async def read(request: Request, name: Annotated[str, Query(max_length=500)] = "picture", drawn: bool = False) -> JSONResponse:  # fmt: skip
        try:
            data = await request.body()
        except ClientDisconnect:  # nobody is left to be told
            raise HTTPException(400, "the picture did not arrive whole; send it again") from None
        try:
            return JSONResponse({"pictures": await run_in_threadpool(desk.read, data, name, drawn)})
        except HemofedError:
            raise
        except Exception as error:  # its text may hold what is in the file, and would end up in a log
            kind = type(error).__name__
            raise HTTPException(
                500, f"a fault in hemofed ({kind}); `hemofed predict` on this file shows more"
            ) from None

    @app.post("/api/verdict")
    def verdict(counts: Counts) -> JSONResponse:
        return JSONResponse(desk.verdict(counts))

    for file in sorted(WEB.iterdir()):
        if file.suffix in TYPES:
            _add_page(app, "/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), TYPES[file.suffix])
    return app


def _add_page(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    app.add_api_route(path, lambda: Response(content, media_type=kind), methods=["GET"], response_model=None)
