from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.reports.document.page import HtmlPage, ReportWriter
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.report import write_report
from tests.support.html_reader import HtmlReader
from tests.support.run_folder_factory import RunFolderFactory


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolderFactory:
    return RunFolderFactory(tmp_path / "run")


@pytest.fixture(scope="session")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an unchanged run folder; read only."""
    return write_report(RunFolderFactory(tmp_path_factory.mktemp("finished") / "run").write())


@pytest.fixture(scope="session")
def report_page(report_path: Path) -> HtmlReader:
    return HtmlReader(report_path.read_text("utf-8"))


@pytest.fixture
def read_page() -> Callable[[Path], HtmlReader]:
    return lambda path: HtmlReader(path.read_text("utf-8"))


@pytest.fixture
def render_section() -> Callable[[Callable[..., None], RunFolderFactory], HtmlReader]:
    """Renders a page with one section of a run folder's report."""

    def render(add_section: Callable[..., None], run_folder: RunFolderFactory) -> HtmlReader:
        record, page = load_run_record(run_folder.write()), HtmlPage("one section")
        add_section(ReportWriter(page, run_folder.path / "plots"), record, HeadlineMetric.from_record(record))
        return HtmlReader(page.render_html())

    return render
