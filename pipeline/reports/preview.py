"""A study's simulated sites before anything is trained: what each holds, how it sees, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.reports import preview_figures
from pipeline.reports.cell_sections import counts_words
from pipeline.reports.cells import SHOWN_SITES, contact_sheets, grid_of, is_images
from pipeline.reports.figures import class_counts
from pipeline.reports.page import Bar, Column, Page, Picture
from pipeline.reports.svg import HALF, to_svg
from pipeline.reports.words import SPLITS, count_of, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipeline.study import Study
    from sites.build import Population

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
    histograms: list[list[float]]  # of images: a channel's values, shares of preview_figures.BINS bins
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
        counted = [np.histogram(values[:, c], preview_figures.BINS, (0, 1))[0] for c in range(values.shape[1])]
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
        to_svg(preview_figures.channel_means(means), "means"),
        "Mean of every channel, and one standard deviation to each side. With the same scanner everywhere, the dots of a panel would stand below each other.",
        wide=True,
    )
    histograms = {site: one.histograms for site, one in shown.items()}
    page.figure(
        to_svg(preview_figures.channel_histograms(histograms), "histograms"),
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
        page.figure(to_svg(preview_figures.scatters(people.classes, drawn), "points"), caption, wide=True)
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
