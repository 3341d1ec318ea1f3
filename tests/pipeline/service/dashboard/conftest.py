"""A browser, a stage with recorded runs, and pages opened as somebody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.demo_data import scene
from tests.support.fake_api import Stage, served
from tests.support.recorded_runs import STUDIES, Recording, record


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    where = tmp_path_factory.mktemp("recorded")
    return {kind: record(kind, where) for kind in STUDIES}


@pytest.fixture
def stage(browser: Any, recordings: dict[str, Recording]) -> Iterator[Stage]:
    with served(scene(recordings)) as found:
        yield found


@pytest.fixture
def visit(browser: Any, stage: Stage) -> Iterator[Callable[..., Any]]:
    """visit("#/sites", "viewer", width=375): the page, drawn. What a browser complains of fails the test at its end."""
    contexts, complaints = [], []

    def heard(message: Any) -> None:
        # 401, 404 and the like are answers; a breach of the content policy or a bug is not
        if message.cell_type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    def go(hash: str = "#/", role: str | None = "lead", at: Stage = stage, width: int = 1280, **context: Any) -> Any:
        made = browser.new_context(viewport={"width": width, "height": 800}, locale="en-GB", **context)
        contexts.append(made)
        if role:
            made.add_cookies([{"name": "hemofed", "value": f"{role}-token", "url": at.url}])
        page = made.new_page()
        page.set_default_timeout(8000)
        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(at.url) or complaints.append(f"outside: {asked.url}"))
        page.goto(f"{at.url}/{hash}")
        page.wait_for_selector("h1")
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []
