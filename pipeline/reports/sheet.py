"""A page whose figures are also saved as pictures, and the words that its sections share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.reports.page import Page
from pipeline.reports.svg import HALF, save_png, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COORDINATOR = "Coordinator's set"
POOLED = "All sites, pooled"


@dataclass(frozen=True)
class Sheet:
    page: Page
    plots: Path

    def draw(self, key: str, figure: Figure, caption: str) -> None:
        save_png(figure, self.plots / f"{key}.png")
        self.page.figure(to_svg(figure, key), caption, wide=figure.get_figwidth() > HALF[0])
