import pytest

from pipeline.reports.document.formatting import format_interval, format_points, join_names
from pipeline.reports.run import scores as score_figures
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.report import write_report


def tiles(page):
    return dict(zip(page.texts("dt"), page.texts("dd"), strict=True))


@pytest.fixture
def detecting(folder, nasty):
    """The site with the lower accuracy has the higher AUROC."""
    folder.study += "[evaluation]\nspecificity = 0.9\n"
    test = folder.results["test"]
    test["pooled"] |= {"positive_auroc": 0.9, "positive_auprc": 0.6, "sensitivity_at_specificity": 0.75}
    test["sites"]["a"] |= {"positive_auroc": 0.95}
    test["sites"][nasty] |= {"positive_auroc": 0.85}
    folder.results["intervals"] = {
        "unit": "group",
        "units": 97,
        "draws": 1000,
        "level": 0.95,
        "pooled": {"positive_auroc": [0.87, 0.925], "accuracy": [0.79, 0.84]},
        "sites": {"a": {"positive_auroc": [0.9, 0.98]}},
    }
    return folder


def test_the_positive_class_leads_and_accuracy_comes_last(detecting, read_page, nasty):
    page = read_page(write_report(detecting.write()))
    assert list(tiles(page).items())[:5] == [
        ("AUROC, schistocyte, test (all sites)", "0.900 (0.870 to 0.925)"),
        ("Sensitivity at 90 % specificity", "75.0 %"),
        ("AUPRC, schistocyte", "0.600"),
        ("Accuracy", "81.2 % (79.0 to 84.0)"),
        (f"Lowest AUROC of a site: {nasty[:25]}…", "0.850"),
    ]


def test_the_worst_site_is_that_of_the_leading_metric(detecting, read_page, nasty):
    page = read_page(write_report(detecting.write()))
    assert page.row(nasty).startswith(f"{nasty} lowest AUROC 100 0.850")
    assert "0.950 (0.900 to 0.980)" in page.row("a 100")
    assert "draws whole groups (97 in the test data) with replacement, 1,000 times" in page.texts("main")[0]


def test_pooled_scores_lead_where_they_have_intervals(detecting):
    detecting.results["test"]["coordinator"] = {"n": 5, "positive_auroc": 0.99}
    lens = HeadlineMetric.from_record(load_run_record(detecting.write()))
    assert lens.overall_scores(detecting.results["test"])[0] == "all sites"
    detecting.results["intervals"] = None
    lens = HeadlineMetric.from_record(load_run_record(detecting.write()))
    assert lens.overall_scores(detecting.results["test"])[0] == "coordinator's set"


@pytest.mark.parametrize(
    ("best", "leads"),
    [("balanced_accuracy", "balanced_accuracy"), ("loss", "accuracy"), ("macro_f1", "accuracy"), ("?", "accuracy")],
)
def test_without_a_positive_class_what_the_study_chooses_by_leads(folder, best, leads):
    folder.results["positive"] = None
    folder.study += f'[evaluation]\nbest = "{best}"\n'
    assert HeadlineMetric.from_record(load_run_record(folder.write())).metric == leads  # the run has no macro F1


@pytest.mark.parametrize("edges", [None, [], [0.1], [None, 0.2], [float("nan"), 0.5], "ab"])
def test_half_an_interval_is_none(folder, edges):
    folder.results["intervals"] = {"pooled": {"accuracy": edges}, "sites": None}
    lens = HeadlineMetric.from_record(load_run_record(folder.write()))
    assert lens.score_interval("accuracy") is None
    assert lens.score_interval("accuracy", "a") is None


def test_sites_are_drawn_behind_the_whole_and_the_operating_point_is_ringed(detecting, read_page, nasty):
    detecting.results["test"]["sites"]["a"]["roc"] = {"fpr": [0, 1], "tpr": [0, 1]}
    detecting.results["test"]["pooled"] |= {
        "roc": {"fpr": [0, 0.05, 0.5, 1], "tpr": [0, 0.75, 0.9, 1]},
        "pr": {"recall": [0, 0.75, 1], "precision": [1, 0.8, 0.3]},
    }
    drawn = read_page(write_report(detecting.write())).texts("text")
    assert "single sites" in drawn
    assert "sensitivity 75 % at 90 % specificity" in drawn
    assert "precision 80 % there" in drawn
    assert "no skill: 30.8 % are positive" in drawn  # 8 of 26


def test_a_class_may_have_its_area(folder, read_page):
    folder.results["test"]["pooled"]["class_auroc"] = [0.81, None]
    page = read_page(write_report(folder.write()))
    assert page.row("normal") == "normal 18 88.9 % 80.0 % 0.810"
    assert page.row("schistocyte") == "schistocyte 8 50.0 % 66.7 % –"


def test_a_long_curve_keeps_its_ends():
    across, upward = score_figures.thin_curve([at / 1023 for at in range(1024)], [1.0] * 1024)
    assert len(across) == len(upward) <= score_figures.MAX_CURVE_POINTS
    assert (across[0], across[-1]) == (0, 1)
    assert score_figures.thin_curve([0, 1], [0, 1]) == ([0, 1], [0, 1])


def test_the_interval_of_a_share_by_hand():
    # z = 2, 5 of 10: centre 1/2, half-width 2 / 1.4 * sqrt(0.025 + 0.01)
    low, high = score_figures.wilson_interval(0.5, 10, z=2)
    assert (low, high) == pytest.approx((0.5 - 2 / 1.4 * 0.035**0.5, 0.5 + 2 / 1.4 * 0.035**0.5))


def test_words():
    assert [format_points(x) for x in (0.012, -0.034, 0.0004, -0.0004)] == ["+1.2", "−3.4", "0.0", "0.0"]
    assert format_interval("accuracy", 0.9, 0.951) == "(90.0 to 95.1)"
    assert [join_names(names) for names in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b and c"]
