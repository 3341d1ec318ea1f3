import pytest

from pipeline.reports.run import personalization as personal_figures
from pipeline.reports.run.headline_metric import HeadlineMetric, replace_pooled_rank_metrics
from pipeline.reports.run.personalization import PersonalizationScores, add_personalization_section
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.report import write_report

SECTION = "Own models and the common one"


def scored(**sites):
    return {site: {"n": 40, "accuracy": value} for site, value in sites.items()}


@pytest.fixture
def own(folder):
    """Own 90, 80, 70 %; common 80, 80, 75 %; alone 88, 85 % and unknown."""
    folder.data["sites"] = {site: {"train": [30, 12]} for site in "abc"}
    folder.results |= {"positive": None, "intervals": None, "chosen_by": "last round"}
    folder.results["test"] = {
        "coordinator": {"n": 100, "accuracy": 0.76},
        "pooled": {"n": 120, "accuracy": 0.80},
        "sites": scored(a=0.9, b=0.8, c=0.7),
        "views": {"global": {"pooled": {"accuracy": 0.78}, "sites": scored(a=0.8, b=0.8, c=0.75)}},
    }
    folder.results["baselines"] = {"local_only": {"test": {"sites": scored(a=0.88, b=0.85)}, "curve": []}}
    return folder


@pytest.fixture
def page_of(section_of):
    return lambda folder: section_of(add_personalization_section, folder)


def test_gains_over_the_common_model_and_over_none_by_hand(own, page_of):
    said = [words for words in page_of(own).texts("li") if "own" in words]
    # + 10, 0, - 5: mean 1.67
    assert said[0] == (
        "Against the common model, a site's own model gains 1.7 points on average over 3 sites: "
        "better at 1 (most at a, +10.0), worse at 1 (most at c, −5.0) and about the same at 1."
    )
    # + 2, - 5
    assert said[1].startswith("Against training alone, a site's own model loses 1.5 points on average over 2 sites:")
    assert said[2] == "The weakest site is c: 70.0 % with its own; 75.0 % with the common model."


def test_the_best_of_a_row_is_marked_by_a_sign(own, page_of):
    page = page_of(own)
    assert page.row("a 40 80.0 %") == "a 40 80.0 % ★ 90.0 % 88.0 % +10.0 +2.0"
    assert page.row("b 40 80.0 % 80") == "b 40 80.0 % 80.0 % ★ 85.0 % 0.0 −5.0"
    assert page.row("c 40 ★") == "c 40 ★ 75.0 % 70.0 % – −5.0 –"
    assert any("★ marks the best of a row" in words for words in page.texts("caption"))
    assert (own.path / "plots" / "personal.png").exists()
    assert {"common model", "own model", "alone", "own is worse"} <= set(page.texts("text"))


def test_without_yardsticks_nobody_is_alone(own, page_of):
    own.results["baselines"] = {}
    page = page_of(own)
    assert page.row("a 40 80.0 %") == "a 40 80.0 % ★ 90.0 % +10.0"
    assert "alone" not in page.texts("main")[0]


def test_models_that_are_all_alike_are_called_so(own, page_of):
    own.results["test"]["views"]["global"]["sites"] = own.results["test"]["sites"]
    page = page_of(own)
    assert (
        "does about the same (0.0 points on average over 3 sites, no site differs by more than 0.5)"
        in page.texts("li")[-4]
    )
    assert "★ 90.0 %" in page.row("a 40 ★ 90.0 %")  # still better than alone


@pytest.mark.parametrize(
    "views", [None, {}, {"global": None}, {"global": {"sites": {}}}, {"global": {"sites": {"a": None}}}]
)
def test_runs_without_a_second_view_say_nothing(own, page_of, views):
    own.results["test"]["views"] = views
    assert SECTION not in page_of(own).texts("h2")


