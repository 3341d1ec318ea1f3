import pytest

from pipeline.reports.run_report import write_report


def area(value, **more):
    return {"n": 100, "accuracy": 0.8, "positive_auroc": value, **more}


def judged(pooled, **sites):
    return {"pooled": area(pooled), "sites": {site: area(value) for site, value in sites.items()}}


@pytest.fixture
def full(folder):
    """Federated 0.900; alone 0.800 and 0.905; one place 0.930; one scanner 0.940; normalised 0.920."""
    folder.results["test"] = judged(0.90, a=0.88, b=0.91)
    folder.results["yardsticks"] = {
        "local": {"test": judged(0.5, a=0.80, b=0.93), "curve": [[0, 0.5]]},
        "central": {"test": judged(0.93, a=0.91, b=0.94), "curve": []},
        "same_scanner": {"test": judged(0.94, a=0.93, b=0.95), "curve": [], "words": "if <all> scanners were one"},
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
    # + 8 at a, - 2 at b; 0.80 lies outside of a's interval, 0.93 inside of b's
    assert alone.startswith("Against each site alone, the federation gains 3.0 points on average over 2 sites: ")
    assert "better at 1 (most at a, +8.0) and worse at 1 (most at b, −2.0)." in alone
    assert "At 1 of 2 sites the score alone lies inside the federated 95 % interval" in alone
    assert pooling.startswith("All data in one place would reach 0.930: the federation loses 3.0 points to it.")
    assert pooling.endswith("outside the interval.")
    assert "would reach 0.940: the differences between scanners cost 4.0 points." in scanner
    assert "reaches 0.920: it wins back 2.0 of these 4.0 points." in normalising
    assert normalising.endswith("so the difference may be chance.")
    assert caution == "Each score is one training run; another seed would move it too."


def test_small_and_contrary_differences_are_told_as_they_are(full, findings):
    yards = full.results["yardsticks"]
    yards["central"]["test"] = judged(0.86, a=0.8, b=0.9)
    yards["same_scanner"]["test"] = judged(0.903)
    yards["normalised"]["test"] = judged(0.85)
    yards["local"]["test"] = judged(0.5, a=0.881, b=0.907)
    _, alone, pooling, scanner, normalising, _ = findings(full)
    assert alone.startswith(
        "Each site alone would do about the same (+0.1 points on average over 2 sites"
    )  # -0.1, +0.3
    assert pooling.startswith("All data in one place reaches only 0.860, 4.0 points below the federation's 0.900.")
    assert "cost next to nothing here (+0.3 points)" in scanner
    assert "reaches 0.850, 5.0 points less than without: here it does harm." in normalising


def test_more_than_all_of_it_is_not_a_share(full, findings):
    full.results["yardsticks"]["normalised"]["test"] = judged(0.95)
    assert "it wins back all of these 4.0 points." in findings(full)[4]


def test_normalising_stands_alone_without_the_one_scanner(full, findings):
    del full.results["yardsticks"]["same_scanner"]
    assert "reaches 0.920, 2.0 points more than without." in findings(full)[3]


def test_without_intervals_nothing_is_called_chance(full, findings, read_page):
    full.results["intervals"] = None
    found = findings(full)
    assert found[-1].startswith("No intervals were made for this run")
    assert not any("inside" in words or "outside" in words for words in found)
    assert "bootstrap" not in read_page(write_report(full.write())).texts("main")[0]


def test_the_table_has_the_weakest_site_and_the_gap(full, read_page):
    page = read_page(write_report(full.write()))
    assert page.row("Each site alone").endswith("only – 0.865 0.800 a –")  # its pooled scores would mix models
    assert page.row("Federated this run") == "Federated this run 0.900 (0.870 to 0.925) 0.895 0.880 a −3.0"
    assert page.row("Federated, one scanner").startswith("Federated, one scanner if <all> scanners were one 0.940")
    assert page.row("All data in one place").endswith("0.930 0.925 0.910 a –")


def test_one_figure_for_the_sites_and_one_for_the_curves(full, read_page):
    for name in ("same_scanner", "central"):
        full.results["yardsticks"][name]["test"]["pooled"]["roc"] = {"fpr": [0, 0.1, 1], "tpr": [0, 0.8, 1]}
    full.results["test"]["pooled"]["roc"] = {"fpr": [0, 0.2, 1], "tpr": [0, 0.8, 1]}
    page = read_page(write_report(full.write()))
    assert {"yardsticks.png", "yardstick_roc.png"} <= {plot.name for plot in (full.path / "plots").iterdir()}
    assert "Federated, one scanner 0.940" in page.texts("text")
    assert "Sites that train alone have no common curve." in page.texts("main")[0]


def test_many_sites_show_the_weakest(full, read_page):
    full.results["test"]["sites"] = {f"s{at:03}": area(0.5 + at / 1000) for at in range(100)}
    full.results["yardsticks"]["local"]["test"] = {"sites": full.results["test"]["sites"]}
    full.results["yardsticks"] = {"local": full.results["yardsticks"]["local"]}
    page = read_page(write_report(full.write()))
    assert "the 84 strongest are left out" in page.texts("main")[0]
    assert "s015" in page.texts("text")
    assert "All 100 sites" in page.texts("summary")
    assert "All together, and the 10 weakest of 100 sites" in page.texts("caption")


@pytest.mark.parametrize("yards", [{}, None, {"local": {}}, {"central": {"test": {}, "curve": None}}, {"local": None}])
def test_yardsticks_without_content_are_left_out(folder, read_page, yards):
    folder.results["yardsticks"] = yards
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
    folder.results["yardsticks"] = {"central": {"test": {"coordinator": {"accuracy": 0.85}}, "curve": []}}
    found = findings(folder)
    assert "on the coordinator's set, 95 % interval 70.0 to 90.0)" in found[0]
    assert found[1].endswith("so the difference may be chance.")


def test_a_yardstick_may_bring_its_own_interval(full, findings):
    central = full.results["yardsticks"]["central"]
    central["intervals"] = {"pooled": {"positive_auroc": [0.91, 0.95]}}
    assert findings(full)[2].endswith("Neither score lies inside the other's interval.")
    central["intervals"] = {"pooled": {"positive_auroc": [0.89, 0.95]}}  # holds the federation's 0.900
    assert findings(full)[2].endswith("so the difference may be chance.")
