"""The facts of an audit, as audit.json has them: frozen records. A value that is unknown is None.

docs/schemas/audit.json is their JSON Schema; after a change here run tools/write_audit_schema.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, PlainSerializer, computed_field

from pipeline.protocol.messages import ClientFailure
from pipeline.records.privacy_record import PrivacyPlanRecord, SecureAggregationRecord
from pipeline.study.disclosures import Disclosure
from privacy.audit.attack_findings import AttackFindings
from privacy.ledger.records import ChargeRefused, CosignerConsent, DatasetSnapshot, LedgerBudget, PrivacyCharge


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


# JSON has no infinity: it is null there
NullIfInfinite = Annotated[float, PlainSerializer(_finite_or_none, when_used="json")]
MaybeInfinite = Annotated[NullIfInfinite, BeforeValidator(lambda value: math.inf if value is None else value)]


class AuditPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EpsilonByAccountant(AuditPart):
    rdp: MaybeInfinite  # Rényi divergences, by Opacus
    pld: MaybeInfinite  # privacy loss distributions, by dp_accounting
    dp_accounting: MaybeInfinite  # Rényi divergences, by dp_accounting


class RecomputedEpsilon(AuditPart):
    """Epsilon of all charges of a ledger, recomputed from them alone."""

    by_accountant: EpsilonByAccountant
    epsilon: NullIfInfinite | None  # by the ledger's own rule; None if the rule cannot be applied
    accountant: str | None
    problems: tuple[str, ...]


class ParticipationFacts(AuditPart):
    """A site's participation in the rounds, according to the coordinator's records."""

    sampled: tuple[int, ...]  # rounds
    accepted: tuple[int, ...]
    failures: Mapping[int, ClientFailure]  # by round
    out_of_budget: tuple[int, ...]
    evaluated: Mapping[str, int]  # split -> number of evaluations
    epsilon: float | None  # as the site reported it


class ReceiptFacts(AuditPart):
    index: int
    time: str
    key: str  # the coordinator's fingerprint


class LedgerFacts(AuditPart):
    """What the verification of a ledger found."""

    ok: bool
    problems: tuple[str, ...]
    entries: int
    head: str | None
    first_time: str | None
    last_time: str | None
    anchored: bool  # whether the coordinator has a receipt for it
    receipt: ReceiptFacts | None
    unreceipted: int
    agent: str | None  # fingerprints
    officer: str | None
    officer_is_here: bool  # the officer's key is next to the agent's: a simulation
    dataset_id: str | None


class CurvePoint(AuditPart):
    """Total epsilon after a charge of the study, by the ledger and by Rényi divergences."""

    round: int
    epsilon: float
    rdp: MaybeInfinite


class ApprovalFacts(AuditPart):
    kind: str
    time: str
    officer: str | None  # fingerprint; None: the agent alone
    study_hash: str
    terms: Mapping[str, JsonValue] = {}
    consent: CosignerConsent | None = None


class SpendingFacts(AuditPart):
    """What a readable ledger says about the site's data set, over all studies."""

    unit: str
    budget: LedgerBudget | None  # None if it limited nothing: no charge and no plan
    spent: float
    left: float
    spent_before: float  # before the study's first charge
    recomputed: RecomputedEpsilon | None  # None without charges
    charges: tuple[PrivacyCharge, ...]
    curve: tuple[CurvePoint, ...]
    studies: Mapping[str, int]  # name -> number of charges
    refusals: tuple[ChargeRefused, ...]
    approvals: tuple[ApprovalFacts, ...]
    num_withdrawn: int
    data: tuple[DatasetSnapshot, ...]


class SiteFacts(AuditPart):
    ledger: LedgerFacts | None
    privacy_plan: PrivacyPlanRecord | None
    participation: ParticipationFacts
    spending: SpendingFacts | None = None  # None if the ledger is missing or cannot be read
    problems: tuple[str, ...]

    @property
    def budget(self) -> LedgerBudget | None:
        return self.spending.budget if self.spending else None


