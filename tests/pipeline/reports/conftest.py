"""Run folders written by hand, and a reader of pages that a test can ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

NASTY = "<script>alert('$x_1$')</script>"


@dataclass
class Tag:
    name: str
    attributes: dict[str, str]
    text: str = ""


class Reader(HTMLParser):
    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[Tag] = []
        self._open: list[Tag] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = Tag(tag, {name: value or "" for name, value in attrs})
        self.tags.append(found)
        if tag not in self.VOID:
            self._open.append(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(Tag(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            tag.text += data

    def all(self, name: str) -> list[Tag]:
        return [tag for tag in self.tags if tag.name == name]

    def texts(self, name: str) -> list[str]:
        return [" ".join(tag.text.split()) for tag in self.all(name)]

    def row(self, heading: str) -> str:
        """The table row that starts with these words."""
        return next(words for words in self.texts("tr") if words.startswith(heading))


def metrics(accuracy: float | None, n: int = 100, **more: Any) -> dict[str, Any]:
    return {
        "n": n,
        "loss": None if accuracy is None else 2 * (1 - accuracy),
        "accuracy": accuracy,
        "balanced_accuracy": accuracy,
        "macro_f1": None,
        "auroc": 0.75,
        "auprc": None,
        "calibration_error": 0.125,
        **more,
    }


def round_line(turn: int, accuracies: dict[str, float | None], **more: Any) -> dict[str, Any]:
    asked = list(accuracies) if turn else []
    return {
        "round": turn,
        "lr": 0.1,
        "asked": asked,
        "counted": asked,
        "missed": {},
        "work": {site: {"asked": 50, "done": 50, "examples": 10, "seconds": 1.0} for site in asked},
        "train_loss": {},
        "bytes": {"up": 1_000_000 * len(asked), "down": 2_000_000 * len(asked)},
        "seconds": {"train": 30.0, "evaluate": 1.0, "save": 0.5},
        "clock": None,
        "void": None,
        "metrics": {"val": {"sites": {site: metrics(value) for site, value in accuracies.items()}}},
        **more,
    }


@dataclass
class Folder:
    """A small finished run of two sites, `a` and a nasty one; tests change a part and write it."""

    path: Path
    rounds: list[dict[str, Any]] = field(
        default_factory=lambda: [
            round_line(0, {"a": 0.25, NASTY: 0.5}),
            round_line(1, {"a": 0.5, NASTY: 0.75}),
            round_line(2, {"a": 0.6, NASTY: 0.8}),
        ]
    )
    data: dict[str, Any] = field(
        default_factory=lambda: {
            "classes": ["normal", "schistocyte"],
            "sites": {site: {"train": [30, 12], "val": [3, 1], "test": [9, 4]} for site in ("a", NASTY)},
            "coordinator": None,
            "fingerprint": "sha256:feed",
            "skipped": ["b/17.png: truncated"],
        }
    )
    results: dict[str, Any] | None = field(
        default_factory=lambda: {
            "study": "Smears & friends",
            "hash": "0123456789abcdef",
            "strategy": "fedavg",
            "model": "mlp",
            "parameters": 101770,
            "rounds": 2,
            "best_round": 1,
            "chosen_by": "val accuracy",
            "stopped": "all rounds done",
            "positive": "schistocyte",
            "test": {
                "pooled": metrics(
                    0.812,
                    positive_auroc=0.875,
                    confusion=[[16, 2], [4, 4]],
                    roc={"fpr": [0, 0.5, 1], "tpr": [0, 0.9, 1]},
                    pr={"recall": [0, 1], "precision": [1, 0.3]},
                    reliability=[[0.6, 0.5, 10], [0.9, 0.95, 16], [0.3, 0.0, 0]],
                ),
                "sites": {"a": metrics(0.7), NASTY: metrics(0.9)},
            },
            "worst": {"site": "a", "accuracy": 0.7},
            "spread": {"accuracy": 0.1},
            "baselines": {
                "local_only": {"test": {"pooled": metrics(0.66)}, "curve": [[0, 0.2], [1, 0.5], [2, 0.66]]},
                "centralized": {"test": {"pooled": metrics(0.93)}, "curve": []},
            },
            "traffic": {"up": 4_000_000, "down": 8_000_000},
            "seconds": 95.0,
            "software": {"torch": "2.13.0"},
        }
    )
    study: str = 'name = "smears"\nseed = 1\n[strategy]\nname = "fedavg"\n[model]\nname = "mlp"\n'

    def write(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.rounds))
        (self.path / "sites.json").write_text(json.dumps(self.data))
        (self.path / "study.toml").write_text(self.study)
        (self.path / "results.json").unlink(missing_ok=True)
        if self.results is not None:
            (self.path / "results.json").write_text(json.dumps(self.results))
        return self.path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the unchanged folder; only to be read."""
    from pipeline.reports.run.report import write_report

    return write_report(Folder(tmp_path_factory.mktemp("finished") / "run").write())


@pytest.fixture(scope="session")
def page(finished: Path) -> Reader:
    return Reader(finished.read_text("utf-8"))


@pytest.fixture
def read_page() -> Callable[[Path], Reader]:
    return lambda path: Reader(path.read_text("utf-8"))


@pytest.fixture
def section_of() -> Callable[[Callable[..., None], Folder], Reader]:
    """A page that has one section of the report of a folder, or nothing."""
    from pipeline.reports.document.page import HtmlPage, ReportWriter
    from pipeline.reports.run.headline_metric import HeadlineMetric
    from pipeline.reports.run.record import load_run_record

    def write(section: Callable[..., None], folder: Folder) -> Reader:
        record, page = load_run_record(folder.write()), HtmlPage("one section")
        section(ReportWriter(page, folder.path / "plots"), record, HeadlineMetric.from_record(record))
        return Reader(page.render_html())

    return write


@pytest.fixture
def nasty() -> str:
    return NASTY


@pytest.fixture
def line() -> Callable[..., dict[str, Any]]:
    return round_line
