"""The content of attacks.json: what the attacks on a run found. Written by privacy/attacks, read by the audit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import RunFolderError

ATTACKS_FILE = "attacks.json"


class AttackFinding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MembershipFinding(AttackFinding):
    """Who was in the training data? 0.5 is chance."""

    auc: float
    auc_low: float | None = None
    auc_high: float | None = None
    unit: str | None = None
    num_members: int | None = None
    num_nonmembers: int | None = None
    advantage: float | None = None
    summary: str = ""


class CanaryFinding(AttackFinding):
    """Were planted examples in the training data? An epsilon below `epsilon_low` is refuted."""

    epsilon_low: float
    confidence: float | None = None
    epsilon_promised: float | None = None
    delta: float | None = None
    num_canaries: int | None = None
    num_guesses: int | None = None
    num_correct: int | None = None
    max_epsilon_low: float | None = None  # with every guess right
    site: str | None = None
    summary: str = ""


class InversionCase(AttackFinding):
    name: str
    ssim: float | None = None
    psnr: float | None = None
    route: str | None = None


class InversionFinding(AttackFinding):
    """Can images be reconstructed from updates?"""

    image: str | None = None  # path in the run folder
    cases: tuple[InversionCase, ...] = ()
    summary: str = ""


class AttackFindings(AttackFinding):
    membership: MembershipFinding | None = None
    canaries: CanaryFinding | None = None
    inversion: InversionFinding | None = None

    @property
    def tried(self) -> list[MembershipFinding | CanaryFinding | InversionFinding]:
        return [finding for finding in (self.membership, self.canaries, self.inversion) if finding is not None]

    @classmethod
    def load(cls, folder: RunFolder) -> AttackFindings | None:
        """None if no attack has been tried."""
        file = folder.path / ATTACKS_FILE
        if not file.exists():
            return None
        try:
            findings = cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise RunFolderError(
                f"{file} does not have the findings of this version's attacks ({error.error_count()} invalid fields); "
                f"delete it, and try them again with `hemofed audit {folder.path} --attack`"
            ) from error
        return findings if findings.tried else None
