"""Pages of the document model pass axe-core. Pages of other packages are checked beside their own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from pipeline.reports.document.page import MAX_UNFOLDED_ROWS, PALETTE, CaptionedImage, CountBar, HtmlPage, TableColumn
from tests.support.browser.axe import find_violations_of_file
from tests.support.image_files import encode_image

COLUMNS = [TableColumn("Site"), TableColumn("Cells", True), TableColumn("Remark", is_text=True)]


def make_row(number: int) -> list[str | tuple[str, str]]:
    return [f"site-{number}", ("412", "36 of a patient"), "The images of this site are darker than those of others."]


def add_every_block(page: HtmlPage, title: str) -> None:
    names = [f"class {n}" for n in range(len(PALETTE))]
    bars = [CountBar("training", [(name, 3 * n) for n, name in enumerate(names)])]
    page.add_section(title).add_text("A paragraph.").add_findings(["One finding.", "A note on the findings."])
    page.add_tiles([("Accuracy", ("81.2 %", "80.1 to 82.3"))], lead=True).add_tiles([("Sites", "4")])
    page.add_table(COLUMNS, [make_row(1), make_row(2)], highlight=1, badge="lowest")
    page.add_table(COLUMNS, [make_row(3)])
    page.add_table([TableColumn("Art. 35"), TableColumn("")], [["Purpose", "Research"]])
    page.add_table([TableColumn(""), TableColumn("")], [["What is promised?", "Nothing."]])
    page.add_table(COLUMNS, [make_row(n) for n in range(MAX_UNFOLDED_ROWS + 1)], "All sites, last round")
    page.add_figure(Markup('<svg viewBox="0 0 4 3" aria-hidden="true"></svg>'), "A curve").add_legend(names)
    page.add_gallery("Three cells", Markup('<img alt="cell 7" src="data:,">'), "Three of 80 images")
    png = encode_image(np.full((8, 8, 3), 90, np.uint8))
    images = [
        CaptionedImage(name, png, name, ["How it was acquired."], "12 cells", (90, 20, 7), "mean", bars)
        for name in names[:2]
    ]
    page.add_images(images).add_details("The study file", "rounds = 5\n" + "# wide " * 60)


@pytest.fixture
def page_with_every_block(tmp_path: Path) -> Path:
    page = HtmlPage("Every block", "of the document model", "A notice.")
    page.add_tiles([("Best round", "7")], lead=True)
    for title in ("First section", "Second section"):
        add_every_block(page, title)
    return page.save(tmp_path / "page.html")


def test_every_block_is_accessible(browser: Any, page_with_every_block: Path) -> None:
    assert find_violations_of_file(browser, page_with_every_block) == {}


def test_run_report_is_accessible(browser: Any, report_path: Path) -> None:
    assert find_violations_of_file(browser, report_path) == {}
