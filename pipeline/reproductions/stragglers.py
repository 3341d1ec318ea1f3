"""FedAvg against FedProx when 0, 50 and 90 % of the asked sites run out of time (lecture; there FEMNIST, here other data)."""

from __future__ import annotations

from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.curves import Series, curves
from pipeline.reproductions.base import Check, Context, Grid, Reproduction

NAME = "stragglers"
ABOUT = "FedAvg against FedProx at 0, 50 and 90 % stragglers, two classes a site (lecture; other data)"
PUBLISHED = {"fedavg": {0: 95.2, 50: 91.1, 90: 82.3}, "fedprox": {0: 95.4, 50: 94.8, 90: 93.5}}  # FEMNIST, indicative
STRATEGIES = {"fedavg": {"name": "fedavg"}, "fedprox": {"name": "fedprox", "mu": 0.1}}
LAST = 5  # looks that a final accuracy is the mean of: with few sites a round single rounds jump


def run(context: Context) -> Reproduction:
    ours: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    lines = []
    for colour, share in zip(PALETTE, (0, 50, 90), strict=False):
        for name, strategy in STRATEGIES.items():
            done = context.run("stragglers", f"{name}-{share}", strategy=strategy, sites__stragglers=share / 100)
            curve = done.curve("test")
            ours[name][share] = 100 * fmean(curve[-LAST:])
            lines.append(
                Series(
                    f"{name}, {share} % stragglers", done.judged_rounds(), curve, dashed=name == "fedavg", colour=colour
                )
            )
    gap = ours["fedprox"][90] - ours["fedavg"][90]
    loss = {name: ours[name][0] - ours[name][90] for name in STRATEGIES}
    rows = [
        [f"{share} %", *(f"{t[n][share]:.2f}" for n in STRATEGIES for t in (ours, PUBLISHED))] for share in (0, 50, 90)
    ]
    return Reproduction(
        payload={name: {str(k): round(v, 2) for k, v in by.items()} for name, by in ours.items()},
        notes=[
            "The lecture's figures are FEMNIST; these are Fashion-MNIST, 100 sites with two classes each, ten asked a round: other data, so only the ordering can be compared.",
            f"Accuracy is the mean of the last {LAST} looks. FedAvg drops who is late, FedProx (mu 0.1) counts partial work.",
        ],
        grids=[Grid("Test accuracy in per cent", ["stragglers", "FedAvg", "lecture (FEMNIST)", "FedProx", "lecture (FEMNIST)"], rows)],
        figures=[("Accuracy on the coordinator's test images", curves(lines, "Test accuracy", percent=True, wide=True))],
        checks=[
            Check("at 90 % stragglers FedProx is ahead of FedAvg", gap > 0, f"{gap:+.2f} points"),
            Check("stragglers cost FedAvg more than FedProx", loss["fedavg"] > loss["fedprox"],
                  f"from 0 to 90 %: FedAvg loses {loss['fedavg']:.2f}, FedProx {loss['fedprox']:.2f} points"),
        ],
    )  # fmt: skip
