"""The records of a privacy ledger, format version 2: one frozen class per kind. No record names a patient.

- `opened` starts the ledger of one `dataset_id`; `carried_charges` copies the charges of the ledger that it continues.
- The agent writes `dataset`, `commitment`, `charge`, `receipt`, `charge_refused` and `unit_withdrawn`.
- The data protection officer decides `study_approved`, `budget`, `cosigner_policy`, `officer_key_rotated` and
  `agent_key_revoked`.
- The officer or the agent alone may write `approval_revoked`, so that a study can always be stopped.
- `agent_key_rotated` replaces the agent's key.
"""

from __future__ import annotations

import hmac
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)

LEDGER_VERSION: Literal[2] = 2
NonEmptyStr = Annotated[str, StringConstraints(min_length=1)]
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # a SHA-256, or the 32 bytes of a public key
HexSignature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
SamplingRate = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LedgerRecord(StrictModel):
    kind: ClassVar[str]


class LedgerBudget(LedgerRecord):
    """The most privacy loss that all studies together may cost a unit of the data set."""

    kind = "budget"
    epsilon: NonNegativeFloat
    delta: Delta


class PreviousLedger(StrictModel):
    """The last entry of an earlier ledger, from the site's copy or from the coordinator's refusal."""

    ledger_id: HexDigest  # hash of its first entry
    index: NonNegativeInt
    head: HexDigest


class LedgerOpened(LedgerRecord):
    """The first entry. The budget belongs to the `dataset_id`, even if its files change later."""

    kind = "opened"
    version: Literal[2] = LEDGER_VERSION
    site: NonEmptyStr
    dataset_id: NonEmptyStr
    privacy_unit: NonEmptyStr  # what the budget protects, e.g. "patient"
    budget: LedgerBudget
    agent_key: HexDigest  # public keys
    officer_key: HexDigest
    previous_ledger: PreviousLedger | None = None


class DatasetSnapshot(LedgerRecord):
    """The contents of the data set at this time. A new fingerprint does not reset the budget."""

    kind = "dataset"
    fingerprint: NonEmptyStr
    num_units: NonNegativeInt
    num_examples: NonNegativeInt


class StudyCommitment(LedgerRecord):
    """The most that a study may cost at this site if it runs all its rounds."""

    kind = "commitment"
    study: NonEmptyStr
    study_hash: NonEmptyStr
    mechanism: NonEmptyStr
    noise_multiplier: NonNegativeFloat
    sampling_rate: SamplingRate
    steps_per_round: PositiveInt
    max_participations: PositiveInt  # rounds that the site takes part in, at most
    max_grad_norm: PositiveFloat
    privacy_unit: NonEmptyStr
    delta: Delta
    epsilon: NonNegativeFloat


class PrivacyCharge(LedgerRecord):
    """Written before the training that it pays for. `total_epsilon` is the cost of all charges, including this one."""

    kind = "charge"
    study: NonEmptyStr
    study_hash: NonEmptyStr
    round: NonNegativeInt
    attempt: NonNegativeInt
    job_index: NonNegativeInt  # within the round
    mechanism: NonEmptyStr
    noise_multiplier: NonNegativeFloat
    sampling_rate: SamplingRate
    steps: PositiveInt
    privacy_unit: NonEmptyStr
    total_epsilon: NonNegativeFloat
    delta: Delta  # of the budget
    accountant: NonEmptyStr


class CarriedCharges(LedgerRecord):
    """All charges of the ledger that this one continues. Separate from `opened`, which coordinators read."""

    kind = "carried_charges"
    charges: tuple[PrivacyCharge, ...]
    note: str = ""  # e.g. how the charges of a lost end were estimated


class LedgerReceipt(LedgerRecord):
    """A coordinator's countersignature: it has seen the ledger up to entry `index`, whose hash is `head`."""

    kind = "receipt"
    site: NonEmptyStr
    dataset_id: NonEmptyStr
    index: NonNegativeInt
    head: HexDigest
    time: NonEmptyStr
    coordinator_key: HexDigest  # public key
    signature: HexSignature

    def signed_content(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", exclude={"signature"})


class ChargeRefused(LedgerRecord):
    """A charge that was not made because it would have exceeded the budget."""

    kind = "charge_refused"
    study: NonEmptyStr
    round: NonNegativeInt
    reason: NonEmptyStr


class UnitWithdrawn(LedgerRecord):
    """A unit that withdrew. The pseudonym is `pseudonymize_unit(salt, unit_id)`; ids cannot be tried without the site's salt."""

    kind = "unit_withdrawn"
    unit_pseudonym: HexDigest
    reason: str = ""


class CosignerConsent(StrictModel):
    """A second person's signature under the officer's decision, made when `seen_head` was the ledger's head."""

    seen_head: HexDigest
    signature: HexSignature


class StudyApproved(LedgerRecord):
    kind = "study_approved"
    study_hash: NonEmptyStr
    terms: dict[str, JsonValue] = {}
    consent: CosignerConsent | None = None  # required where the policy names a cosigner


class CosignerPolicy(LedgerRecord):
    """The person who must cosign approvals; None: the officer signs alone.

    One person cannot undo this policy: changing it takes the cosigner's consent or, if the cosigner's key is lost, a
    new ledger that continues this one.
    """

    kind = "cosigner_policy"
    cosigner_key: HexDigest | None  # public key
    consent: CosignerConsent | None = None


class ApprovalRevoked(LedgerRecord):
    """Valid with the agent's signature alone, because it can only reduce what the site does."""

    kind = "approval_revoked"
    study_hash: NonEmptyStr
    terms: dict[str, JsonValue] = {}


class AgentKeyRotated(LedgerRecord):
    """A new key for the agent.

    `possession_proof` is signed by the new key. A rotation with reason "lost" needs none: the new key signs the entry.
    """

    kind = "agent_key_rotated"
    agent_key: HexDigest
    reason: Literal["routine", "lost"]
    possession_proof: HexSignature | None = None


class OfficerKeyRotated(LedgerRecord):
    """A new key for the officer. The old key signs the decision, the new key signs `possession_proof`."""

    kind = "officer_key_rotated"
    officer_key: HexDigest
    possession_proof: HexSignature


class AgentKeyRevoked(LedgerRecord):
    """Invalidates what this agent's key signed after entry `last_trusted_index`. Signed by the officer alone."""

    kind = "agent_key_revoked"
    agent_key: HexDigest
    last_trusted_index: NonNegativeInt
    reason: str = ""


RECORD_TYPES: dict[str, type[LedgerRecord]] = {
    record_type.kind: record_type
    for record_type in (LedgerOpened, CarriedCharges, DatasetSnapshot, StudyCommitment, PrivacyCharge, LedgerReceipt, ChargeRefused, UnitWithdrawn, StudyApproved, ApprovalRevoked, LedgerBudget, CosignerPolicy,
                 AgentKeyRotated, OfficerKeyRotated, AgentKeyRevoked)
}  # fmt: skip


def pseudonymize_unit(salt: bytes, unit_id: str) -> str:
    """HMAC-SHA256. The salt (at least 16 random bytes) stays at the site, outside the ledger."""
    return hmac.new(salt, unit_id.encode(), "sha256").hexdigest()
