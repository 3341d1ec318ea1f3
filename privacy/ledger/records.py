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

Text = Annotated[str, StringConstraints(min_length=1)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # a SHA-256, or a public key's 32 bytes
Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
Rate = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Body(Strict):
    kind: ClassVar[str]


class Budget(Body):
    """What the data set may cost a unit in all, over all studies."""

    kind = "budget"
    epsilon: NonNegativeFloat
    delta: Delta


class Continues(Strict):
    """The end of an earlier ledger: as the site has it, or as the coordinator's refusal names it."""

    ledger: Digest  # hash of its first entry
    index: NonNegativeInt
    head: Digest


class Open(Body):
    """Always the first entry. A budget belongs to the `dataset_id`, whatever files it has come to mean since."""

    kind = "open"
    version: Literal[1] = 1
    site: Text
    dataset_id: Text
    unit: Text  # whom the budget protects: "patient"
    budget: Budget
    agent: Digest  # public keys
    officer: Digest
    continues: Continues | None = None


class Data(Body):
    """What the data set was made of at the time. A new fingerprint resets nothing."""

    kind = "data"
    fingerprint: Text
    units: NonNegativeInt
    examples: NonNegativeInt


class Commit(Body):
    """What a study may cost here if it runs to its end."""

    kind = "commit"
    study: Text
    plan: Text  # the plan's hash
    mechanism: Text
    noise: NonNegativeFloat
    rate: Rate
    steps_per_turn: PositiveInt
    turns: PositiveInt  # that the site takes part in, at most
    clip: PositiveFloat
    unit: Text
    delta: Delta
    epsilon: NonNegativeFloat


class Charge(Body):
    """Written before the training that it pays for. `epsilon` is what the data set has cost in all, this included."""

    kind = "charge"
    study: Text
    plan: Text
    turn: NonNegativeInt
    attempt: NonNegativeInt
    nth: NonNegativeInt  # job within the turn
    mechanism: Text
    noise: NonNegativeFloat
    rate: Rate
    steps: PositiveInt
    unit: Text
    epsilon: NonNegativeFloat
    delta: Delta  # the budget's
    accountant: Text


class Carried(Body):
    """Right after an `open` that continues: every charge so far. Kept out of `open`, which coordinators read."""

    kind = "carried"
    charges: tuple[Charge, ...]
    note: str = ""  # such as: how the charges of a lost end were reckoned


class Receipt(Body):
    """A coordinator's word that it has seen the ledger up to entry `index`, whose hash is `head`."""

    kind = "receipt"
    site: Text
    dataset_id: Text
    index: NonNegativeInt
    head: Digest
    time: Text
    key: Digest  # the coordinator's public key
    signature: Signature

    def statement(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", exclude={"signature"})


class Refusal(Body):
    """A charge that was not made, since it would have passed the budget."""

    kind = "refusal"
    study: Text
    turn: NonNegativeInt
    reason: Text


class Forget(Body):
    """A unit that withdrew. `unit` is `pseudonym(salt, id)`; without the site's salt nobody can try ids on it."""

    kind = "forget"
    unit: Digest
    reason: str = ""


class Consent(Strict):
    """A second person's signature under the officer's decision, made when the ledger's head was `seen`."""

    seen: Digest
    signature: Signature


class Approve(Body):
    kind = "approve"
    plan: Text
    terms: dict[str, JsonValue] = {}
    consent: Consent | None = None  # where the policy asks for two persons


class Policy(Body):
    """Who must sign approvals beside the officer; nobody if `second` is none. What takes two, one cannot undo: a policy
    that names somebody is changed with his consent, or, if his key is lost, by a new ledger that continues this one."""

    kind = "policy"
    second: Digest | None  # public key
    consent: Consent | None = None


class Withdraw(Body):
    """Signed by the agent alone it counts too: what it does can only be less."""

    kind = "withdraw"
    plan: Text
    terms: dict[str, JsonValue] = {}


class Rotate(Body):
    """A new key for the agent. `proof` is the new key's: a lost rotation needs none, for the new key signs it."""

    kind = "rotate"
    agent: Digest
    reason: Literal["routine", "lost"]
    proof: Signature | None = None


class Officer(Body):
    """A new key for the officer. Decided with the old one; `proof` is the new one's."""

    kind = "officer"
    officer: Digest
    proof: Signature


class Revoke(Body):
    """Nothing that this agent's key signed after entry `after` is to be believed. Signed by the officer alone."""

    kind = "revoke"
    agent: Digest
    after: NonNegativeInt
    reason: str = ""


KINDS: dict[str, type[Body]] = {
    body.kind: body
    for body in (Open, Carried, Data, Commit, Charge, Receipt, Refusal, Forget, Approve, Withdraw, Budget, Policy,
                 Rotate, Officer, Revoke)
}  # fmt: skip


def pseudonym(salt: bytes, unit: str) -> str:
    """HMAC-SHA256. The salt (16 random bytes or more) stays with the site, away from the ledger."""
    return hmac.new(salt, unit.encode(), "sha256").hexdigest()
