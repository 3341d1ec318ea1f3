"""A fake API with recorded runs, and the dashboard's pages in a browser whose console errors fail the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.dashboard.demo_data import make_fake_api
from tests.support.dashboard.fake_api import FakeApi, serve_fake_api
from tests.support.dashboard.recorded_runs import STUDIES, RecordedRun, record_run


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    folder = tmp_path_factory.mktemp("recorded")
    return {kind: record_run(kind, folder) for kind in STUDIES}


@pytest.fixture
def fake_api(browser: Any, recordings: dict[str, RecordedRun]) -> Iterator[FakeApi]:
    with serve_fake_api(make_fake_api(recordings)) as served_api:
        yield served_api


@pytest.fixture
def open_page(browser: Any, fake_api: FakeApi) -> Iterator[Callable[..., Any]]:
    """open_page("#/sites", "viewer", width=375) gives the page of a user with this role; role None: signed out.

    Console errors and requests to other hosts fail the test at its end.
    """
    contexts, complaints = [], []

    def on_console(message: Any) -> None:
        # 401, 404 and the like are valid responses; a violation of the content policy or a bug is not
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    def open_dashboard(
        hash: str = "#/", role: str | None = "lead", at: FakeApi = fake_api, width: int = 1280, **options: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, locale="en-GB", **options)
        contexts.append(context)
        if role:
            context.add_cookies([{"name": "hemofed", "value": f"{role}-token", "url": at.url}])
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith(at.url) or complaints.append(f"another host: {request.url}"),
        )
        page.goto(f"{at.url}/{hash}")
        page.wait_for_selector("h1")
        return page

    yield open_dashboard
    for context in contexts:
        context.close()
    assert complaints == []
