"""Study summaries and disclosures: complete lists of what leaves the site, and no promise without protection."""

import pytest

from pipeline.core.errors import StudyError
from pipeline.core.registry import registered_components
from pipeline.study.disclosures import list_disclosures
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.records import CosignerPolicy, LedgerBudget
from privacy.ledger.signatures import fingerprint_of
from sites.governance.offers import offered_study
from sites.governance.study_summary import summarize_study, total_spent_epsilon
from tests.support.hospital import Hospital
from tests.support.ledger_factory import make_charge, make_commitment


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def facts(summary):
    return dict(summary.facts)


def test_summary_without_privacy(hospital):
    summary = summarize_study(hospital.make_offer(), hospital.home)
    assert any(text.startswith("No formal privacy") for text in summary.paragraphs)
    assert "Epsilon asked" not in facts(summary)
    update = next(item for item in summary.disclosures if item.kind == "update")
    assert update.reason == "unprotected"
    assert any(item.content == "Number of training images" for item in summary.disclosures)
    assert "receives every site's update and adds them up itself" in facts(summary)["The coordinator sees"]
    assert not summary.warnings


def test_summary_names_sites_and_coordinator(hospital):
    offer = hospital.make_offer()
    summary_facts = facts(summarize_study(offer, hospital.home))
    assert summary_facts["Other site"] == f"charite, key {fingerprint_of(offer.site_keys['charite'])}"
    assert summary_facts["This site"].startswith("st-anne, key ")
    assert summary_facts["Coordinator"] == f"key {fingerprint_of(offer.coordinator_key)}"
    assert summary_facts["Offer"] == offer.digest
    assert summary_facts["Rounds"].startswith(f"at most {offered_study(offer).rounds}, in each all of 2")


def test_summary_of_epsilon_asked_spent_and_left(hospital):
    offer = hospital.make_offer("smear-private", **{"privacy.dp_sgd.epsilon": [1.0, 3.0]})
    summary = summarize_study(offer, hospital.home, num_weights=1234)
    summary_facts = facts(summary)
    assert summary_facts["Epsilon asked"].startswith("3; for each patient, at delta 1e-05")
    assert summary_facts["Epsilon spent so far"].startswith("0 of a budget of 8")
    assert summary_facts["Left afterwards"].startswith("about 5,")
    assert any("of head, 1,234 numbers" in item.detail and "noise" in item.reason for item in summary.disclosures)
    assert not any(item.kind == "loss" for item in summary.disclosures)
    assert any("the site stops by itself" in text for text in summary.paragraphs)
    assert not summary.warnings


def test_spent_epsilon_includes_other_studies(hospital):
    home = hospital.home
    home.ledger.append(make_commitment())
    home.ledger.append(make_charge(0, 0.5))
    spent = total_spent_epsilon(home)
    assert 0 < spent < 1
    summary = summarize_study(hospital.make_offer("smear-private"), home)
    assert facts(summary)["Epsilon spent so far"].startswith(f"{spent:.4g} of a budget of 8")
    assert "the site may have to stop before the end" in summary.warnings[0]
    home.ledger.append(LedgerBudget(epsilon=0.0, delta=1e-5), hospital.officer)
    assert total_spent_epsilon(home) == 0.5


def test_summary_with_noise_multiplier(hospital):
    settings = {"privacy.dp_sgd": {"noise_multiplier": 2.0, "privacy_unit": "example"}}
    summary = summarize_study(hospital.make_offer("moons-demo", **settings), hospital.home)
    assert "follows from the study's noise multiplier" in facts(summary)["Epsilon asked"]
    assert "Left afterwards" not in facts(summary)
    assert "a patient with many images has almost no protection" in summary.warnings[0]


def test_secure_aggregation_hides_updates_and_not_scores(hospital):
    summary = summarize_study(hospital.make_offer(**{"privacy.secure_aggregation.max_update_norm": 1.0}), hospital.home)
    assert facts(summary)["The coordinator sees"].startswith(
        "The sum of updates over at least 3 sites, and no single update"
    )
    reasons = {item.content: item.reason for item in summary.disclosures}
    assert reasons["Model update"] == "masked: only the sum is seen"
    assert reasons["Scores on validation images"] == "unprotected"
    assert not any("seconds" in content for content in reasons)


def test_warning_about_an_incompatible_offer(hospital):
    offer = hospital.make_offer().model_copy(update={"version": "99.0"})
    summary = summarize_study(offer, hospital.home)
    assert summary.warnings[0].startswith("This site will refuse it: run-1 needs hemofed 99.0, and this site has")
    assert "hemofed 99.0; here " in facts(summary)["Code"]


def test_warning_names_the_cosigner(hospital):
    cosigner_key = public_hex(generate_key())
    hospital.home.ledger.append(CosignerPolicy(cosigner_key=cosigner_key), hospital.officer)
    assert fingerprint_of(cosigner_key) in summarize_study(hospital.make_offer(), hospital.home).warnings[0]


def test_every_strategy_has_a_description(hospital):
    assert all(cls.description for cls in registered_components("strategies").values())
    ifca = offered_study(hospital.make_offer(strategy={"name": "ifca"}))
    assert any("which cluster's model" in item.detail for item in list_disclosures(ifca))
    summary_facts = facts(summarize_study(hospital.make_offer(aggregation="median"), hospital.home))
    assert summary_facts["The coordinator sees"] == "It receives, compares and keeps every site's own update."


def test_number_of_epsilons_must_match_the_sites(hospital):
    with pytest.raises(StudyError, match="names 3 epsilons for 2 sites"):
        summarize_study(
            hospital.make_offer("smear-private", **{"privacy.dp_sgd.epsilon": [1.0, 2.0, 3.0]}), hospital.home
        )


def test_disclosures_with_compression_and_evaluation_at_the_coordinator(hospital):
    overrides = {"evaluation.evaluate_at": "coordinator", "compression.uplink": "fp16"}
    whats = [item.full_content for item in list_disclosures(offered_study(hospital.make_offer(**overrides)))]
    assert any("half precision" in what for what in whats)
    assert not any("Scores" in what for what in whats)
    assert not any("Validation profile" in what for what in whats)


def test_validation_profile_is_disclosed_unless_turned_off(hospital):
    assert any(item.content == "Validation profile" for item in list_disclosures(offered_study(hospital.make_offer())))
    without = offered_study(hospital.make_offer(**{"evaluation.validation_profile": False}))
    assert not any(item.kind == "profile" for item in list_disclosures(without))
