import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.reports.run.contact_sheets import (
    MAX_SHEET_SITES,
    TILE_GAP_PIXELS,
    make_contact_sheets,
    write_contact_sheets,
)
from pipeline.reports.run.report import write_report
from sites.data.pool import ExamplePool, SplitIndices
from sites.population.simulated_sites import FederatedDataset
from tests.support.run_folder_factory import HOSTILE_NAME


def make_dataset(sites, classes, shape=(3, 40, 40), labels_by_site=None):
    """Every image is of one brightness, its row number; `labels_by_site`: site -> its labels, else two of each class."""
    labels = [(labels_by_site or {}).get(site, [c for c in range(len(classes)) for _ in range(2)]) for site in sites]
    y = torch.tensor([label for mine in labels for label in mine])
    x = torch.arange(len(y), dtype=torch.uint8).reshape(-1, *[1] * len(shape)).expand(-1, *shape)
    ends = np.cumsum([0, *map(len, labels)]).tolist()
    no_rows = torch.zeros(0, dtype=torch.int64)
    examples = {
        site: SplitIndices(torch.arange(a, b), no_rows, no_rows)
        for site, a, b in zip(sites, ends[:-1], ends[1:], strict=True)
    }
    pool = ExamplePool(x, y, torch.device("cpu"))
    metadata = {
        "fingerprint": "feed",
        "skipped": (),
        "privacy_unit": None,
        "public_indices": no_rows,
        "acquisition_descriptions": {},
    }
    return FederatedDataset(pool, tuple(sites), examples, tuple(classes), shape, **metadata)


def decode_png(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def test_two_classes_are_rows_with_the_positive_one_first():
    dataset = make_dataset(["a"], ["schistocyte", "other"], labels_by_site={"a": [0, 1, 1, 0, 1]})
    sheet = decode_png(make_contact_sheets(dataset, per_class=3, positive_class="schistocyte")["a"])
    assert sheet.shape[:2] == (2 * 40 + TILE_GAP_PIXELS, 3 * 40 + 2 * TILE_GAP_PIXELS)
    upper = {int(sheet[0, at * (40 + TILE_GAP_PIXELS), 0]) for at in range(2)}
    assert upper == {0, 3}  # the rows of the pool that are schistocytes
    assert sheet[0, -1, 3] == 0  # there are only two: the third tile is blank
    assert sheet[-1, -1, 3] == 255


def test_many_classes_are_columns_and_a_missing_class_is_blank():
    dataset = make_dataset(["a"], list("vwxyz"), labels_by_site={"a": [0, 1, 3, 4]})
    sheet = decode_png(make_contact_sheets(dataset, per_class=1)["a"])
    assert [int(sheet[5, at * (40 + TILE_GAP_PIXELS) + 5, 3]) for at in range(5)] == [255, 255, 0, 255, 255]


@pytest.mark.parametrize(("side", "tile"), [(28, 56), (48, 48), (72, 56)])
def test_small_images_are_enlarged_by_integer_factors_and_large_ones_reduced(side, tile):
    dataset = make_dataset(["a"], ["x", "y"], (1, side, side))
    assert decode_png(make_contact_sheets(dataset, per_class=1)["a"]).shape[:2] == (2 * tile + TILE_GAP_PIXELS, tile)


def test_points_have_no_contact_sheets(tmp_path):
    dataset = make_dataset(["a"], ["x", "y"], (2,))
    assert make_contact_sheets(dataset) == {}
    write_contact_sheets(tmp_path, dataset)
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_sites_have_contact_sheets():
    dataset = make_dataset([f"site {at}" for at in range(12)], ["x", "y"])
    assert list(make_contact_sheets(dataset)) == [f"site {at}" for at in range(MAX_SHEET_SITES)]


def test_hostile_site_names_become_safe_file_names(tmp_path):
    sites = ["../../etc/passwd", HOSTILE_NAME, "東京", "a/b", "a b"]
    write_contact_sheets(
        tmp_path, replace(make_dataset(sites, ["x", "y"]), acquisition_descriptions={"a/b": "warm light"})
    )
    index = json.loads((tmp_path / "cells" / "index.json").read_text())
    assert list(index) == sites
    assert index["a/b"]["acquisition"] == "warm light"
    files = [entry["file"] for entry in index.values()]
    assert len(set(files)) == len(sites)
    assert {path.name for path in (tmp_path / "cells").iterdir()} == {*files, "index.json"}
    assert not any(path.name.startswith("..") for path in tmp_path.iterdir())


def test_the_report_shows_every_contact_sheet(run_folder, read_page):
    path = run_folder.write()
    dataset = replace(
        make_dataset(["a", HOSTILE_NAME], ["normal", "schistocyte"]), acquisition_descriptions={"a": "warm <light>"}
    )
    write_contact_sheets(path, dataset, "schistocyte")
    page = read_page(write_report(path))
    images = page.all("img")
    assert len(images) == 2
    for image in images:
        head, _, content = image.attributes["src"].partition(",")
        assert head == "data:image/png;base64"
        assert decode_png(base64.b64decode(content)).shape[2] == 4
    assert HOSTILE_NAME in images[1].attributes["alt"]
    assert page.all("script") == []
    assert page.texts("h3") == ["a", HOSTILE_NAME]
    assert "warm <light> 42 training images, 12 of them schistocyte (28.6 %)" in page.texts("article")[0]
    assert "Rows, from the top: schistocyte, normal." in page.texts("main")[0]


def test_the_report_says_how_many_sites_are_not_shown(run_folder, read_page):
    path = run_folder.write()
    write_contact_sheets(path, make_dataset(["a"], ["normal", "schistocyte"]))
    assert "Shown: 1 of 2 sites; 1 more took part." in read_page(write_report(path)).texts("main")[0]


def test_a_report_without_contact_sheets_has_no_image(report_page):
    assert report_page.all("img") == []
    assert "Training images by site" not in report_page.texts("h2")


@pytest.mark.parametrize(
    "index", ["", "[]", '{"a": 3}', '{"a": {"file": "gone.png"}}', '{"a": {"file": "../study.toml"}}']
)
def test_a_damaged_index_removes_only_the_images(run_folder, read_page, index):
    path = run_folder.write()
    (path / "cells").mkdir()
    (path / "cells" / "index.json").write_text(index)
    page = read_page(write_report(path))
    assert page.all("img") == []
    assert "Results on test data" in page.texts("h2")
