"""What a ledger's entries say: one frozen class a kind. None of them names a patient.

`open` starts the ledger of one `dataset_id` and `carried` brings over what was spent in the ledger that it continues.
`data`, `commit`, `charge`, `receipt`, `refusal` and `forget` are the agent's. `approve`, `budget`, `policy`, `officer`
and `revoke` are for the data protection officer to decide. `withdraw` is the officer's or the agent's: stopping is easy.
`rotate` replaces the agent's key.
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

NonEmptyStr = Annotated[str, StringConstraints(min_length=1)]
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # a SHA-256, or a public key's 32 bytes
HexSignature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
SamplingRate = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LedgerRecord(StrictModel):
    kind: ClassVar[str]


class LedgerBudget(LedgerRecord):
    """What the data set may cost a unit in all, over all studies."""

    kind = "budget"
    epsilon: NonNegativeFloat
    delta: Delta


class PreviousLedger(StrictModel):
    """The end of an earlier ledger: as the site has it, or as the coordinator's refusal names it."""

    ledger_id: HexDigest  # hash of its first entry
    index: NonNegativeInt
    head: HexDigest


class LedgerOpened(LedgerRecord):
    """Always the first entry. A budget belongs to the `dataset_id`, whatever files it has come to mean since."""

    kind = "open"
    version: Literal[1] = 1
    site: NonEmptyStr
    dataset_id: NonEmptyStr
    privacy_unit: NonEmptyStr  # whom the budget protects: "patient"
    budget: LedgerBudget
    agent_key: HexDigest  # public keys
    officer_key: HexDigest
    previous_ledger: PreviousLedger | None = None


class DatasetSnapshot(LedgerRecord):
    """What the data set was made of at the time. A new fingerprint resets nothing."""

    kind = "data"
    fingerprint: NonEmptyStr
    num_units: NonNegativeInt
    num_examples: NonNegativeInt


class StudyCommitment(LedgerRecord):
    """What a study may cost here if it runs to its end."""

    kind = "commit"
    study: NonEmptyStr
    study_hash: NonEmptyStr  # the plan's hash
    mechanism: NonEmptyStr
    noise_multiplier: NonNegativeFloat
    sampling_rate: SamplingRate
    steps_per_round: PositiveInt
    max_participations: PositiveInt  # that the site takes part in, at most
    max_grad_norm: PositiveFloat
    privacy_unit: NonEmptyStr
    delta: Delta
    epsilon: NonNegativeFloat


class PrivacyCharge(LedgerRecord):
    """Written before the training that it pays for. `epsilon` is what the data set has cost in all, this included."""

    kind = "charge"
    study: NonEmptyStr
    study_hash: NonEmptyStr
    round: NonNegativeInt
    attempt: NonNegativeInt
    job_index: NonNegativeInt  # job within the turn
    mechanism: NonEmptyStr
    noise_multiplier: NonNegativeFloat
    sampling_rate: SamplingRate
    steps: PositiveInt
    privacy_unit: NonEmptyStr
    total_epsilon: NonNegativeFloat
    delta: Delta  # the budget's
    accountant: NonEmptyStr


class CarriedCharges(LedgerRecord):
    """Right after an `open` that continues: every charge so far. Kept out of `open`, which coordinators read."""

    kind = "carried"
    charges: tuple[PrivacyCharge, ...]
    note: str = ""  # such as: how the charges of a lost end were reckoned


class LedgerReceipt(LedgerRecord):
    """A coordinator's word that it has seen the ledger up to entry `index`, whose hash is `head`."""

    kind = "receipt"
    site: NonEmptyStr
    dataset_id: NonEmptyStr
    index: NonNegativeInt
    head: HexDigest
    time: NonEmptyStr
    coordinator_key: HexDigest  # the coordinator's public key
    signature: HexSignature

    def signed_content(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", exclude={"signature"})


class ChargeRefused(LedgerRecord):
    """A charge that was not made, since it would have passed the budget."""

    kind = "refusal"
    study: NonEmptyStr
    round: NonNegativeInt
    reason: NonEmptyStr


class UnitWithdrawn(LedgerRecord):
    """A unit that withdrew. `unit` is `pseudonym(salt, id)`; without the site's salt nobody can try ids on it."""

    kind = "forget"
    unit_pseudonym: HexDigest
    reason: str = ""


class CosignerConsent(StrictModel):
    """A second person's signature under the officer's decision, made when the ledger's head was `seen`."""

    seen_head: HexDigest
    signature: HexSignature


class StudyApproved(LedgerRecord):
    kind = "approve"
    study_hash: NonEmptyStr
    terms: dict[str, JsonValue] = {}
    consent: CosignerConsent | None = None  # where the policy asks for two persons


class CosignerPolicy(LedgerRecord):
    """Who must sign approvals beside the officer; nobody if `second` is none. What takes two, one cannot undo: a policy
    that names somebody is changed with his consent, or, if his key is lost, by a new ledger that continues this one."""

    kind = "policy"
    cosigner_key: HexDigest | None  # public key
    consent: CosignerConsent | None = None


class ApprovalRevoked(LedgerRecord):
    """Signed by the agent alone it counts too: what it does can only be less."""

    kind = "withdraw"
    study_hash: NonEmptyStr
    terms: dict[str, JsonValue] = {}


class AgentKeyRotated(LedgerRecord):
    """A new key for the agent. `proof` is the new key's: a lost rotation needs none, for the new key signs it."""

    kind = "rotate"
    agent_key: HexDigest
    reason: Literal["routine", "lost"]
    possession_proof: HexSignature | None = None


class OfficerKeyRotated(LedgerRecord):
    """A new key for the officer. Decided with the old one; `proof` is the new one's."""

    kind = "officer"
    officer_key: HexDigest
    possession_proof: HexSignature


class AgentKeyRevoked(LedgerRecord):
    """Nothing that this agent's key signed after entry `after` is to be believed. Signed by the officer alone."""

    kind = "revoke"
    agent_key: HexDigest
    last_trusted_index: NonNegativeInt
    reason: str = ""


RECORD_TYPES: dict[str, type[LedgerRecord]] = {
    body.kind: body
    for body in (LedgerOpened, CarriedCharges, DatasetSnapshot, StudyCommitment, PrivacyCharge, LedgerReceipt, ChargeRefused, UnitWithdrawn, StudyApproved, ApprovalRevoked, LedgerBudget, CosignerPolicy,
                 AgentKeyRotated, OfficerKeyRotated, AgentKeyRevoked)
}  # fmt: skip


def pseudonymize_unit(salt: bytes, unit_id: str) -> str:
    """HMAC-SHA256. The salt (16 random bytes or more) stays with the site, away from the ledger."""
    return hmac.new(salt, unit_id.encode(), "sha256").hexdigest()
