"""Test accuracy of FedAvg on Fashion-MNIST by round, for three ways to deal the images to ten sites."""

from __future__ import annotations

from typing import Any

from pipeline.reports.figures import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, reference

NAME = "fashion-mnist-table"
ABOUT = "FedAvg, 10 sites, 10 rounds, 20 local epochs: IID, 5 classes a site, 1 class a site (thesis table)"
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partition": {"name": "iid"}},
    "classes_per_site=5": {"partition": {"name": "classes", "per_site": 5}},
    "classes_per_site=1": {"partition": {"name": "classes", "per_site": 1}},
}
TOLERANCE = {"iid": 1.5, "classes_per_site=5": 2.0, "classes_per_site=1": 3.0}  # points, from round 2 on


def run(context: Context) -> Reproduction:
    published = {
        row["partition"]: [float(row[f"r{t}"]) for t in range(11)] for row in reference("fashion_mnist_fedavg.csv")
    }
    ours = {}
    for partition, overrides in PARTITIONS.items():
        curve = context.run("fashion-mnist-table", partition.replace("=", "-"), **overrides).curve("test")
        ours[partition] = [round(100 * accuracy, 2) for accuracy in curve]
    rows, checks, lines = [], [], []
    for partition, theirs in published.items():
        mine = ours[partition]
        apart = [a - b for a, b in zip(mine, theirs, strict=True)]
        rows += [[partition, "ours", *(f"{v:.2f}" for v in mine)], ["", "published", *(f"{v:.2f}" for v in theirs)],
                 ["", "difference", *(f"{v:+.2f}" for v in apart)]]  # fmt: skip
        worst = max(map(abs, apart[2:]))
        claim = f"{partition}: every round from 2 on within {TOLERANCE[partition]} points"
        checks.append(Check(claim, worst <= TOLERANCE[partition], f"largest difference {worst:.2f}"))
        lines.append(Series(partition, range(11), [v / 100 for v in mine]))
        lines.append(Series(f"{partition}, published", range(11), [v / 100 for v in theirs], dashed=True))
    figure = curves(lines, "Test accuracy by round", percent=True, wide=True)
    return Reproduction(
        payload=ours,
        notes=[
            "The published runs are single and unseeded, from other initial weights; rounds 0 and 1 depend on those."
        ],
        grids=[Grid("Test accuracy in per cent", ["partition", "", *(f"r{t}" for t in range(11))], rows)],
        figures=[("Accuracy on the coordinator's 10,000 test images", figure)],
        checks=checks,
    )
