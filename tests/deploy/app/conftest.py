"""Rendered fields as files, the service on a port, and a browser that complains when the page does."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deploy.app.app import create_app
from deploy.inference.runtime import BundleRuntime
from sites.data.renderer.field import render_field
from tests.support.fake_api import listening


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="session")
def rendered() -> list[np.ndarray]:
    return [np.ascontiguousarray(render_field(seed).image) for seed in (3, 4)]


@pytest.fixture(scope="session")
def files(rendered: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("fields")
    paths = [folder / f"field-{n}.png" for n in range(len(rendered))]
    for path, pixels in zip(paths, rendered, strict=True):
        path.write_bytes(png(pixels))
    return paths


@pytest.fixture
def visit(browser: Any, runtime: BundleRuntime) -> Iterator[Callable[..., Any]]:
    """visit(width=375): the page. What a browser complains of, and a request elsewhere, fail the test at its end."""
    contexts, complaints = [], []

    def heard(message: Any) -> None:
        # 422 is an answer; a breach of the content policy or a bug is not
        if message.cell_type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    with ExitStack() as servers:

        def go(width: int = 1280, height: int = 800, of: BundleRuntime = runtime) -> Any:
            url = servers.enter_context(listening(create_app(of)))
            context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("console", heard)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "request", lambda asked: asked.url.startswith((url, "blob:", "data:")) or complaints.append(asked.url)
            )
            page.goto(url)
            page.wait_for_selector("#facts dt", state="attached")
            return page

        yield go
        for context in contexts:
            context.close()
    assert complaints == []
