"""A small federation of real processes, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.chaos_federation import SITES, STUDY, ChaosFederation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosFederation]:
    from pipeline.cli.local_federation import LocalFederation
    from sites.governance.settings import ResourceLimits, SiteSettings

    folder = tmp_path_factory.mktemp("federation")
    study_path = folder / "study.toml"
    study_path.write_text(STUDY)
    local = LocalFederation(folder)
    try:
        local.start_coordinator()
        for site in SITES:
            local.enrol_site(site, "--simulate-site", site, "--unit", "example")
            # the limit of the site's policy must not be reached before the small file system of a test is full
            SiteSettings(simulated_site=site, limits=ResourceLimits(min_free_disk_gb=0.0001)).save(folder / site)
        yield ChaosFederation(local, study_path)
    finally:
        local.close()
