"""Fixtures: a coordinator's home, and a service on a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web.app import create_app
from tests.support.service_factory import CoordinatorService, FakeClock


@pytest.fixture(scope="session")
def coordinator_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared and read-only, because creating its keys takes a second."""
    folder = tmp_path_factory.mktemp("coordinator") / "home"
    return CoordinatorHome.create(folder, "Test Trust", "localhost", 8443).path


@pytest.fixture
def service(coordinator_home: Path, tmp_path: Path) -> Iterator[CoordinatorService]:
    shutil.copytree(coordinator_home, tmp_path / "home")
    home, clock = CoordinatorHome.open(tmp_path / "home"), FakeClock()
    store = CoordinatorStore(home.database_url, clock)
    app = create_app(home, store, registered_sites=lambda: {"a"})
    yield CoordinatorService(home, store, app, clock, home.token_path.read_text().strip())
    store.close()