def test_the_lens_is_followed(own, page_of):
    own.results["positive"] = "schistocyte"
    for sites in (own.results["test"]["sites"], own.results["test"]["views"]["global"]["sites"]):
        for site, metrics in sites.items():
            metrics["positive_auroc"] = metrics["accuracy"] + (0.05 if site == "a" else 0.0)
    page = page_of(own)
    assert page.row("a 40 0.850") == "a 40 0.850 ★ 0.950 +10.0"  # the yardstick knows no AUROC
    assert "AUROC, schistocyte" in page.texts("text")


def test_a_hundred_sites_are_dots_and_a_folded_table(own, page_of):
    many = {f"s{at:03}": {"n": 10, "accuracy": 0.5 + at / 400} for at in range(100)}
    own.results["test"]["sites"] = many
    own.results["test"]["views"]["global"]["sites"] = {site: {"n": 10, "accuracy": 0.6} for site in many}
    own.results["baselines"]["local_only"]["test"]["sites"] = many
    page = page_of(own)
    # at / 400 against 0.1: better from 42 on, worse up to 38
    assert {"own is better (58)", "own is worse (39)", "about the same (100)"} <= set(page.texts("text"))
    assert any(words.startswith("Accuracy on test data, site by site") for words in page.texts("summary"))
    assert {"personal.png", "personal_alone.png"} <= {plot.name for plot in (own.path / "plots").iterdir()}


def test_a_line_goes_from_the_common_model_to_the_own_one():
    figure = personal_figures.plot_dumbbells(
        [PersonalizationScores("a", 0.8, 0.9, 0.85), PersonalizationScores("b", 0.8, 0.7)], "Accuracy", True
    )
    lines = [list(line.get_xdata()) for line in figure.axes[0].lines]
    assert lines == [[80, 90], [80, 70]]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours[0] != colours[1]
    rings, dots, ticks = figure.axes[0].collections
    assert (len(rings.get_offsets()), len(dots.get_offsets()), len(ticks.get_offsets())) == (2, 2, 1)


def test_intervals_of_the_common_model_stand_beside_no_other(own, read_page):
    own.results["intervals"] = {
        "unit": "example",
        "level": 0.95,
        "pooled": {"accuracy": [0.7, 0.82]},
        "sites": {"a": {"accuracy": [0.71, 0.88]}},
    }
    page = read_page(write_report(own.write()))
    tiles = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert tiles["Accuracy, test (all sites, own models)"] == "80.0 %"
    assert page.row("a 40 80.0 %") == "a 40 80.0 % (71.0 to 88.0) ★ 90.0 % 88.0 % +10.0 +2.0"
    assert page.row("a 40 90.0 %") == "a 40 90.0 %"  # among the results
    assert page.row("Coordinator's set") == "Coordinator's set the common model 100 76.0 %"
    assert "0.95 %" not in page.texts("main")[0]
    assert any(words.startswith("There are intervals of the common model alone") for words in page.texts("li"))
    assert "The models of round 1, the last." in page.texts("main")[0]


def test_areas_of_several_models_are_means_over_sites(own):
    test = own.results["test"]
    test["pooled"] |= {"auroc": 0.99, "roc": {"fpr": [0, 1], "tpr": [0, 1]}, "class_auroc": [0.9, 0.9]}
    test["sites"]["a"]["auroc"], test["sites"]["b"]["auroc"] = 0.8, 0.9
    assert replace_pooled_rank_metrics(test)["pooled"] == {"n": 120, "accuracy": 0.80, "auroc": pytest.approx(0.85)}
    lens = HeadlineMetric.from_record(load_run_record(own.write()))
    assert lens.has_several_models
    assert lens.overall_scores(test)[0] == "all sites"


def test_one_common_model_keeps_its_areas(folder):
    lens = HeadlineMetric.from_record(load_run_record(folder.write()))
    assert not lens.has_several_models
    assert lens.comparable_scores(folder.results["test"]) is folder.results["test"]
