"""The decision boundary of a saved model on the plane, with one site's test points."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.reports.svg import PALETTE, new_figure, styled
from pipeline.run_folder import RunFolder
from pipeline.scoring import load_model
from sites.build import populate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 200


@styled()
def boundary(run: Path, title: str, site: int | None = None) -> Figure:
    """`site`: whose points to show; all sites' if not given."""
    folder = RunFolder(run)
    module, _ = load_model(folder, "global")
    people = populate(folder.study(), None, torch.device("cpu"))
    shown = people.sites if site is None else people.sites[site : site + 1]
    rows = torch.cat([people.examples[s].test for s in shown])
    points, labels = people.pool.x[rows].numpy(), people.pool.y[rows].numpy()
    low, high = points.min(0) - 0.4, points.max(0) + 0.4
    across, up = np.meshgrid(np.linspace(low[0], high[0], GRID), np.linspace(low[1], high[1], GRID))
    with torch.inference_mode():
        grid = torch.from_numpy(np.stack([across.ravel(), up.ravel()], 1)).float()
        chance = module(grid).softmax(1)[:, 1].numpy().reshape(GRID, GRID)
    figure, axes = new_figure()
    axes.contourf(across, up, chance, levels=[0, 0.5, 1], colors=[PALETTE[0], PALETTE[1]], alpha=0.25)
    axes.contour(across, up, chance, levels=[0.5], colors=[PALETTE[2]])
    for label, name in enumerate(people.classes):
        mine = points[labels == label]
        axes.scatter(mine[:, 0], mine[:, 1], s=12, color=PALETTE[label], label=name)
    axes.set_title(title)
    axes.legend()
    return figure
