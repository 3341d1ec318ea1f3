import pytest

from pipeline.reports.run.report import write_report
from tests.support.run_folder_factory import make_baseline, make_intervals


def make_scores(value, **more):
    return {"n": 100, "accuracy": 0.8, "positive_auroc": value, **more}


def make_test_scores(pooled, **sites):
    return {"pooled": make_scores(pooled), "sites": {site: make_scores(value) for site, value in sites.items()}}


@pytest.fixture
def baselines_run(run_folder):
    """Federated 0.900; local only 0.800 and 0.930 by site; centralised 0.930; unskewed 0.940; normalised 0.920."""
    run_folder.results["test"] = make_test_scores(0.90, a=0.88, b=0.91)
    run_folder.results["baselines"] = {
        "local_only": make_baseline(make_test_scores(0.5, a=0.80, b=0.93), [[0, 0.5]]),
        "centralized": make_baseline(make_test_scores(0.93, a=0.91, b=0.94)),
        "unskewed": make_baseline(make_test_scores(0.94, a=0.93, b=0.95)),
        "normalized": make_baseline(make_test_scores(0.92, a=0.90, b=0.93)),
    }
    run_folder.results["intervals"] = make_intervals(
        num_units=97,
        pooled={"positive_auroc": [0.87, 0.925]},
        sites={"a": {"positive_auroc": [0.85, 0.9]}, "b": {"positive_auroc": [0.89, 0.95]}},
    )
    draws = {"federated": 0.90, "centralized": 0.93, "unskewed": 0.94, "normalized": 0.92}
    width = {
        "federated": 0.0,
        "centralized": 0.01,
        "unskewed": 0.01,
        "normalized": 0.03,
    }  # of the difference, either way
    for name, middle in draws.items():
        entry = run_folder.results if name == "federated" else run_folder.results["baselines"][name]
        values = [middle + width[name] * (n / 100 - 1) for n in range(201)]
        entry["intervals"] = (entry["intervals"] or make_intervals()) | {
            "paired": {"metric": "positive_auroc", "values": values}
        }
    return run_folder


@pytest.fixture
def findings(read_page):
    def render(run_folder):
        return read_page(write_report(run_folder.write())).texts("li")

    return render


def test_gains_and_losses_against_baselines_by_hand(baselines_run, findings):
    federated, local_only, centralized, skew_cost, normalization, caution = findings(baselines_run)
    assert federated == (
        "The federated model reaches 0.900 (AUROC, schistocyte, all sites pooled, 95 % interval 0.870 to 0.925)."
    )
    # + 8 at a, - 2 at b
    assert local_only.startswith(
        "Compared with local-only training, the federated model gains 3.0 points on average over 2 sites: "
    )
    assert "better at 1 (most at a, +8.0) and worse at 1 (most at b, −2.0)." in local_only
    assert centralized.startswith("Centralised training reaches 0.930: the federated model loses 3.0 points.")
    # the difference's draws lie evenly in 3 +- 1 points, so 95 % of them in 3 +- 0.95
    assert centralized.endswith("is +2.1 to +3.9 points, so sampling of the test data does not explain it.")
    assert (
        "reaches 0.940: the feature skew (differences between scanners and degraded images together) costs 4.0 points."
        in skew_cost
    )
    assert "reaches 0.920: it recovers 2.0 of these 4.0 points." in normalization
    assert normalization.endswith("is −0.8 to +4.8 points, so it may be chance.")
    assert caution.startswith("Each score is from one training run and varies with the seed.")


def test_normalization_recovers_nothing_of_a_skew_cost_that_may_be_chance(baselines_run, findings):
    baselines_run.results["baselines"]["unskewed"]["intervals"]["paired"]["values"] = [
        0.7 + n / 500 for n in range(201)
    ]
    assert "reaches 0.920, 2.0 points more than without." in findings(baselines_run)[4]


def test_negligible_and_reversed_differences(baselines_run, findings):
    baselines = baselines_run.results["baselines"]
    baselines["centralized"]["test"] = make_test_scores(0.86, a=0.8, b=0.9)
    baselines["unskewed"]["test"] = make_test_scores(0.903)
    baselines["normalized"]["test"] = make_test_scores(0.85)
    baselines["local_only"]["test"] = make_test_scores(0.5, a=0.881, b=0.907)
    _, local_only, centralized, skew_cost, normalization, _ = findings(baselines_run)
    assert local_only.startswith(
        "Local-only training scores about the same (+0.1 points on average over 2 sites"
    )  # -0.1, +0.3
    assert centralized.startswith(
        "Centralised training reaches only 0.860, 4.0 points below the federated model's 0.900."
    )
    assert "the cost of the feature skew is negligible here (+0.3 points)" in skew_cost
    assert "reaches 0.850, 5.0 points less than without: it lowers the score here." in normalization


