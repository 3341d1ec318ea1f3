"""Sites behind NVIDIA FLARE: `exchange` as one `send` task a site, in the job process of FLARE's server.

Never `broadcast`: with a payload of their own for each site it has delivered one site's to another. A site that works
says so every second; one that has been silent for a while is not waited for any longer, whatever became of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from torch import Tensor

from pipeline.coordinator.live_status import LiveStatus, requested_state
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, MessageError, RunHaltedError
from pipeline.core.files import exclusive_lock, write_atomically
from pipeline.flare.constants import (
    COORDINATOR_HOME_ENV,
    DATA_SUMMARY_TASK,
    EXCHANGE_TASK,
    HEARTBEAT_TOPIC,
    JSON_TEXT_KEY,
    MAX_SILENCE_SECONDS,
    MESSAGE_BYTES_KEY,
    RECEIPT_TOPIC,
)
from pipeline.protocol.messages import Declined, RoundPolicy, SiteId
from pipeline.protocol.serialization import peek_task, serialize_reply
from pipeline.runs.federated import find_run_folder, run_federated
from pipeline.study.offer import possession_statement, read_offer
from privacy.ledger.keys import is_valid_signature

POLL_SECONDS = 0.02  # seconds between two looks for answers
DEADLINE_GRACE_SECONDS = 5.0  # seconds that an answer may be on its way after the deadline
FIRST_REPLY_SECONDS = 120.0  # seconds that a site may take to read its data before it first says anything
MAX_REPLY_BYTES = 64 << 20  # bytes that an answer may have, or four times the question


class FlareEngine:
    """All of FLARE that a run needs, behind `Engine`."""

    def __init__(
        self, send_task: Callable[[Task, SiteId], None], cancel_task: Callable[[Task], None], last_seen: MutableMapping[SiteId, float], live_status: LiveStatus,
        halt_reason: Callable[[], str], min_sites: int, verify_proof: Callable[[SiteId, str, str], bool],
    ) -> None:  # fmt: skip
        """`proven`: whether a site's answer to a number used once is signed by the key that it is known by."""
        self._send_task, self._cancel_task, self._last_seen, self._live_status = (
            send_task,
            cancel_task,
            last_seen,
            live_status,
        )
        self._halt_reason, self._min_sites, self._verify_proof = halt_reason, min_sites, verify_proof
        self._replies: queue.Queue[tuple[SiteId, str, Shareable]] = queue.Queue()
        self._open_tasks: dict[SiteId, Task] = {}  # questions whose late answers are welcome
        self._started_at = time.monotonic()

    @property
    def clock(self) -> float:
        return time.monotonic() - self._started_at

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Real sites keep their own state."""
        return {"clock": self.clock}, {}

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._started_at = time.monotonic() - float(header["clock"])

    def collect_data_summaries(self) -> dict[SiteId, dict[str, Any]]:
        self._live_status.phase = "about"
        summaries: dict[SiteId, dict[str, Any]] = {}
        refusals: dict[SiteId, str] = {}
        nonce, num_asked = secrets.token_hex(16), len(self._last_seen)
        for site, reply in self._request_replies(
            DATA_SUMMARY_TASK,
            {site: Shareable({JSON_TEXT_KEY: nonce}) for site in self._last_seen},
            None,
            FIRST_REPLY_SECONDS,
        ):
            try:
                summary = json.loads(reply[JSON_TEXT_KEY])
                if "refused" in summary:
                    refusals[site] = str(summary["refused"])
                elif not self._verify_proof(site, nonce, str(summary.get("proof"))):
                    # an old certificate opens the line, but whoever holds it has to hold the agent's key, too
                    refusals[site] = "is not signed by the site's key; did it lose its place to another machine?"
                else:
                    summaries[site] = summary
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
                refusals[site] = f"could not say what data it has ({reply.get_return_code()})"
        self._forget_other_sites(summaries)
        if len(summaries) < self._min_sites:
            reasons = "; ".join(f"{site}: {reason}" for site, reason in refusals.items()) or "they do not answer"
            raise RunHaltedError(
                f"{len(summaries)} of {num_asked} sites are ready, {self._min_sites} are needed ({reasons})"
            )
        return {site: summaries[site] for site in self._last_seen if site in summaries}

    def _forget_other_sites(self, sites: Mapping[SiteId, object]) -> None:
        """Nobody else is asked in this job."""
        for site in [site for site in self._last_seen if site not in sites]:
            del self._last_seen[site]

    def exchange(
        self, encoded_messages: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]:
        self._live_status.phase = next((peek_task(encoded) for encoded in encoded_messages.values()), "")
        requests = {
            site: Shareable({MESSAGE_BYTES_KEY: encoded})
            for site, encoded in encoded_messages.items()
            if site in self._last_seen
        }
        max_bytes = max([MAX_REPLY_BYTES, *(4 * len(encoded) for encoded in encoded_messages.values())])
        for site, reply in self._request_replies(EXCHANGE_TASK, requests, round_policy, MAX_SILENCE_SECONDS):
            encoded = reply.get(MESSAGE_BYTES_KEY)
            if reply.get_return_code() != ReturnCode.OK or not isinstance(encoded, bytes):
                yield site, _encode_declined(site, f"failed ({reply.get_return_code()}); its log says why")
            elif len(encoded) > max_bytes:
                yield site, _encode_declined(site, f"quarantined: sent {len(encoded)} bytes, more than {max_bytes}")
            else:
                yield site, encoded

    def _request_replies(
        self, task_name: str, requests: Mapping[SiteId, Shareable], round_policy: RoundPolicy | None, max_silence: float
    ) -> Iterator[tuple[SiteId, Shareable]]:
        started_at = time.monotonic()
        tasks = {
            site: self._create_task(task_name, site, request)
            for site, request in requests.items()
            if site not in self._open_tasks
        }
        for site, flare_task in tasks.items():
            self._send_task(flare_task, site)
        live_status, pending_sites = self._live_status, set(tasks)
        live_status.asked, live_status.answered, live_status.missed = list(requests), [], {}
        give_up_at = (
            None
            if round_policy is None or round_policy.deadline is None
            else started_at + round_policy.deadline + DEADLINE_GRACE_SECONDS
        )
        while pending_sites:
            live_status.write(force=False)
            if reason := self._halt_reason():
                raise RunHaltedError(reason)
            try:
                site, request_id, reply = self._replies.get(timeout=POLL_SECONDS)
            except queue.Empty:
                pending_sites -= self._drop_silent_sites(pending_sites, started_at, max_silence)
                if give_up_at is not None and time.monotonic() > give_up_at:
                    break
                continue
            if site in self._last_seen:
                self._last_seen[site] = time.monotonic()
            if site in tasks and request_id == tasks[site].props["which"]:
                pending_sites.discard(site)
                live_status.answered.append(site)
            elif self._open_tasks.pop(site, None) is None:
                continue  # an answer that nobody waits for
            yield site, reply
        self._close_tasks(tasks, pending_sites, round_policy)
        live_status.write()

    def _create_task(self, name: str, site: SiteId, request: Shareable) -> Task:
        request_id = f"{name}-{site}-{time.monotonic_ns()}"

        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._replies.put((client_task.client.name, request_id, client_task.result))
            client_task.result = None  # FLARE would keep it until the task is cleared away

        return Task(name=name, data=request, props={"which": request_id}, result_received_cb=on_result)

    def _drop_silent_sites(self, pending_sites: set[SiteId], started_at: float, max_silence: float) -> set[SiteId]:
        """Not heard of for so long, and asked as long ago."""
        now = time.monotonic()
        silent_sites = {site for site in pending_sites if now - max(started_at, self._last_seen[site]) > max_silence}
        self._live_status.missed |= dict.fromkeys(silent_sites, "silent")
        self._live_status.lost = sorted(
            site for site, last_seen in self._last_seen.items() if now - last_seen > MAX_SILENCE_SECONDS
        )
        if silent_sites and len(self._last_seen) - len(self._live_status.lost) < self._min_sites:
            raise RunHaltedError(
                f"{', '.join(self._live_status.lost)} cannot be reached, and {self._min_sites} sites are needed"
            )
        return silent_sites

    def _close_tasks(
        self, tasks: Mapping[SiteId, Task], pending_sites: set[SiteId], round_policy: RoundPolicy | None
    ) -> None:
        for site in pending_sites:
            if round_policy is not None and round_policy.late_updates == "keep":
                self._open_tasks[site] = tasks[site]
        for site, task in tasks.items():
            if site not in self._open_tasks and task.completion_status is None:
                self._cancel_task(task)


def _encode_declined(site: SiteId, reason: str) -> bytes:
    return serialize_reply(Declined(site, "", 0, reason))


class FlareController(Controller):  # type: ignore[misc]
    """The workflow of a job: everything that it does is in the run's folder, which the job only names."""

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
        self.log_info(fl_ctx, f"{client.name}: an answer that nobody waits for any more is dropped")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        folder = find_run_folder(Path(os.environ[COORDINATOR_HOME_ENV]), self._run)
        try:
            with exclusive_lock(folder, wait=True):
                self._run_federated(RunFolder.open(folder), abort_signal, fl_ctx)
        except RunHaltedError as halt:
            _write_outcome(folder, "halted", str(halt))
            self.log_info(fl_ctx, f"halted: {halt}")
        except HemofedError as error:
            _write_outcome(folder, "failed", str(error))
            self.log_error(fl_ctx, str(error))
        except Exception as error:
            _write_outcome(folder, "failed", f"{type(error).__name__}: {error}; the log of the coordinator has more")
            raise

    def _run_federated(self, folder: RunFolder, abort_signal: Signal, fl_ctx: FLContext) -> None:
        offer = read_offer((folder.path / "offer.json").read_bytes())
        if offer.digest != self._digest:
            raise MessageError(f"{folder.path} holds another offer than the one this job is for")
        connected_sites = [client.name for client in self._engine.get_clients()]
        now = time.monotonic()
        self._last_seen.update({site: now for site in offer.site_keys if site in connected_sites})
        study = folder.load_study()
        live_status = LiveStatus(folder.path, study.rounds)
        live_status.lost = [site for site in offer.site_keys if site not in self._last_seen]
        live_status.write()

        def halt_reason() -> str:
            return "aborted" if abort_signal.triggered else "stop" if requested_state(folder.path) == "stop" else ""

        def privacy_spent() -> dict[str, Any]:
            return {"epsilon": dict(self._epsilon_by_site)} if self._epsilon_by_site else {}

        engine = FlareEngine(
            lambda task, site: self.send(task, fl_ctx, targets=[site]),
            lambda task: self.cancel_task(task),
            self._last_seen,
            live_status,
            halt_reason,
            max(study.round.quorum, self._min_sites),
            lambda site, nonce, proof: is_valid_signature(
                offer.site_keys[site], "possession", possession_statement(offer, site, nonce), proof
            ),
        )
        run_federated(folder, offer, engine, live_status, privacy_spent)
        _write_outcome(folder.path, "finished", "")

    def _on_heartbeat(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        site = fl_ctx.get_peer_context().get_identity_name()
        if site in self._last_seen:
            self._last_seen[site] = time.monotonic()
        return make_reply(ReturnCode.OK)

    def _on_receipt_request(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Countersigns the head of a site's ledger."""
        from pipeline.service.runtime.receipts import countersign_request
        from pipeline.service.storage.home import CoordinatorHome
        from pipeline.service.storage.store import CoordinatorStore

        site, home = (
            fl_ctx.get_peer_context().get_identity_name(),
            CoordinatorHome.open(Path(os.environ[COORDINATOR_HOME_ENV])),
        )
        reply = make_reply(ReturnCode.OK)
        with self._lock, contextlib.closing(CoordinatorStore(home.database_url)) as store:
            reply[JSON_TEXT_KEY] = countersign_request(
                home.path, site, request.get(JSON_TEXT_KEY, ""), store.record_receipt
            )
            epsilon = request.get("epsilon")
            is_granted = "receipt" in json.loads(
                reply[JSON_TEXT_KEY]
            )  # signed by that site's key, whoever passed it on
            if is_granted and isinstance(epsilon, float) and math.isfinite(epsilon):
                self._epsilon_by_site[site] = epsilon
        return reply


def _write_outcome(folder: Path, outcome: str, reason: str) -> None:
    write_atomically(folder / "ended.json", json.dumps({"how": outcome, "why": reason}).encode())
