"""Runs one client task at one site: converts the deadline to a maximum number of steps, and weights the reply."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.codecs.base import EncodedVector
from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError, StrategyContractError
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression, drop_residuals, select_residuals
from pipeline.protocol.messages import (
    ClientState,
    ClientTask,
    ClientUpdate,
    Declined,
    DeclineKind,
    Message,
    Reply,
    SiteId,
    Weighting,
    client_weight,
)
from pipeline.protocol.serialization import serialize_reply
from pipeline.protocol.tasks import GradientJob, GradientResult, JobResult, LocalJob, LocalWork, TrainJob, TrainResult
from pipeline.strategies.base import CLIENT_METHODS, Strategy, StrategyContext
from sites.worker.client_state import ClientStateStore

if TYPE_CHECKING:
    from sites.privacy.secure_agg_client import SecureAggClient


class TaskSession:
    """The processing of one message. `job`: the next local job; None when `reply` is ready."""

    def __init__(
        self,
        site: SiteId,
        message: Message,
        strategy: Strategy,
        context: StrategyContext,
        state_store: ClientStateStore,
        weighting: Weighting,
        steps_per_second: float,
        compression: UpdateCompression = NO_COMPRESSION,
        secure_agg_client: SecureAggClient | None = None,
    ) -> None:
        if message.task not in strategy.tasks:
            raise MessageError(f"{site}: {strategy.name} has no task {message.task!r}; it has {sorted(strategy.tasks)}")
        self._encrypted_shares: Mapping[str, bytes] = {}
        self._secure_agg_client = secure_agg_client if message.task == "train" else None
        if self._secure_agg_client is not None:
            message, self._encrypted_shares = self._secure_agg_client.split_shares(message)
        self._budget_guard = self._secure_agg_client.budget_guard if self._secure_agg_client is not None else None
        self._is_charged = False
        self._charged_steps_left = 0  # private steps that are charged and not done yet
        self.site, self.message, self.state_store = site, message, state_store
        self.weighting, self.compression = weighting, compression
        self._encoded_vectors: dict[str, EncodedVector] = {}
        self.work: LocalWork | None = None  # also of a declined task
        self.job_index = 0
        self.job: LocalJob | None = None
        self.reply: Reply | Declined | None = None
        self._steps_left = (
            math.inf if message.deadline is None else math.floor(message.deadline * steps_per_second + 1e-9)
        )
        self._steps_done = 0
        self._started_at = time.perf_counter()
        client_state = (
            state_store.resolve_pending(message.last_accepted)
            if message.task == "train"
            else state_store.latest_state(message.last_accepted)
        )
        self._residuals = select_residuals(client_state)
        self._client_task: ClientTask = getattr(strategy, CLIENT_METHODS[message.task])(
            message, drop_residuals(client_state), context
        )
        stored_update = self._budget_guard.load_stored_update(message) if self._budget_guard is not None else None
        if stored_update is not None:  # sending the same noised update again costs no epsilon
            self._is_charged = True
            self._finish_task(*stored_update)
        else:
            self._advance(None)

    @property
    def is_private(self) -> bool:
        """Whether the result of the next job leaves the site and needs differential privacy."""
        return (
            self._budget_guard is not None
            and isinstance(self.job, TrainJob | GradientJob)
            and not _is_public_job(self.job)
        )

    def submit_result(self, result: JobResult) -> None:
        if isinstance(result, TrainResult | GradientResult):
            self._charged_steps_left -= result.work.steps_done if self.is_private else 0
            affordable_steps = min(self._steps_left, result.work.steps_requested)
            self._steps_left -= result.work.steps_done + result.work.eval_steps
            self._steps_done += result.work.steps_done
            # a partial gradient, or a result without any step, is never accepted
            rejects_partial = (
                not self.message.accept_partial or isinstance(result, GradientResult) or not self._steps_done
            )
            if rejects_partial and (result.work.is_partial or self._steps_left < 0):
                self._decline("late", f"{affordable_steps} of {result.work.steps_requested} steps by the deadline")
                return
        self.job_index += 1
        self._advance(result)

    def encode_reply(self) -> bytes:
        assert self.reply is not None
        return serialize_reply(self.reply, self._encoded_vectors)

    def _advance(self, result: JobResult | None) -> None:
        try:
            job = next(self._client_task) if result is None else self._client_task.send(result)
        except StopIteration as stop:
            match stop.value:
                case ClientUpdate() as update, Mapping() as client_state:
                    self._finish_task(update, client_state)
                    return
            raise StrategyContractError(
                f"{self.message.task} of a strategy ends with `return ClientUpdate(...), client_state`, not {stop.value!r}"
            ) from None
        if not isinstance(job, LocalJob):
            raise StrategyContractError(
                f"{self.message.task} of a strategy yielded a {type(job).__name__}, which is not a job; is `yield from` missing?"
            )
        if isinstance(job, TrainJob) and self._steps_left < math.inf:
            job = replace(job, max_steps=int(self._steps_left), all_or_nothing=not self.message.accept_partial)
        self.job = job
        if self.is_private and not self._is_charged:
            self._charge_budget()
        if self.is_private and isinstance(self.job, TrainJob):  # never more steps than charged
            max_steps = math.inf if self.job.max_steps is None else self.job.max_steps
            self.job = replace(self.job, max_steps=int(min(max_steps, self._charged_steps_left)))

    def _charge_budget(self) -> None:
        """Charges all private steps of the round at once, before the first step. Their maximum number is known in advance."""
        assert self._budget_guard is not None
        steps = self._budget_guard.privacy_plan.steps_per_round
        self._is_charged = True
        if self._steps_left < steps and not self.message.accept_partial:
            self._decline("late", f"{int(self._steps_left)} of {steps} steps by the deadline")
            return
        self._charged_steps_left = int(min(steps, self._steps_left))
        refusal = self._budget_guard.charge_round(self.message, self._charged_steps_left)
        if refusal is not None:
            self._decline(*refusal)

    def _finish_task(self, update: ClientUpdate, client_state: ClientState) -> None:
        m, work = self.message, update.work
        self.work = work
        weight = client_weight(self.weighting, work)
        if self._budget_guard is not None:
            # the training loss has no privacy mechanism, so it stays at the site
            update = replace(update, summed={k: v for k, v in update.summed.items() if k != "train_loss"})
            self._budget_guard.store_update(m, update, client_state)
        if m.task == "train":
            try:
                if self._secure_agg_client is not None and self._secure_agg_client.secure_aggregation is not None:
                    # the weight is part of the masked sum, and the work does not leave the site
                    update = self._secure_agg_client.mask_update(m, update, weight, self._encrypted_shares)
                    work, weight = None, 1.0
                self._encoded_vectors, new_residuals = self.compression.compress_update(
                    update, self._residuals, self.site, m.round
                )
            except (MessageError, ReplyError, QuorumNotReachedError) as error:
                self._decline("not_sent", f"not sent: {error}")
                return
            self.state_store.set_pending({**client_state, **new_residuals}, (m.round, m.attempt))
        if m.task == "save_personal":
            self.state_store.personal_model = dict(client_state)
        if work is not None:
            update = replace(update, work=replace(work, seconds=round(time.perf_counter() - self._started_at, 6)))
        self.job, self.reply = None, Reply(self.site, m.task, m.round, m.attempt, update, weight)

    def _decline(self, kind: DeclineKind, text: str) -> None:
        self._client_task.close()
        self.job, self.reply = None, Declined(self.site, self.message.task, self.message.round, kind, text)


def _is_public_job(job: LocalJob) -> bool:
    return isinstance(job, TrainJob) and job.dataset == "public"