def test_normalization_that_recovers_more_than_the_skew_cost(baselines_run, findings):
    baselines_run.results["baselines"]["normalized"]["test"] = make_test_scores(0.95)
    assert "it recovers all of these 4.0 points." in findings(baselines_run)[4]


def test_normalization_without_the_unskewed_baseline(baselines_run, findings):
    del baselines_run.results["baselines"]["unskewed"]
    assert "reaches 0.920, 2.0 points more than without." in findings(baselines_run)[3]


def test_without_intervals_no_difference_is_called_chance(baselines_run, findings, read_page):
    baselines_run.results["intervals"] = None
    found = findings(baselines_run)
    assert found[-1].startswith("This run has no intervals")
    assert not any("chance" in text or "explain" in text for text in found[:-1])
    assert "bootstrap" not in read_page(write_report(baselines_run.write())).texts("main")[0]


def test_the_baselines_table_has_the_weakest_site_and_the_gap(baselines_run, read_page):
    page = read_page(write_report(baselines_run.write()))
    assert page.row("Local only").endswith("last round – 0.865 0.800 a –")  # its pooled scores would mix models
    assert page.row("Federated this run") == "Federated this run 0.900 (0.870 to 0.925) 0.895 0.880 a −3.0"
    assert page.row("Federated, unskewed").endswith("without the feature skew 0.940 0.940 0.930 a +1.0")
    assert page.row("Centralised").endswith("0.930 0.925 0.910 a –")


def test_dot_plot_and_roc_overlay(baselines_run, read_page):
    for name in ("unskewed", "centralized"):
        baselines_run.results["baselines"][name]["test"]["pooled"]["roc"] = {"fpr": [0, 0.1, 1], "tpr": [0, 0.8, 1]}
    baselines_run.results["test"]["pooled"]["roc"] = {"fpr": [0, 0.2, 1], "tpr": [0, 0.8, 1]}
    page = read_page(write_report(baselines_run.write()))
    assert {"baselines.png", "baseline_roc.png"} <= {plot.name for plot in (baselines_run.path / "plots").iterdir()}
    assert "Federated, unskewed 0.940" in page.texts("text")
    assert "Local-only models have no common curve." in page.texts("main")[0]


def test_the_dot_plot_of_many_sites_shows_the_weakest(baselines_run, read_page):
    baselines_run.results["test"]["sites"] = {f"s{at:03}": make_scores(0.5 + at / 1000) for at in range(100)}
    baselines_run.results["baselines"]["local_only"]["test"] = {"sites": baselines_run.results["test"]["sites"]}
    baselines_run.results["baselines"] = {"local_only": baselines_run.results["baselines"]["local_only"]}
    page = read_page(write_report(baselines_run.write()))
    assert "the 84 strongest are not shown" in page.texts("main")[0]
    assert "s015" in page.texts("text")
    assert "All 100 sites" in page.texts("summary")
    assert "All together, and the 10 weakest of 100 sites" in page.texts("caption")


@pytest.mark.parametrize(
    "baselines",
    [{}, {"local_only": make_baseline({})}, {"centralized": make_baseline({}), "local_only": make_baseline({})}],
)
def test_baselines_without_results_are_left_out(run_folder, read_page, baselines):
    run_folder.results["baselines"] = baselines
    assert "Comparison with baselines" not in read_page(write_report(run_folder.write())).texts("h2")


def test_a_run_of_an_older_version_is_compared_by_accuracy(report_page):
    # no AUROC of the class in its baselines, no intervals, no descriptions, no curves of sites
    found = report_page.texts("li")
    assert found[0] == "The federated model reaches 81.2 % (Accuracy, all sites pooled)."
    assert found[1] == "Local-only training reaches 66.0 %: the federated model gains 15.2 points."
    assert found[2] == "Centralised training reaches 93.0 %: the federated model loses 11.8 points."


def test_a_run_evaluated_at_the_coordinator_is_compared_there(run_folder, findings):
    run_folder.results |= {"positive_class": None, "test": {"coordinator": {"n": 10, "accuracy": 0.8}}}
    run_folder.results["intervals"] = make_intervals(coordinator={"accuracy": [0.7, 0.9]})
    run_folder.results["baselines"] = {"centralized": make_baseline({"coordinator": {"n": 10, "accuracy": 0.85}})}
    found = findings(run_folder)
    assert "on the coordinator's set, 95 % interval 70.0 to 90.0)" in found[0]
    assert found[1].endswith("the federated model loses 5.0 points.")


def test_paired_draws_of_another_metric_are_not_compared(baselines_run, findings):
    baselines_run.results["baselines"]["centralized"]["intervals"]["paired"]["metric"] = "accuracy"
    assert findings(baselines_run)[2].endswith("the federated model loses 3.0 points.")
