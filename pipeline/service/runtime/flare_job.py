"""The FLARE controller of one run; FLARE starts it on the coordinator when a job begins."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from pipeline.coordinator.run_folder import RunFolder, find_run_folder
from pipeline.core.errors import HemofedError, MessageError, RunHaltedError
from pipeline.core.files import exclusive_lock
from pipeline.engines.flare import POLL_SECONDS, FlareEngine
from pipeline.flare.constants import COORDINATOR_HOME_ENV, HEARTBEAT_TOPIC, JSON_TEXT_KEY, RECEIPT_TOPIC
from pipeline.protocol.messages import SiteId
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.live_status import LiveStatusWriter
from pipeline.records.run_control import requested_state
from pipeline.runs.federated import run_federated
from pipeline.study.offer import possession_statement
from privacy.ledger.keys import is_valid_signature


class FlareController(Controller):  # type: ignore[misc]
    """The workflow of a job. The job only names the run; all its input and output is in the run's folder.

    `digest`: of the offer that the job was submitted for. `min_sites`: replies that a round needs at least.
    """

    def __init__(self, run: str, digest: str, min_sites: int = 1) -> None:
        super().__init__(task_check_period=POLL_SECONDS)
        self._run, self._digest, self._min_sites = run, digest, min_sites
        self._last_seen: dict[SiteId, float] = {}
        self._epsilon_by_site: dict[SiteId, float] = {}
        self._lock = threading.Lock()

    def start_controller(self, fl_ctx: FLContext) -> None:
        self._engine.register_aux_message_handler(HEARTBEAT_TOPIC, self._on_heartbeat)
        self._engine.register_aux_message_handler(RECEIPT_TOPIC, self._on_receipt_request)

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"{client.name}: dropped a late reply")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        folder = find_run_folder(Path(os.environ[COORDINATOR_HOME_ENV]), self._run)
        try:
            with exclusive_lock(folder, wait=True):
                self._run_federated(RunFolder.open(folder), abort_signal, fl_ctx)
        except RunHaltedError as halt:
            AttemptOutcome(outcome="halted", reason=str(halt)).write(folder)
            self.log_info(fl_ctx, f"halted: {halt}")
        except HemofedError as error:
            AttemptOutcome(outcome="failed", reason=str(error)).write(folder)
            self.log_error(fl_ctx, str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}; see the coordinator's log for details"
            AttemptOutcome(outcome="failed", reason=text).write(folder)
            raise

    def _run_federated(self, folder: RunFolder, abort_signal: Signal, fl_ctx: FLContext) -> None:
        offer = folder.load_offer()
        if offer.digest != self._digest:
            raise MessageError(f"{folder.path} holds a different offer than the one of this job; resume the run")
        connected_sites = [client.name for client in self._engine.get_clients()]
        now = time.monotonic()
        self._last_seen.update({site: now for site in offer.site_keys if site in connected_sites})
        study = folder.load_study()
        live_status = LiveStatusWriter(folder.path, study.rounds)
        live_status.unreachable = [site for site in offer.site_keys if site not in self._last_seen]
        live_status.write()

        def halt_reason() -> str:
            return "aborted" if abort_signal.triggered else "stop" if requested_state(folder.path) == "stop" else ""

        engine = FlareEngine(
            send_task=lambda task, site: self.send(task, fl_ctx, targets=[site]),
            cancel_task=lambda task: self.cancel_task(task),
            last_seen=self._last_seen,
            live_status=live_status,
            halt_reason=halt_reason,
            min_sites=max(study.round.quorum, self._min_sites),
            verify_proof=lambda site, nonce, proof: is_valid_signature(
                offer.site_keys[site], "possession", possession_statement(offer, site, nonce), proof
            ),
            reported_epsilon=self._epsilon_by_site,
        )
        run_federated(folder, offer, engine, live_status)
        AttemptOutcome(outcome="finished", reason="").write(folder.path)

    def _on_heartbeat(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        site = fl_ctx.get_peer_context().get_identity_name()
        if site in self._last_seen:
            self._last_seen[site] = time.monotonic()
        return make_reply(ReturnCode.OK)

    def _on_receipt_request(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Countersigns the head of a site's ledger, and records the epsilon that the site reports with it."""
        from pipeline.service.runtime.receipts import countersign_request
        from pipeline.service.storage.home import CoordinatorHome
        from pipeline.service.storage.store import CoordinatorStore

        site = fl_ctx.get_peer_context().get_identity_name()
        home = CoordinatorHome.open(Path(os.environ[COORDINATOR_HOME_ENV]))
        reply = make_reply(ReturnCode.OK)
        with self._lock, contextlib.closing(CoordinatorStore(home.database_url)) as store:
            request_json = request.get(JSON_TEXT_KEY, "")
            reply[JSON_TEXT_KEY] = countersign_request(home.path, site, request_json, store.record_receipt)
            epsilon = request.get("epsilon")
            # a granted request is signed with this site's key
            is_granted = "receipt" in json.loads(reply[JSON_TEXT_KEY])
            if is_granted and isinstance(epsilon, float) and math.isfinite(epsilon):
                self._epsilon_by_site[site] = epsilon
        return reply
