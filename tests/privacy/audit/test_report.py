import json
import math

import pytest

from pipeline.cli.commands.audit import audit_command
from pipeline.reports.run.report import write_report
from privacy.audit.collect import collect_facts
from privacy.audit.document.report import build_report
from tests.support.audit_factory import printed, ran

AT_SITE = {"dp_sgd": {"noise": 1.4, "budget": 20.0}}


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """(facts, what the PDF says) of a study's tiny run; made once each."""
    done = {}

    def get(**sections):
        key = json.dumps(sections, sort_keys=True)
        if key not in done:
            folder = ran(tmp_path_factory.mktemp("words") / "run", **sections)
            facts = collect_facts(folder)
            done[key] = folder, facts, printed(build_report(facts, folder.path))
        return done[key]

    return get


def officers(facts, folder):
    first = build_report(facts, folder.path).chapters[0]
    return dict(first.blocks[1].rows)


def test_a_run_without_privacy_says_so(audited):
    folder, facts, text = audited()
    assert facts["ok"]
    assert facts["headline"] is None
    assert not any(facts["protection"].values())
    assert "Nothing is protected" in officers(facts, folder)["What is promised?"]
    assert "Mean training loss" in text
    assert {row["by"] for row in facts["disclosures"]} == {"unprotected"}
    html = write_report(folder.path).read_text("utf-8")
    assert "This run has no formal privacy protection" in html


def test_the_command_says_so_too_and_does_not_fail(audited, tmp_path, capsys):
    folder, _, _ = audited()
    audit_command(folder.path, False, tmp_path / "out", None, False)
    assert "nothing is protected in this run" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["ok"]


def test_the_unit_is_named_first(audited):
    folder, facts, text = audited(privacy=AT_SITE)
    page = officers(facts, folder)
    assert page["What is promised?"].startswith("The unit is the patient: all images of one patient count as one.")
    e = facts["headline"]["epsilon"]
    rises = 100 * 0.01 * math.exp(e) / (0.99 + 0.01 * math.exp(e))
    assert f"think it at most {rises:.1f} % likely" in page["What does that mean?"]
    assert "AES-256" in page["What does it rest on?"]
    assert "Mironov 2012" in page["What does it rest on?"]
    assert "validation and test images" in page["What is not protected?"]
    assert page["Was it kept?"].startswith("Yes. All 3 ledgers")
    assert "Art. 35 (7) GDPR" in text
    assert "Art. 30 (1) GDPR" in text
    assert "[to be filled in]" in text
    assert text.count("no legal advice") == 1
    assert "none recorded (a simulation)" in text


def test_a_promise_to_images_says_what_it_does_not_promise(audited):
    folder, facts, _ = audited(
        privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0, "privacy_unit": "example"}}
    )
    promised = officers(facts, folder)["What is promised?"]
    assert promised.startswith("The unit is the single image, not the patient. A patient has about 4 images here")
    assert facts["person"]["examples"] / facts["person"]["units"] == 4
    assert f"epsilon {4 * facts['headline']['epsilon']:.1f}" in promised


def test_masks_alone_promise_no_patient_anything(audited):
    folder, facts, _ = audited(privacy={"secure_aggregation": {}})
    page = officers(facts, folder)
    assert "No differential privacy" in page["What is promised?"]
    assert "All 3 sites but one in league learn that one's update" in page["To whom, against whom?"]
    by = {row["key"]: row["by"] for row in facts["disclosures"]}
    assert by["update"] == by["weight"] == by["loss"] == "sum"
    assert "work" not in by
    assert by["final"] == "unprotected"


def test_noise_at_the_coordinator_does_not_hold_off_the_coordinator(audited):
    folder, facts, _ = audited(weighting="equal", privacy={"client_level_dp": {"noise_multiplier": 2.0}})
    page = officers(facts, folder)
    assert facts["protection"]["client_level_dp"]["releases"] == 2
    assert page["What is promised?"].startswith("With the site as unit")
    assert "Not against the coordinator, which sees every update before the noise" in page["To whom, against whom?"]
    assert "below 50 sites" in page["What else to know?"]


def test_models_that_sites_adapt_are_pointed_out(audited):
    folder, facts, _ = audited(strategy="finetune", privacy=AT_SITE)
    assert {"own", "own_model"} <= {row["key"] for row in facts["disclosures"]}
    assert "must not be given away" in officers(facts, folder)["What else to know?"]


def test_the_runs_own_report_names_spent_and_budget(audited):
    folder, facts, _ = audited(privacy=AT_SITE)
    html = write_report(folder.path).read_text("utf-8")
    section = html[html.index(">Privacy</h2>") :]
    section = section[: section.index("</section>")]
    assert "with the patient as unit" in section
    assert f"{facts['sites']['site-01']['spent']:.2f}" in section
    assert "20.00" in section
    assert "1.400" in section
