"""What would leave a site if it took part in a study: what, how often, behind which protection, and who sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.probe.feature_names import TRAITS
from pipeline.aggregation.client_sampling import how_many
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, TEMPERATURES
from pipeline.study.offer import Offer
from pipeline.study.schema import Study

SPLITS = {"val": "validation", "test": "test", "train": "training"}
SEES = {
    "totals": "It needs sums over sites only, but without a secure sum it receives every site's update and adds them up itself.",
    "groups": "It receives every site's update, and learns which group each site is in.",
    "each": "It receives, compares and keeps every site's own update.",
}


@dataclass(frozen=True)
class Leaving:
    what: str
    when: str
    protection: str


def leaves(study: Study, numbers: int | None = None) -> Iterator[Leaving]:
    """`numbers`: of the model, if they are known; they follow from the images' size and the classes."""
    p, each = study.privacy, "each round"
    noise = "noise on what each patient adds" if p.at_site else ""
    mask = "masked: only the sum is seen" if p.secure_sum else ""
    guarded = "; ".join(filter(None, (noise, mask))) or "none"
    part = f" of {' and '.join(study.local.trains)}" if study.local.trains else ""
    size = f"{numbers:,} numbers" if numbers else "a number a weight"
    coded = "".join(f"; {codec.about}" for codec in study.up)
    counts = "number of images by split" + (", number of patients, noise" if p.at_site else "")
    yield Leaving(f"names of the classes, size of images, {counts}", "once, before the first round", "none")
    yield Leaving(f"model update: the change of the model's weights{part}, {size}{coded}", each, guarded)
    if not p.at_site:
        yield Leaving(
            "statistics of normalisation layers, if the model has them; mean training loss", each, mask or "none"
        )
    if not p.secure_sum:
        yield Leaving("number of training images, steps done, seconds taken", each, "none")
    if study.strategy.sees == "groups":
        yield Leaving("which group's model fits this site best", each, "none")
    if study.evaluation.where != "coordinator":
        often = f"every {study.evaluation.every} rounds" if study.evaluation.every > 1 else each
        scores = f"which classes were taken for which, loss, histograms of scores ({SCORE_BINS:,} and {CALIBRATION_BINS} bins; of few images nearly one by one)"
        for split in study.evaluation.watch:
            yield Leaving(f"scores on {SPLITS[split]} images: {scores}", often, "none")
        if "test" not in study.evaluation.watch:
            yield Leaving(f"scores on test images: {scores}", "once, at the end", "none")
        if study.evaluation.profile:
            yield Leaving(
                f"a profile of validation images, so that the model can be used at a bedside: their loss at {len(TEMPERATURES)} temperatures, sums "
                f"and products of at most {TRAITS} features, histograms of scores, distances, brightness, contrast, sharpness and colour",
                "twice, at the end",
                "none",
            )
    if p.at_site:
        yield Leaving("of the ledger: epsilon spent, salted hashes, budget, public keys", each, "tells of no patient")
    yield Leaving(
        "that this site takes part, its version and health, when it answers", "all the time", "tells of no patient"
    )


def seen(offer: Offer, study: Study) -> str:
    if study.privacy.secure_sum:
        from privacy.secure_aggregation.protocol import threshold

        asked = how_many(len(offer.sites), study.selection.fraction)
        return f"The sum of updates over at least {threshold(asked)} sites, and no single one; scores of every site."
    closer = "each" if "each" in (study.strategy.sees, study.combine.sees) else study.strategy.sees
    return SEES[closer]
