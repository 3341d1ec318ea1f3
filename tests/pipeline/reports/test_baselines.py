import pytest

from pipeline.reports.run.report import write_report


def area(value, **more):
    return {"n": 100, "accuracy": 0.8, "positive_auroc": value, **more}


def judged(pooled, **sites):
    return {"pooled": area(pooled), "sites": {site: area(value) for site, value in sites.items()}}


@pytest.fixture
def full(folder):
    """Federated 0.900; alone 0.800 and 0.905; one place 0.930; no scanners 0.940; normalised 0.920."""
    folder.results["test"] = judged(0.90, a=0.88, b=0.91)
    folder.results["baselines"] = {
        "local_only": {"test": judged(0.5, a=0.80, b=0.93), "curve": [[0, 0.5]]},
        "centralized": {"test": judged(0.93, a=0.91, b=0.94), "curve": []},
        "unskewed": {"test": judged(0.94, a=0.93, b=0.95), "curve": []},
        "normalised": {"test": judged(0.92, a=0.90, b=0.93), "curve": []},
    }
    folder.results["intervals"] = {
        "unit": "patient",
        "units": 97,
        "draws": 1000,
        "level": 0.95,
        "pooled": {"positive_auroc": [0.87, 0.925]},
        "sites": {"a": {"positive_auroc": [0.85, 0.9]}, "b": {"positive_auroc": [0.89, 0.95]}},
    }
    draws = {"federated": 0.90, "centralized": 0.93, "unskewed": 0.94, "normalised": 0.92}
    width = {
        "federated": 0.0,
        "centralized": 0.01,
        "unskewed": 0.01,
        "normalised": 0.03,
    }  # of the difference, either way
    for name, middle in draws.items():
        whose = folder.results if name == "federated" else folder.results["baselines"][name]
        values = [middle + width[name] * (n / 100 - 1) for n in range(201)]
        whose["intervals"] = (whose.get("intervals") or {}) | {"paired": {"metric": "positive_auroc", "values": values}}
    return folder


@pytest.fixture
def findings(read_page):
    def of(folder):
        return read_page(write_report(folder.write())).texts("li")

    return of


def test_what_is_gained_lost_and_won_back_by_hand(full, findings):
    ours, alone, pooling, scanner, normalising, caution = findings(full)
    assert ours == (
        "The federation reaches 0.900 (AUROC, schistocyte, all sites pooled, 95 % interval 0.870 to 0.925)."
    )
    # + 8 at a, - 2 at b
    assert alone.startswith("Against each site alone, the federation gains 3.0 points on average over 2 sites: ")
    assert "better at 1 (most at a, +8.0) and worse at 1 (most at b, −2.0)." in alone
    assert pooling.startswith("All data in one place would reach 0.930: the federation loses 3.0 points to it.")
    # the difference's draws lie evenly in 3 +- 1 points, so 95 % of them in 3 +- 0.95
    assert pooling.endswith("is +2.1 to +3.9 points, so the test data at hand do not explain it.")
    assert "reaches 0.940: the scanners, their differences and their faults together, cost 4.0 points." in scanner
    assert "reaches 0.920: it wins back 2.0 of these 4.0 points." in normalising
    assert normalising.endswith("is −0.8 to +4.8 points, so it may be chance.")
    assert caution.startswith("Each score is one training run; another seed would move it too.")


def test_nothing_is_won_back_of_what_may_be_chance(full, findings):
    full.results["baselines"]["unskewed"]["intervals"]["paired"]["values"] = [0.7 + n / 500 for n in range(201)]
    assert "reaches 0.920, 2.0 points more than without." in findings(full)[4]


def test_small_and_contrary_differences_are_told_as_they_are(full, findings):
    yards = full.results["baselines"]
    yards["centralized"]["test"] = judged(0.86, a=0.8, b=0.9)
    yards["unskewed"]["test"] = judged(0.903)
    yards["normalised"]["test"] = judged(0.85)
    yards["local_only"]["test"] = judged(0.5, a=0.881, b=0.907)
    _, alone, pooling, scanner, normalising, _ = findings(full)
    assert alone.startswith(
        "Each site alone would do about the same (+0.1 points on average over 2 sites"
    )  # -0.1, +0.3
    assert pooling.startswith("All data in one place reaches only 0.860, 4.0 points below the federation's 0.900.")
    assert "cost next to nothing here (+0.3 points)" in scanner
    assert "reaches 0.850, 5.0 points less than without: here it does harm." in normalising


