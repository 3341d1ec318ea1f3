"""The sentences of the audit report under each protection."""

import json
import math

import pytest

from pipeline.cli.commands.audit import audit_command
from pipeline.reports.document.blocks import TableBlock
from pipeline.reports.run.report import write_report
from privacy.audit.attack_findings import AttackFindings, MembershipFinding
from privacy.audit.collect import collect_facts
from privacy.audit.disclosures import list_run_disclosures
from privacy.audit.document.attack_chapter import attack_gauges
from privacy.audit.document.report import build_report
from tests.support.audit_factory import read_pdf_text, run_tiny_study

DP_SGD = {"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0}}


@pytest.fixture(scope="module")
def audit_run(tmp_path_factory):
    """Runs a tiny study with these sections, once each: (run folder, facts, text of the PDF)."""
    audits = {}

    def get(**sections):
        key = json.dumps(sections, sort_keys=True)
        if key not in audits:
            folder = run_tiny_study(tmp_path_factory.mktemp("report") / "run", **sections)
            facts = collect_facts(folder)
            audits[key] = folder, facts, read_pdf_text(build_report(facts, folder.path))
        return audits[key]

    return get


def officer_answers(facts, folder):
    officer_chapter = build_report(facts, folder.path).chapters[0]
    return dict(officer_chapter.blocks[1].rows)


def test_report_of_an_unprotected_run(audit_run):
    folder, facts, text = audit_run()
    assert facts.ok
    assert facts.headline is None
    assert not facts.protection.is_any
    assert "Nothing is protected" in officer_answers(facts, folder)["What is promised?"]
    assert "Mean training loss" in text
    assert {row.protected_by for row in facts.disclosures if "patients" in row.subjects} == {"unprotected"}
    html = write_report(folder.path).read_text("utf-8")
    assert "This run has no formal privacy protection" in html


def test_audit_command_of_an_unprotected_run_succeeds(audit_run, tmp_path, capsys):
    folder, _, _ = audit_run()
    audit_command(folder.path, False, tmp_path / "out", None, False)
    assert "this run has no formal protection" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["ok"]


def test_report_of_dp_sgd_names_the_unit_first(audit_run):
    folder, facts, text = audit_run(privacy=DP_SGD)
    answers = officer_answers(facts, folder)
    assert answers["What is promised?"].startswith("The unit is the patient: all images of one patient count as one.")
    e = facts.headline.spent.epsilon
    belief = 100 * 0.01 * math.exp(e) / (0.99 + 0.01 * math.exp(e))
    assert f"consider it at most {belief:.1f} % likely" in answers["What does that mean?"]
    assert "AES-256" in answers["What does the promise rest on?"]
    assert "Mironov 2012" in answers["What does the promise rest on?"]
    assert "validation and test images" in answers["What is not protected?"]
    assert answers["Was the promise kept?"].startswith("Yes. All 3 ledgers")
    assert "Art. 35 (7) GDPR" in text
    assert "Art. 30 (1) GDPR" in text
    assert "[to be filled in]" in text
    assert text.count("not legal advice") == 1
    assert "none recorded (a simulation)" in text


def test_report_of_image_privacy_gives_the_bound_for_a_patient(audit_run):
    folder, facts, _ = audit_run(
        privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0, "privacy_unit": "example"}}
    )
    promise = officer_answers(facts, folder)["What is promised?"]
    assert promise.startswith(
        "The privacy unit is the single image, not the patient. A patient has about 4 images here"
    )
    assert facts.data_subject.examples / facts.data_subject.units == 4
    assert f"epsilon {4 * facts.headline.spent.epsilon:.1f}" in promise


def test_report_of_secure_aggregation_alone_promises_nothing_to_a_patient(audit_run):
    folder, facts, _ = audit_run(privacy={"secure_aggregation": {}})
    answers = officer_answers(facts, folder)
    assert "no differential privacy: nothing is promised to a patient" in answers["What is promised?"]
    assert (
        "If all 3 sites except one collude, they learn the update of that one" in answers["To whom, and against whom?"]
    )
    protected_by = {row.kind: row.protected_by for row in facts.disclosures}
    assert protected_by["update"] == protected_by["norm_stats"] == protected_by["loss"] == "sum"
    weight = next(row for row in facts.disclosures if row.kind == "weight")
    assert weight.protected_by == "unprotected"
    assert "masked here, but the data summary states it" in weight.reason
    assert "work" not in protected_by
    assert protected_by["final_model"] == "unprotected"


