import json

import numpy as np
import pytest
from PIL import Image

from pipeline.cli.commands.study import preview_command
from tests.support.browser.axe import find_violations_of_file


@pytest.fixture
def smear_study(tmp_path):
    """Six red and six blue images at two sites with the same distribution."""
    for label, color in (("normal", (255, 0, 0)), ("<odd>", (0, 0, 255))):
        (tmp_path / "images" / label).mkdir(parents=True)
        for at in range(6):
            image = np.full((32, 32, 3), color, np.uint8)
            Image.fromarray(image).save(tmp_path / "images" / label / f"{at}.png")
    study = tmp_path / "smears.toml"
    study.write_text(
        'name = "smears"\n[data]\nname = "folder"\npath = "images"\nval = 0\ntest = 0.3\n[sites]\ncount = 2\n[model]\nname = "cnn28"\n'
    )
    return study


def test_a_preview_of_images(smear_study, tmp_path, read_page, capsys):
    preview_command(str(smear_study), [], None, tmp_path / "new" / "page.html", json=False)
    assert "wrote" in capsys.readouterr().out
    page = read_page(tmp_path / "new" / "page.html")
    assert page.texts("h3") == ["site-01", "site-02"]
    assert len(page.all("img")) == 2
    assert len(page.all("svg")) == 3  # means, histograms, counts
    header = page.texts("header")[0]
    assert "simulated sites on this machine" in header
    assert "must not leave the hospital" in header
    assert "Mean and standard deviation: R" in page.texts("article")[0]
    html = (tmp_path / "new" / "page.html").read_text()
    assert "<odd>" not in html
    assert "http" not in html


def test_a_preview_of_images_is_accessible(browser, smear_study, tmp_path):
    preview_command(str(smear_study), [], None, tmp_path / "page.html", json=True)
    assert find_violations_of_file(browser, tmp_path / "page.html") == {}


def test_json_has_the_statistics_of_a_site(smear_study, tmp_path, capsys):
    preview_command(str(smear_study), [], None, tmp_path, json=True)
    preview = json.loads(capsys.readouterr().out)
    assert preview["page"] == str(tmp_path / "preview.html")  # a folder gets preview.html
    assert preview["classes"] == ["<odd>", "normal"]
    assert preview["shape"] == [3, 32, 32]
    assert list(preview["sites"]) == ["site-01", "site-02"]
    site = preview["sites"]["site-01"]
    assert set(site) == {"counts", "measured_on", "means", "stds", "acquisition"}
    red = site["counts"]["train"]["normal"] / site["measured_on"]
    assert site["means"] == pytest.approx([red, 0, 1 - red], abs=1e-4)
    assert site["stds"] == pytest.approx([(red * (1 - red)) ** 0.5, 0, (red * (1 - red)) ** 0.5], abs=1e-4)


def test_a_preview_of_points(tmp_path, read_page, capsys):
    preview_command("moons-demo", ["sites.count=3"], None, tmp_path / "moons.html", json=True)
    sites = json.loads(capsys.readouterr().out)["sites"]
    assert len(sites) == 3
    assert sites["site-01"]["acquisition"] == "moved by (0.2, 0.2)"
    page = read_page(tmp_path / "moons.html")
    assert page.all("img") == []
    assert {"site-01", "upper", "lower"} <= set(page.texts("text"))
    assert "must not leave" not in page.texts("header")[0]


def test_of_many_sites_only_the_first_are_shown(tmp_path, read_page, capsys):
    preview_command("moons-demo", ["sites.count=30"], None, tmp_path / "moons.html", json=False)
    page = read_page(tmp_path / "moons.html")
    assert "The first 8 sites are shown; there are 22 more." in page.texts("main")[0]
    assert page.row("site-30")
    assert "… 10 more on the page" in capsys.readouterr().out
