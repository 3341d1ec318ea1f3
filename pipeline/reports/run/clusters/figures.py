"""Figures of clusters: assignments by round, and the dendrogram."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import FULL_WIDTH_INCHES, INK_COLOR, PALETTE, apply_figure_style, new_figure
from pipeline.reports.document.formatting import format_count, shorten_text
from pipeline.reports.run.curves import MAX_HEATMAP_COLUMNS, format_round_axis, label_rows, num_legend_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ClusterColors = Mapping[str, str]  # cluster -> colour
MAX_FULL_HEIGHT_ROWS = 60  # with more sites, rows are narrower and cells have no labels
ROW_HEIGHT_INCHES, LETTER_WIDTH_INCHES = 0.24, 0.075
OTHER_CLUSTERS_COLOR = PALETTE[8]
CLUSTER_PALETTE = tuple(color for color in PALETTE if color != OTHER_CLUSTERS_COLOR)
PIXELS_PER_ROW = 14  # the first and the last stay blank
CELL_OPACITY = 0.55  # never opaque, so that text is readable on both themes


def assign_cluster_colors(names: Sequence[str], result_clusters: Collection[str]) -> dict[str, str]:
    """A colour per cluster. If colours run out, the result's clusters repeat them and the others share one."""
    own_colors = {
        name: CLUSTER_PALETTE[index % len(CLUSTER_PALETTE)]
        for index, name in enumerate(names)
        if index < len(CLUSTER_PALETTE) or name in result_clusters
    }
    return {name: own_colors.get(name, OTHER_CLUSTERS_COLOR) for name in names}


