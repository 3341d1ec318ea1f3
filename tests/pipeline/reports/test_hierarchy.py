import pytest

from pipeline.reports.run.hierarchy import LevelScores, add_hierarchy_section, level_scores
from pipeline.reports.run.report import write_report

SECTION = "Specialisation and generalisation"
MEMBERS = {"a": "0.0", "b": "0.1"}


def at(value):
    return {"accuracy": value, "positive_auroc": value}


def demlearn(shift=0.0):
    """Sites 90 and 50 %, groups 80 and 60, the top one 70 and 75; a group in between is left out."""
    return {
        "coordinator": at(0.75 + shift),
        "pooled": at(0.9 + shift),
        "sites": {"a": at(0.88), "b": at(0.9)},
        "views": {
            "group": {"pooled": at(0.8 + shift), "sites": {"a": at(0.7)}},
            "global": {"pooled": at(0.7 + shift), "sites": {"a": at(0.6)}},
        },
        "models": {
            "group/0.0": at(0.5),
            "group/0.1": at(0.7),
            "group/0": at(0.0),
            "site/a": at(0.4),
            "site/b": at(0.6),
        },
    }


@pytest.fixture
def hierarchy(folder):
    folder.results |= {"positive": None, "strategy": "demlearn", "best_round": 2, "test": demlearn(), "baselines": {}}
    for entry in folder.rounds[1:]:
        entry |= {"groups": MEMBERS, "metrics": {"val": demlearn(entry["round"] / 100)}}
    return folder


@pytest.fixture
def page_of(section_of):
    return lambda folder: section_of(add_hierarchy_section, folder)


def test_three_levels_by_hand():
    found = level_scores(demlearn(), MEMBERS, "accuracy")
    assert found == {
        "site": LevelScores(0.9, pytest.approx(0.5)),
        "group": LevelScores(0.8, pytest.approx(0.6)),
        "top": LevelScores(0.7, 0.75),
    }


def test_areas_of_several_models_are_means_over_sites():
    found = level_scores(demlearn(), MEMBERS, "positive_auroc")
    assert found["site"].specialization == pytest.approx(0.89)
    assert found["group"].specialization == pytest.approx(0.7)


def test_without_models_of_their_own_sites_stand_for_their_groups():
    scores = {"pooled": at(0.8), "models": {"group/0": at(0.5), "group/1": at(0.6), "group/2": at(0.1)}}
    assert level_scores(scores, {"a": "0", "b": "1"}, "accuracy") == {"group": LevelScores(0.8, pytest.approx(0.55))}


def test_the_table_the_words_and_both_curves(hierarchy, page_of):
    page = page_of(hierarchy)
    assert page.row("Sites' models") == "Sites' models 90.0 % 50.0 % +40.0"
    assert page.row("Groups' models") == "Groups' models 80.0 % 60.0 % +20.0"
    assert page.row("Common model") == "Common model 70.0 % 75.0 % −5.0"
    assert "Best at specialising: sites' models, 90.0 %; at generalising: common model, 75.0 %." in page.texts("p")
    assert {"specialisation.png", "generalisation.png"} <= {plot.name for plot in (hierarchy.path / "plots").iterdir()}
    assert "skewed" not in page.texts("main")[0]


def test_a_skewed_study_says_that_the_coordinator_is_not(hierarchy, page_of):
    hierarchy.study += '[feature_skew]\nname = "plane"\n'
    assert any("belongs to no site and is not skewed." in words for words in page_of(hierarchy).texts("p"))


@pytest.mark.parametrize("models", [None, {}, {"site/a": {"accuracy": None}}])
def test_without_further_models_nothing_is_said(hierarchy, page_of, models):
    hierarchy.results["test"]["models"] = models
    assert SECTION not in page_of(hierarchy).texts("h2")


def test_one_common_model_has_no_levels(page):
    assert SECTION not in page.texts("h2")


def test_a_run_that_goes_on_has_levels_too(hierarchy, page_of):
    hierarchy.results = None
    assert page_of(hierarchy).row("Sites' models") == "Sites' models 92.0 % 50.0 % +42.0"


def test_the_sections_stand_in_the_report_in_this_order(hierarchy, read_page, nasty):
    def renamed(found):
        return {nasty if site == "b" else site: value for site, value in found.items()}

    entries = [hierarchy.results["test"], *(entry["metrics"]["val"] for entry in hierarchy.rounds[1:])]
    for entry in entries:
        entry["sites"] = renamed(entry["sites"])
        entry["views"]["global"]["sites"] = {"a": at(0.6), nasty: at(0.9)}
    for entry in hierarchy.rounds[1:]:
        entry["groups"] = renamed(entry["groups"])
        entry["tree"] = {"leaves": ["a", nasty], "merges": [[0, 1, 0.5, 2]]}
    page = read_page(write_report(hierarchy.write()))
    titles = page.texts("h2")
    first = titles.index("Results on test data")
    assert titles[first + 1 : first + 4] == ["Own models and the common one", "Groups", SECTION]
    assert page.all("script") == []
    drawn = page.texts("text")
    assert any(words.startswith(nasty[:12]) and words.endswith("· 0.1") for words in drawn)
