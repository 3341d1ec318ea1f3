import pytest
from pydantic import ValidationError

from pipeline.records.scores import EvaluationScores
from pipeline.reports.document.formatting import format_interval, format_points, join_names
from pipeline.reports.run import scores as score_figures
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.report import write_report
from tests.support.run_folder_factory import HOSTILE_NAME, make_intervals


def read_tiles(page):
    return dict(zip(page.texts("dt"), page.texts("dd"), strict=True))


@pytest.fixture
def detection_run(run_folder):
    """The site with the lower accuracy has the higher AUROC."""
    run_folder.study_toml += "[evaluation]\ntarget_specificity = 0.9\n"
    test = run_folder.results["test"]
    test["pooled"] |= {"positive_auroc": 0.9, "positive_auprc": 0.6, "sensitivity_at_specificity": 0.75}
    test["sites"]["a"] |= {"positive_auroc": 0.95}
    test["sites"][HOSTILE_NAME] |= {"positive_auroc": 0.85}
    run_folder.results["intervals"] = make_intervals(
        privacy_unit="group",
        num_units=97,
        pooled={"positive_auroc": [0.87, 0.925], "accuracy": [0.79, 0.84]},
        sites={"a": {"positive_auroc": [0.9, 0.98]}},
    )
    return run_folder


def test_headline_tiles_begin_with_the_positive_class(detection_run, read_page):
    page = read_page(write_report(detection_run.write()))
    assert list(read_tiles(page).items())[:5] == [
        ("AUROC, schistocyte, test (all sites)", "0.900 (0.870 to 0.925)"),
        ("Sensitivity at 90 % specificity", "75.0 %"),
        ("AUPRC, schistocyte", "0.600"),
        ("Accuracy", "81.2 % (79.0 to 84.0)"),
        (f"Lowest AUROC of a site: {HOSTILE_NAME[:25]}…", "0.850"),
    ]


def test_the_worst_site_is_by_the_headline_metric(detection_run, read_page):
    page = read_page(write_report(detection_run.write()))
    assert page.row(HOSTILE_NAME).startswith(f"{HOSTILE_NAME} lowest AUROC 100 0.850")
    assert "0.950 (0.900 to 0.980)" in page.row("a 100")
    assert "draws whole groups (97 in the test data) with replacement, 1,000 times" in page.texts("main")[0]


def test_pooled_scores_come_first_if_they_have_intervals(detection_run):
    detection_run.results["test"]["coordinator"] = {"n": 5, "positive_auroc": 0.99}
    scores = EvaluationScores.model_validate(detection_run.results["test"])
    headline = HeadlineMetric.from_record(load_run_record(detection_run.write()))
    assert headline.overall_scores(scores)[0] == "all sites"
    detection_run.results["intervals"] = None
    headline = HeadlineMetric.from_record(load_run_record(detection_run.write()))
    assert headline.overall_scores(scores)[0] == "coordinator's set"


@pytest.mark.parametrize(
    ("selection_metric", "headline_metric"),
    [("balanced_accuracy", "balanced_accuracy"), ("loss", "accuracy"), ("macro_f1", "accuracy"), ("?", "accuracy")],
)
def test_without_a_positive_class_the_selection_metric_is_the_headline(run_folder, selection_metric, headline_metric):
    run_folder.results["positive_class"] = None
    run_folder.study_toml += f'[evaluation]\nselection_metric = "{selection_metric}"\n'
    assert (
        HeadlineMetric.from_record(load_run_record(run_folder.write())).metric == headline_metric
    )  # the run has no macro F1


@pytest.mark.parametrize("edges", [None, [], [0.1], [None, 0.2], [float("nan"), 0.5], "ab"])
def test_an_incomplete_interval_is_refused(run_folder, edges):
    run_folder.results["intervals"] = make_intervals(pooled={"accuracy": edges})
    with pytest.raises(ValidationError, match="intervals"):
        run_folder.write()


def test_a_metric_or_a_site_without_an_interval(run_folder, read_page):
    run_folder.results["intervals"] = make_intervals(
        num_units=23, min_units=12, pooled={"accuracy": [0.7, 0.9]}, sites={"a": {}}
    )
    path = run_folder.write()
    headline = HeadlineMetric.from_record(load_run_record(path))
    assert headline.score_interval("accuracy") == (0.7, 0.9)
    assert headline.score_interval("auroc") is None
    assert headline.score_interval("accuracy", "a") is None
    assert headline.score_interval("accuracy", "elsewhere") is None
    text = read_page(write_report(path)).texts("main")[0]
    assert "draws whole patients (23 in the test data) with replacement, 1,000 times" in text
    assert "Sites with fewer than 12 patients have no interval." in text


def test_roc_figure_shows_single_sites_and_the_operating_point(detection_run, read_page):
    detection_run.results["test"]["sites"]["a"]["roc"] = {"fpr": [0, 1], "tpr": [0, 1]}
    detection_run.results["test"]["pooled"] |= {
        "roc": {"fpr": [0, 0.05, 0.5, 1], "tpr": [0, 0.75, 0.9, 1]},
        "pr": {"recall": [0, 0.75, 1], "precision": [1, 0.8, 0.3]},
    }
    texts = read_page(write_report(detection_run.write())).texts("text")
    assert "single sites" in texts
    assert "sensitivity 75 % at 90 % specificity" in texts
    assert "precision 80 % there" in texts
    assert "no skill: 30.8 % are positive" in texts  # 8 of 26
    assert {"all sites, area 0.900", "all sites, area 0.600"} <= set(texts)


def test_auroc_by_class(run_folder, read_page):
    run_folder.results["test"]["pooled"]["class_auroc"] = [0.81, None]
    page = read_page(write_report(run_folder.write()))
    assert page.row("normal") == "normal 18 88.9 % 80.0 % 0.810"
    assert page.row("schistocyte") == "schistocyte 8 50.0 % 66.7 % –"


def test_a_thinned_curve_keeps_its_ends():
    across, upward = score_figures.thin_curve([at / 1023 for at in range(1024)], [1.0] * 1024)
    assert len(across) == len(upward) <= score_figures.MAX_CURVE_POINTS
    assert (across[0], across[-1]) == (0, 1)
    assert score_figures.thin_curve([0, 1], [0, 1]) == ([0, 1], [0, 1])


def test_wilson_interval_by_hand():
    # z = 2, 5 of 10: centre 1/2, half-width 2 / 1.4 * sqrt(0.025 + 0.01)
    low, high = score_figures.wilson_interval(0.5, 10, z=2)
    assert (low, high) == pytest.approx((0.5 - 2 / 1.4 * 0.035**0.5, 0.5 + 2 / 1.4 * 0.035**0.5))


def test_formatting():
    assert [format_points(x) for x in (0.012, -0.034, 0.0004, -0.0004)] == ["+1.2", "−3.4", "0.0", "0.0"]
    assert format_interval("accuracy", 0.9, 0.951) == "(90.0 to 95.1)"
    assert [join_names(names) for names in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b and c"]
