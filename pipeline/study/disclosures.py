"""What leaves a site during a study: the one list that the approval screen, the audit, the dashboard and docs/officer.md show.

It follows from the study alone, so an officer sees it before a run. The audit puts a run's numbers into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from models.probe.feature_names import MAX_FEATURES, QUALITY_MEASURES
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, TEMPERATURES
from pipeline.study.schema import Study

DisclosureKind = Literal[
    "data_summary",
    "update",
    "norm_stats",
    "loss",
    "weight",
    "work",
    "cluster",
    "scores/val",
    "scores/test",
    "scores/train",
    "profile",
    "personal_scores",
    "personal_model",
    "masks",
    "ledger",
    "decline",
    "presence",
    "status",
    "approval",
    "model",
    "final_model",  # this and the next two: only in the audit of a run
    "simulation",
    "baselines",
]
Protection = Literal["dp", "sum", "nothing", "unprotected"]  # nothing: it reveals nothing about a patient
PROTECTION_LABELS: Mapping[Protection, str] = {
    "dp": "differential privacy",
    "sum": "secure aggregation",
    "nothing": "nothing to protect",
    "unprotected": "unprotected",
}
SPLIT_NAMES = {"val": "validation", "test": "test", "train": "training"}
COORDINATOR = "the coordinator"
ONLY_SUM = "masked: only the sum is seen"
EVERY_ROUND = "every round"
EVERY_START = "when a run starts or resumes"
# the fields of an agent's heartbeat, in words; sites/agent/status.py sends no others
STATUS_TEXTS: Mapping[str, str] = {
    "state": "its state",
    "run": "the run in which it takes part",
    "flare": "whether its worker runs",
    "disk_free_gb": "free disk space",
    "versions": "versions of hemofed, Python, NVIDIA FLARE and torch",
    "warnings": "number of warnings",
}


@dataclass(frozen=True)
class Disclosure:
    kind: DisclosureKind
    content: str  # a title
    detail: str
    receiver: str
    subjects: str  # whom it is about
    protected_by: Protection
    reason: str  # how it is protected, or why not
    when: str

    @property
    def full_content(self) -> str:
        return f"{self.content}: {self.detail}" if self.detail else self.content


def list_disclosures(
    study: Study, num_weights: int | None = None, subjects_name: str = "patients"
) -> tuple[Disclosure, ...]:
    """`num_weights`: of the model; None if unknown, because it depends on the image size and the classes."""
    lists = (
        _data_disclosures(study, subjects_name),
        _training_disclosures(study, num_weights, f"training {subjects_name}"),
        _score_disclosures(study, subjects_name),
        _personal_disclosures(study, f"training {subjects_name}"),
        _protocol_disclosures(study),
        _model_disclosures(study, subjects_name),
    )
    return tuple(disclosure for disclosures in lists for disclosure in disclosures)


def _data_disclosures(study: Study, subjects_name: str) -> Iterator[Disclosure]:
    plan_text = (
        f"; the site's privacy plan: number of {subjects_name} or other privacy units, noise, sampling rate, steps, epsilon"
        if study.privacy.dp_sgd
        else ""
    )
    yield Disclosure(
        kind="data_summary",
        content="Data summary",
        detail="number of images for training, validation and testing; names of the classes; image size; name of the "
        f"privacy unit{plan_text}",
        receiver=COORDINATOR,
        subjects=f"all {subjects_name}",
        protected_by="unprotected",
        reason="unprotected; these numbers are treated as public",
        when=EVERY_START,
    )


def _training_disclosures(study: Study, num_weights: int | None, subjects: str) -> Iterator[Disclosure]:
    privacy = study.privacy
    masked: Protection = "sum" if privacy.secure_aggregation else "unprotected"
    masked_reason = ONLY_SUM if privacy.secure_aggregation else "unprotected"

    def every_round(
        kind: DisclosureKind, content: str, detail: str = "", protected_by: Protection = masked, reason: str = ""
    ) -> Disclosure:
        return Disclosure(
            kind=kind,
            content=content,
            detail=detail,
            receiver=COORDINATOR,
            subjects=subjects,
            protected_by=protected_by,
            reason=reason or masked_reason,
            when=EVERY_ROUND,
        )

    if study.strategy.update_text:
        yield every_round(
            "update",
            "Model update",
            _describe_update(study, num_weights),
            "dp" if privacy.dp_sgd else masked,
            _update_reason(study),
        )
    if not privacy.dp_sgd:
        if study.strategy.update_text:
            yield every_round("norm_stats", "Normalisation statistics", "if the model has such layers")
        yield every_round("loss", "Mean training loss")
    if privacy.secure_aggregation and study.weighting != "equal":
        yield every_round(
            "weight",
            "Number of training images",
            "as the site's weight",
            "unprotected",
            "unprotected: masked here, but the data summary states it",
        )
    if not privacy.secure_aggregation:
        yield every_round(
            "weight",
            "Number of training images",
            "" if study.weighting == "equal" else "as the site's weight",
            reason="unprotected; treated as public",
        )
        yield every_round(
            "work",
            "Steps and seconds of training",
            reason="unprotected: the time depends on how many images were sampled",
        )
    if study.strategy.visibility == "groups":
        yield every_round(
            "cluster", "Cluster", "which cluster's model fits the site's images best", "unprotected", "unprotected"
        )


def _describe_update(study: Study, num_weights: int | None) -> str:
    trainable_text = f" of {' and '.join(study.local.trainable)}" if study.local.trainable else ""
    size_text = f"{num_weights:,} numbers" if num_weights else "one number for each weight"
    codecs_text = "".join(f"; {codec.summary}" for codec in study.uplink_codecs)
    return f"{study.strategy.update_text}{trainable_text}, {size_text}{codecs_text}"


def _update_reason(study: Study) -> str:
    noise_text = "noise on what each patient adds" if study.privacy.dp_sgd else ""
    masking_text = ONLY_SUM if study.privacy.secure_aggregation else ""
    return "; ".join(filter(None, (noise_text, masking_text))) or "unprotected"


def _score_disclosures(study: Study, subjects_name: str) -> Iterator[Disclosure]:
    evaluation = study.evaluation
    if evaluation.evaluate_at == "coordinator":
        return
    frequency = f"every {evaluation.every} rounds" if evaluation.every > 1 else EVERY_ROUND
    detail = (
        f"confusion matrix, loss, histograms of scores ({SCORE_BINS:,} and {CALIBRATION_BINS} bins; with few images, "
        "almost single scores)"
    )
    kinds: Mapping[str, DisclosureKind] = {"val": "scores/val", "test": "scores/test", "train": "scores/train"}
    for split in dict.fromkeys([*evaluation.splits, "test"]):
        yield Disclosure(
            kind=kinds[split],
            content=f"Scores on {SPLIT_NAMES[split]} images",
            detail=detail,
            receiver=COORDINATOR,
            subjects=f"{SPLIT_NAMES[split]} {subjects_name}",
            protected_by="unprotected",
            reason="unprotected",
            when=frequency if split in evaluation.splits else "once, at the end",
        )
    if evaluation.validation_profile:
        yield Disclosure(
            kind="profile",
            content="Validation profile",
            detail=f"with which the model can be used on new slides: loss of validation images at {len(TEMPERATURES)} "
            f"temperatures, sums and products of at most {MAX_FEATURES} features, histograms of scores, distances and "
            f"{len(QUALITY_MEASURES)} measures of the images, such as brightness and sharpness",
            receiver=f"{COORDINATOR}; the totals of an exported model: anyone who receives its bundle",
            subjects=f"validation {subjects_name}",
            protected_by="unprotected",
            reason="unprotected",
            when="twice, at the end",
        )


def _personal_disclosures(study: Study, subjects: str) -> Iterator[Disclosure]:
    if not (study.strategy.personalized or study.strategy.result_in_client_states):
        return
    reason = "unprotected: what a site trains for itself may be trained without noise"
    if study.evaluation.evaluate_at != "coordinator":
        yield Disclosure(
            kind="personal_scores",
            content="Scores of the personalized model",
            detail="the scores above are those of a model that the site adapted to its own images",
            receiver=COORDINATOR,
            subjects=subjects,
            protected_by="unprotected",
            reason=reason,
            when="with the scores",
        )
    yield Disclosure(
        kind="personal_model",
        content="Personalized model",
        detail="it stays at the site; nothing is promised if it is given to anyone",
        receiver="no one outside the site",
        subjects=subjects,
        protected_by="unprotected",
        reason=reason,
        when="never",
    )


def _protocol_disclosures(study: Study) -> Iterator[Disclosure]:
    """About the site: they follow from the study, and from numbers treated as public."""

    def about_site(
        kind: DisclosureKind,
        content: str,
        detail: str,
        when: str,
        reason: str = "nothing to protect: it says nothing about a patient",
    ) -> Disclosure:
        return Disclosure(
            kind=kind,
            content=content,
            detail=detail,
            receiver=COORDINATOR,
            subjects="the site",
            protected_by="nothing",
            reason=reason,
            when=when,
        )

    if study.privacy.secure_aggregation:
        yield about_site(
            "masks",
            "Keys of the masks",
            "public keys, encrypted shares of secrets, and the shares that remove the masks from the sum",
            EVERY_ROUND,
            "nothing to protect: random numbers; fewer than the threshold of sites cannot unmask an update",
        )
    reason = "nothing to protect: it follows from the study and from numbers treated as public"
    if study.privacy.dp_sgd:
        yield about_site(
            "ledger",
            "Ledger",
            "epsilon spent so far, hashes of the entries, the opening entry with budget, privacy unit, data set and keys, "
            "changes of keys",
            EVERY_ROUND,
            f"{reason}; the hashes are salted",
        )
    yield about_site(
        "decline",
        "Declined round",
        "that the site sits a round out and why: late, no permission, no budget, an error in words without file names",
        "when it happens",
        reason,
    )
    yield Disclosure(
        kind="presence",
        content="Participation",
        detail="that the site exists, takes part, and when it answers",
        receiver=f"{COORDINATOR} and the other sites",
        subjects="the site",
        protected_by="unprotected",
        reason="unprotected",
        when="always",
    )
    yield about_site("status", "Status of the agent", ", ".join(STATUS_TEXTS.values()), "always")
    yield about_site(
        "approval",
        "Approval",
        "that the officer approved or revoked the study, when, until when, and the fingerprint of the officer's key",
        "after each decision",
    )


def _model_disclosures(study: Study, subjects_name: str) -> Iterator[Disclosure]:
    privacy = study.privacy
    protected_by: Protection = "unprotected"
    reason = "unprotected"
    if privacy.dp_sgd:
        protected_by = "dp"
        reason = f"computed only from noised updates: no further epsilon is spent on training {subjects_name}"
    elif privacy.client_level_dp:
        protected_by, reason = "dp", "computed only from noised sums: no further epsilon is spent on the sites"
    yield Disclosure(
        kind="model",
        content="Models of all rounds",
        detail="computed from the updates",
        receiver="all sites",
        subjects=f"training {subjects_name}",
        protected_by=protected_by,
        reason=reason,
        when=EVERY_ROUND,
    )
