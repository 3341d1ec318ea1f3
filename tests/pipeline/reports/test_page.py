import errno

import pytest
from markupsafe import Markup

from pipeline.core.errors import NoSpaceError
from pipeline.core.files import write_atomically
from pipeline.reports.document.formatting import format_bytes, format_count, format_duration, format_score, shorten_text
from pipeline.reports.document.page import HtmlPage, TableColumn


def test_blocks_come_in_order_and_are_escaped(tmp_path, read_page):
    page = HtmlPage("A < B", "sub & title").add_section("Tables").add_text("1 < 2", "two")
    page.add_table([TableColumn("Site"), TableColumn("n", True)], [["<b>", "3"]], "A caption", highlight=0, badge="odd")
    page.add_figure(Markup("<svg></svg>"), "A drawing").add_details("More", "a <pre>\n b")
    found = read_page(page.save(tmp_path / "new" / "page.html"))
    assert found.texts("h1") == ["A < B"]
    assert found.texts("p")[2:4] == ["1 < 2", "two"]
    assert found.row("<b>") == "<b> odd 3"
    assert found.all("td")[0].attributes == {"class": "number"}
    assert [tag.text for tag in found.all("pre")] == ["a <pre>\n b"]
    assert found.texts("figcaption") == ["A drawing"]


def test_svg_given_as_plain_text_is_escaped():
    assert "<svg" not in HtmlPage("x").add_figure("<svg></svg>", "forged").render_html()


def test_a_long_captioned_table_starts_folded():
    rows = [[str(at)] for at in range(13)]
    assert "<summary>Many</summary>" in HtmlPage("x").add_table([TableColumn("n")], rows, "Many").render_html()
    assert "<summary>" not in HtmlPage("x").add_table([TableColumn("n")], rows[:12], "Few").render_html()
    assert "<summary>" not in HtmlPage("x").add_table([TableColumn("n")], rows, "Marked", highlight=2).render_html()


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "page.html", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(NoSpaceError, match=r"no space left to write .*page\.html"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.04, "0.0 s"), (59.97, "1 min 00 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (2.5e13, "25.0 TB")]
)
def test_sizes(count, text):
    assert format_bytes(count) == text


def test_scores_and_counts():
    assert format_score("accuracy", 0.8604) == "86.0 %"
    assert format_score("auroc", 0.8604) == "0.860"
    assert format_score("loss", None) == "–"
    assert (format_count(1, "site"), format_count(2000, "site")) == ("1 site", "2,000 sites")
    assert shorten_text("x" * 30, 5) == "xxxx…"
