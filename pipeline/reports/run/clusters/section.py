"""The report section on clusters of sites: members, moves between clusters, scores and dendrogram."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.protocol.messages import SiteId
from pipeline.records.scores import ModelMetrics, metric_by_site
from pipeline.reports.document.formatting import SPLIT_LABELS, format_count, format_integer, format_score, join_names
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run.clusters import figures as cluster_figures
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import RunRecord

MAX_NAMES_PER_ROW = 12  # sites named in a cluster's row
MAX_NAMES_IN_SENTENCE = 5
MAX_DENDROGRAM_LEAVES = 60
DENDROGRAM_AXIS_TITLES = {"cfl": "Splits: the first is furthest right"}  # other strategies: a distance
ClusterBySite = Mapping[str, str]


def add_clusters_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    history = load_cluster_history(record)
    if history is None or not history.result_clusters:
        return
    writer.page.add_section("Clusters").add_text(
        _describe_clusters(history, len(record.sites)), *filter(None, [_describe_later_moves(history)])
    )
    _add_clusters_table(writer, record, headline, history)
    result_clusters = set(history.result_clusters.values())
    colors = cluster_figures.assign_cluster_colors(history.cluster_names, result_clusters)
    former_clusters = [name for name in history.cluster_names if name not in result_clusters]
    sites = _sites_by_cluster(history, record.sites)
    figure = cluster_figures.plot_cluster_membership(
        sites, history.rounds, history.clusters_by_round, colors, history.result_index
    )
    writer.add_figure("clusters", figure, _membership_caption(history, former_clusters, len(sites)))
    if max(Counter(history.result_clusters.values()).values()) > MAX_NAMES_PER_ROW:
        _add_sites_table(writer, history)
    _add_dendrogram(writer, record, history, colors)


def _describe_clusters(history: ClusterHistory, num_sites: int) -> str:
    num_clusters = len(set(history.result_clusters.values()))
    unassigned_text = (
        f", {num_sites - len(history.result_clusters)} not yet assigned"
        if num_sites > len(history.result_clusters)
        else ""
    )
    text = f"{format_count(len(history.result_clusters), 'site')} in {format_count(num_clusters, 'cluster')}{unassigned_text}. "
    moves = history.moves
    if not moves:
        return f"{text}No site changed its cluster, from round {history.rounds[0]} to {history.rounds[-1]}."
    last_move_round = moves[-1].round
    moved_sites = _join_some_sites(
        sorted({move.site for move in moves if move.round == last_move_round}, key=natural_sort_key)
    )
    num_stable_rounds = history.rounds[-1] - last_move_round
    if not num_stable_rounds:
        return f"{text}The clusters are not stable: {moved_sites} moved in the last round, {last_move_round}."
    return f"{text}Last move: {moved_sites}, in round {last_move_round}. The clusters were stable for the following {format_count(num_stable_rounds, 'round')}."


def _describe_later_moves(history: ClusterHistory) -> str:
    """Moves after the round that the result is from."""
    last_clusters = next(cluster_by_site for cluster_by_site in reversed(history.clusters_by_round) if cluster_by_site)
    result_round = history.rounds[history.result_index]
    if last_clusters is history.result_clusters or result_round == history.rounds[-1]:
        return ""
    moved_sites = sorted(
        (site for site, cluster in last_clusters.items() if history.result_clusters.get(site) != cluster),
        key=natural_sort_key,
    )
    text = f"These are the clusters of round {result_round}, whose models are the result."
    return f"{text} By the last round, {_join_some_sites(moved_sites)} had moved." if moved_sites else text


def _join_some_sites(sites: Sequence[str]) -> str:
    if len(sites) <= MAX_NAMES_IN_SENTENCE + 1:
        return join_names(sites)
    return f"{', '.join(sites[:MAX_NAMES_IN_SENTENCE])} and {len(sites) - MAX_NAMES_IN_SENTENCE} others"


def _sites_by_cluster(history: ClusterHistory, sites: Sequence[str]) -> list[str]:
    """All sites by cluster, then by first move, those that never moved last; unassigned sites at the end."""
    first_move_round: dict[str, int] = {}
    for move in history.moves:
        first_move_round.setdefault(move.site, move.round)
    all_sites = dict.fromkeys(
        [*sites, *(site for cluster_by_site in history.clusters_by_round for site in cluster_by_site)]
    )
    cluster_order = {name: index for index, name in enumerate(history.cluster_names)}
    after_last_round = history.rounds[-1] + 1
    return sorted(
        all_sites,
        key=lambda site: (
            cluster_order.get(history.result_clusters.get(site, ""), len(cluster_order)),
            first_move_round.get(site, after_last_round),
        ),
    )


def _membership_caption(history: ClusterHistory, former_clusters: Sequence[str], num_sites: int) -> str:
    caption = "Cluster of every site by round; at the right, the clusters "
    caption += (
        "of the last round" if history.result_index == len(history.rounds) - 1 else "of the round at the dotted line"
    )
    caption += ", which order the sites."
    caption += (
        " Blank: not yet assigned."
        if any(len(cluster_by_site) < num_sites for cluster_by_site in history.clusters_by_round)
        else ""
    )
    if former_clusters:
        names = (
            f"{former_clusters[0]} to {former_clusters[-1]}"
            if len(former_clusters) > 2
            else join_names(former_clusters)
        )
        caption += f" {names}: clusters of other rounds."
    return caption


def _add_clusters_table(
    writer: ReportWriter, record: RunRecord, headline: HeadlineMetric, history: ClusterHistory
) -> None:
    split, scores = record.latest_scores()
    sites, models = scores.sites, scores.models
    metric = headline.site_ranking_metric(sites)
    cluster_model_scores = scores.comparison("cluster").sites
    cluster_names = sorted(set(history.result_clusters.values()), key=natural_sort_key)
    coordinator_scores = {
        name: models[key].value(metric) if (key := f"cluster/{name}") in models else None for name in cluster_names
    }
    rows: list[list[TableCell]] = []
    for name in cluster_names:
        cluster_sites = sorted(
            (site for site, cluster in history.result_clusters.items() if cluster == name), key=natural_sort_key
        )
        row: list[TableCell] = [
            name,
            format_integer(len(cluster_sites)),
            _list_sites(cluster_sites),
            format_score(metric, _cluster_score(sites, cluster_sites, metric)),
        ]
        row += (
            [format_score(metric, _cluster_score(cluster_model_scores, cluster_sites, metric))]
            if cluster_model_scores
            else []
        )
        row += (
            [format_score(metric, coordinator_scores[name])]
            if any(value is not None for value in coordinator_scores.values())
            else []
        )
        rows.append(row)
    columns = [TableColumn("Cluster"), TableColumn("Sites", True), TableColumn("Members", is_text=True)]
    columns += [TableColumn("Personalised models", True)] if record.has_personalized_models else []
    columns += (
        [TableColumn("Cluster model", True)] if cluster_model_scores or not record.has_personalized_models else []
    )
    columns += [TableColumn("Cluster model, coordinator's set", True)] if len(rows[0]) > len(columns) else []
    pooling_text = "pooled" if metric == "accuracy" else "mean over sites"
    writer.page.add_table(
        columns,
        rows,
        f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data of the cluster's sites, {pooling_text}.",
    )


def _add_sites_table(writer: ReportWriter, history: ClusterHistory) -> None:
    """The cluster of every site, for clusters with more sites than a row names."""
    last_move_round: dict[str, int] = {}
    num_moves: dict[str, int] = {}
    first_known_round = {
        site: round_number
        for round_number, cluster_by_site in reversed([*zip(history.rounds, history.clusters_by_round, strict=True)])
        for site in cluster_by_site
    }
    for move in history.moves:
        if move.round <= history.rounds[history.result_index]:
            last_move_round[move.site] = move.round
        num_moves[move.site] = num_moves.get(move.site, 0) + 1
    rows: list[list[TableCell]] = [
        [
            site,
            history.result_clusters[site],
            format_integer(last_move_round.get(site, first_known_round[site])),
            format_integer(num_moves.get(site, 0)),
        ]
        for site in sorted(history.result_clusters, key=natural_sort_key)
    ]
    columns = [
        TableColumn("Site"),
        TableColumn("Cluster"),
        TableColumn("Since round", True),
        TableColumn("Moves", True),
    ]
    writer.page.add_table(columns, rows, "Cluster of every site")


def _list_sites(sites: Sequence[str]) -> str:
    num_hidden = len(sites) - MAX_NAMES_PER_ROW
    return ", ".join(sites[:MAX_NAMES_PER_ROW]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def _cluster_score(sites: Mapping[SiteId, ModelMetrics], cluster_sites: Sequence[str], metric: str) -> float | None:
    """Accuracy weighted by examples, which equals the pooled one; of other metrics the mean over sites."""
    values = metric_by_site({site: sites[site] for site in cluster_sites if site in sites}, metric)
    if not values:
        return None
    counts = {site: sites[site].n for site in values}
    if metric != "accuracy" or not sum(counts.values()):
        return fmean(values.values())
    return sum(values[site] * counts[site] for site in values) / sum(counts.values())


def _add_dendrogram(
    writer: ReportWriter, record: RunRecord, history: ClusterHistory, colors: Mapping[str, str]
) -> None:
    result_round = history.rounds[history.result_index]
    dendrogram = next(
        (line.dendrogram for line in reversed(record.round_records) if line.dendrogram and line.round <= result_round),
        None,
    )
    if dendrogram is None or len(dendrogram.leaves) < 2 or len(dendrogram.merges) != len(dendrogram.leaves) - 1:
        return
    leaves, merges = dendrogram.leaves, dendrogram.merges
    if len(leaves) > MAX_DENDROGRAM_LEAVES:
        writer.page.add_text(f"The dendrogram of {len(leaves)} sites is too large to plot; rounds.jsonl contains it.")
        return
    title = DENDROGRAM_AXIS_TITLES.get(record.strategy_name or "", "Distance between models")
    description = (
        "Dendrogram that the clusters were cut from: the further right two branches join, the less similar they are."
    )
    if record.strategy_name == "cfl":
        description = "Splits that made the clusters: the first split is furthest right."
    caption = f"{description} Next to every site, its cluster; a branch has the colour of its cluster."
    writer.add_figure(
        "dendrogram", cluster_figures.plot_dendrogram(leaves, merges, history.result_clusters, colors, title), caption
    )


# History of cluster assignments


@dataclass(frozen=True)
class ClusterMove:
    round: int
    site: str
    previous_cluster: str
    new_cluster: str


@dataclass(frozen=True)
class ClusterHistory:
    """Assignments by round, with the cluster names of the result's round; other clusters are named f1, f2, ..."""

    rounds: Sequence[int]
    clusters_by_round: Sequence[ClusterBySite]  # one per round; empty if unknown
    result_index: int  # index in `rounds` of the round that the run's result is from

    @property
    def result_clusters(self) -> ClusterBySite:
        return self.clusters_by_round[self.result_index]

    @property
    def cluster_names(self) -> list[str]:
        """The clusters of the result first."""
        all_clusters = {cluster for cluster_by_site in self.clusters_by_round for cluster in cluster_by_site.values()}
        result_names = set(self.result_clusters.values())
        return sorted(all_clusters, key=lambda name: (name not in result_names, natural_sort_key(name)))

    @property
    def moves(self) -> list[ClusterMove]:
        moves, last_cluster = [], dict[str, str]()
        for round_number, cluster_by_site in zip(self.rounds, self.clusters_by_round, strict=True):
            moves += [
                ClusterMove(round_number, site, last_cluster[site], cluster)
                for site, cluster in cluster_by_site.items()
                if last_cluster.get(site, cluster) != cluster
            ]
            last_cluster |= cluster_by_site
        return moves


