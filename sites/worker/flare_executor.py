"""The site's part of the FLARE engine: an executor that checks the site's policy and passes each task to the run worker."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from pipeline.core.errors import (
    BudgetError,
    DataError,
    HemofedError,
    LedgerError,
    MessageError,
    MissingDataError,
    NoSpaceError,
    RunFolderError,
    StudyError,
)
from pipeline.flare.constants import (
    DATA_SUMMARY_TASK,
    EXCHANGE_TASK,
    HEARTBEAT_SECONDS,
    HEARTBEAT_TOPIC,
    JSON_TEXT_KEY,
    MESSAGE_BYTES_KEY,
    RECEIPT_TOPIC,
    SITE_HOME_ENV,
)
from pipeline.protocol.messages import Declined, DeclineKind
from pipeline.protocol.serialization import deserialize_frame, serialize_reply
from pipeline.study.offer import StudyOffer, possession_statement, read_offer
from privacy.ledger.keys import sign
from privacy.ledger.receipts import ReceiptRequest, read_receipt
from privacy.ledger.records import LedgerReceipt
from sites.governance.home import SiteHome
from sites.governance.settings import SiteSettings
from sites.worker.policy import DESCRIBE_TASK, TaskPolicy
from sites.worker.run_worker import RunWorker, open_run_worker
from sites.worker.single_instance import take_over_run

RECEIPT_TIMEOUT_SECONDS = 30.0


class NotPermittedError(MessageError):
    """A refusal by the site's policy. The text contains no file name."""


REPORTABLE_ERRORS = (NotPermittedError, StudyError, BudgetError)  # their texts contain no file names
ERROR_SUMMARIES: Mapping[type[HemofedError], str] = {
    NoSpaceError: "no space left on the site's disk",
    DataError: "its data cannot be used; `hemofed site check` at the site says why",
    MissingDataError: "its data are not in the folder of site.toml; `hemofed site check` at the site says more",
    RunFolderError: "its stored state of the run cannot be used; its log says why",
    LedgerError: "its ledger refuses; its log says why",
}


class SiteExecutor(Executor):  # type: ignore[misc]
    """The job contains only an offer's digest. The site has the offer and its approval itself."""

    def __init__(self, run: str, digest: str) -> None:
        super().__init__()
        self._digest = digest
        self._home_folder = Path(os.environ[SITE_HOME_ENV])
        self._settings = SiteSettings.load(self._home_folder)
        self._policy = TaskPolicy(SiteHome.open(self._home_folder), self._settings)
        self._worker: RunWorker | None = None
        self._heartbeat_stop: threading.Event | None = None
        self._fl_context: FLContext | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        site = fl_ctx.get_identity_name()
        self._fl_context = fl_ctx
        self._start_heartbeat(fl_ctx)
        reply = make_reply(ReturnCode.OK)
        try:
            if task_name == DATA_SUMMARY_TASK:
                reply[JSON_TEXT_KEY] = self._describe_site(site, str(shareable.get(JSON_TEXT_KEY, "")))
            elif task_name == EXCHANGE_TASK:
                reply[MESSAGE_BYTES_KEY] = self._answer_task(site, shareable)
            else:
                return make_reply(ReturnCode.TASK_UNKNOWN)
        except Exception:
            self.log_error(fl_ctx, traceback.format_exc())
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return reply

    def _describe_site(self, site: str, nonce: str) -> str:
        try:
            self._require_permission(DESCRIBE_TASK)
            proof = sign(
                self._policy.home.agent_key, "possession", possession_statement(self._load_offer(), site, nonce)
            )
            return json.dumps(self._open_worker(site).describe_site().to_dict() | {"proof": proof})
        except HemofedError as error:
            return json.dumps({"refused": self._outward_error_text(error)})

    def _outward_error_text(self, error: HemofedError) -> str:
        """The part of an error that may leave the site. File names may name patients; the log has the full text."""
        assert self._fl_context is not None
        self.log_error(self._fl_context, f"{type(error).__name__}: {error}")
        if isinstance(error, REPORTABLE_ERRORS):
            return str(error)
        return ERROR_SUMMARIES.get(type(error), f"failed ({type(error).__name__})")

    def _answer_task(self, site: str, shareable: Shareable) -> bytes:
        payload = shareable.get(MESSAGE_BYTES_KEY)
        if not isinstance(payload, bytes):
            raise MessageError("the task has no message; does the coordinator have the same version?")
        header, _ = deserialize_frame(payload)
        task, round_number = str(header.get("task", "")), int(header.get("round", 0))
        try:
            self._require_permission(task)
            return self._open_worker(site).answer_message(payload)
        except HemofedError as error:
            kind: DeclineKind = "not_permitted" if isinstance(error, NotPermittedError) else "failed"
            return serialize_reply(Declined(site, task, round_number, kind, self._outward_error_text(error)))

    def _require_permission(self, task: str) -> None:
        refusal = self._policy.refusal_reason(self._load_offer(), task, datetime.now(UTC))
        if refusal:
            raise NotPermittedError(f"refused: {refusal}".replace(str(self._home_folder), "its home"))

    def _load_offer(self) -> StudyOffer:
        """Loads the offer and recomputes its digest, which detects changed files."""
        file = self._home_folder / "offers" / f"{self._digest}.json"
        if len(self._digest) != 64 or not self._digest.isalnum() or not file.is_file():
            raise MessageError("this site has no offer of the study of this job, so the study cannot be approved here")
        offer = read_offer(file.read_bytes())
        if offer.digest != self._digest:
            raise MessageError(f"{file} was changed; the coordinator must offer the study again")
        return offer

    def _open_worker(self, site: str) -> RunWorker:
        if self._worker is None:
            take_over_run(self._home_folder / "runs" / self._load_offer().run)
            self._worker = open_run_worker(
                self._home_folder, site, self._load_offer(), self._countersign, self._settings
            )
        return self._worker

    def _countersign(self, request: ReceiptRequest) -> LedgerReceipt:
        assert self._fl_context is not None
        aux_request = Shareable({JSON_TEXT_KEY: request.model_dump_json()})
        ledger = self._policy.home.ledger
        ledger.refresh()  # another handle appended the charge
        if epsilon := ledger.epsilon_spent:
            aux_request["epsilon"] = epsilon
        engine = self._fl_context.get_engine()
        replies = engine.send_aux_request(None, RECEIPT_TOPIC, aux_request, RECEIPT_TIMEOUT_SECONDS, self._fl_context)
        for reply in replies.values():
            if isinstance(reply, Shareable) and reply.get_return_code() == ReturnCode.OK:
                return read_receipt(str(reply.get(JSON_TEXT_KEY, "")))
        raise LedgerError("the coordinator did not answer the request for a receipt; the next round requests it again")

    def _start_heartbeat(self, fl_ctx: FLContext) -> None:
        """Sends heartbeats from the first task to the end of the process, also between tasks."""
        if self._heartbeat_stop is not None:
            return
        self._heartbeat_stop = stop = threading.Event()
        engine = fl_ctx.get_engine()

        def send_heartbeats() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                with engine.new_context() as context:
                    engine.fire_and_forget_aux_request(HEARTBEAT_TOPIC, Shareable(), context, optional=True)

        threading.Thread(target=send_heartbeats, name="heartbeat", daemon=True).start()
