"""A study's simulated sites before anything is trained: what each holds, how it sees, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.reports.document.figure_style import HALF, INK, PALETTE, WIDE, styled, to_svg
from pipeline.reports.document.formatting import SPLITS, count_of, shorten, whole
from pipeline.reports.document.page import Bar, Column, Page, Picture
from pipeline.reports.run.contact_sheets import SHOWN_SITES, contact_sheets, counts_words, grid_of, is_images
from pipeline.reports.run.curves import class_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipeline.study.schema import Study
    from sites.population.simulated_sites import Population

SPLITS_IN_ORDER = ("train", "val", "test")
LOOKED_AT = 1000  # training examples a site that colours are measured on
Floats = NDArray[np.floating[Any]]
Counts = Mapping[str, list[int]]  # split -> examples by class


@dataclass(frozen=True)
class Seen:
    """A site's training examples in numbers; channels of images, coordinates of points."""

    counts: Counts
    examples: int  # that the rest was measured on
    means: list[float]
    spreads: list[float]  # standard deviations
    histograms: list[list[float]]  # of images: a channel's values, shares of BINS bins
    acquisition: str

    def json(self, classes: Sequence[str]) -> dict[str, Any]:
        by_class = {split: dict(zip(classes, counts, strict=True)) for split, counts in self.counts.items()}
        measured = {"measured_on": self.examples, "means": self.means, "spreads": self.spreads}
        return {"counts": by_class, **measured, "acquisition": self.acquisition}


def look_at(people: Population) -> dict[str, Seen]:
    return {site: _seen(people, site) for site in people.sites}


def write_preview(study: Study, people: Population, seen: Mapping[str, Seen], out: Path) -> Path:
    images = is_images(people.shape)
    title = f"{study.name}: {count_of(len(people.sites), 'site')} before training"
    page = Page(title, _subtitle(study, people), _warning(images))
    if images:
        _cells(page, study, people, seen)
        _colours(page, people, seen)
    else:
        _points(page, people, seen)
    _counts(page, people, seen)
    return page.save(out)


def sample(people: Population, site: str, most: int) -> tuple[Floats, NDArray[np.int64]]:
    """x (n, ...) and y (n,) of training examples, evenly from the first to the last."""
    import torch

    train = people.examples[site].train
    chosen = torch.linspace(0, max(len(train) - 1, 0), min(most, len(train)), device=train.device).round().long()
    rows = train[chosen]
    return people.pool.inputs(rows).cpu().numpy(), people.pool.labels(rows).cpu().numpy()


def _seen(people: Population, site: str) -> Seen:
    x, _ = sample(people, site, LOOKED_AT)
    values = x.astype(np.float64).reshape(len(x), x.shape[1], -1)  # (n, channels, pixels); points have one pixel
    means, spreads = values.mean((0, 2)), values.std((0, 2))
    histograms = []
    if is_images(people.shape):
        counted = [np.histogram(values[:, c], BINS, (0, 1))[0] for c in range(values.shape[1])]
        histograms = [(counts / max(counts.sum(), 1)).tolist() for counts in counted]
    words = people.acquisitions.get(site, "")
    return Seen(people.counts(site), len(x), means.round(4).tolist(), spreads.round(4).tolist(), histograms, words)


def _subtitle(study: Study, people: Population) -> str:
    shape = " × ".join(map(str, people.shape))
    parts = (("data", study.data), ("partition", study.partition), ("skew", study.skew))
    named = [f"{part} {chosen.name}" for part, chosen in parts]
    return " · ".join([*named, f"examples of {shape}", f"seed {study.seed}"])


def _warning(images: bool) -> str:
    words = "These are simulated sites on this machine; nothing has been trained and nothing was sent."
    return f"{words} This page contains images: it must not leave the hospital." if images else words


