"""What the coordinator of real sites refuses before and at the start of a run."""

import pytest

from pipeline.core.errors import IncompatibleStudyError, ReplyError
from pipeline.runs.federated import _agree_on_data_format, validate_federated_study
from pipeline.study.toml_file import parse_study

STUDY = 'name = "x"\ndata = "moons"\nmodel = "moons_net"\nsites = { count = 2 }\nevaluation = { where = "sites" }\n'
ABOUT = {"shape": [2], "classes": ["a", "b"], "examples": {"train": 5, "val": 0, "test": 2}}


def test_a_federated_study_that_is_judged_at_the_sites_is_fit():
    validate_federated_study(parse_study(STUDY, "x", {}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("evaluation.evaluate_at", "both", "holds no test images"),
        ("public.fraction", 0.1, "public.data"),
        ("strategy", "centralized", "in one place"),
        ("sites.stragglers", 0.5, "leave them out"),
        ("sites.dropout", 0.5, "leave them out"),
    ],
)
def test_what_only_a_simulation_has_is_refused(key, value, words):
    with pytest.raises(IncompatibleStudyError, match=words):
        validate_federated_study(parse_study(STUDY, "x", {key: value}))


def test_sites_that_agree_are_believed():
    assert _agree_on_data_format({"a": ABOUT, "b": ABOUT}) == ((2,), ("a", "b"))


@pytest.mark.parametrize(
    "odd",
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
def test_a_site_that_says_what_cannot_be_is_named(odd):
    with pytest.raises(ReplyError, match=r"^b "):
        _agree_on_data_format({"a": ABOUT, "b": ABOUT | odd})
    with pytest.raises(ReplyError):
        _agree_on_data_format({"a": ABOUT, "b": {k: v for k, v in ABOUT.items() if k not in odd}})
