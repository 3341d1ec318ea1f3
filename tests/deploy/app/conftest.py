"""Rendered fields as files, and the edge app in a browser whose console errors fail the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.app.app import create_app
from deploy.inference.runtime import BundleRuntime
from sites.data.renderer.field import render_field
from tests.support.image_files import encode_image
from tests.support.web_server import serve_app


@pytest.fixture(scope="session")
def rendered_fields() -> list[np.ndarray]:
    return [np.ascontiguousarray(render_field(seed).image) for seed in (3, 4)]


@pytest.fixture(scope="session")
def field_paths(rendered_fields: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("fields")
    paths = [folder / f"field-{n}.png" for n in range(len(rendered_fields))]
    for path, pixels in zip(paths, rendered_fields, strict=True):
        path.write_bytes(encode_image(pixels))
    return paths


@pytest.fixture
def open_page(browser: Any, runtime: BundleRuntime) -> Iterator[Callable[..., Any]]:
    """open_page(width=375) gives the page. Console errors and requests to other hosts fail the test at its end."""
    contexts, complaints = [], []

    def on_console(message: Any) -> None:
        # 422 is a valid response; a violation of the content policy or a bug is not
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    with ExitStack() as servers:

        def open_edge_app(width: int = 1280, height: int = 800, of: BundleRuntime = runtime) -> Any:
            url = servers.enter_context(serve_app(create_app(of)))
            context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("console", on_console)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "request",
                lambda request: request.url.startswith((url, "blob:", "data:")) or complaints.append(request.url),
            )
            page.goto(url)
            page.wait_for_selector("#facts dt", state="attached")
            return page

        yield open_edge_app
        for context in contexts:
            context.close()
    assert complaints == []
