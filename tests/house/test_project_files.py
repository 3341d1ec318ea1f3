"""Files for people and services outside the code agree with it."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_citation_names_the_version_and_the_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["license"] == project["license"]


def test_continuous_integration_calls_make_targets():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    targets = jobs["make"]["strategy"]["matrix"]["target"]
    assert {"test", "lint", "docs"} <= set(targets)
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(targets) <= defined
    assert jobs["make"]["steps"][-1]["run"] == "make ${{ matrix.target }}"


def test_readme_images_are_small_and_described():
    readme = (ROOT / "README.md").read_text("utf-8")
    images = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", readme)
    assert len(images) == 2
    for description, path in images:
        assert len(description) > 40
        assert (ROOT / path).stat().st_size < 150_000
