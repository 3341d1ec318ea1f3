"""What the coordinator of real sites refuses before and at the start of a run."""

import pytest

from pipeline.core.errors import BadReply, Refused
from pipeline.runs.federated import _agreed, check_hospital_study
from pipeline.study.toml_file import read_study

STUDY = 'name = "x"\ndata = "moons"\nmodel = "moons_net"\nsites = { count = 2 }\nevaluation = { where = "sites" }\n'
ABOUT = {"shape": [2], "classes": ["a", "b"], "examples": {"train": 5, "val": 0, "test": 2}}


def test_a_federated_study_that_is_judged_at_the_sites_is_fit():
    check_hospital_study(read_study(STUDY, "x", {}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("evaluation.where", "both", "holds no test images"),
        ("public.share", 0.1, "public.data"),
        ("strategy", "central", "in one place"),
        ("sites.stragglers", 0.5, "leave them out"),
        ("sites.dropout", 0.5, "leave them out"),
    ],
)
def test_what_only_a_simulation_has_is_refused(key, value, words):
    with pytest.raises(Refused, match=words):
        check_hospital_study(read_study(STUDY, "x", {key: value}))


def test_sites_that_agree_are_believed():
    assert _agreed({"a": ABOUT, "b": ABOUT}) == ((2,), ("a", "b"))


@pytest.mark.parametrize(
    "odd",
    [{"shape": [3]}, {"classes": ["b", "a"]}, {"shape": [10**9]}, {"shape": []}, {"shape": "2"}, {"classes": ["a"]},
     {"classes": "ab"}, {"examples": {"train": -1}}, {"examples": {"train": 10**12}}, {"examples": {"more": 1}}],
)  # fmt: skip
def test_a_site_that_says_what_cannot_be_is_named(odd):
    with pytest.raises(BadReply, match=r"^b "):
        _agreed({"a": ABOUT, "b": ABOUT | odd})
    with pytest.raises(BadReply):
        _agreed({"a": ABOUT, "b": {k: v for k, v in ABOUT.items() if k not in odd}})
