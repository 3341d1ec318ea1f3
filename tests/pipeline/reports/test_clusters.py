import pytest

from pipeline.reports.run.clusters import figures as cluster_figures
from pipeline.reports.run.clusters.section import (
    ClusterHistory,
    ClusterMove,
    add_clusters_section,
    load_cluster_history,
    natural_sort_key,
    track_clusters,
)
from pipeline.reports.run.record import load_run_record
from tests.support.run_folder_factory import make_round_record

SITES = "abcd"


def parse_clusters(names, sites=SITES):
    """`0011` -> {a: 0, b: 0, c: 1, d: 1}; a blank is unassigned."""
    return {site: group for site, group in zip(sites, names, strict=True) if group != " "}


def make_site_scores(**sites):
    return {site: {"n": n, "accuracy": value} for site, (n, value) in sites.items()}


@pytest.fixture
def clustered_run(run_folder):
    """Rounds 0 to 4: nothing, all in 0, b and d leave for 1, c joins them, and so it stays."""
    rounds = [None, "0000", "0101", "0111", "0111"]
    run_folder.round_records = [make_round_record(round_number, dict.fromkeys(SITES, 0.5)) for round_number in range(5)]
    for entry, names in zip(run_folder.round_records, rounds, strict=True):
        if names:
            entry["clusters"] = parse_clusters(names)
            entry["dendrogram"] = {"leaves": list(SITES), "merges": [[1, 3, 0.25, 2], [2, 4, 0.5, 3], [0, 5, 2.0, 4]]}
    run_folder.site_data["sites"] = {site: {"train": [30, 12]} for site in SITES}
    run_folder.results |= {
        "strategy": "similarity_clustering",
        "positive_class": None,
        "best_round": 4,
        "baselines": {},
        "rounds": 4,
    }
    run_folder.results["test"] = {
        "pooled": {"n": 100, "accuracy": 0.8},
        "sites": make_site_scores(a=(40, 0.9), b=(10, 0.5), c=(20, 0.8), d=(30, 0.9)),
        "models": {"cluster/0": {"n": 50, "accuracy": 0.55}, "cluster/1": {"n": 50, "accuracy": 0.65}},
    }
    return run_folder


@pytest.fixture
def render_page(render_section):
    return lambda run_folder: render_section(add_clusters_section, run_folder)


def test_cluster_members_and_scores_by_hand(clustered_run, render_page):
    page = render_page(clustered_run)
    # cluster 1: (10 * 0.5 + 20 * 0.8 + 30 * 0.9) / 60
    assert page.row("0 1 a") == "0 1 a 90.0 % 55.0 %"
    assert page.row("1 3 b") == "1 3 b, c, d 80.0 % 65.0 %"
    assert (
        "4 sites in 2 clusters. Last move: c, in round 3. The clusters were stable for the following 1 round."
        in page.texts("p")
    )
    assert {"clusters.png", "dendrogram.png"} <= {plot.name for plot in (clustered_run.path / "plots").iterdir()}
    assert {"0: 1 site", "1: 3 sites", "a · 0", "b · 1"} <= set(page.texts("text"))


def test_clusters_that_are_not_stable_and_that_never_change(clustered_run, render_page):
    clustered_run.round_records[4]["clusters"] = parse_clusters("0011")
    assert any(
        "are not stable: b moved in the last round, 4." in text for text in render_page(clustered_run).texts("p")
    )
    for entry in clustered_run.round_records[1:]:
        entry["clusters"] = parse_clusters("0011")
    assert any(
        "No site changed its cluster, from round 1 to 4." in text for text in render_page(clustered_run).texts("p")
    )


def test_clusters_are_those_of_the_best_round(clustered_run, render_page):
    clustered_run.results["best_round"] = 2
    page = render_page(clustered_run)
    assert (
        "These are the clusters of round 2, whose models are the result. By the last round, c had moved."
        in page.texts("p")
    )
    assert page.row("0 2 a").startswith("0 2 a, c")
    assert any("the clusters of the round at the dotted line" in text for text in page.texts("figcaption"))


