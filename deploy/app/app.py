"""The edge app as a web service: static files, three API routes, and errors as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deploy.app.handlers import EdgeHandlers, SlideRequest
from deploy.app.local_only import LocalOnlyMiddleware
from deploy.inference.runtime import BundleRuntime
from pipeline.core.errors import HemofedError

MAX_REQUEST_BYTES = 200_000_000
WEB_FOLDER = Path(__file__).parent / "static"
# fixed: the machine's own table may map scripts to text/plain, which browsers refuse
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def create_app(runtime: BundleRuntime, max_bytes: int = MAX_REQUEST_BYTES) -> FastAPI:
    """`max_bytes`: limit of a request, hence of an image file."""
    handlers = EdgeHandlers(runtime, max_bytes)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.shutdown_event = handlers.shutdown_event  # the server sets it before it stops
    app.add_middleware(LocalOnlyMiddleware, max_bytes=max_bytes)

    @app.exception_handler(HTTPException)
    async def handle_http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(HemofedError)
    async def handle_hemofed_error(_: Request, error: HemofedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    @app.get("/api/model")
    def get_model() -> JSONResponse:
        return JSONResponse(handlers.describe_model())

    @app.post("/api/images")
    async def post_images(
        request: Request, name: Annotated[str, Query(max_length=500)] = "image", include_pixels: bool = False
    ) -> JSONResponse:
        try:
            data = await request.body()
        except ClientDisconnect:  # the response has no recipient
            raise HTTPException(400, "the image was sent incompletely; send it again") from None
        try:
            return JSONResponse({"images": await run_in_threadpool(handlers.read_images, data, name, include_pixels)})
        except HemofedError:
            raise
        except Exception as error:  # leave its text out: it may quote the file, and would end up in a log
            error_type = type(error).__name__
            raise HTTPException(
                500, f"a fault in hemofed ({error_type}); `hemofed predict` on this file shows more"
            ) from None

    @app.post("/api/slide")
    def post_slide(request: SlideRequest) -> JSONResponse:
        return JSONResponse(handlers.assess_slide(request))

    for file in sorted(WEB_FOLDER.iterdir()):
        if file.suffix in MEDIA_TYPES:
            _add_static_file(
                app, "/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), MEDIA_TYPES[file.suffix]
            )
    return app


def _add_static_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    app.add_api_route(path, lambda: Response(content, media_type=media_type), methods=["GET"], response_model=None)