def _cells(page: Page, study: Study, people: Population, seen: Mapping[str, Seen]) -> None:
    positive = study.evaluation.positive
    sheets = contact_sheets(people, seed=study.seed, positive=positive)
    shows = grid_of(people, None, positive).words(people.classes)
    words = (
        f"Training images drawn at random, as the site's own scanner sees them. {shows} A blank place: the site has no "
    )
    words += "more of that class. Bars: examples by class."
    page.section("What each site sees").text(words + _more(people))
    page.legend(people.classes)
    page.pictures([_picture(people, site, seen[site], png, positive, shows) for site, png in sheets.items()])


def _more(people: Population) -> str:
    more = len(people.sites) - SHOWN_SITES
    return (
        f" The first {SHOWN_SITES} sites are shown; there {'is' if more == 1 else 'are'} {more} more."
        if more > 0
        else ""
    )


def _picture(people: Population, site: str, seen: Seen, png: bytes, positive: str | None, shows: str) -> Picture:
    names = "RGB" if len(seen.means) == 3 else ("Grey",)
    pairs = zip(names, seen.means, seen.spreads, strict=True)
    colour_words = "Mean and spread: " + ", ".join(f"{name} {mean:.2f} ± {spread:.2f}" for name, mean, spread in pairs)
    mean = [round(255 * min(max(value, 0.0), 1.0)) for value in seen.means]
    red, green, blue = mean if len(mean) == 3 else mean * 3
    bars = [
        Bar(f"{SPLITS[split].capitalize()} {sum(counts):,}", list(zip(people.classes, counts, strict=True)))
        for split, counts in seen.counts.items()
        if sum(counts)
    ]
    words = [seen.acquisition] if seen.acquisition else []
    words.append(counts_words(people.classes, seen.counts["train"], positive))
    return Picture(
        site, png, f"Training images of {site}. {shows}", words,
        colour=(red, green, blue), colour_words=colour_words, bars=bars,
    )  # fmt: skip


def _colours(page: Page, people: Population, seen: Mapping[str, Seen]) -> None:
    shown = {site: seen[site] for site in people.sites[:SHOWN_SITES]}
    page.section("How the sites' images differ")
    means = {site: (one.means, one.spreads) for site, one in shown.items()}
    page.figure(
        to_svg(channel_means(means), "means"),
        "Mean of every channel, and one standard deviation to each side. With the same scanner everywhere, the dots of a panel would stand below each other.",
        wide=True,
    )
    histograms = {site: one.histograms for site, one in shown.items()}
    page.figure(
        to_svg(channel_histograms(histograms), "histograms"),
        "How often each brightness occurs, by channel; a line a site. Lines apart: a model that learnt one site's colours "
        f"meets others elsewhere. Measured on at most {LOOKED_AT:,} training images a site.",
        wide=True,
    )


def _points(page: Page, people: Population, seen: Mapping[str, Seen]) -> None:
    words = "Training points of each site, on the same axes." + _more(people)
    page.section("What each site sees").text(words)
    if len(people.shape) == 1 and people.shape[0] >= 2:
        drawn = {site: sample(people, site, LOOKED_AT) for site in people.sites[:SHOWN_SITES]}
        caption = "Training points by class" + (", first two coordinates." if people.shape[0] > 2 else ".")
        page.figure(to_svg(scatters(people.classes, drawn), "points"), caption, wide=True)
    described = [[site, one.acquisition] for site, one in seen.items() if one.acquisition]
    if described:
        page.table([Column("Site"), Column("How it differs")], described)


def _counts(page: Page, people: Population, seen: Mapping[str, Seen]) -> None:
    page.section("How much each site holds")
    drawn = class_counts(people.classes, {site: one.counts["train"] for site, one in seen.items()})
    page.figure(to_svg(drawn, "counts"), "Training examples of every class at each site.", wide=_is_wide(drawn))
    splits = [split for split in SPLITS_IN_ORDER if any(sum(one.counts[split]) for one in seen.values())]
    rows = [[site, *(whole(sum(one.counts[split])) for split in splits)] for site, one in seen.items()]
    page.table([Column("Site"), *(Column(SPLITS[split].capitalize(), True) for split in splits)], rows, "Examples")
    if people.skipped:
        page.details(f"{count_of(len(people.skipped), 'note')} on what was left out", "\n".join(people.skipped))


