"""The engine over NVIDIA FLARE: `exchange` sends one task per site, in the job process of FLARE's server.

It uses `send`, never `broadcast`: FLARE's broadcast with a different payload per site has delivered one site's payload to
another. A working site sends a heartbeat every second; the engine stops waiting for a site that has been silent too long.
"""

from __future__ import annotations

import json
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from pipeline.core.errors import RunHaltedError
from pipeline.flare.constants import (
    DATA_SUMMARY_TASK,
    EXCHANGE_TASK,
    JSON_TEXT_KEY,
    MAX_SILENCE_SECONDS,
    MESSAGE_BYTES_KEY,
)
from pipeline.protocol.messages import ClientFailure, Declined, DeclineKind, RoundPolicy, SiteId
from pipeline.protocol.serialization import peek_task, serialize_reply
from pipeline.records.live_status import LiveStatusWriter

POLL_SECONDS = 0.02  # between two polls for replies
DEADLINE_GRACE_SECONDS = 5.0  # that a reply may travel after the deadline
FIRST_REPLY_SECONDS = 120.0  # that a site may take to load its data before its first heartbeat
MAX_REPLY_BYTES = 64 << 20  # of one reply, or four times the message if that is more


class FlareEngine:
    """The `Engine` protocol over FLARE tasks."""

    def __init__(
        self,
        send_task: Callable[[Task, SiteId], None],
        cancel_task: Callable[[Task], None],
        last_seen: MutableMapping[SiteId, float],
        live_status: LiveStatusWriter,
        halt_reason: Callable[[], str],
        min_sites: int,
        verify_proof: Callable[[SiteId, str, str], bool],
        reported_epsilon: Mapping[SiteId, float],
    ) -> None:
        """`verify_proof(site, nonce, proof)`: whether the proof is the site's signature of the nonce.

        `last_seen` and `reported_epsilon` are views of what sites report outside of tasks.
        """
        self._send_task, self._cancel_task = send_task, cancel_task
        self._last_seen, self._live_status = last_seen, live_status
        self._halt_reason, self._min_sites, self._verify_proof = halt_reason, min_sites, verify_proof
        self._reported_epsilon = reported_epsilon
        self._replies: queue.Queue[tuple[SiteId, str, Shareable]] = queue.Queue()
        self._open_tasks: dict[SiteId, Task] = {}  # tasks whose late replies are accepted
        self._started_at = time.monotonic()

    @property
    def clock(self) -> float:
        return time.monotonic() - self._started_at

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Only the clock: real sites keep their own state."""
        return {"clock": self.clock}, {}

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._started_at = time.monotonic() - float(header["clock"])

    def epsilon_spent(self) -> dict[SiteId, float]:
        return dict(self._reported_epsilon)

    def collect_data_summaries(self) -> dict[SiteId, dict[str, Any]]:
        """Asks every site for its data summary and a proof of its key. Excludes sites that refuse or do not reply."""
        self._live_status.phase = "data_summary"
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
                    # a certificate opens the connection, but only the agent's key proves the site
                    refusals[site] = (
                        "sent a proof that is not signed by the site's key; does another machine use its certificate?"
                    )
                else:
                    summaries[site] = summary
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
                refusals[site] = f"sent no data summary ({reply.get_return_code()})"
        self._forget_other_sites(summaries)
        if len(summaries) < self._min_sites:
            reasons = "; ".join(f"{site}: {reason}" for site, reason in refusals.items()) or "they do not reply"
            raise RunHaltedError(
                f"{len(summaries)} of {num_asked} sites are ready, {self._min_sites} are needed ({reasons})"
            )
        return {site: summaries[site] for site in self._last_seen if site in summaries}

    def _forget_other_sites(self, sites: Mapping[SiteId, object]) -> None:
        """Excludes all other sites from this job."""
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
                yield site, _encode_declined(site, "failed", f"failed ({reply.get_return_code()}); see its log")
            elif len(encoded) > max_bytes:
                yield site, _encode_declined(site, "too_large", f"sent {len(encoded)} bytes, more than {max_bytes}")
            else:
                yield site, encoded

    def _request_replies(
        self, task_name: str, requests: Mapping[SiteId, Shareable], round_policy: RoundPolicy | None, max_silence: float
    ) -> Iterator[tuple[SiteId, Shareable]]:
        """Yields replies as they arrive, until all sites have replied, are silent, or the deadline has passed."""
        started_at = time.monotonic()
        tasks = {
            site: self._create_task(task_name, site, request)
            for site, request in requests.items()
            if site not in self._open_tasks
        }
        for site, flare_task in tasks.items():
            self._send_task(flare_task, site)
        live_status, pending_sites = self._live_status, set(tasks)
        live_status.requested, live_status.replied, live_status.failures = list(requests), [], {}
        deadline = None if round_policy is None else round_policy.deadline
        give_up_at = None if deadline is None else started_at + deadline + DEADLINE_GRACE_SECONDS
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
                live_status.replied.append(site)
            elif self._open_tasks.pop(site, None) is None:
                continue  # a late reply that the round policy drops
            yield site, reply
        self._close_tasks(tasks, pending_sites, round_policy)
        live_status.write()

    def _create_task(self, name: str, site: SiteId, request: Shareable) -> Task:
        request_id = f"{name}-{site}-{time.monotonic_ns()}"

        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._replies.put((client_task.client.name, request_id, client_task.result))
            client_task.result = None  # FLARE would keep it until the task is removed

        return Task(name=name, data=request, props={"which": request_id}, result_received_cb=on_result)

    def _drop_silent_sites(self, pending_sites: set[SiteId], started_at: float, max_silence: float) -> set[SiteId]:
        """Pending sites without a message since `max_silence` seconds, counted from the request at the earliest."""
        now = time.monotonic()
        silent_sites = {site for site in pending_sites if now - max(started_at, self._last_seen[site]) > max_silence}
        self._live_status.failures |= dict.fromkeys(silent_sites, ClientFailure("no_reply", "silent"))
        self._live_status.unreachable = sorted(
            site for site, last_seen in self._last_seen.items() if now - last_seen > MAX_SILENCE_SECONDS
        )
        if silent_sites and len(self._last_seen) - len(self._live_status.unreachable) < self._min_sites:
            raise RunHaltedError(
                f"{', '.join(self._live_status.unreachable)} cannot be reached, and {self._min_sites} sites are needed"
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


def _encode_declined(site: SiteId, kind: DeclineKind, text: str) -> bytes:
    return serialize_reply(Declined(site, "", 0, kind, text))