class SpentEpsilon(AuditPart):
    """The epsilon that was spent, and what (epsilon, delta) bounds by interpretation.py."""

    epsilon: MaybeInfinite
    delta: float
    factor: MaybeInfinite  # by which the odds of a statement change, at most
    prior: float  # belief before, and false positive rate, of the example
    belief: float  # after, at most
    detection: float  # true positive rate, at most
    auc: float  # of any attack, at most


class HeadlineFacts(AuditPart):
    """The site with the largest epsilon."""

    site: str
    unit: str
    spent: SpentEpsilon


class ClientLevelDpFacts(AuditPart):
    """The promise in privacy.json, and what the actual releases cost: a repeated round counts again, with new noise."""

    noise_multiplier: float
    max_update_norm: float
    sensitivity: float
    delta: float
    epsilon: float  # promised for `rounds`
    accountant: str
    rounds: int
    sites: int
    num_sampled_clients: int
    releases: int
    recomputed: EpsilonByAccountant
    spent: SpentEpsilon


class ProtectionFacts(AuditPart):
    dp_sgd: bool
    client_level_dp: ClientLevelDpFacts | None
    secure_aggregation: SecureAggregationRecord | None

    @property
    def is_any(self) -> bool:
        return self.dp_sgd or self.client_level_dp is not None or self.secure_aggregation is not None


class StudyFacts(AuditPart):
    name: str
    description: str
    hash: str
    strategy: str
    model: str
    num_parameters: int | None
    data: str
    classes: tuple[str, ...]
    weighting: str
    privacy: Mapping[str, Mapping[str, JsonValue]]  # the sections of `[privacy]`
    splits: tuple[str, ...]
    evaluate_at: str
    profiled: bool  # whether sites sent a validation profile


class ReleasedModel(AuditPart):
    round: int | None
    selected_by: str | None
    stop_reason: str | None


class DataSubjectFacts(AuditPart):
    """How many images belong to how many persons, or units of the data's coarsest key."""

    unit: str
    units: int
    examples: int
    split: Literal["train", "test"]


class CoordinatorFacts(AuditPart):
    key: str | None  # public key
    receipts: int  # number of ledgers
    shared_homes: bool  # whether other runs' charges are in the same ledgers


class SoftwareFacts(AuditPart):
    run: Mapping[str, JsonValue]
    audit: Mapping[str, str]


class DataFacts(AuditPart):
    fingerprint: str | None
    examples_by_site: Mapping[str, Mapping[str, tuple[int, ...]]]  # site -> split -> examples of each class

    def num_examples(self, site: str, split: str) -> int:
        return sum(self.examples_by_site[site].get(split, ()))


class AuditFacts(AuditPart):
    format: Literal["hemofed-audit/3"] = "hemofed-audit/3"
    written: str
    run: str
    study: StudyFacts
    rounds: int
    planned: int
    released: ReleasedModel | None  # None: the run has not finished
    protection: ProtectionFacts
    data_subject: DataSubjectFacts | None
    sites: Mapping[str, SiteFacts]
    headline: HeadlineFacts | None  # None without DP-SGD
    coordinator: CoordinatorFacts
    attacks: AttackFindings | None
    software: SoftwareFacts
    data: DataFacts
    disclosures: tuple[Disclosure, ...] = ()
    warnings: tuple[str, ...] = ()  # what a reader should know before relying on the promise
    problems: tuple[str, ...] = ()  # each makes the audit fail

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def spent(self) -> SpentEpsilon | None:
        """Of the strongest promise: for privacy units at the worst site, else for sites."""
        if self.headline:
            return self.headline.spent
        return self.protection.client_level_dp.spent if self.protection.client_level_dp else None

    @property
    def privacy_plans(self) -> list[PrivacyPlanRecord]:
        return [site_facts.privacy_plan for site_facts in self.sites.values() if site_facts.privacy_plan]

    @property
    def subjects_name(self) -> str:
        """The persons whose images they are, or the units of the data's coarsest key, in the plural."""
        return f"{self.data_subject.unit}s" if self.data_subject else "patients"

    @property
    def privacy_unit_name(self) -> str:
        if self.headline is None:
            return "site"
        return "image" if self.headline.unit == "example" else self.headline.unit
