"""The page of `hemofed study preview`: each simulated site's class counts, images and acquisition, before training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.reports.document.figure_style import (
    FULL_WIDTH_INCHES,
    HALF_WIDTH_INCHES,
    INK_COLOR,
    PALETTE,
    apply_figure_style,
    to_svg,
)
from pipeline.reports.document.formatting import SPLIT_LABELS, format_count, format_integer, shorten_text
from pipeline.reports.document.page import CaptionedImage, CountBar, HtmlPage, TableColumn
from pipeline.reports.run.contact_sheets import (
    MAX_SHEET_SITES,
    contact_sheet_layout,
    describe_class_counts,
    has_image_shape,
    make_contact_sheets,
)
from pipeline.reports.run.curves import plot_class_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipeline.study.schema import Study
    from sites.population.simulated_sites import FederatedDataset

ORDERED_SPLITS = ("train", "val", "test")
MAX_MEASURED_EXAMPLES = 1000  # training examples per site for the channel statistics
NUM_HISTOGRAM_BINS = 48
CHANNEL_STYLES: Mapping[int, Sequence[tuple[str, str]]] = {  # number of channels -> (name, colour) of each
    3: (("Red", "#c9505f"), ("Green", "#3f9e6d"), ("Blue", "#3f7fc1")),
    1: (("Grey", "#7d8a97"),),
}
FloatArray = NDArray[np.floating[Any]]
CountsBySplit = Mapping[str, list[int]]  # split -> examples by class


@dataclass(frozen=True)
class SitePreview:
    """Statistics of a site's training examples, by channel of images or coordinate of points."""

    counts: CountsBySplit
    num_examples: int  # that means, stds and histograms were measured on
    means: list[float]
    stds: list[float]
    histograms: list[list[float]]  # images only; per channel, fractions in NUM_HISTOGRAM_BINS bins over [0, 1]
    acquisition: str  # description of the site's feature skew

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        by_class = {split: dict(zip(classes, counts, strict=True)) for split, counts in self.counts.items()}
        statistics = {"measured_on": self.num_examples, "means": self.means, "stds": self.stds}
        return {"counts": by_class, **statistics, "acquisition": self.acquisition}


def preview_sites(dataset: FederatedDataset) -> dict[str, SitePreview]:
    return {site: _preview_site(dataset, site) for site in dataset.sites}


def write_preview(study: Study, dataset: FederatedDataset, previews: Mapping[str, SitePreview], out_path: Path) -> Path:
    has_images = has_image_shape(dataset.shape)
    title = f"{study.name}: {format_count(len(dataset.sites), 'site')} before training"
    page = HtmlPage(title, _data_subtitle(study, dataset), _confidentiality_notice(has_images))
    if has_images:
        _add_contact_sheets_section(page, study, dataset, previews)
        _add_color_section(page, dataset, previews)
    else:
        _add_points_section(page, dataset, previews)
    _add_counts_section(page, dataset, previews)
    return page.save(out_path)


def sample_train_examples(
    dataset: FederatedDataset, site: str, max_examples: int
) -> tuple[FloatArray, NDArray[np.int64]]:
    """x (n, ...) and y (n,) of training examples, evenly spaced from the first to the last."""
    import torch

    train_rows = dataset.split_indices[site].train
    positions = (
        torch.linspace(0, max(len(train_rows) - 1, 0), min(max_examples, len(train_rows)), device=train_rows.device)
        .round()
        .long()
    )
    rows = train_rows[positions]
    return dataset.pool.inputs(rows).cpu().numpy(), dataset.pool.labels(rows).cpu().numpy()


def _preview_site(dataset: FederatedDataset, site: str) -> SitePreview:
    inputs, _ = sample_train_examples(dataset, site, MAX_MEASURED_EXAMPLES)
    values = inputs.astype(np.float64).reshape(
        len(inputs), inputs.shape[1], -1
    )  # (n, channels, pixels); points have one pixel
    means, stds = values.mean((0, 2)), values.std((0, 2))
    histograms = []
    if has_image_shape(dataset.shape):
        channel_counts = [
            np.histogram(values[:, channel], NUM_HISTOGRAM_BINS, (0, 1))[0] for channel in range(values.shape[1])
        ]
        histograms = [(counts / max(counts.sum(), 1)).tolist() for counts in channel_counts]
    text = dataset.acquisition_descriptions.get(site, "")
    return SitePreview(
        dataset.class_counts(site), len(inputs), means.round(4).tolist(), stds.round(4).tolist(), histograms, text
    )


def _data_subtitle(study: Study, dataset: FederatedDataset) -> str:
    shape = " × ".join(map(str, dataset.shape))
    components = (("data", study.data), ("partition", study.partition), ("feature_skew", study.feature_skew))
    component_texts = [f"{component} {setting.name}" for component, setting in components]
    return " · ".join([*component_texts, f"examples of {shape}", f"seed {study.seed}"])