def test_a_rank_based_metric_is_the_mean_over_the_clusters_sites(clustered_run, render_page):
    clustered_run.results["positive_class"] = "schistocyte"
    for site, value in zip(SITES, (0.9, 0.6, 0.7, 0.8), strict=True):
        clustered_run.results["test"]["sites"][site]["positive_auroc"] = value
    page = render_page(clustered_run)
    assert page.row("1 3 b") == "1 3 b, c, d 0.700"
    assert any("of the cluster's sites, mean over sites" in text for text in page.texts("caption"))


def test_cluster_models_and_personalized_models_have_columns(clustered_run, render_page):
    test = clustered_run.results["test"]
    test["comparisons"] = {
        "cluster": {"sites": make_site_scores(a=(40, 0.8), b=(60, 0.6))},
        "global": {"sites": make_site_scores(a=(40, 0.7))},
    }
    page = render_page(clustered_run)
    assert page.row("0 1 a") == "0 1 a 90.0 % 80.0 % 55.0 %"
    assert {"Personalised models", "Cluster model", "Cluster model, coordinator's set"} <= set(page.texts("th"))


def test_a_run_without_clusters_has_no_section(report_page):
    assert "Clusters" not in report_page.texts("h2")


def test_a_single_cluster_has_a_section(clustered_run, render_page):
    for entry in clustered_run.round_records[1:]:
        entry["clusters"] = parse_clusters("0000")
        del entry["dendrogram"]
    page = render_page(clustered_run)
    assert any(text.startswith("4 sites in 1 cluster.") for text in page.texts("p"))
    assert not (clustered_run.path / "plots" / "dendrogram.png").exists()


@pytest.mark.parametrize("tree", [{"leaves": ["a"], "merges": []}, {"leaves": ["a", "b"], "merges": []}, None])
def test_an_incomplete_dendrogram_is_not_plotted(clustered_run, render_page, tree):
    for entry in clustered_run.round_records:
        entry["dendrogram"] = tree
    render_page(clustered_run)
    assert not (clustered_run.path / "plots" / "dendrogram.png").exists()


def test_clusters_of_a_hundred_sites(clustered_run, render_page):
    sites = [f"s{at:03}" for at in range(100)]
    clustered_run.round_records = [
        make_round_record(round_number, dict.fromkeys(sites, 0.5)) for round_number in range(3)
    ]
    for entry in clustered_run.round_records[1:]:
        entry["clusters"] = {site: str(at % 3) for at, site in enumerate(sites[:98])}
        entry["dendrogram"] = {"leaves": sites, "merges": [[0, 1, 0.5, 2]] * 99}
    clustered_run.site_data["sites"] = {}
    clustered_run.results["test"]["sites"] = {site: {"n": 10, "accuracy": 0.5} for site in sites}
    page = render_page(clustered_run)
    assert any(text.startswith("98 sites in 3 clusters, 2 not yet assigned.") for text in page.texts("p"))
    assert page.row("0 33 s000").endswith("and 21 more 50.0 % 55.0 %")
    assert "Cluster of every site" in page.texts("summary")
    assert "s097 1 1 0" in page.texts("tr")  # its cluster, since when, number of moves
    assert any(text.endswith("Blank: not yet assigned.") for text in page.texts("figcaption"))
    assert "The dendrogram of 100 sites is too large to plot; rounds.jsonl contains it." in page.texts("p")


def test_moves_across_rounds_without_assignments():
    found = ClusterHistory([1, 2, 3], [parse_clusters("00 ", "abc"), {}, parse_clusters("010", "abc")], 2)
    assert found.moves == [ClusterMove(3, "b", "0", "1")]


def test_clusters_named_by_tree_position_are_tracked_by_members():
    # the names are swapped in the second round, and c changes sides in the third
    rounds = [
        {"a": "0.0", "b": "0.0", "c": "0.0", "d": "0.1", "e": "0.1"},
        {"a": "0.1", "b": "0.1", "c": "0.1", "d": "0.0", "e": "0.0"},
        {"a": "0.0", "b": "0.0", "c": "0.1", "d": "0.1", "e": "0.1"},
    ]
    found = ClusterHistory([1, 2, 3], track_clusters(rounds, 2), 2)
    assert found.moves == [ClusterMove(3, "c", "0.0", "0.1")]
    assert found.result_clusters == rounds[2]