def _is_wide(figure: Figure) -> bool:
    return bool(figure.get_figwidth() > HALF[0])


# What a preview draws: colours of sites beside each other, or points of the plane.

BINS = 48
CHANNELS: Mapping[int, Sequence[tuple[str, str]]] = {
    3: (("Red", "#c9505f"), ("Green", "#3f9e6d"), ("Blue", "#3f7fc1")),
    1: (("Grey", "#7d8a97"),),
}


@styled()
def channel_means(sites: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """site -> (means, spreads) in [0, 1]; a panel a channel, a row a site."""
    channels = CHANNELS[len(next(iter(sites.values()))[0])]
    figure, panels = _panels(1, len(channels), (WIDE[0], 0.9 + 0.3 * len(sites)))
    for at, ((name, colour), axes) in enumerate(zip(channels, panels, strict=True)):
        for row, (means, spreads) in enumerate(sites.values()):
            edges = [max(means[at] - spreads[at], 0), min(means[at] + spreads[at], 1)]
            axes.plot(edges, [row, row], color=colour, alpha=0.35, linewidth=4, solid_capstyle="butt")
            axes.plot(means[at], row, marker="o", markersize=6, color=colour, linestyle="")
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_yticks(range(len(sites)), [shorten(site, 22) if not at else "" for site in sites], parse_math=False)
        axes.set_ylim(len(sites) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
    return figure


@styled()
def channel_histograms(sites: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """site -> channel -> shares of BINS bins over [0, 1]."""
    channels = CHANNELS[len(next(iter(sites.values())))]
    figure, panels = _panels(1, len(channels), (WIDE[0], 3.1))
    middles = [(at + 0.5) / BINS for at in range(BINS)]
    for at, ((name, _), axes) in enumerate(zip(channels, panels, strict=True)):
        for nth, (site, histograms) in enumerate(sites.items()):
            axes.plot(
                middles, [100 * share for share in histograms[at]], color=PALETTE[nth % len(PALETTE)], linewidth=1.5,
                linestyle=("-", "--")[nth % 2], label=None if at else shorten(site, 22),
            )  # fmt: skip
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_xlim(*_reach(sites.values()))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Brightness")
    panels[0].set_ylabel("Pixels, %")
    figure.legend(loc="outside lower center", ncols=min(len(sites), 6))
    return figure


@styled()
def scatters(classes: Sequence[str], sites: Mapping[str, tuple[Any, Any]]) -> Figure:
    """site -> x (n, 2 or more), y (n,); a panel a site."""
    columns = min(len(sites), 4)
    rows = math.ceil(len(sites) / columns)
    figure, panels = _panels(rows, columns, (WIDE[0], 0.6 + 2.5 * rows), share_up=True)
    for axes, (site, (x, y)) in zip(panels, sites.items(), strict=False):
        for label, name in enumerate(classes):
            mine = x[y == label]
            axes.plot(
                mine[:, 0], mine[:, 1], color=PALETTE[label % len(PALETTE)], linestyle="", marker="os^Dv"[label % 5],
                markersize=3, alpha=0.6, markeredgewidth=0, label=shorten(name) if axes is panels[0] else None,
            )  # fmt: skip
        axes.set_title(shorten(site, 24), fontsize=9.5, loc="left", parse_math=False)
    for axes in panels[len(sites) :]:
        axes.set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(classes), 6), labelcolor=INK)
    return figure


def _reach(sites: Iterable[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The brightness that occurs at all, the same for every panel."""
    used = [at for histograms in sites for shares in histograms for at, share in enumerate(shares) if share > 0.001]
    return (min(used) / BINS, (max(used) + 1) / BINS) if used else (0.0, 1.0)


def _panels(rows: int, columns: int, size: tuple[float, float], share_up: bool = False) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=share_up, squeeze=False)
    return figure, list(grid.flat)
