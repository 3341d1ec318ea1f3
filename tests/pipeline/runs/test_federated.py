"""Studies and data summaries that a run across real sites refuses."""

import pytest

from pipeline.core.errors import IncompatibleStudyError, ReplyError
from pipeline.runs.federated import _agree_on_data_format, _read_summary, validate_federated_study
from pipeline.study.toml_file import parse_study

STUDY = (
    'name = "x"\ndata = "moons"\nmodel = "moons_net"\nsites = { count = 2 }\nevaluation = { evaluate_at = "sites" }\n'
)
DATA_SUMMARY = {"shape": [2], "classes": ["a", "b"], "examples": {"train": 5, "val": 0, "test": 2}}


def test_federated_study_with_evaluation_at_the_sites_is_valid():
    validate_federated_study(parse_study(STUDY, "x", {}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("evaluation.evaluate_at", "both", "has no test images"),
        ("public.fraction", 0.1, "public.data"),
        ("strategy", "centralized", "pooled images"),
        ("sites.stragglers", 0.5, "leave them out"),
        ("sites.dropout", 0.5, "leave them out"),
    ],
)
def test_federated_study_refuses_simulation_only_settings(key, value, words):
    with pytest.raises(IncompatibleStudyError, match=words):
        validate_federated_study(parse_study(STUDY, "x", {key: value}))


def agree(**sent_by_site):
    return _agree_on_data_format({site: _read_summary(site, sent) for site, sent in sent_by_site.items()})


def test_equal_data_summaries_give_shape_and_classes():
    assert agree(a=DATA_SUMMARY, b=DATA_SUMMARY) == ((2,), ("a", "b"))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3]},
        {"classes": ["b", "a"]},
        {"shape": [10**9]},
        {"shape": []},
        {"shape": "2"},
        {"classes": ["a"]},
        {"classes": "ab"},
        {"examples": {"train": -1}},
        {"examples": {"train": 10**12}},
        {"examples": {"more": 1}},
    ],
)
def test_invalid_or_different_data_summary_names_its_site(changes):
    with pytest.raises(ReplyError, match=r"^b "):
        agree(a=DATA_SUMMARY, b=DATA_SUMMARY | changes)
    with pytest.raises(ReplyError):
        agree(a=DATA_SUMMARY, b={k: v for k, v in DATA_SUMMARY.items() if k not in changes})


PRIVACY_PLAN = {
    "noise_multiplier": 1.25,
    "max_grad_norm": 0.5,
    "privacy_unit": "patient",
    "num_units": 40,
    "sampling_rate": 0.125,
    "loss_scale": 0.25,
    "delta": 1e-5,
    "steps_per_round": 6,
    "max_rounds": 20,
    "epsilon": 3.75,
    "accountant": "prv",
    "num_examples": 160,
}


def test_a_privacy_unit_has_a_short_name():
    assert _read_summary("b", DATA_SUMMARY | {"privacy_unit": "patient"}).privacy_unit == "patient"
    with pytest.raises(ReplyError, match=r"^b .*\(privacy_unit\)"):
        _read_summary("b", DATA_SUMMARY | {"privacy_unit": "x" * 200})


def test_a_privacy_plan_arrives_as_the_site_made_it():
    plan = _read_summary("b", DATA_SUMMARY | {"privacy_plan": PRIVACY_PLAN}).privacy_plan
    assert plan.to_dict() == PRIVACY_PLAN
    assert _read_summary("b", DATA_SUMMARY | {"privacy_plan": None}).privacy_plan is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": float("nan")},
        {"epsilon": -1.0},
        {"epsilon": "3"},
        {"noise_multiplier": float("inf")},
        {"sampling_rate": 1.5},
        {"delta": 0.0},
        {"num_units": -2},
        {"num_units": 10**15},
        {"num_units": 2.5},
        {"privacy_unit": "x" * 200},
        {"html": "<script>"},
    ],
)
def test_a_privacy_plan_out_of_bounds_is_refused(changes):
    with pytest.raises(ReplyError, match=r"^b sent an invalid data summary \(privacy_plan\)"):
        _read_summary("b", DATA_SUMMARY | {"privacy_plan": PRIVACY_PLAN | changes})
