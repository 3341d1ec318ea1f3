import pytest

from pipeline.records.scores import EvaluationScores
from pipeline.reports.run import personalization
from pipeline.reports.run.headline_metric import HeadlineMetric, replace_pooled_rank_metrics
from pipeline.reports.run.personalization import PersonalizationScores, add_personalization_section
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.report import write_report
from tests.support.run_folder_factory import make_baseline, make_intervals

SECTION = "Personalised and global models"


def make_site_scores(**sites):
    return {site: {"n": 40, "accuracy": value} for site, value in sites.items()}


@pytest.fixture
def personalized_run(run_folder):
    """Personalised 90, 80, 70 %; global 80, 80, 75 %; local only 88, 85 % and unknown."""
    run_folder.site_data["sites"] = {site: {"train": [30, 12]} for site in "abc"}
    run_folder.results |= {"positive_class": None, "intervals": None, "selected_by": "last round"}
    run_folder.results["test"] = {
        "coordinator": {"n": 100, "accuracy": 0.76},
        "pooled": {"n": 120, "accuracy": 0.80},
        "sites": make_site_scores(a=0.9, b=0.8, c=0.7),
        "comparisons": {
            "global": {"pooled": {"n": 120, "accuracy": 0.78}, "sites": make_site_scores(a=0.8, b=0.8, c=0.75)}
        },
    }
    run_folder.results["baselines"] = {"local_only": make_baseline({"sites": make_site_scores(a=0.88, b=0.85)})}
    return run_folder


@pytest.fixture
def render_page(render_section):
    return lambda run_folder: render_section(add_personalization_section, run_folder)


def test_gains_over_the_global_model_and_local_only_training_by_hand(personalized_run, render_page):
    findings = [text for text in render_page(personalized_run).texts("li") if "personalised" in text]
    # + 10, 0, - 5: mean 1.67
    assert findings[0] == (
        "Compared with the global model, a site's personalised model gains 1.7 points on average over 3 sites: "
        "better at 1 (most at a, +10.0), worse at 1 (most at c, −5.0) and about the same at 1."
    )
    # + 2, - 5
    assert findings[1].startswith(
        "Compared with local-only training, a site's personalised model loses 1.5 points on average over 2 sites:"
    )
    assert findings[2] == "The weakest site is c: 70.0 % with its personalised model; 75.0 % with the global model."


def test_the_best_score_of_a_row_is_marked(personalized_run, render_page):
    page = render_page(personalized_run)
    assert page.row("a 40 80.0 %") == "a 40 80.0 % ★ 90.0 % 88.0 % +10.0 +2.0"
    assert page.row("b 40 80.0 % 80") == "b 40 80.0 % 80.0 % ★ 85.0 % 0.0 −5.0"
    assert page.row("c 40 ★") == "c 40 ★ 75.0 % 70.0 % – −5.0 –"
    assert any("★ marks the best of a row" in text for text in page.texts("caption"))
    assert (personalized_run.path / "plots" / "personalized.png").exists()
    assert {"global model", "personalised model", "local only", "personalised is worse"} <= set(page.texts("text"))


def test_without_baselines_there_is_no_local_only_column(personalized_run, render_page):
    personalized_run.results["baselines"] = {}
    page = render_page(personalized_run)
    assert page.row("a 40 80.0 %") == "a 40 80.0 % ★ 90.0 % +10.0"
    assert "local only" not in page.texts("main")[0]


def test_negligible_gains_of_personalized_models(personalized_run, render_page):
    personalized_run.results["test"]["comparisons"]["global"]["sites"] = personalized_run.results["test"]["sites"]
    page = render_page(personalized_run)
    assert (
        "scores about the same (0.0 points on average over 3 sites, no site differs by more than 0.5)"
        in page.texts("li")[-4]
    )
    assert "★ 90.0 %" in page.row("a 40 ★ 90.0 %")  # still better than local only


@pytest.mark.parametrize(
    "views", [{}, {"global": {}}, {"global": {"sites": {}}}, {"global": {"sites": {"a": {"n": 0, "accuracy": None}}}}]
)
def test_runs_without_global_scores_have_no_personalization_section(personalized_run, render_page, views):
    personalized_run.results["test"]["comparisons"] = views
    assert SECTION not in render_page(personalized_run).texts("h2")


