"""The data that leave a site during a study: what, how often, with which protection, and who sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.probe.feature_names import MAX_FEATURES
from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, TEMPERATURES
from pipeline.study.offer import StudyOffer
from pipeline.study.schema import Study

SPLIT_NAMES = {"val": "validation", "test": "test", "train": "training"}
VISIBILITY_TEXT = {
    "totals": "It needs only sums over sites, but without secure aggregation it receives every site's update and adds them up itself.",
    "groups": "It receives every site's update, and learns the cluster of each site.",
    "each": "It receives, compares and keeps every site's own update.",
}


@dataclass(frozen=True)
class Disclosure:
    what: str
    when: str
    protection: str


def list_disclosures(study: Study, num_weights: int | None = None) -> Iterator[Disclosure]:
    """`num_weights`: of the model; None if unknown, because it depends on the image size and the classes."""
    privacy, every_round = study.privacy, "each round"
    noise_text = "noise on what each patient adds" if privacy.dp_sgd else ""
    masking_text = "masked: only the sum is seen" if privacy.secure_aggregation else ""
    protection = "; ".join(filter(None, (noise_text, masking_text))) or "none"
    trainable_text = f" of {' and '.join(study.local.trainable)}" if study.local.trainable else ""
    size_text = f"{num_weights:,} numbers" if num_weights else "one number for each weight"
    compression_text = "".join(f"; {codec.description}" for codec in study.uplink_codecs)
    counts_text = "number of images by split" + (", number of patients, noise" if privacy.dp_sgd else "")
    yield Disclosure(f"names of the classes, size of images, {counts_text}", "once, before the first round", "none")
    yield Disclosure(
        f"model update: the change of the model's weights{trainable_text}, {size_text}{compression_text}",
        every_round,
        protection,
    )
    if not privacy.dp_sgd:
        yield Disclosure(
            "statistics of normalisation layers, if the model has them; mean training loss",
            every_round,
            masking_text or "none",
        )
    if not privacy.secure_aggregation:
        yield Disclosure("number of training images, steps done, seconds taken", every_round, "none")
    if study.strategy.visibility == "groups":
        yield Disclosure("which cluster's model fits this site best", every_round, "none")
    if study.evaluation.evaluate_at != "coordinator":
        frequency = f"every {study.evaluation.every} rounds" if study.evaluation.every > 1 else every_round
        scores_text = f"confusion matrix, loss, histograms of scores ({SCORE_BINS:,} and {CALIBRATION_BINS} bins; with few images, almost single scores)"
        for split in study.evaluation.splits:
            yield Disclosure(f"scores on {SPLIT_NAMES[split]} images: {scores_text}", frequency, "none")
        if "test" not in study.evaluation.splits:
            yield Disclosure(f"scores on test images: {scores_text}", "once, at the end", "none")
        if study.evaluation.validation_profile:
            yield Disclosure(
                f"a profile of validation images, with which the model can be used on new slides: their loss at {len(TEMPERATURES)} temperatures, "
                f"sums and products of at most {MAX_FEATURES} features, histograms of scores, distances, brightness, contrast, sharpness and colour",
                "twice, at the end",
                "none",
            )
    if privacy.dp_sgd:
        yield Disclosure(
            "from the ledger: epsilon spent, salted hashes, budget, public keys", every_round, "no patient data"
        )
    yield Disclosure(
        "that this site takes part, its version, status and response times", "continuously", "no patient data"
    )


def describe_coordinator_view(offer: StudyOffer, study: Study) -> str:
    """Whether the coordinator sees single updates or only their sum."""
    if study.privacy.secure_aggregation:
        from privacy.secure_aggregation.shamir import reconstruction_threshold

        num_sampled = num_sampled_clients(len(offer.site_keys), study.client_sampling.fraction)
        return f"The sum of updates over at least {reconstruction_threshold(num_sampled)} sites, and no single update; scores of every site."
    visibility = (
        "each" if "each" in (study.strategy.visibility, study.aggregation.visibility) else study.strategy.visibility
    )
    return VISIBILITY_TEXT[visibility]
