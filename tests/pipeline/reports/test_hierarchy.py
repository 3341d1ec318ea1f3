import pytest

from pipeline.records.scores import EvaluationScores
from pipeline.reports.run.hierarchy import LevelScores, add_hierarchy_section, level_scores
from pipeline.reports.run.report import write_report
from tests.support.run_folder_factory import HOSTILE_NAME

SECTION = "Specialisation and generalisation"
CLUSTER_BY_SITE = {"a": "0.0", "b": "0.1"}


def make_scores(value):
    return {"n": 10, "accuracy": value, "positive_auroc": value}


def make_demlearn_scores(shift=0.0):
    """Site models 90 and 50 %, cluster models 80 and 60, the global one 70 and 75; an intermediate cluster is left out."""
    return {
        "coordinator": make_scores(0.75 + shift),
        "pooled": make_scores(0.9 + shift),
        "sites": {"a": make_scores(0.88), "b": make_scores(0.9)},
        "comparisons": {
            "cluster": {"pooled": make_scores(0.8 + shift), "sites": {"a": make_scores(0.7)}},
            "global": {"pooled": make_scores(0.7 + shift), "sites": {"a": make_scores(0.6)}},
        },
        "models": {
            "cluster/0.0": make_scores(0.5),
            "cluster/0.1": make_scores(0.7),
            "cluster/0": make_scores(0.0),
            "site/a": make_scores(0.4),
            "site/b": make_scores(0.6),
        },
    }


@pytest.fixture
def hierarchy_run(run_folder):
    run_folder.results |= {
        "positive_class": None,
        "strategy": "demlearn",
        "best_round": 2,
        "test": make_demlearn_scores(),
        "baselines": {},
    }
    for entry in run_folder.round_records[1:]:
        entry |= {"clusters": CLUSTER_BY_SITE, "metrics": {"val": make_demlearn_scores(entry["round"] / 100)}}
    return run_folder


@pytest.fixture
def render_page(render_section):
    return lambda run_folder: render_section(add_hierarchy_section, run_folder)


def test_scores_of_three_levels_by_hand():
    found = level_scores(EvaluationScores.model_validate(make_demlearn_scores()), CLUSTER_BY_SITE, "accuracy")
    assert found == {
        "site": LevelScores(0.9, pytest.approx(0.5)),
        "cluster": LevelScores(0.8, pytest.approx(0.6)),
        "top": LevelScores(0.7, 0.75),
    }


def test_rank_based_metrics_of_several_models_are_means_over_sites():
    found = level_scores(EvaluationScores.model_validate(make_demlearn_scores()), CLUSTER_BY_SITE, "positive_auroc")
    assert found["site"].specialization == pytest.approx(0.89)
    assert found["cluster"].specialization == pytest.approx(0.7)


def test_sites_without_their_own_model_use_their_clusters_model():
    scores = {
        "pooled": make_scores(0.8),
        "models": {"cluster/0": make_scores(0.5), "cluster/1": make_scores(0.6), "cluster/2": make_scores(0.1)},
    }
    assert level_scores(EvaluationScores.model_validate(scores), {"a": "0", "b": "1"}, "accuracy") == {
        "cluster": LevelScores(0.8, pytest.approx(0.55))
    }


def test_table_summary_and_curves_of_levels(hierarchy_run, render_page):
    page = render_page(hierarchy_run)
    assert page.row("Site models") == "Site models 90.0 % 50.0 % +40.0"
    assert page.row("Cluster models") == "Cluster models 80.0 % 60.0 % +20.0"
    assert page.row("Global model") == "Global model 70.0 % 75.0 % −5.0"
    assert "Best specialisation: site models, 90.0 %; best generalisation: global model, 75.0 %." in page.texts("p")
    assert {"specialisation.png", "generalisation.png"} <= {
        plot.name for plot in (hierarchy_run.path / "plots").iterdir()
    }
    assert "skewed" not in page.texts("main")[0]


def test_a_study_with_feature_skew_says_that_the_coordinators_set_has_none(hierarchy_run, render_page):
    hierarchy_run.study_toml += '[feature_skew]\nname = "plane"\n'
    assert any("not from the sites and has no feature skew." in text for text in render_page(hierarchy_run).texts("p"))


@pytest.mark.parametrize("models", [{}, {"site/a": {"n": 10, "accuracy": None}}])
def test_without_further_models_there_is_no_section(hierarchy_run, render_page, models):
    hierarchy_run.results["test"]["models"] = models
    assert SECTION not in render_page(hierarchy_run).texts("h2")


def test_one_global_model_has_no_levels(report_page):
    assert SECTION not in report_page.texts("h2")


def test_an_unfinished_run_has_levels(hierarchy_run, render_page):
    hierarchy_run.results = None
    assert render_page(hierarchy_run).row("Site models") == "Site models 92.0 % 50.0 % +42.0"


def test_order_of_personalization_clusters_and_hierarchy_sections(hierarchy_run, read_page):
    def rename_site(found):
        return {HOSTILE_NAME if site == "b" else site: value for site, value in found.items()}

    entries = [hierarchy_run.results["test"], *(entry["metrics"]["val"] for entry in hierarchy_run.round_records[1:])]
    for entry in entries:
        entry["sites"] = rename_site(entry["sites"])
        entry["comparisons"]["global"]["sites"] = {"a": make_scores(0.6), HOSTILE_NAME: make_scores(0.9)}
    for entry in hierarchy_run.round_records[1:]:
        entry["clusters"] = rename_site(entry["clusters"])
        entry["dendrogram"] = {"leaves": ["a", HOSTILE_NAME], "merges": [[0, 1, 0.5, 2]]}
    page = read_page(write_report(hierarchy_run.write()))
    titles = page.texts("h2")
    first = titles.index("Results on test data")
    assert titles[first + 1 : first + 4] == ["Personalised and global models", "Clusters", SECTION]
    assert page.all("script") == []
    texts = page.texts("text")
    assert any(text.startswith(HOSTILE_NAME[:12]) and text.endswith("· 0.1") for text in texts)
