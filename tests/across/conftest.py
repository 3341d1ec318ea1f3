"""One small federation of real processes for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.across.world import SITES, STUDY, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from pipeline.miniature import Miniature

    folder = tmp_path_factory.mktemp("world")
    study = folder / "study.toml"
    study.write_text(STUDY)
    small = Miniature(folder)
    try:
        small.coordinate()
        for site in SITES:
            small.enrol(site, "--plays", site, "--unit", "example")
            settings = (folder / site / "site.toml").read_text()
            (folder / site / "site.toml").write_text(settings + "\n[limits]\ndisk_gb = 0.001\n")
        yield World(small, study)
    finally:
        small.close()
