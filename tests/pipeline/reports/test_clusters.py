import pytest

from pipeline.reports.run.clusters import figures as group_figures
from pipeline.reports.run.clusters.section import (
    ClusterHistory,
    ClusterMove,
    add_clusters_section,
    load_cluster_history,
    natural_sort_key,
    track_clusters,
)
from pipeline.reports.run.record import load_run_record

SITES = "abcd"


def members(groups, sites=SITES):
    """`0011` -> {a: 0, b: 0, c: 1, d: 1}; a blank is unknown."""
    return {site: group for site, group in zip(sites, groups, strict=True) if group != " "}


def scored(**sites):
    return {site: {"n": n, "accuracy": value} for site, (n, value) in sites.items()}


@pytest.fixture
def grouped(folder, line):
    """Rounds 0 to 4: nothing, all in 0, b and d leave for 1, c joins them, and so it stays."""
    rounds = [None, "0000", "0101", "0111", "0111"]
    folder.rounds = [line(turn, dict.fromkeys(SITES, 0.5)) for turn in range(5)]
    for entry, named in zip(folder.rounds, rounds, strict=True):
        if named:
            entry["groups"] = members(named)
            entry["tree"] = {"leaves": list(SITES), "merges": [[1, 3, 0.25, 2], [2, 4, 0.5, 3], [0, 5, 2.0, 4]]}
    folder.data["sites"] = {site: {"train": [30, 12]} for site in SITES}
    folder.results |= {
        "strategy": "similarity_clustering",
        "positive": None,
        "best_round": 4,
        "baselines": {},
        "rounds": 4,
    }
    folder.results["test"] = {
        "pooled": {"n": 100, "accuracy": 0.8},
        "sites": scored(a=(40, 0.9), b=(10, 0.5), c=(20, 0.8), d=(30, 0.9)),
        "models": {"group/0": {"accuracy": 0.55}, "group/1": {"accuracy": 0.65}},
    }
    return folder


@pytest.fixture
def page_of(section_of):
    return lambda folder: section_of(add_clusters_section, folder)


def test_who_is_where_and_how_good_the_group_is(grouped, page_of):
    page = page_of(grouped)
    # group 1: (10 * 0.5 + 20 * 0.8 + 30 * 0.9) / 60
    assert page.row("0 1 a") == "0 1 a 90.0 % 55.0 %"
    assert page.row("1 3 b") == "1 3 b, c, d 80.0 % 65.0 %"
    assert (
        "4 sites in 2 groups. The last to move: c, in round 3. Since then, for 1 round, the groups have been stable."
        in page.texts("p")
    )
    assert {"groups.png", "tree.png"} <= {plot.name for plot in (grouped.path / "plots").iterdir()}
    assert {"0: 1 site", "1: 3 sites", "a · 0", "b · 1"} <= set(page.texts("text"))


def test_groups_in_unrest_and_at_rest(grouped, page_of):
    grouped.rounds[4]["groups"] = members("0011")
    assert any("had not settled: b moved in the last round, 4." in words for words in page_of(grouped).texts("p"))
    for entry in grouped.rounds[1:]:
        entry["groups"] = members("0011")
    assert any("Nobody ever changed group, from round 1 to 4." in words for words in page_of(grouped).texts("p"))


def test_the_groups_are_those_of_the_models_that_were_kept(grouped, page_of):
    grouped.results["best_round"] = 2
    page = page_of(grouped)
    assert (
        "These are the groups of round 2, whose models were kept. By the last round, c had gone elsewhere."
        in page.texts("p")
    )
    assert page.row("0 2 a").startswith("0 2 a, c")
    assert any("the groups of the round at the dotted line" in words for words in page.texts("figcaption"))


def test_a_ranked_metric_is_the_mean_over_the_groups_sites(grouped, page_of):
    grouped.results["positive"] = "schistocyte"
    for site, value in zip(SITES, (0.9, 0.6, 0.7, 0.8), strict=True):
        grouped.results["test"]["sites"][site]["positive_auroc"] = value
    page = page_of(grouped)
    assert page.row("1 3 b") == "1 3 b, c, d 0.700"
    assert any("of the group's sites, the mean over them" in words for words in page.texts("caption"))


def test_a_groups_model_stands_beside_its_sites_own(grouped, page_of):
    test = grouped.results["test"]
    test["views"] = {"group": {"sites": scored(a=(40, 0.8), b=(60, 0.6))}, "global": {"sites": scored(a=(40, 0.7))}}
    page = page_of(grouped)
    assert page.row("0 1 a") == "0 1 a 90.0 % 80.0 % 55.0 %"
    assert {"Own models", "Group's model", "Group's model, coordinator's set"} <= set(page.texts("th"))


def test_a_run_without_groups_says_nothing(page):
    assert "Groups" not in page.texts("h2")


def test_one_group_is_still_told(grouped, page_of):
    for entry in grouped.rounds[1:]:
        entry["groups"] = members("0000")
        del entry["tree"]
    page = page_of(grouped)
    assert any(words.startswith("4 sites in 1 group.") for words in page.texts("p"))
    assert not (grouped.path / "plots" / "tree.png").exists()


@pytest.mark.parametrize("tree", [{"leaves": ["a"], "merges": []}, {"leaves": ["a", "b"], "merges": []}, {}])
def test_half_a_tree_is_not_drawn(grouped, page_of, tree):
    for entry in grouped.rounds:
        entry["tree"] = tree
    page_of(grouped)
    assert not (grouped.path / "plots" / "tree.png").exists()


