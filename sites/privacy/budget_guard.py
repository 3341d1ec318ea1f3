"""Asks the site's ledger before private work: charge, let the coordinator countersign, and only then train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.errors import HemofedError, LedgerError, RunFolderError
from pipeline.core.tensor_io import load_tensors, save_tensors
from pipeline.protocol.messages import ClientState, ClientUpdate, DeclineKind, Message
from pipeline.protocol.tasks import LocalWork
from privacy.accounting.accountant import DpEvent
from privacy.accounting.privacy_filter import check_charge
from privacy.ledger.receipts import ReceiptRequest, check_receipt, create_receipt_request
from privacy.ledger.records import ChargeRefused, LedgerReceipt, PrivacyCharge, StudyCommitment
from privacy.ledger.summary import charge_history, filter_budget, planned_spending
from sites.governance.home import SiteHome
from sites.privacy.plan import PrivacyPlan

DP_SGD_MECHANISM = "DP-SGD: Poisson-sampled units, clipped, Gaussian noise"
CountersignFn = Callable[[ReceiptRequest], LedgerReceipt]


@dataclass
class BudgetGuard:
    home: SiteHome
    privacy_plan: PrivacyPlan
    study_name: str
    study_hash: str  # hash
    countersign: CountersignFn
    coordinator_key: str  # its public key

    def charge_round(self, message: Message, steps: int) -> tuple[DeclineKind, str] | None:
        """Charges the ledger for the round's private steps; if the site must decline, the kind and the reason."""
        if not steps:
            return None
        ledger, params = self.home.ledger, self.privacy_plan.dp_sgd_params
        try:
            self._ensure_receipt()  # of a charge that a crash left without one
        except HemofedError as error:
            return "no_receipt", f"no receipt, no training: {error}"
        self._ensure_commitment()
        requested_charge = (self.study_hash, DpEvent(params.noise_multiplier, params.sampling_rate, steps))
        decision = check_charge(
            charge_history(ledger), planned_spending(ledger), requested_charge, filter_budget(ledger)
        )
        if not decision.is_allowed:
            ledger.append(ChargeRefused(study=self.study_name, round=message.round, reason=decision.reason))
            return "privacy_budget", decision.reason
        try:
            ledger.append(
                PrivacyCharge(
                    study=self.study_name,
                    study_hash=self.study_hash,
                    round=message.round,
                    attempt=message.attempt,
                    job_index=0,
                    mechanism=DP_SGD_MECHANISM,
                    noise_multiplier=params.noise_multiplier,
                    sampling_rate=params.sampling_rate,
                    steps=steps,
                    privacy_unit=params.privacy_unit,
                    total_epsilon=decision.epsilon_after,
                    delta=ledger.budget.delta,
                    accountant=decision.accountant,
                )
            )
            self._ensure_receipt()
        except LedgerError as error:  # also where another process has charged in between
            return "no_receipt", f"no receipt, no training: {error}"
        return None

    def _ensure_receipt(self) -> None:
        ledger = self.home.ledger
        last_charge_index = max((entry.index for entry in ledger.entries(PrivacyCharge.kind)), default=-1)
        if last_charge_index <= max((receipt.index for receipt in ledger.state.receipts), default=-1):
            return
        try:
            receipt = self.countersign(create_receipt_request(ledger, self.home.agent_key, self.coordinator_key))
        except LedgerError:  # a coordinator that was restored from a backup has to see more than the news
            receipt = self.countersign(
                create_receipt_request(ledger, self.home.agent_key, self.coordinator_key, since_index=0)
            )
        check_receipt(receipt, ledger, self.coordinator_key)
        ledger.append(receipt)

    def _ensure_commitment(self) -> None:
        if any(
            isinstance(e.record, StudyCommitment) and e.record.study_hash == self.study_hash
            for e in self.home.ledger.entries(StudyCommitment.kind)
        ):
            return
        privacy_plan, params = self.privacy_plan, self.privacy_plan.dp_sgd_params
        self.home.ledger.append(
            StudyCommitment(
                study=self.study_name,
                study_hash=self.study_hash,
                mechanism=DP_SGD_MECHANISM,
                noise_multiplier=params.noise_multiplier,
                sampling_rate=params.sampling_rate,
                steps_per_round=privacy_plan.steps_per_round,
                max_participations=privacy_plan.max_rounds,
                max_grad_norm=params.max_grad_norm,
                privacy_unit=params.privacy_unit,
                delta=privacy_plan.delta,
                epsilon=privacy_plan.epsilon,
            )
        )

    def load_stored_update(self, message: Message) -> tuple[ClientUpdate, ClientState] | None:
        """The answer that was already made, and paid for, to the same question."""
        if not self.home.outbox_file.is_file():
            return None
        try:
            header, tensors = load_tensors(self.home.outbox_file)
        except RunFolderError:
            return None
        if header["question"] != self._request_digest(message):
            return None
        tensors_by_kind = {
            kind: {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
            for kind in ("mean", "sum", "memory")
        }
        work = LocalWork(**header["work"]) if header["work"] else None
        return ClientUpdate(tensors_by_kind["mean"], tensors_by_kind["sum"], work, header["group"]), tensors_by_kind[
            "memory"
        ]

    def store_update(self, message: Message, update: ClientUpdate, client_state: ClientState) -> None:
        kinds = (("mean", update.averaged), ("sum", update.summed), ("memory", client_state))
        tensors = {f"{kind}/{key}": value for kind, vectors in kinds for key, value in vectors.items()}
        header = {
            "question": self._request_digest(message),
            "group": update.cluster,
            "work": None if update.work is None else vars(update.work),
        }
        save_tensors(self.home.outbox_file, header, tensors)

    def _request_digest(self, message: Message) -> str:
        """What is asked, whichever attempt it is."""
        digest = hashlib.sha256(f"{self.study_hash} {message.task} {message.round}".encode())
        for key in sorted(message.vectors):
            digest.update(key.encode())
            digest.update(message.vectors[key].contiguous().numpy().tobytes())
        return digest.hexdigest()
