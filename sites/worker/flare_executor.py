"""The site's end of the FLARE engine: a task comes in, the site's policy is asked, its place answers."""

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
    BadBudget,
    BadData,
    BadLedger,
    BadMessage,
    BadRun,
    BadStudy,
    HemofedError,
    MissingData,
    NoSpace,
)
from pipeline.flare.constants import ABOUT, ALIVE, ASK, BEAT, PARCEL, RECEIPT, SITE_HOME, TOLD
from pipeline.protocol.messages import Excuse
from pipeline.protocol.serialization import reply_bytes, unpack
from pipeline.service.runtime.receipts import read_receipt
from pipeline.study.offer import Offer, read_offer, statement
from privacy.ledger.keys import sign
from privacy.ledger.receipts import Request
from privacy.ledger.records import Receipt
from sites.governance.home import Home
from sites.governance.settings import Settings
from sites.worker.policy import Policy
from sites.worker.run_worker import Place, open_place
from sites.worker.single_instance import take_over

PATIENCE = 30.0  # seconds for a receipt


class NotPermitted(BadMessage):
    """By the site's own policy; names no file."""


TOLD_WHOLE = (NotPermitted, BadStudy, BadBudget)  # about the study alone
KINDS: Mapping[type[HemofedError], str] = {
    NoSpace: "no space left on the site's disk",
    BadData: "its data cannot be used; `hemofed site check` says why there",
    MissingData: "its data are not where site.toml says; `hemofed site check` says more there",
    BadRun: "what it remembers of the run cannot be used; its log says why",
    BadLedger: "its ledger refuses; its log says why",
}


class SiteExecutor(Executor):  # type: ignore[misc]
    """The job names an offer by its digest; what that is, and whether it is approved, the site knows by itself."""

    def __init__(self, run: str, digest: str) -> None:
        super().__init__()
        self._digest = digest
        self._home = Path(os.environ[SITE_HOME])
        self._settings = Settings.load(self._home)
        self._policy = Policy(Home.open(self._home), self._settings)
        self._place: Place | None = None
        self._beating: threading.Event | None = None
        self._context: FLContext | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        site = fl_ctx.get_identity_name()
        self._context = fl_ctx
        self._beat(fl_ctx)
        reply = make_reply(ReturnCode.OK)
        try:
            if task_name == ABOUT:
                reply[TOLD] = self._about(site, str(shareable.get(TOLD, "")))
            elif task_name == ASK:
                reply[PARCEL] = self._answer(site, shareable)
            else:
                return make_reply(ReturnCode.TASK_UNKNOWN)
        except Exception:
            self.log_error(fl_ctx, traceback.format_exc())
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return reply

    def _about(self, site: str, once: str) -> str:
        try:
            self._permitted("about")
            proof = sign(self._policy.home.key, "possession", statement(self._offer(), site, once))
            return json.dumps(self._opened(site).about() | {"proof": proof})
        except HemofedError as error:
            return json.dumps({"refused": self._outward(error)})

    def _outward(self, error: HemofedError) -> str:
        """What may leave the site of an error: texts may name files, and those may name patients. The log has it all."""
        assert self._context is not None
        self.log_error(self._context, f"{type(error).__name__}: {error}")
        return (
            str(error) if isinstance(error, TOLD_WHOLE) else KINDS.get(type(error), f"failed ({type(error).__name__})")
        )

    def _answer(self, site: str, shareable: Shareable) -> bytes:
        parcel = shareable.get(PARCEL)
        if not isinstance(parcel, bytes):
            raise BadMessage("a question without a parcel; is the coordinator of the same version?")
        header, _ = unpack(parcel)
        task, turn = str(header.get("task", "")), int(header.get("turn", 0))
        try:
            self._permitted(task)
            return self._opened(site).answer(parcel)
        except HemofedError as error:
            return reply_bytes(Excuse(site, task, turn, self._outward(error)))

    def _permitted(self, task: str) -> None:
        refused = self._policy.permits(self._offer(), task, datetime.now(UTC))
        if refused:
            raise NotPermitted(f"refused: {refused}".replace(str(self._home), "its home"))

    def _offer(self) -> Offer:
        """By its digest, which is also recomputed: a file that was changed is none."""
        file = self._home / "offers" / f"{self._digest}.json"
        if len(self._digest) != 64 or not self._digest.isalnum() or not file.is_file():
            raise BadMessage("this site was not offered the study of this job, so nobody here can have approved it")
        offer = read_offer(file.read_bytes())
        if offer.digest != self._digest:
            raise BadMessage(f"{file} was changed; the coordinator has to offer the study again")
        return offer

    def _opened(self, site: str) -> Place:
        if self._place is None:
            take_over(self._home / "runs" / self._offer().run / "worker.json")
            self._place = open_place(self._home, site, self._offer(), self._countersign, self._settings)
        return self._place

    def _countersign(self, request: Request) -> Receipt:
        assert self._context is not None
        ask = Shareable({TOLD: request.model_dump_json()})
        ledger = self._policy.home.ledger
        ledger.refresh()  # the charge was written through another handle
        spent = ledger.spent_events()
        if spent:
            ask["epsilon"] = float(spent[-1].epsilon)
        engine = self._context.get_engine()
        answers = engine.send_aux_request(None, RECEIPT, ask, PATIENCE, self._context)
        for answer in answers.values():
            if isinstance(answer, Shareable) and answer.get_return_code() == ReturnCode.OK:
                return read_receipt(str(answer.get(TOLD, "")))
        raise BadLedger("the coordinator did not answer the request for a receipt; it is asked again in the next turn")

    def _beat(self, fl_ctx: FLContext) -> None:
        """From the first task to the end of the process: also while it waits for the next one."""
        if self._beating is not None:
            return
        self._beating = stop = threading.Event()
        engine = fl_ctx.get_engine()

        def beat() -> None:
            while not stop.wait(BEAT):
                with engine.new_context() as context:
                    engine.fire_and_forget_aux_request(ALIVE, Shareable(), context, optional=True)

        threading.Thread(target=beat, name="beat", daemon=True).start()
