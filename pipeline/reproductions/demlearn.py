"""DemLearn: specialisation and generalisation of site, group and top models, beside FedAvg and FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

NAME = "demlearn"
ABOUT = "DemLearn, 50 sites with two classes each: specialisation and generalisation beside FedAvg and FedProx"
STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},
    "DemLearn": {"name": "demlearn"},
}
LEVELS = {"site": "own", "group": "group", "top": "global"}


def run(context: Context) -> Reproduction:
    done = {label: context.run("demlearn", label.lower(), strategy=s) for label, s in STRATEGIES.items()}
    scores: dict[str, tuple[float, float]] = {
        label: (last["pooled"]["accuracy"], last["coordinator"]["accuracy"])
        for label in ("FedAvg", "FedProx")
        for last in [_last(done[label])]
    }
    last = _last(done["DemLearn"])
    scores |= {f"DemLearn, {level}": (special(last, level), general(last, level)) for level in LEVELS}
    rows = [[label, f"{100 * own:.2f}", f"{100 * others:.2f}"] for label, (own, others) in scores.items()]
    looks = [line for line in done["DemLearn"].rounds if line["metrics"]]
    rounds = [line["round"] for line in looks]
    lines = [
        Series(
            f"{level}, {name}",
            rounds,
            [score(line["metrics"]["test"], level) for line in looks],
            dashed=dashed,
            colour=colour,
        )
        for colour, level in zip(PALETTE, LEVELS, strict=False)
        for name, score, dashed in (("own data", special, False), ("all data", general, True))
    ]
    others = [
        Series(label, done[label].judged_rounds(), done[label].curve("test"), colour=colour)
        for colour, label in zip(PALETTE, ("FedAvg", "FedProx"), strict=False)
    ]
    others.append(
        Series("DemLearn, top", rounds, [general(line["metrics"]["test"], "top") for line in looks], colour=PALETTE[2])
    )
    site, avg, top = scores["DemLearn, site"], scores["FedAvg"], scores["DemLearn, top"]
    return Reproduction(
        payload={label: {"specialisation": round(100 * a, 2), "generalisation": round(100 * b, 2)} for label, (a, b) in scores.items()},
        notes=[
            "Specialisation: on the sites' own test images, pooled; generalisation: on all 10,000 test images, mean over the models of a level. FedAvg and FedProx have one model.",
            "One seed. The settings (three levels, alpha 0.5, mu 0.001, amplification 1.15 for five rounds, centroid linkage) are the defaults; nothing was tuned.",
        ],
        grids=[Grid("Test accuracy in per cent", ["model", "specialisation", "generalisation"], rows)],
        figures=[
            ("DemLearn by level: on own data (full) and on everybody's (dashed)", curves(lines, "Test accuracy", percent=True, wide=True)),
            ("The common model on everybody's data", curves(others, "Accuracy on all test data", percent=True)),
        ],
        checks=[
            Check("site models specialise: better on own data than FedAvg's model", site[0] > avg[0], f"{100 * (site[0] - avg[0]):+.2f} points"),
            Check("the top model generalises better than the site models", top[1] > site[1], f"{100 * (top[1] - site[1]):+.2f} points"),
            Check("the top model generalises no worse than FedAvg's, within 2 points", top[1] > avg[1] - 0.02, f"{100 * (top[1] - avg[1]):+.2f} points"),
        ],
    )  # fmt: skip


def _last(done: Run) -> Mapping[str, Any]:
    found: Mapping[str, Any] = [line for line in done.rounds if line["metrics"]][-1]["metrics"]["test"]
    return found


def special(judged: Mapping[str, Any], level: str) -> float:
    """On the sites' own examples."""
    seen = judged if LEVELS[level] == "own" else judged["views"][LEVELS[level]]
    return float(seen["pooled"]["accuracy"])


def general(judged: Mapping[str, Any], level: str) -> float:
    """On everybody's; the mean over the models of the level, of groups the lowest. At first there is the top model alone."""
    models = {name: m["accuracy"] for name, m in judged.get("models", {}).items() if name.startswith(f"{level}/")}
    lowest = [value for name, value in models.items() if not any(other.startswith(f"{name}.") for other in models)]
    return fmean(lowest) if lowest else float(judged["coordinator"]["accuracy"])