def test_more_than_all_of_it_is_not_a_share(full, findings):
    full.results["baselines"]["normalised"]["test"] = judged(0.95)
    assert "it wins back all of these 4.0 points." in findings(full)[4]


def test_normalising_stands_alone_without_the_unskewed(full, findings):
    del full.results["baselines"]["unskewed"]
    assert "reaches 0.920, 2.0 points more than without." in findings(full)[3]


def test_without_intervals_nothing_is_called_chance(full, findings, read_page):
    full.results["intervals"] = None
    found = findings(full)
    assert found[-1].startswith("No intervals were made for this run")
    assert not any("chance" in words or "explain" in words for words in found[:-1])
    assert "bootstrap" not in read_page(write_report(full.write())).texts("main")[0]


def test_the_table_has_the_weakest_site_and_the_gap(full, read_page):
    page = read_page(write_report(full.write()))
    assert page.row("Each site alone").endswith("last round – 0.865 0.800 a –")  # its pooled scores would mix models
    assert page.row("Federated this run") == "Federated this run 0.900 (0.870 to 0.925) 0.895 0.880 a −3.0"
    assert page.row("Federated, no scanners").endswith("before the scanners 0.940 0.940 0.930 a +1.0")
    assert page.row("All data in one place").endswith("0.930 0.925 0.910 a –")


def test_one_figure_for_the_sites_and_one_for_the_curves(full, read_page):
    for name in ("unskewed", "centralized"):
        full.results["baselines"][name]["test"]["pooled"]["roc"] = {"fpr": [0, 0.1, 1], "tpr": [0, 0.8, 1]}
    full.results["test"]["pooled"]["roc"] = {"fpr": [0, 0.2, 1], "tpr": [0, 0.8, 1]}
    page = read_page(write_report(full.write()))
    assert {"yardsticks.png", "yardstick_roc.png"} <= {plot.name for plot in (full.path / "plots").iterdir()}
    assert "Federated, no scanners 0.940" in page.texts("text")
    assert "Sites that train alone have no common curve." in page.texts("main")[0]


def test_many_sites_show_the_weakest(full, read_page):
    full.results["test"]["sites"] = {f"s{at:03}": area(0.5 + at / 1000) for at in range(100)}
    full.results["baselines"]["local_only"]["test"] = {"sites": full.results["test"]["sites"]}
    full.results["baselines"] = {"local_only": full.results["baselines"]["local_only"]}
    page = read_page(write_report(full.write()))
    assert "the 84 strongest are left out" in page.texts("main")[0]
    assert "s015" in page.texts("text")
    assert "All 100 sites" in page.texts("summary")
    assert "All together, and the 10 weakest of 100 sites" in page.texts("caption")


@pytest.mark.parametrize(
    "yards", [{}, None, {"local_only": {}}, {"centralized": {"test": {}, "curve": None}}, {"local_only": None}]
)
def test_yardsticks_without_content_are_left_out(folder, read_page, yards):
    folder.results["baselines"] = yards
    assert "What federation gains and loses" not in read_page(write_report(folder.write())).texts("h2")


def test_a_run_of_an_older_version_is_compared_by_accuracy(page):
    # no AUROC of the class in its yardsticks, no intervals, no words, no curves of sites
    found = page.texts("li")
    assert found[0] == "The federation reaches 81.2 % (Accuracy, all sites pooled)."
    assert found[1] == "Each site alone reaches 66.0 %: the federation gains 15.2 points over it."
    assert found[2] == "All data in one place would reach 93.0 %: the federation loses 11.8 points to it."


def test_a_federation_judged_at_the_coordinator_is_compared_there(folder, findings):
    folder.results |= {"positive": None, "test": {"coordinator": {"n": 10, "accuracy": 0.8}}}
    folder.results["intervals"] = {"unit": "example", "coordinator": {"accuracy": [0.7, 0.9]}}
    folder.results["baselines"] = {"centralized": {"test": {"coordinator": {"accuracy": 0.85}}, "curve": []}}
    found = findings(folder)
    assert "on the coordinator's set, 95 % interval 70.0 to 90.0)" in found[0]
    assert found[1].endswith("the federation loses 5.0 points to it.")


def test_draws_of_another_metric_are_not_compared(full, findings):
    full.results["baselines"]["centralized"]["intervals"]["paired"]["metric"] = "accuracy"
    assert findings(full)[2].endswith("the federation loses 3.0 points to it.")
