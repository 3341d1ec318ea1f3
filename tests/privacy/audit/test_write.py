import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from PIL import Image

from pipeline.reports.document.blocks import ReportChapter
from pipeline.reports.document.pdf import write_pdf
from privacy.audit.collect import collect_facts
from privacy.audit.document.report import build_report
from privacy.audit.write import to_finite_json, write_audit
from tests.support.audit_factory import printed, ran

NASTY = "<script>alert('$x_1$')</script> & 北京"
LONG = "Universitätsklinikum" * 9


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = ran(
        tmp_path_factory.mktemp("files") / "run",
        privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0}, "secure_aggregation": {}},
    )
    (folder.path / "attacks").mkdir()
    Image.new("RGB", (60, 20), "red").save(folder.path / "attacks" / "inversion.png")
    tried = {
        "membership": {
            "auc": 0.53,
            "low": 0.44,
            "high": 0.62,
            "unit": "patient",
            "members": 15,
            "others": 6,
            "words": "By loss.",
        },
        "canaries": {
            "epsilon_low": 0.4,
            "confidence": 0.95,
            "epsilon_promised": 4.3,
            "delta": 1e-5,
            "m": 64,
            "guesses": 20,
            "correct": 14,
        },
        "inversion": {"picture": "attacks/inversion.png", "cases": [{"name": "as it is", "ssim": 0.9, "psnr": 24.0}]},
    }
    (folder.path / "attacks.json").write_text(json.dumps(tried))
    return folder, collect_facts(folder, datetime(2026, 1, 2, tzinfo=UTC))


def pages(file):
    return len(re.findall(rb"/Type /Page\b", file.read_bytes()))


@pytest.fixture(scope="module")
def written(audited, tmp_path_factory):
    folder, facts = audited
    return write_audit(facts, folder.path, tmp_path_factory.mktemp("written"))


def test_the_page_stands_alone(written):
    html = written[0].read_text("utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", html)
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html
    assert "<script" not in html
    assert html.count("data:image/png;base64,") == 1
    assert "consistent with the promise" in html


def test_the_same_facts_make_the_same_bytes(audited, written, tmp_path):
    folder, facts = audited
    again = write_audit(facts, folder.path, tmp_path)
    assert [one.read_bytes() for one in again] == [other.read_bytes() for other in written]


def test_the_pdf_has_the_officers_page_first_and_alone(audited, written, tmp_path):
    folder, facts = audited
    whole, file = build_report(facts, folder.path), written[1]
    data = file.read_bytes()
    assert data.startswith(b"%PDF-")
    assert pages(file) >= len(facts["sites"]) + 4
    titles = re.findall(rb"/Title \(([^)]*)\)", data)
    assert b"Attacks beside the bound" in titles
    assert b"Site site-03" in titles
    one = replace(whole, notice=80 * "not in order; ", chapters=whole.chapters[:1])
    assert pages(write_pdf(one, tmp_path / "one.pdf")) == 1
    text = printed(whole)
    for words in (
        "For the data protection officer",
        "The unit is the patient",
        "AUC 0.530 (0.440 to 0.620)",
        "0.5 is chance",
        "epsilon at least 0.400 with 95 % confidence",
        "SSIM 0.90",
        facts["data"]["fingerprint"],
    ):
        assert words in text, words


def test_names_are_neither_markup_nor_cut(audited, tmp_path):
    folder, facts = audited
    text = json.dumps(facts)
    for name, other in (("site-01", NASTY), ("site-02", LONG)):
        text = text.replace(name, json.dumps(other)[1:-1])
    named = json.loads(text)
    page, pdf, _ = write_audit(named, folder.path, tmp_path)
    html = page.read_text("utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert pages(pdf) > 1
    words = printed(build_report(named, folder.path))
    assert "<script>alert('$x_1$')</script> & [U+5317][U+4EAC]" in words
    assert LONG in words


def test_many_sites_share_pages(audited):
    folder, facts = audited
    one = facts["sites"]["site-01"]
    many = build_report({**facts, "sites": {f"site-{n:03}": one for n in range(70)}}, folder.path)
    assert not [chapter for chapter in many.chapters if chapter.title.startswith("Site ")]
    assert "site-069" in printed(many)


def test_a_picture_from_elsewhere_is_not_shown(audited, tmp_path):
    folder, facts = audited
    secret = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(secret)
    for path in (str(secret), "../secret.png", "attacks/none.png"):
        tried = {**facts["attacks"], "inversion": {"picture": path}}
        chapter = next(
            c for c in build_report({**facts, "attacks": tried}, folder.path).chapters if "Attacks" in c.title
        )
        assert isinstance(chapter, ReportChapter)
        assert not [block for block in chapter.blocks if type(block).__name__ == "Photo"]


def test_json_holds_no_infinity():
    assert to_finite_json({"a": [1.0, float("inf"), (float("nan"), Path("x").name)]}) == {"a": [1.0, None, [None, "x"]]}