def load_cluster_history(record: RunRecord) -> ClusterHistory | None:
    """Starts at the first round with clusters; None if the run has none."""
    known_indices = [index for index, round_record in enumerate(record.round_records) if round_record.clusters]
    if not known_indices:
        return None
    round_records = record.round_records[known_indices[0] :]
    rounds = [round_record.round for round_record in round_records]
    clusters_by_round = [round_record.clusters for round_record in round_records]
    best_round = record.results.best_round if record.results else None
    result_index = next(
        (index for index, round_number in enumerate(rounds) if round_number == best_round and clusters_by_round[index]),
        known_indices[-1] - known_indices[0],
    )
    has_tree_paths = any(
        "." in cluster for cluster_by_site in clusters_by_round for cluster in cluster_by_site.values()
    )
    return ClusterHistory(
        rounds, track_clusters(clusters_by_round, result_index) if has_tree_paths else clusters_by_round, result_index
    )


def track_clusters(clusters_by_round: Sequence[ClusterBySite], result_index: int) -> list[ClusterBySite]:
    """Renames clusters so that a cluster keeps its name over rounds, by its members.

    DemLearn names a cluster by its position in the tree, which changes whenever the tree is rebuilt.
    """
    result_members = {
        name: {site for site, cluster in clusters_by_round[result_index].items() if cluster == name}
        for name in clusters_by_round[result_index].values()
    }
    tracked_rounds = [clusters_by_round[result_index]]
    for step, indices in ((1, range(result_index + 1, len(clusters_by_round))), (-1, range(result_index - 1, -1, -1))):
        last_members = {
            name: set(sites) for name, sites in result_members.items()
        }  # of each cluster in the last round that had it
        for index in indices:
            tracked_clusters = _match_clusters(
                clusters_by_round[index],
                last_members,
                used_names={
                    *result_members,
                    *(cluster_name for tracked in tracked_rounds for cluster_name in tracked.values()),
                },
            )
            tracked_rounds = [*tracked_rounds, tracked_clusters] if step > 0 else [tracked_clusters, *tracked_rounds]
            last_members |= {
                name: {site for site, cluster in tracked_clusters.items() if cluster == name}
                for name in tracked_clusters.values()
            }
    return tracked_rounds


