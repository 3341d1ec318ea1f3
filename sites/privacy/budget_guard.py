"""Budget guard: charges the site's ledger and gets the coordinator's receipt before the site trains privately."""

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
    """The budget guard of one run at one site.

    Order of operations: receipt of an earlier charge, commitment to the plan, charge, receipt, training. A crash in
    between can charge a round without training, but never train without a charge.
    """

    home: SiteHome
    privacy_plan: PrivacyPlan
    study_name: str
    study_hash: str  # of the study in a simulation, the offer's digest at a real site
    countersign: CountersignFn  # sends the request to the coordinator and returns its receipt
    coordinator_key: str  # public key, hex

    def charge_round(self, message: Message, steps: int) -> tuple[DeclineKind, str] | None:
        """Charges the ledger for `steps` private steps. Returns kind and reason if the site must decline, else None."""
        if not steps:
            return None
        ledger, params = self.home.ledger, self.privacy_plan.dp_sgd_params
        try:
            self._ensure_receipt()  # an earlier charge may lack its receipt after a crash
        except HemofedError as error:
            return "no_receipt", f"no receipt, no training: {error}"
        self._ensure_commitment()
        requested = (self.study_hash, DpEvent(params.noise_multiplier, params.sampling_rate, steps))
        decision = check_charge(charge_history(ledger), planned_spending(ledger), requested, filter_budget(ledger))
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
        except LedgerError as error:  # also if another process charged in between
            return "no_receipt", f"no receipt, no training: {error}"
        return None

    def _ensure_receipt(self) -> None:
        """Gets the receipt of the last charge, unless the ledger has it."""
        ledger = self.home.ledger
        last_charge_index = max((entry.index for entry in ledger.entries(PrivacyCharge.kind)), default=-1)
        if last_charge_index <= max((receipt.index for receipt in ledger.state.receipts), default=-1):
            return
        try:
            receipt = self.countersign(create_receipt_request(ledger, self.home.agent_key, self.coordinator_key))
        except LedgerError:  # a coordinator restored from a backup needs earlier entries too
            receipt = self.countersign(
                create_receipt_request(ledger, self.home.agent_key, self.coordinator_key, since_index=0)
            )
        check_receipt(receipt, ledger, self.coordinator_key)
        ledger.append(receipt)

    def _ensure_commitment(self) -> None:
        """Records the plan in the ledger before its first charge."""
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
        """The noised update that was already charged for an equal message. Sending it again costs no epsilon."""
        if not self.home.outbox_file.is_file():
            return None
        try:
            header, tensors = load_tensors(self.home.outbox_file)
        except RunFolderError:
            return None
        if header["request_digest"] != self._request_digest(message):
            return None
        tensors_by_kind = {
            kind: {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
            for kind in ("mean", "sum", "client_state")
        }
        work = LocalWork(**header["work"]) if header["work"] else None
        update = ClientUpdate(tensors_by_kind["mean"], tensors_by_kind["sum"], work, header["cluster"])
        return update, tensors_by_kind["client_state"]

    def store_update(self, message: Message, update: ClientUpdate, client_state: ClientState) -> None:
        kinds = (("mean", update.averaged), ("sum", update.summed), ("client_state", client_state))
        tensors = {f"{kind}/{key}": value for kind, vectors in kinds for key, value in vectors.items()}
        header = {
            "request_digest": self._request_digest(message),
            "cluster": update.cluster,
            "work": None if update.work is None else vars(update.work),
        }
        save_tensors(self.home.outbox_file, header, tensors)

    def _request_digest(self, message: Message) -> str:
        """Digest of the message without its attempt, so that a repeated round has the same digest."""
        digest = hashlib.sha256(f"{self.study_hash} {message.task} {message.round}".encode())
        for key in sorted(message.vectors):
            digest.update(key.encode())
            digest.update(message.vectors[key].contiguous().numpy().tobytes())
        return digest.hexdigest()
