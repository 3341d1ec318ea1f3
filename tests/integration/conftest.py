"""One small federation of real processes for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.chaos_federation import SITES, STUDY, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from pipeline.cli.local_federation import LocalFederation
    from sites.governance.settings import ResourceLimits, SiteSettings

    folder = tmp_path_factory.mktemp("world")
    study = folder / "study.toml"
    study.write_text(STUDY)
    small = LocalFederation(folder)
    try:
        small.start_coordinator()
        for site in SITES:
            small.enrol_site(site, "--simulate-site", site, "--unit", "example")
            # a file system of some kilobytes is to be full for the system, not for the policy
            SiteSettings(simulated_site=site, limits=ResourceLimits(min_free_disk_gb=0.0001)).save(folder / site)
        yield World(small, study)
    finally:
        small.close()