def _match_clusters(
    cluster_by_site: ClusterBySite, last_members: Mapping[str, set[str]], used_names: set[str]
) -> dict[str, str]:
    """Gives each cluster the name of the known cluster with which it shares most sites (optimal assignment)."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    new_clusters, old_clusters = (
        sorted(set(cluster_by_site.values()), key=natural_sort_key),
        sorted(last_members, key=natural_sort_key),
    )
    new_members = [{site for site, cluster in cluster_by_site.items() if cluster == name} for name in new_clusters]
    if not new_clusters:
        return {}
    num_shared_sites = np.array([[len(sites & last_members[name]) for name in old_clusters] for sites in new_members])
    rows, columns = linear_sum_assignment(-num_shared_sites)
    name_by_cluster = {
        new_clusters[r]: old_clusters[c] for r, c in zip(rows, columns, strict=True) if num_shared_sites[r, c]
    }
    unused_names = (
        name for n in range(1, len(used_names) + len(new_clusters) + 1) if (name := f"f{n}") not in used_names
    )
    name_by_cluster |= {name: next(unused_names) for name in new_clusters if name not in name_by_cluster}
    return {site: name_by_cluster[cluster] for site, cluster in cluster_by_site.items()}


def natural_sort_key(name: str) -> list[tuple[int, int | str]]:
    """0.2 before 0.10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