def test_the_headline_metric_is_used(personalized_run, render_page):
    personalized_run.results["positive_class"] = "schistocyte"
    for sites in (
        personalized_run.results["test"]["sites"],
        personalized_run.results["test"]["comparisons"]["global"]["sites"],
    ):
        for site, metrics in sites.items():
            metrics["positive_auroc"] = metrics["accuracy"] + (0.05 if site == "a" else 0.0)
    page = render_page(personalized_run)
    assert page.row("a 40 0.850") == "a 40 0.850 ★ 0.950 +10.0"  # the baseline has no AUROC
    assert "AUROC, schistocyte" in page.texts("text")


def test_a_hundred_sites_are_a_scatter_plot_and_a_folded_table(personalized_run, render_page):
    many = {f"s{at:03}": {"n": 10, "accuracy": 0.5 + at / 400} for at in range(100)}
    personalized_run.results["test"]["sites"] = many
    personalized_run.results["test"]["comparisons"]["global"]["sites"] = {
        site: {"n": 10, "accuracy": 0.6} for site in many
    }
    personalized_run.results["baselines"]["local_only"]["test"]["sites"] = many
    page = render_page(personalized_run)
    # at / 400 against 0.1: better from 42 on, worse up to 38
    assert {"personalised is better (58)", "personalised is worse (39)", "about the same (100)"} <= set(
        page.texts("text")
    )
    assert any(text.startswith("Accuracy on test data, site by site") for text in page.texts("summary"))
    assert {"personalized.png", "personalized_local_only.png"} <= {
        plot.name for plot in (personalized_run.path / "plots").iterdir()
    }


def test_dumbbell_lines_go_from_the_global_to_the_personalized_model():
    figure = personalization.plot_dumbbells(
        [PersonalizationScores("a", 0.8, 0.9, 0.85), PersonalizationScores("b", 0.8, 0.7)], "Accuracy", True
    )
    lines = [list(line.get_xdata()) for line in figure.axes[0].lines]
    assert lines == [[80, 90], [80, 70]]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours[0] != colours[1]
    rings, dots, ticks = figure.axes[0].collections
    assert (len(rings.get_offsets()), len(dots.get_offsets()), len(ticks.get_offsets())) == (2, 2, 1)


def test_intervals_of_the_global_model_are_not_shown_for_personalized_models(personalized_run, read_page):
    personalized_run.results["intervals"] = make_intervals(
        privacy_unit="example", pooled={"accuracy": [0.7, 0.82]}, sites={"a": {"accuracy": [0.71, 0.88]}}
    )
    page = read_page(write_report(personalized_run.write()))
    tiles = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert tiles["Accuracy, test (all sites, personalised models)"] == "80.0 %"
    assert page.row("a 40 80.0 %") == "a 40 80.0 % (71.0 to 88.0) ★ 90.0 % 88.0 % +10.0 +2.0"
    assert page.row("a 40 90.0 %") == "a 40 90.0 %"  # among the results
    assert page.row("Coordinator's set") == "Coordinator's set the global model 100 76.0 %"
    assert "0.95 %" not in page.texts("main")[0]
    assert any(text.startswith("Only the global model has intervals") for text in page.texts("li"))
    assert "The models of round 1, the last round." in page.texts("main")[0]


def test_pooled_auroc_of_several_models_is_the_mean_over_sites(personalized_run):
    test = personalized_run.results["test"]
    test["pooled"] |= {"auroc": 0.99, "roc": {"fpr": [0, 1], "tpr": [0, 1]}, "class_auroc": [0.9, 0.9]}
    test["sites"]["a"]["auroc"], test["sites"]["b"]["auroc"] = 0.8, 0.9
    scores = EvaluationScores.model_validate(test)
    pooled = replace_pooled_rank_metrics(scores).pooled
    assert (pooled.n, pooled.accuracy, pooled.auroc) == (120, 0.80, pytest.approx(0.85))
    assert (pooled.roc, pooled.class_auroc) == (None, None)
    headline = HeadlineMetric.from_record(load_run_record(personalized_run.write()))
    assert headline.has_several_models
    assert headline.overall_scores(scores)[0] == "all sites"


def test_one_global_model_keeps_its_pooled_auroc(run_folder):
    headline = HeadlineMetric.from_record(load_run_record(run_folder.write()))
    assert not headline.has_several_models
    scores = EvaluationScores.model_validate(run_folder.results["test"])
    assert headline.comparable_scores(scores) is scores
