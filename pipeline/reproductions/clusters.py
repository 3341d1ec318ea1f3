"""Planted populations: do IFCA, CFL, similarity clustering and DemLearn find them again, and does it help?"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from pipeline.reports.figures import Series, curves
from pipeline.reports.svg import PALETTE
from pipeline.reproductions.base import Check, Context, Grid, Reproduction, Run

NAME = "clusters"
ABOUT = "Eight sites of two planted populations (upside down, inverted, two stains): who finds them, and does it help?"
PLANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "upside down": ("clusters", {"skew": {"name": "views", "kinds": ["as_is", "turned_180"]}}),
    "inverted": ("clusters", {"skew": {"name": "views", "kinds": ["as_is", "inverted"]}}),
    "two stains": ("stains", {}),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ifca": {"name": "ifca", "k": 2, "warmup": 5},
    "cfl": {"name": "cfl"},
    "similarity": {"name": "similarity", "k": 2, "every": 5},
    "demlearn": {"name": "demlearn", "levels": 2, "alpha": 0.1, "amplify": 1.0},
}


def run(context: Context) -> Reproduction:
    rows, checks, lines, payload = [], [], [], {}
    for plant, (study, settings) in PLANTS.items():
        base = context.run(study, f"{plant.replace(' ', '-')}-fedavg", strategy={"name": "fedavg"}, **settings)
        metric = "positive_auroc" if study == "stains" else "accuracy"
        common = score(base, metric)
        rows.append([plant, "fedavg", "–", f"{100 * common:.2f}", ""])
        lines.append(
            Series(f"{plant}, fedavg", base.judged_rounds(), base.curve("test", metric, "pooled"), dashed=True)
        )
        for name, strategy in ALGORITHMS.items():
            done = context.run(study, f"{plant.replace(' ', '-')}-{name}", strategy=strategy, **settings)
            rand, reached = agreement(done), score(done, metric)
            payload[f"{plant}, {name}"] = {"rand": rand, metric: round(reached, 4), "fedavg": round(common, 4)}
            rows.append([plant, name, f"{rand:.2f}", f"{100 * reached:.2f}", f"{100 * (reached - common):+.2f}"])
            checks.append(
                Check(f"{plant}: {name} finds the planted groups", rand == 1.0, f"adjusted Rand index {rand:.2f}")
            )
            checks.append(
                Check(
                    f"{plant}: {name} beats one common model",
                    reached > common,
                    f"{100 * (reached - common):+.2f} points",
                )
            )
    iid = context.run("clusters", "iid-cfl", strategy={"name": "cfl"}, skew={"name": "none"})
    groups = set(iid.rounds[-1]["groups"].values())
    checks.append(Check("on data without populations CFL does not split", len(groups) == 1, f"{len(groups)} group"))
    colours = dict(zip(PLANTS, PALETTE, strict=False))
    lines = [Series(s.label, s.rounds, s.values, dashed=True, colour=colours[s.label.partition(",")[0]]) for s in lines]
    lines += [
        Series(f"{plant}, similarity", r.judged_rounds(), r.curve("test", "accuracy", "pooled"), colour=colours[plant])
        for plant, (study, settings) in PLANTS.items()
        for r in [
            context.run(study, f"{plant.replace(' ', '-')}-similarity", strategy=ALGORITHMS["similarity"], **settings)
        ]
        if study == "clusters"
    ]
    return Reproduction(
        payload=payload,
        notes=[
            "Fashion-MNIST: 1,000 images a site, an MLP, 30 rounds, accuracy. Stains: rendered cells, a CNN, AUROC of schistocytes, mean over the sites. One seed.",
            "DemLearn is judged by its group models. IFCA begins with five rounds of one common model: from random starts, as its paper has it, all sites stayed with one model on the inverted images.",
        ],
        grids=[Grid("Planted populations", ["planted", "algorithm", "Rand index", "score", "to FedAvg"], rows)],
        figures=[("Accuracy at the sites by round", curves([s for s in lines if "stains" not in s.label], "Test accuracy", percent=True, wide=True))],
        checks=checks,
    )  # fmt: skip


def agreement(done: Run) -> float:
    """Adjusted Rand index of the last groups and the planted ones, which alternate from site to site."""
    from sklearn.metrics import adjusted_rand_score

    groups: Mapping[str, str] = done.rounds[-1]["groups"]
    sites = sorted(groups)
    return float(adjusted_rand_score([n % 2 for n in range(len(sites))], [groups[site] for site in sites]))


def score(done: Run, metric: str) -> float:
    """At the sites, of the groups' models; AUROC is a mean over sites, for scores of several models have no common order."""
    test = done.results["test"]
    seen = test["views"]["group"] if "group" in test.get("views", {}) else test
    if metric == "accuracy":
        return float(seen["pooled"]["accuracy"])
    values = [m[metric] for m in seen["sites"].values() if m.get(metric) is not None]
    return float(fmean(values))