def test_report_of_client_level_dp_excludes_the_coordinator(audit_run):
    folder, facts, _ = audit_run(weighting="equal", privacy={"client_level_dp": {"noise_multiplier": 2.0}})
    answers = officer_answers(facts, folder)
    assert facts.protection.client_level_dp.releases == 2
    assert answers["What is promised?"].startswith("With the site as unit")
    scope = answers["To whom, and against whom?"]
    assert "Not against the coordinator, which sees every update before the noise" in scope
    assert "below 50 sites" in answers["What else is important?"]


def test_report_warns_of_personalized_models(audit_run):
    folder, facts, _ = audit_run(strategy="finetune", privacy=DP_SGD)
    assert {"personal_scores", "personal_model"} <= {row.kind for row in facts.disclosures}
    assert "must not be given to others" in officer_answers(facts, folder)["What else is important?"]


def test_run_report_shows_spent_epsilon_and_budget(audit_run):
    folder, facts, _ = audit_run(privacy=DP_SGD)
    html = write_report(folder.path).read_text("utf-8")
    section = html[html.index(">Privacy</h2>") :]
    section = section[: section.index("</section>")]
    assert "with the patient as unit" in section
    assert f"{facts.sites['site-01'].spending.spent:.2f}" in section
    assert "20.00" in section
    assert "1.400" in section


def find_table(facts, folder, chapter_title, first_column):
    """Rows of the table with this first column, as text without notes."""
    chapters = {chapter.title: chapter for chapter in build_report(facts, folder.path).chapters}
    tables = [block for block in chapters[chapter_title].blocks if isinstance(block, TableBlock)]
    (table,) = [table for table in tables if table.columns[0].title == first_column]
    return [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in table.rows]


def test_site_chapter_counts_what_left_the_site(audit_run):
    budget = {"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 4.5}}
    folder, facts, _ = audit_run(rounds=3, privacy=budget)
    counts = {row[0]: row[1:] for row in find_table(facts, folder, "Site site-01", "What left this site")}
    assert counts == {
        "Model update": ["2", "differential privacy"],
        "Number of training images": ["2", "unprotected"],
        "Steps and seconds of training": ["2", "unprotected"],
        "Scores on validation images": ["4", "unprotected"],
        "Scores on test images": ["1", "unprotected"],
        "Validation profile": ["2", "unprotected"],
        "Declined round": ["1", "nothing to protect"],
    }
    (charges,) = find_table(facts, folder, "Site site-01", "Study")
    assert charges[:2] == ["tiny", "1 to 2"]


def test_disclosures_follow_what_happened_in_the_run(audit_run):
    folder, facts, _ = audit_run(privacy=DP_SGD)
    study = folder.load_study()
    final_model = facts.disclosures[[row.kind for row in facts.disclosures].index("final_model")]
    assert "only through the choice of its round, which is unprotected" in final_model.reason
    unprofiled = facts.model_copy(update={"study": facts.study.model_copy(update={"profiled": False})})
    assert "profile" not in {row.kind for row in list_run_disclosures(study, unprofiled, [])}
    at_round_1 = facts.model_copy(update={"released": None})
    kinds = {row.kind for row in list_run_disclosures(study, at_round_1, ["local_only"])}
    assert {"final_model", "scores/test"}.isdisjoint(kinds)
    assert {"scores/val", "baselines"} <= kinds


def test_personalized_models_are_named_only_where_there_are_some(audit_run):
    text = "Personalized models, which sites adapt for themselves"
    for strategy, is_named in (("finetune", True), ("fedavg", False)):
        folder, facts, _ = audit_run(strategy=strategy, privacy=DP_SGD)
        assert (text in officer_answers(facts, folder)["What is not protected?"]) == is_named


def test_attack_gauges_show_the_interval_of_the_auc(audit_run):
    _, facts, _ = audit_run(privacy=DP_SGD)
    for low, high in ((0.44, 0.62), (None, None)):
        findings = AttackFindings(membership=MembershipFinding(auc=0.53, auc_low=low, auc_high=high))
        (gauge,) = attack_gauges(facts.model_copy(update={"attacks": findings}))
        assert (gauge.low, gauge.measured, gauge.high) == (low or 0.53, 0.53, high or 0.53)