def test_a_hundred_sites(grouped, page_of, line):
    sites = [f"s{at:03}" for at in range(100)]
    grouped.rounds = [line(turn, dict.fromkeys(sites, 0.5)) for turn in range(3)]
    for entry in grouped.rounds[1:]:
        entry["groups"] = {site: str(at % 3) for at, site in enumerate(sites[:98])}
        entry["tree"] = {"leaves": sites, "merges": [[0, 1, 0.5, 2]] * 99}
    grouped.data["sites"] = {}
    grouped.results["test"]["sites"] = {site: {"n": 10, "accuracy": 0.5} for site in sites}
    page = page_of(grouped)
    assert any(words.startswith("98 sites in 3 groups, 2 not yet in any.") for words in page.texts("p"))
    assert page.row("0 33 s000").endswith("and 21 more 50.0 % 55.0 %")
    assert "The group of every site" in page.texts("summary")
    assert "s097 1 1 0" in page.texts("tr")  # its group, since when, how often it moved
    assert any(words.endswith("Blank: not yet known.") for words in page.texts("figcaption"))
    assert "The tree of 100 sites is too large to draw; rounds.jsonl has it." in page.texts("p")


def test_moves_bridge_gaps():
    found = ClusterHistory([1, 2, 3], [members("00 ", "abc"), {}, members("010", "abc")], 2)
    assert found.moves == [ClusterMove(3, "b", "0", "1")]


def test_places_in_a_tree_are_followed_by_their_members():
    # the names are swapped in the second round, and c changes sides in the third
    rounds = [
        {"a": "0.0", "b": "0.0", "c": "0.0", "d": "0.1", "e": "0.1"},
        {"a": "0.1", "b": "0.1", "c": "0.1", "d": "0.0", "e": "0.0"},
        {"a": "0.0", "b": "0.0", "c": "0.1", "d": "0.1", "e": "0.1"},
    ]
    found = ClusterHistory([1, 2, 3], track_clusters(rounds, 2), 2)
    assert found.moves == [ClusterMove(3, "c", "0.0", "0.1")]
    assert found.result_clusters == rounds[2]


def test_a_group_without_a_successor_has_a_name_of_its_own():
    found = track_clusters([{"a": "0.0", "b": "0.1", "c": "0.1"}, {"a": "0.0", "b": "0.0", "c": "0.0"}], 1)
    assert found[0] == {"a": "f1", "b": "0.0", "c": "0.0"}


def test_names_that_are_models_stay_as_they_are(grouped):
    for entry, named in zip(grouped.rounds[1:], ("0011", "1100", "0011", "0011"), strict=True):
        entry["groups"] = members(named)
    assert len(load_cluster_history(load_run_record(grouped.write())).moves) == 8  # they all took another model, twice


def test_natural_order():
    assert sorted(["0.10", "0.2", "f1", "0"], key=natural_sort_key) == ["0", "0.2", "0.10", "f1"]


def test_the_strip_has_a_colour_a_group_and_none_for_the_unknown():
    groups = [{"a": "0"}, {"a": "0", "b": "1"}]
    colours = group_figures.assign_cluster_colors(["0", "1"], {"0", "1"})
    figure = group_figures.plot_cluster_membership(["a", "b"], [1, 2], groups, colours, 1)
    cells = figure.axes[0].images[0].get_array()
    middle = group_figures.PIXELS_PER_ROW // 2
    a, b = cells[middle], cells[middle + group_figures.PIXELS_PER_ROW]
    assert (a[:, 3] > 0).all()
    assert b[0, 3] == 0
    assert tuple(a[1, :3]) != tuple(b[1, :3])
    assert cells[0, :, 3].max() == 0  # rows part from each other


def test_many_rounds_share_columns():
    groups = [{"a": "0"}] * 999 + [{"a": "1"}]
    figure = group_figures.plot_cluster_membership(
        ["a"], range(1000), groups, group_figures.assign_cluster_colors(["0", "1"], {"1"}), 999
    )
    assert figure.axes[0].images[0].get_array().shape[1] <= 120
    assert "1: 1 site" in [text.get_text() for text in figure.axes[0].texts]


def test_more_groups_than_colours():
    names = [f"0.{n}" for n in range(20)]
    shared = group_figures.assign_cluster_colors(names, set(names[:4]))
    assert len({shared[name] for name in names[:11]}) == 11
    assert {shared[name] for name in names[11:]} == {group_figures.OTHER_CLUSTERS_COLOR}
    again = group_figures.assign_cluster_colors(names, set(names))
    assert group_figures.OTHER_CLUSTERS_COLOR not in again.values()


def test_a_branch_has_its_groups_colour_as_long_as_it_is_one_group():
    colours = {"0": "#111111", "1": "#222222"}
    merges = [[1, 3, 0.25, 2], [2, 4, 0.5, 3], [0, 5, 2.0, 4]]
    figure = group_figures.plot_dendrogram(list(SITES), merges, members("0111"), colours, "Distance")
    axes = figure.axes[0]
    assert sorted(line.get_color() for line in axes.lines) == sorted([group_figures.INK_COLOR, "#222222", "#222222"])
    assert {label.get_text() for label in axes.get_yticklabels()} == {"a · 0", "b · 1", "c · 1", "d · 1"}
    assert max(max(line.get_xdata()) for line in axes.lines) == 2.0


def test_cuts_are_counted_in_whole_numbers(grouped, page_of):
    grouped.results["strategy"] = "cfl"
    for entry in grouped.rounds[1:]:
        entry["tree"] = {"leaves": ["a", "b", "c", "d"], "merges": [[1, 2, 0.0, 2], [4, 3, 0.0, 3], [0, 5, 1.0, 4]]}
    page = page_of(grouped)
    assert "Cuts: the first is furthest right" in page.texts("text")
    assert any(words.startswith("The cuts that made the groups") for words in page.texts("figcaption"))
