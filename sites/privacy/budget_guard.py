"""Budget guard: charges the site's ledger and gets the coordinator's receipt before the site trains privately."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.core.errors import HemofedError, LedgerError, RunFolderError, TaskDeclinedError
from pipeline.core.tensor_io import load_tensors, save_tensors
from pipeline.protocol.client_tasks import StepAllowance, intercept_jobs, is_private_job
from pipeline.protocol.messages import ClientState, ClientTask, ClientUpdate, Message
from pipeline.protocol.tasks import GradientResult, JobResult, LocalJob, LocalWork, TrainJob, TrainResult
from privacy.accounting.privacy_filter import check_charge
from privacy.ledger.receipts import ReceiptRequest, check_receipt, create_receipt_request
from privacy.ledger.records import ChargeRefused, LedgerReceipt, PrivacyCharge, StudyCommitment
from privacy.ledger.spending import charge_history, filter_budget, planned_spending
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

    @property
    def epsilon_spent(self) -> float:
        """Of the site's data set, by all studies so far, as the ledger says."""
        return self.home.ledger.epsilon_spent

    def charge_task(self, task: ClientTask, message: Message, allowance: StepAllowance) -> ClientTask:
        """The task with its private jobs charged; this is all that a task session asks of the guard.

        All private steps of the round are charged at once, before the first one: their maximum number is known. A request
        that equals an earlier one gets the stored update, which costs no epsilon. The training loss has no privacy
        mechanism, so it stays at the site.
        """
        stored_update = self._load_stored_update(message)
        if stored_update is not None:
            task.close()
            return stored_update
        charged_steps = _ChargedSteps(
            lambda: self.charge_round(message, allowance.reserve(self.privacy_plan.steps_per_round))
        )
        update, client_state = yield from intercept_jobs(task, charged_steps.limit_job, charged_steps.count_steps)
        update = replace(update, summed={k: v for k, v in update.summed.items() if k != "train_loss"})
        self._store_update(message, update, client_state)
        return update, client_state

    def charge_round(self, message: Message, steps: int) -> int:
        """Charges the ledger for `steps` private steps, and returns them; declines the task if it may not."""
        if not steps:
            return 0
        ledger, event = self.home.ledger, self.privacy_plan.dp_event(steps)
        try:
            self._ensure_receipt()  # an earlier charge may lack its receipt after a crash
        except HemofedError as error:
            raise TaskDeclinedError("no_receipt", f"no receipt, no training: {error}") from error
        self._ensure_commitment()
        decision = check_charge(
            charge_history(ledger), planned_spending(ledger), (self.study_hash, event), filter_budget(ledger)
        )
        if not decision.is_allowed:
            ledger.append(ChargeRefused(study=self.study_name, round=message.round, reason=decision.reason))
            raise TaskDeclinedError("privacy_budget", decision.reason)
        try:
            ledger.append(
                PrivacyCharge(
                    study=self.study_name,
                    study_hash=self.study_hash,
                    round=message.round,
                    attempt=message.attempt,
                    job_index=0,
                    mechanism=DP_SGD_MECHANISM,
                    noise_multiplier=event.noise_multiplier,
                    sampling_rate=event.sampling_rate,
                    steps=steps,
                    privacy_unit=self.privacy_plan.dp_sgd_params.privacy_unit,
                    total_epsilon=decision.epsilon_after,
                    delta=ledger.budget.delta,
                    accountant=decision.accountant,
                )
            )
            self._ensure_receipt()
        except LedgerError as error:  # also if another process charged in between
            raise TaskDeclinedError("no_receipt", f"no receipt, no training: {error}") from error
        return steps

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

    def _load_stored_update(self, message: Message) -> tuple[ClientUpdate, ClientState] | None:
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

    def _store_update(self, message: Message, update: ClientUpdate, client_state: ClientState) -> None:
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


class _ChargedSteps:
    """The private steps of one round that are charged and not done yet; `charge_round` is called before the first one."""

    def __init__(self, charge_round: Callable[[], int]) -> None:
        self._charge_round = charge_round
        self._steps_left: int | None = None  # None: not charged yet

    def limit_job(self, job: LocalJob) -> LocalJob:
        """Never more steps than charged."""
        if not is_private_job(job):
            return job
        if self._steps_left is None:
            self._steps_left = self._charge_round()
        if not isinstance(job, TrainJob):
            return job
        max_steps = self._steps_left if job.max_steps is None else min(job.max_steps, self._steps_left)
        return replace(job, max_steps=max_steps)

    def count_steps(self, job: LocalJob, result: JobResult) -> None:
        if is_private_job(job) and isinstance(result, TrainResult | GradientResult):
            assert self._steps_left is not None
            self._steps_left -= result.work.steps_done