def _confidentiality_notice(has_images: bool) -> str:
    text = "These are simulated sites on this machine; no model was trained and no data was sent."
    return f"{text} This page contains images: it must not leave the hospital." if has_images else text


def _add_contact_sheets_section(
    page: HtmlPage, study: Study, dataset: FederatedDataset, previews: Mapping[str, SitePreview]
) -> None:
    positive_class = study.evaluation.positive_class
    sheets = make_contact_sheets(dataset, seed=study.seed, positive_class=positive_class)
    layout_text = contact_sheet_layout(dataset, None, positive_class).describe(dataset.classes)
    description = f"Training images drawn at random, as acquired by the site's simulated scanner. {layout_text} Blank tile: the site "
    description += "has no more examples of that class. Bars: examples by class."
    page.add_section("Training images by site").add_text(description + _hidden_sites_text(dataset))
    page.add_legend(dataset.classes)
    page.add_images(
        [
            _captioned_sheet(dataset, site, previews[site], png, positive_class, layout_text)
            for site, png in sheets.items()
        ]
    )


def _hidden_sites_text(dataset: FederatedDataset) -> str:
    num_hidden = len(dataset.sites) - MAX_SHEET_SITES
    return (
        f" The first {MAX_SHEET_SITES} sites are shown; there {'is' if num_hidden == 1 else 'are'} {num_hidden} more."
        if num_hidden > 0
        else ""
    )


def _captioned_sheet(
    dataset: FederatedDataset, site: str, preview: SitePreview, png: bytes, positive_class: str | None, layout_text: str
) -> CaptionedImage:
    channel_names = "RGB" if len(preview.means) == 3 else ("Grey",)
    channels = zip(channel_names, preview.means, preview.stds, strict=True)
    color_text = "Mean and standard deviation: " + ", ".join(
        f"{name} {mean:.2f} ± {std:.2f}" for name, mean, std in channels
    )
    mean = [round(255 * min(max(value, 0.0), 1.0)) for value in preview.means]
    red, green, blue = mean if len(mean) == 3 else mean * 3
    bars = [
        CountBar(f"{SPLIT_LABELS[split].capitalize()} {sum(counts):,}", list(zip(dataset.classes, counts, strict=True)))
        for split, counts in preview.counts.items()
        if sum(counts)
    ]
    paragraphs = [preview.acquisition] if preview.acquisition else []
    paragraphs.append(describe_class_counts(dataset.classes, preview.counts["train"], positive_class))
    return CaptionedImage(
        site,
        png,
        f"Training images of {site}. {layout_text}",
        paragraphs,
        color=(red, green, blue),
        color_text=color_text,
        bars=bars,
    )


def _add_color_section(page: HtmlPage, dataset: FederatedDataset, previews: Mapping[str, SitePreview]) -> None:
    shown_previews = {site: previews[site] for site in dataset.sites[:MAX_SHEET_SITES]}
    page.add_section("Channel statistics by site")
    means = {site: (preview.means, preview.stds) for site, preview in shown_previews.items()}
    page.add_figure(
        to_svg(plot_channel_means(means), "means"),
        "Mean of every channel, and one standard deviation to each side. With the same scanner at all sites, the dots of a panel would be aligned.",
        wide=True,
    )
    histograms = {site: preview.histograms for site, preview in shown_previews.items()}
    page.add_figure(
        to_svg(plot_channel_histograms(histograms), "histograms"),
        "Histograms of pixel values by channel, one line per site. Where lines differ, a model trained on one site's colours "
        f"sees other colours elsewhere. Measured on at most {MAX_MEASURED_EXAMPLES:,} training images per site.",
        wide=True,
    )


def _add_points_section(page: HtmlPage, dataset: FederatedDataset, previews: Mapping[str, SitePreview]) -> None:
    description = "Training points of each site, on the same axes." + _hidden_sites_text(dataset)
    page.add_section("Training points by site").add_text(description)
    if len(dataset.shape) == 1 and dataset.shape[0] >= 2:
        points_by_site = {
            site: sample_train_examples(dataset, site, MAX_MEASURED_EXAMPLES)
            for site in dataset.sites[:MAX_SHEET_SITES]
        }
        caption = "Training points by class" + (", first two coordinates." if dataset.shape[0] > 2 else ".")
        page.add_figure(to_svg(plot_site_points(dataset.classes, points_by_site), "points"), caption, wide=True)
    described_rows = [[site, preview.acquisition] for site, preview in previews.items() if preview.acquisition]
    if described_rows:
        page.add_table([TableColumn("Site"), TableColumn("Feature skew")], described_rows)


