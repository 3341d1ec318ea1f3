"""The documentation builds as a site without a warning, and its pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED_FROM_OTHER_HOSTS = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the extra `docs` is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr  # with --quiet, mkdocs would not count warnings
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    names = [page.stem for page in (ROOT / "docs").glob("*.md")] + ["readme", "contributing", "changelog", "security"]
    assert [name for name in names if not (site / f"{name}.html").is_file()] == []


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = {page.name: LOADED_FROM_OTHER_HOSTS.findall(page.read_text("utf-8")) for page in site.glob("*.html")}
    assert {page: tags for page, tags in loaded.items() if tags} == {}


def test_api_reference_shows_signatures(site: Path) -> None:
    text = re.sub(r"<[^>]*>", "", (site / "api.html").read_text("utf-8"))
    assert "weighted_sums: NamedTensors" in text


def test_code_blocks_show_file_names_but_no_marks(site: Path) -> None:
    page = (site / "add-a-strategy.html").read_text("utf-8")
    assert '<span class="filename">cautious.py</span>' in page
    assert "file=" not in page
