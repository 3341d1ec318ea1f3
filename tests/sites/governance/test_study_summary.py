"""An offer in plain words: nothing that leaves is left out, and nothing is promised that is not kept."""

import pytest

from pipeline.core.errors import StudyError
from pipeline.core.registry import registered_components
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.records import CosignerPolicy, LedgerBudget
from privacy.ledger.signatures import fingerprint_of
from sites.governance.disclosures import list_disclosures
from sites.governance.offers import offered_study
from sites.governance.study_summary import STRATEGY_DESCRIPTIONS, summarize_study, total_spent_epsilon
from tests.support.hospital import Hospital
from tests.support.ledger_factory import charge, commit


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def facts(words):
    return dict(words.facts)


def test_without_privacy_it_says_so(hospital):
    words = summarize_study(hospital.offer(), hospital.home)
    assert any(text.startswith("No formal privacy") for text in words.paragraphs)
    assert "Epsilon asked" not in facts(words)
    update = next(one for one in words.disclosures if one.what.startswith("model update"))
    assert update.protection == "none"
    assert any("number of training images" in one.what for one in words.disclosures)
    assert "receives every site's update and adds them up itself" in facts(words)["The coordinator sees"]
    assert not words.warnings


def test_who_asks_and_who_else_is_in_it(hospital):
    offer = hospital.offer()
    told = facts(summarize_study(offer, hospital.home))
    assert told["Other site"] == f"charite, key {fingerprint_of(offer.sites['charite'])}"
    assert told["This site"].startswith("st-anne, key ")
    assert told["Coordinator"] == f"key {fingerprint_of(offer.coordinator)}"
    assert told["Offer"] == offer.digest
    assert told["Rounds"].startswith(f"at most {offered_study(offer).rounds}, in each all of 2")


def test_epsilon_asked_spent_and_left(hospital):
    offer = hospital.offer("smear-private", **{"privacy.dp_sgd.epsilon": [1.0, 3.0]})
    words = summarize_study(offer, hospital.home, num_weights=1234)
    told = facts(words)
    assert told["Epsilon asked"].startswith("3; for each patient, at delta 1e-05")
    assert told["Epsilon spent so far"].startswith("0 of a budget of 8")
    assert told["Left afterwards"].startswith("about 5,")
    assert any("of head, 1,234 numbers" in one.what and "noise" in one.protection for one in words.disclosures)
    assert not any("training loss" in one.what for one in words.disclosures)
    assert any("the site stops by itself" in text for text in words.paragraphs)
    assert not words.warnings


def test_what_was_spent_counts_other_studies(hospital):
    home = hospital.home
    home.ledger.append(commit())
    home.ledger.append(charge(0, 0.5))
    spent = total_spent_epsilon(home)
    assert 0 < spent < 1
    words = summarize_study(hospital.offer("smear-private"), home)
    assert facts(words)["Epsilon spent so far"].startswith(f"{spent:.4g} of a budget of 8")
    assert "the site may have to stop before the end" in words.warnings[0]
    home.ledger.append(LedgerBudget(epsilon=0.0, delta=1e-5), hospital.officer)
    assert total_spent_epsilon(home) == 0.5


def test_noise_instead_of_epsilon(hospital):
    given = {"privacy.dp_sgd": {"noise_multiplier": 2.0, "privacy_unit": "example"}}
    words = summarize_study(hospital.offer("moons-demo", **given), hospital.home)
    assert "follows from the noise" in facts(words)["Epsilon asked"]
    assert "Left afterwards" not in facts(words)
    assert "a patient with many images is promised next to nothing" in words.warnings[0]


def test_a_secure_sum_hides_updates_and_not_scores(hospital):
    words = summarize_study(hospital.offer(**{"privacy.secure_aggregation.max_update_norm": 1.0}), hospital.home)
    assert facts(words)["The coordinator sees"].startswith(
        "The sum of updates over at least 3 sites, and no single one"
    )
    by = {one.what.split(":")[0]: one.protection for one in words.disclosures}
    assert by["model update"] == "masked: only the sum is seen"
    assert by["scores on validation images"] == "none"
    assert not any("seconds" in what for what in by)


def test_what_this_site_would_refuse(hospital):
    offer = hospital.offer().model_copy(update={"version": "99.0"})
    words = summarize_study(offer, hospital.home)
    assert words.warnings[0].startswith("This site will refuse it: run-1 needs hemofed 99.0, and here is")
    assert "hemofed 99.0; here " in facts(words)["Code"]


def test_two_persons_are_named(hospital):
    second = public_hex(generate_key())
    hospital.home.ledger.append(CosignerPolicy(cosigner_key=second), hospital.officer)
    assert fingerprint_of(second) in summarize_study(hospital.offer(), hospital.home).warnings[0]


def test_every_strategy_has_plain_words(hospital):
    assert set(STRATEGY_DESCRIPTIONS) == set(registered_components("strategies"))
    ifca = offered_study(hospital.offer(strategy={"name": "ifca"}))
    assert any("which group's model" in one.what for one in list_disclosures(ifca))
    told = facts(summarize_study(hospital.offer(aggregation="median"), hospital.home))
    assert told["The coordinator sees"] == "It receives, compares and keeps every site's own update."


def test_an_epsilon_for_each_site_or_one(hospital):
    with pytest.raises(StudyError, match="names 3 epsilons for 2 sites"):
        summarize_study(hospital.offer("smear-private", **{"privacy.dp_sgd.epsilon": [1.0, 2.0, 3.0]}), hospital.home)


def test_codecs_and_evaluation(hospital):
    quiet = {"evaluation.evaluate_at": "coordinator", "compression.uplink": "fp16"}
    whats = [one.what for one in list_disclosures(offered_study(hospital.offer(**quiet)))]
    assert any("half precision" in what for what in whats)
    assert not any("scores" in what for what in whats)
    assert not any("profile" in what for what in whats)


def test_the_profile_is_told_and_can_be_left_out(hospital):
    assert any(
        "a profile of validation images" in one.what for one in list_disclosures(offered_study(hospital.offer()))
    )
    without = offered_study(hospital.offer(**{"evaluation.validation_profile": False}))
    assert not any("a profile" in one.what for one in list_disclosures(without))
