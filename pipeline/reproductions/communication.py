"""Rounds to a target accuracy: FedSGD, FedAvg with one and with five local epochs (lecture; there MNIST)."""

from __future__ import annotations

from typing import Any

from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction

NAME = "communication"
ABOUT = "Rounds to a target accuracy with the 2NN: FedSGD, E=1 B=10, E=5 B=10 (lecture; other data)"
PUBLISHED = {"FedSGD": 1000, "E=1, B=10": 300, "E=5, B=10": 50}  # MNIST 2NN IID, indicative
SETTINGS: dict[str, dict[str, Any]] = {
    # FedSGD's rate is the best of 0.2, 0.5 and 1 after 120 rounds; a step on ten images has to be shorter
    "FedSGD": {"strategy": {"name": "fedsgd"}, "local__batch": "all", "local__lr": 0.2},
    "E=1, B=10": {"local__epochs": 1, "local__lr": 0.05},
    "E=5, B=10": {"local__epochs": 5, "local__lr": 0.05},
}


def run(context: Context) -> Reproduction:
    runs = {
        label: context.run("communication", label.replace(", ", "-").replace("=", ""), **s)
        for label, s in SETTINGS.items()
    }
    rounds = {label: int(r.results["rounds"]) for label, r in runs.items()}
    missed = [label for label, r in runs.items() if not str(r.results["stopped"]).startswith("target")]
    slow = rounds["FedSGD"]
    rows = [
        [
            label,
            f"more than {n}" if label in missed else str(n),
            f"{slow / n:.1f}x",
            str(PUBLISHED[label]),
            f"{PUBLISHED['FedSGD'] / PUBLISHED[label]:.1f}x",
        ]
        for label, n in rounds.items()
    ]
    lines = [Series(label, r.judged_rounds(), r.curve("test")) for label, r in runs.items()]
    return Reproduction(
        payload=dict(rounds),
        notes=["The lecture's figures are MNIST; these are Fashion-MNIST: other data, another target (85 % test accuracy)."],
        grids=[Grid("Rounds to 85 % test accuracy", ["setting", "rounds", "saving", "lecture (MNIST)", "its saving"], rows)],
        figures=[("Test accuracy by round", curves(lines, "Test accuracy", percent=True, wide=True))],
        checks=[
            Check("local work saves rounds: FedSGD > E=1 > E=5", slow > rounds["E=1, B=10"] > rounds["E=5, B=10"],
                  " > ".join(map(str, rounds.values()))),
        ],
    )  # fmt: skip