def _add_counts_section(page: HtmlPage, dataset: FederatedDataset, previews: Mapping[str, SitePreview]) -> None:
    page.add_section("Examples by site")
    figure = plot_class_counts(dataset.classes, {site: preview.counts["train"] for site, preview in previews.items()})
    page.add_figure(
        to_svg(figure, "counts"), "Training examples of every class at each site.", wide=_is_wide_figure(figure)
    )
    splits = [split for split in ORDERED_SPLITS if any(sum(preview.counts[split]) for preview in previews.values())]
    rows = [
        [site, *(format_integer(sum(preview.counts[split])) for split in splits)] for site, preview in previews.items()
    ]
    page.add_table(
        [TableColumn("Site"), *(TableColumn(SPLIT_LABELS[split].capitalize(), True) for split in splits)],
        rows,
        "Examples",
    )
    if dataset.skipped:
        page.add_details(f"{format_count(len(dataset.skipped), 'note')} on skipped files", "\n".join(dataset.skipped))


def _is_wide_figure(figure: Figure) -> bool:
    return bool(figure.get_figwidth() > HALF_WIDTH_INCHES[0])


# Figures


@apply_figure_style()
def plot_channel_means(sites: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """`sites`: site -> (means, standard deviations) in [0, 1]. One panel per channel, one row per site."""
    channels = CHANNEL_STYLES[len(next(iter(sites.values()))[0])]
    figure, panels = _new_panels(1, len(channels), (FULL_WIDTH_INCHES[0], 0.9 + 0.3 * len(sites)))
    for channel, ((name, color), axes) in enumerate(zip(channels, panels, strict=True)):
        for row, (means, stds) in enumerate(sites.values()):
            edges = [max(means[channel] - stds[channel], 0), min(means[channel] + stds[channel], 1)]
            axes.plot(edges, [row, row], color=color, alpha=0.35, linewidth=4, solid_capstyle="butt")
            axes.plot(means[channel], row, marker="o", markersize=6, color=color, linestyle="")
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_yticks(
            range(len(sites)), [shorten_text(site, 22) if not channel else "" for site in sites], parse_math=False
        )
        axes.set_ylim(len(sites) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
    return figure


@apply_figure_style()
def plot_channel_histograms(sites: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """`sites`: site -> channel -> fractions in NUM_HISTOGRAM_BINS bins over [0, 1]."""
    channels = CHANNEL_STYLES[len(next(iter(sites.values())))]
    figure, panels = _new_panels(1, len(channels), (FULL_WIDTH_INCHES[0], 3.1))
    bin_centers = [(index + 0.5) / NUM_HISTOGRAM_BINS for index in range(NUM_HISTOGRAM_BINS)]
    for index, ((name, _), axes) in enumerate(zip(channels, panels, strict=True)):
        for site_index, (site, histograms) in enumerate(sites.items()):
            axes.plot(
                bin_centers,
                [100 * fraction for fraction in histograms[index]],
                color=PALETTE[site_index % len(PALETTE)],
                linewidth=1.5,
                linestyle=("-", "--")[site_index % 2],
                label=None if index else shorten_text(site, 22),
            )
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_xlim(*_brightness_range(sites.values()))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Brightness")
    panels[0].set_ylabel("Pixels, %")
    figure.legend(loc="outside lower center", ncols=min(len(sites), 6))
    return figure


@apply_figure_style()
def plot_site_points(classes: Sequence[str], sites: Mapping[str, tuple[Any, Any]]) -> Figure:
    """`sites`: site -> x (n, 2 or more), y (n,). One panel per site."""
    columns = min(len(sites), 4)
    rows = math.ceil(len(sites) / columns)
    figure, panels = _new_panels(rows, columns, (FULL_WIDTH_INCHES[0], 0.6 + 2.5 * rows), share_y=True)
    for axes, (site, (points, labels)) in zip(panels, sites.items(), strict=False):
        for label, name in enumerate(classes):
            class_points = points[labels == label]
            axes.plot(
                class_points[:, 0],
                class_points[:, 1],
                color=PALETTE[label % len(PALETTE)],
                linestyle="",
                marker="os^Dv"[label % 5],
                markersize=3,
                alpha=0.6,
                markeredgewidth=0,
                label=shorten_text(name) if axes is panels[0] else None,
            )
        axes.set_title(shorten_text(site, 24), fontsize=9.5, loc="left", parse_math=False)
    for axes in panels[len(sites) :]:
        axes.set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(classes), 6), labelcolor=INK_COLOR)
    return figure


def _brightness_range(sites: Iterable[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The range of pixel values that occur at any site, shared by all panels."""
    used_bins = [
        bin_index
        for histograms in sites
        for fractions in histograms
        for bin_index, fraction in enumerate(fractions)
        if fraction > 0.001
    ]
    return (min(used_bins) / NUM_HISTOGRAM_BINS, (max(used_bins) + 1) / NUM_HISTOGRAM_BINS) if used_bins else (0.0, 1.0)


def _new_panels(rows: int, columns: int, size: tuple[float, float], share_y: bool = False) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes_grid = figure.subplots(rows, columns, sharex=True, sharey=share_y, squeeze=False)
    return figure, list(axes_grid.flat)
