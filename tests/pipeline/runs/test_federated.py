"""Studies and data summaries that a run across real sites refuses."""

import pytest

from pipeline.core.errors import IncompatibleStudyError, ReplyError
from pipeline.runs.federated import _agree_on_data_format, validate_federated_study
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


def test_equal_data_summaries_give_shape_and_classes():
    assert _agree_on_data_format({"a": DATA_SUMMARY, "b": DATA_SUMMARY}) == ((2,), ("a", "b"))


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
        _agree_on_data_format({"a": DATA_SUMMARY, "b": DATA_SUMMARY | changes})
    with pytest.raises(ReplyError):
        _agree_on_data_format({"a": DATA_SUMMARY, "b": {k: v for k, v in DATA_SUMMARY.items() if k not in changes}})