@apply_figure_style()
def plot_cluster_membership(
    sites: Sequence[str],
    rounds: Sequence[int],
    clusters_by_round: Sequence[Mapping[str, str]],
    colors: ClusterColors,
    result_index: int,
) -> Figure:
    """One row per site, one column per round; `sites` are ordered by their clusters in the round at `result_index`."""
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    figure_height = 1.5 + ROW_HEIGHT_INCHES * min(len(sites), MAX_FULL_HEIGHT_ROWS)
    figure, axes = new_figure((FULL_WIDTH_INCHES[0], figure_height))
    per_column = max(1, math.ceil(len(rounds) / MAX_HEATMAP_COLUMNS))
    sampled_indices = [min(start + per_column, len(rounds)) - 1 for start in range(0, len(rounds), per_column)]
    clusters_by_row = [[clusters_by_round[round_index].get(site) for round_index in sampled_indices] for site in sites]
    cells = np.zeros((len(sites), len(sampled_indices), 4))  # transparent: unknown
    for row, row_clusters in enumerate(clusters_by_row):
        for column, cluster in enumerate(row_clusters):
            if cluster is not None:
                cells[row, column] = (*to_rgb(colors[cluster]), CELL_OPACITY)
    if len(sites) <= MAX_FULL_HEIGHT_ROWS:  # blank lines between rows
        cells = np.repeat(cells, PIXELS_PER_ROW, axis=0)
        cells[0::PIXELS_PER_ROW] = cells[PIXELS_PER_ROW - 1 :: PIXELS_PER_ROW] = 0
    axes.imshow(cells, aspect="auto", interpolation="none", extent=(-0.5, len(rounds) - 0.5, len(sites) - 0.5, -0.5))
    if len(sites) <= MAX_FULL_HEIGHT_ROWS:
        _label_cluster_runs(axes, clusters_by_row, per_column)
    if result_index != len(rounds) - 1:
        axes.axvline(result_index, color=INK_COLOR, linewidth=1, linestyle=":")
    _label_clusters(axes, sites, clusters_by_round[result_index], len(rounds), figure_height - 1.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    label_rows(axes, sites)
    format_round_axis(axes, rounds)
    color_by_label = {
        "others" if color == OTHER_CLUSTERS_COLOR else cluster: color for cluster, color in colors.items()
    }
    handles = [
        Line2D([], [], marker="s", linestyle="", markersize=8, markeredgewidth=0, color=color, alpha=0.7, label=label)
        for label, color in color_by_label.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=num_legend_columns(list(color_by_label), wide=True)
    )
    return figure


def _label_cluster_runs(axes: Any, clusters_by_row: Sequence[Sequence[str | None]], per_column: int) -> None:
    """Labels every stretch of rounds in one cluster if there is room, as colours may repeat."""
    column_width = (FULL_WIDTH_INCHES[0] - 2.6) / max(len(clusters_by_row[0]), 1) if clusters_by_row else 0.0  # inches
    for row, row_clusters in enumerate(clusters_by_row):
        start = 0
        for column in range(1, len(row_clusters) + 1):
            if column < len(row_clusters) and row_clusters[column] == row_clusters[start]:
                continue
            cluster = row_clusters[start]
            if cluster is not None and (column - start) * column_width > LETTER_WIDTH_INCHES * (len(cluster) + 1):
                left = start * per_column - 0.5 + 0.25 * LETTER_WIDTH_INCHES / column_width * per_column
                axes.text(left, row, cluster, ha="left", va="center_baseline", fontsize=7.5)
            start = column


def _label_clusters(
    axes: Any, sites: Sequence[str], cluster_by_site: Mapping[str, str], num_rounds: int, height: float
) -> None:
    """Labels the clusters at the right of their rows; leaves out labels that would overlap the one above."""
    start, min_free_inches = 0, -1.0
    edge = num_rounds - 0.5
    for row in range(1, len(sites) + 1):
        cluster = cluster_by_site.get(sites[start])
        if row < len(sites) and cluster_by_site.get(sites[row]) == cluster:
            continue
        if start:
            axes.axhline(start - 0.5, color=INK_COLOR, alpha=0.5, linewidth=0.7)
        middle = (start + row - 1) / 2
        middle_inches = height * middle / len(sites)
        if cluster is not None and middle_inches >= min_free_inches:
            text = f"{shorten_text(cluster, 14)}: {format_count(row - start, 'site')}"
            axes.text(edge + 0.01 * num_rounds, middle, text, ha="left", va="center", fontsize=8.5)
            min_free_inches = middle_inches + 0.15
        start = row


@apply_figure_style()
def plot_dendrogram(
    leaves: Sequence[str],
    merges: Sequence[Sequence[float]],
    cluster_by_site: Mapping[str, str],
    colors: ClusterColors,
    title: str,
) -> Figure:
    """A dendrogram with the sites at the left; a branch within one cluster has the cluster's colour."""
    import numpy as np
    from matplotlib.colors import to_rgba
    from matplotlib.ticker import MaxNLocator
    from scipy.cluster.hierarchy import dendrogram

    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.0 + ROW_HEIGHT_INCHES * len(leaves)))
    clusters_below: list[set[str | None]] = [{cluster_by_site.get(site)} for site in leaves]
    for first, second, *_ in merges:
        clusters_below.append(clusters_below[int(first)] | clusters_below[int(second)])
    single_clusters = [
        next(iter(node_clusters)) if len(node_clusters) == 1 else None for node_clusters in clusters_below
    ]
    dendrogram_data = dendrogram(
        np.asarray(merges, dtype=float),
        no_plot=True,
        link_color_func=lambda node: colors.get(single_clusters[node] or "", INK_COLOR),
    )
    for positions, distances, color in zip(
        dendrogram_data["icoord"], dendrogram_data["dcoord"], dendrogram_data["color_list"], strict=True
    ):
        is_mixed = color == INK_COLOR
        axes.plot(distances, positions, color=color, alpha=0.6 if is_mixed else 1.0, linewidth=1.1 if is_mixed else 1.8)
    ordered_leaves = [leaves[leaf] for leaf in dendrogram_data["leaves"] or ()]
    leaf_labels = [
        f"{shorten_text(site)} · {cluster_by_site[site]}" if site in cluster_by_site else shorten_text(site)
        for site in ordered_leaves
    ]
    axes.set_yticks([10 * index + 5 for index in range(len(ordered_leaves))], leaf_labels, parse_math=False)
    for label, site in zip(axes.get_yticklabels(), ordered_leaves, strict=True):
        if site in cluster_by_site:
            background_color = to_rgba(colors[cluster_by_site[site]], 0.35)
            label.set_bbox({"boxstyle": "round,pad=0.25", "facecolor": background_color, "linewidth": 0})
    axes.tick_params(axis="y", pad=7)
    axes.set_ylim(10 * len(ordered_leaves), 0)
    heights = [float(merge[2]) for merge in merges]
    max_height = max(heights, default=0.0) or 1.0
    axes.set_xlim(-0.006 * max_height, 1.04 * max_height)
    axes.xaxis.set_major_locator(MaxNLocator(integer=all(height.is_integer() for height in heights)))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    return figure
