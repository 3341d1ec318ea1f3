"""The files of an audit: self-contained HTML, PDF with outline, and JSON, for hostile and long names too."""

import json
import re
import runpy
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from PIL import Image

from pipeline.reports.document.blocks import ImageBlock
from pipeline.reports.document.pdf import write_pdf
from privacy.audit.attack_findings import InversionFinding
from privacy.audit.collect import collect_facts
from privacy.audit.document.report import build_report
from privacy.audit.facts import AuditFacts
from privacy.audit.write import write_audit
from tests.support.audit_factory import read_pdf_text, run_tiny_study
from tests.support.browser.axe import find_violations_of_file

ROOT = Path(__file__).parents[3]
HOSTILE_NAME = "<script>alert('$x_1$')</script> & 北京"
LONG_NAME = "Universitätsklinikum" * 9


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """(run folder, facts) of a private run with results of attacks."""
    folder = run_tiny_study(
        tmp_path_factory.mktemp("files") / "run",
        privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0}, "secure_aggregation": {}},
    )
    (folder.path / "attacks").mkdir()
    Image.new("RGB", (60, 20), "red").save(folder.path / "attacks" / "inversion.png")
    attack_results = {
        "membership": {
            "auc": 0.53,
            "auc_low": 0.44,
            "auc_high": 0.62,
            "unit": "patient",
            "num_members": 15,
            "num_nonmembers": 6,
            "summary": "By loss.",
        },
        "canaries": {
            "epsilon_low": 0.4,
            "confidence": 0.95,
            "epsilon_promised": 4.3,
            "delta": 1e-5,
            "num_canaries": 64,
            "num_guesses": 20,
            "num_correct": 14,
            "max_epsilon_low": 1.25,
        },
        "inversion": {"image": "attacks/inversion.png", "cases": [{"name": "unprotected", "ssim": 0.9, "psnr": 24.0}]},
    }
    (folder.path / "attacks.json").write_text(json.dumps(attack_results))
    return folder, collect_facts(folder, datetime(2026, 1, 2, tzinfo=UTC))


def count_pages(file):
    return len(re.findall(rb"/Type /Page\b", file.read_bytes()))


@pytest.fixture(scope="module")
def written(audited, tmp_path_factory):
    folder, facts = audited
    return write_audit(facts, folder.path, tmp_path_factory.mktemp("written"))


def test_html_is_self_contained(written):
    html = written[0].read_text("utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", html)
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html
    assert "<script" not in html
    assert html.count("data:image/png;base64,") == 1
    assert "consistent with the promise" in html


def test_html_is_accessible(browser, written):
    assert find_violations_of_file(browser, written[0]) == {}


def test_same_facts_give_the_same_bytes(audited, written, tmp_path):
    folder, facts = audited
    rewritten = write_audit(facts, folder.path, tmp_path)
    assert [path.read_bytes() for path in rewritten] == [path.read_bytes() for path in written]


def test_pdf_starts_with_one_page_for_the_officer(audited, written, tmp_path):
    folder, facts = audited
    report, file = build_report(facts, folder.path), written[1]
    data = file.read_bytes()
    assert data.startswith(b"%PDF-")
    assert count_pages(file) >= len(facts.sites) + 4
    titles = re.findall(rb"/Title \(([^)]*)\)", data)
    assert b"Attacks compared with the bound" in titles
    assert b"Site site-03" in titles
    officer_report = replace(report, notice=80 * "not in order; ", chapters=report.chapters[:1])
    assert count_pages(write_pdf(officer_report, tmp_path / "officer.pdf")) == 1
    text = read_pdf_text(report)
    for expected in (
        "For the data protection officer",
        "The unit is the patient",
        "AUC 0.530 (0.440 to 0.620), by patient; 0.5 is chance; 15 members, 6 nonmembers",
        "By loss.",
        "epsilon at least 0.400 with 95 % confidence; 14 of 20 guesses right, 64 canaries; with every guess right 1.25",
        "SSIM 0.90",
        facts.data.fingerprint,
    ):
        assert expected in text, expected


def test_hostile_and_long_names_are_shown_as_text(audited, tmp_path):
    folder, facts = audited
    facts_json = facts.model_dump_json(exclude={"ok"})
    for name, new_name in (("site-01", HOSTILE_NAME), ("site-02", LONG_NAME)):
        facts_json = facts_json.replace(name, json.dumps(new_name)[1:-1])
    renamed_facts = AuditFacts.model_validate_json(facts_json)
    html_path, pdf_path, _ = write_audit(renamed_facts, folder.path, tmp_path)
    html = html_path.read_text("utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert count_pages(pdf_path) > 1
    text = read_pdf_text(build_report(renamed_facts, folder.path))
    assert "<script>alert('$x_1$')</script> & [U+5317][U+4EAC]" in text
    assert LONG_NAME in text


def test_many_sites_have_no_chapters_of_their_own(audited):
    folder, facts = audited
    sites = {f"site-{n:03}": facts.sites["site-01"] for n in range(70)}
    report = build_report(facts.model_copy(update={"sites": sites}), folder.path)
    assert not [chapter for chapter in report.chapters if chapter.title.startswith("Site ")]
    assert "site-069" in read_pdf_text(report)


def attack_images(facts, folder, image):
    """The images that the report shows if attacks.json names this one."""
    findings = facts.attacks.model_copy(update={"inversion": InversionFinding(image=image)})
    chapters = build_report(facts.model_copy(update={"attacks": findings}), folder.path).chapters
    attack_chapter = next(chapter for chapter in chapters if "Attacks" in chapter.title)
    return [block for block in attack_chapter.blocks if isinstance(block, ImageBlock)]


def test_image_outside_the_run_folder_is_not_shown(audited, tmp_path):
    folder, facts = audited
    secret = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(secret)
    for path in (str(secret), "../secret.png", "attacks/none.png"):
        assert attack_images(facts, folder, path) == []
    assert [image.title for image in attack_images(facts, folder, "attacks/inversion.png")] == ["Inversion"]


def test_json_holds_the_facts(audited, written):
    _, facts = audited
    content = json.loads(written[2].read_text("utf-8"))
    assert content.pop("ok") is True
    assert content["format"] == "hemofed-audit/3"
    assert AuditFacts.model_validate_json(json.dumps(content)) == facts


def test_json_has_no_infinity(audited):
    _, facts = audited
    unbounded = facts.headline.spent.model_copy(update={"factor": float("inf")})
    headline = facts.headline.model_copy(update={"spent": unbounded})
    written = facts.model_copy(update={"headline": headline}).model_dump(mode="json", exclude={"ok"})
    assert written["headline"]["spent"]["factor"] is None
    assert AuditFacts.model_validate_json(json.dumps(written, allow_nan=False)).headline.spent.factor == float("inf")


def test_schema_of_audit_json_is_current():
    schema = runpy.run_path(str(ROOT / "tools" / "write_audit_schema.py"))["render_schema"]()
    current = (ROOT / "docs" / "schemas" / "audit.json").read_text("utf-8")
    assert current == schema, "docs/schemas/audit.json is out of date; run python tools/write_audit_schema.py"
    properties = json.loads(schema)["properties"]
    assert set(properties) == {*AuditFacts.model_fields, "ok"}