def test_a_cluster_without_a_successor_gets_a_new_name():
    found = track_clusters([{"a": "0.0", "b": "0.1", "c": "0.1"}, {"a": "0.0", "b": "0.0", "c": "0.0"}], 1)
    assert found[0] == {"a": "f1", "b": "0.0", "c": "0.0"}


def test_clusters_not_named_by_tree_position_are_not_tracked(clustered_run):
    for entry, names in zip(clustered_run.round_records[1:], ("0011", "1100", "0011", "0011"), strict=True):
        entry["clusters"] = parse_clusters(names)
    assert (
        len(load_cluster_history(load_run_record(clustered_run.write())).moves) == 8
    )  # they all took another model, twice


def test_natural_sort_order():
    assert sorted(["0.10", "0.2", "f1", "0"], key=natural_sort_key) == ["0", "0.2", "0.10", "f1"]


def test_membership_heatmap_has_a_color_per_cluster_and_blanks():
    groups = [{"a": "0"}, {"a": "0", "b": "1"}]
    colors = cluster_figures.assign_cluster_colors(["0", "1"], {"0", "1"})
    figure = cluster_figures.plot_cluster_membership(["a", "b"], [1, 2], groups, colors, 1)
    cells = figure.axes[0].images[0].get_array()
    middle = cluster_figures.PIXELS_PER_ROW // 2
    a, b = cells[middle], cells[middle + cluster_figures.PIXELS_PER_ROW]
    assert (a[:, 3] > 0).all()
    assert b[0, 3] == 0
    assert tuple(a[1, :3]) != tuple(b[1, :3])
    assert cells[0, :, 3].max() == 0  # blank lines between rows


def test_many_rounds_share_columns():
    groups = [{"a": "0"}] * 999 + [{"a": "1"}]
    figure = cluster_figures.plot_cluster_membership(
        ["a"], range(1000), groups, cluster_figures.assign_cluster_colors(["0", "1"], {"1"}), 999
    )
    assert figure.axes[0].images[0].get_array().shape[1] <= 120
    assert "1: 1 site" in [text.get_text() for text in figure.axes[0].texts]


def test_more_clusters_than_colors():
    names = [f"0.{n}" for n in range(20)]
    shared = cluster_figures.assign_cluster_colors(names, set(names[:4]))
    assert len({shared[name] for name in names[:11]}) == 11
    assert {shared[name] for name in names[11:]} == {cluster_figures.OTHER_CLUSTERS_COLOR}
    again = cluster_figures.assign_cluster_colors(names, set(names))
    assert cluster_figures.OTHER_CLUSTERS_COLOR not in again.values()


def test_dendrogram_branches_within_one_cluster_have_its_color():
    colors = {"0": "#111111", "1": "#222222"}
    merges = [[1, 3, 0.25, 2], [2, 4, 0.5, 3], [0, 5, 2.0, 4]]
    figure = cluster_figures.plot_dendrogram(list(SITES), merges, parse_clusters("0111"), colors, "Distance")
    axes = figure.axes[0]
    assert sorted(line.get_color() for line in axes.lines) == sorted([cluster_figures.INK_COLOR, "#222222", "#222222"])
    assert {label.get_text() for label in axes.get_yticklabels()} == {"a · 0", "b · 1", "c · 1", "d · 1"}
    assert max(max(line.get_xdata()) for line in axes.lines) == 2.0


def test_the_dendrogram_of_cfl_counts_splits(clustered_run, render_page):
    clustered_run.results["strategy"] = "cfl"
    for entry in clustered_run.round_records[1:]:
        entry["dendrogram"] = {
            "leaves": ["a", "b", "c", "d"],
            "merges": [[1, 2, 0.0, 2], [4, 3, 0.0, 3], [0, 5, 1.0, 4]],
        }
    page = render_page(clustered_run)
    assert "Splits: the first is furthest right" in page.texts("text")
    assert any(text.startswith("Splits that made the clusters") for text in page.texts("figcaption"))
