"""One client task at one site: runs the client's half of the strategy, and makes the reply of its update."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pipeline.codecs.base import EncodedVector
from pipeline.core.errors import (
    MessageError,
    QuorumNotReachedError,
    ReplyError,
    StrategyContractError,
    TaskDeclinedError,
)
from pipeline.protocol.client_tasks import StepAllowance, is_private_job
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
from pipeline.protocol.tasks import JobResult, LocalJob, LocalWork
from pipeline.strategies.base import CLIENT_METHODS, Strategy, StrategyContext
from sites.worker.client_state import ClientStateStore

if TYPE_CHECKING:  # opacus and cryptography are optional
    from sites.privacy.site_privacy import SitePrivacy


class TaskSession:
    """The processing of one message. `job`: the next local job; None when `reply` is ready.

    The generator `_perform` is the whole sequence; the session advances it, so that an engine can interleave many.
    """

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
        privacy: SitePrivacy | None = None,
    ) -> None:
        if message.task not in strategy.tasks:
            raise MessageError(f"{site}: {strategy.name} has no task {message.task!r}; it has {sorted(strategy.tasks)}")
        self.site, self.message = site, message
        self.job_index = 0
        self.job: LocalJob | None = None
        self.reply: Reply | Declined | None = None
        self.work: LocalWork | None = None  # also of an update that is not sent
        self._privacy = privacy if message.task == "train" else None
        self._strategy, self._context, self._state_store = strategy, context, state_store
        self._weighting, self._compression = weighting, compression
        self._steps_per_second = steps_per_second
        self._encoded_vectors: dict[str, EncodedVector] = {}
        self._started_at = time.perf_counter()
        self._performance = self._perform()
        self._advance(None)

    @property
    def is_private(self) -> bool:
        """Whether the result of the next job leaves the site and needs differential privacy."""
        has_guard = self._privacy is not None and self._privacy.budget_guard is not None
        return has_guard and is_private_job(self.job)

    def submit_result(self, result: JobResult) -> None:
        self.job_index += 1
        self._advance(result)

    def encode_reply(self) -> bytes:
        assert self.reply is not None
        return serialize_reply(self.reply, self._encoded_vectors)

    def _advance(self, result: JobResult | None) -> None:
        try:
            job = self._performance.send(cast(JobResult, result))  # the first one must be None
        except StopIteration as stop:
            self.job, self.reply = None, stop.value
            return
        if not isinstance(job, LocalJob):
            raise StrategyContractError(
                f"{self.message.task} of a strategy yielded a {type(job).__name__}, which is not a job; is `yield from` missing?"
            )
        self.job = job

    def _perform(self) -> Generator[LocalJob, JobResult, Reply | Declined]:
        message = self.message
        encrypted_shares: Mapping[str, bytes] = {}
        masker = self._privacy.update_masker if self._privacy is not None else None
        if masker is not None:
            message, encrypted_shares = masker.split_shares(message)
        client_state = self._load_client_state(message)
        method = getattr(self._strategy, CLIENT_METHODS[message.task])
        client_task = method(message, drop_residuals(client_state), self._context)
        try:
            update, new_state = _check_outcome((yield from self._limit_task(client_task, message)), message.task)
            self.work = update.work
            weight = client_weight(self._weighting, update.work)
            if message.task == "train":
                with _declining_as_not_sent():
                    if masker is not None:  # the weight is part of the masked sum, and the work does not leave the site
                        update = masker.mask_update(message, update, weight, encrypted_shares)
                        weight = 1.0
                    self._encoded_vectors, residuals = self._compression.compress_update(
                        update, select_residuals(client_state), self.site, message.round
                    )
                self._state_store.set_pending({**new_state, **residuals}, (message.round, message.attempt))
        except TaskDeclinedError as declined:
            return Declined(self.site, message.task, message.round, cast(DeclineKind, declined.kind), str(declined))
        if message.task == "save_personal":
            self._state_store.personal_model = dict(new_state)
        return Reply(self.site, message.task, message.round, message.attempt, self._timed(update), weight)

    def _load_client_state(self, message: Message) -> ClientState:
        if message.task == "train":
            return self._state_store.resolve_pending(message.last_accepted)
        return self._state_store.latest_state(message.last_accepted)

    def _limit_task(self, task: ClientTask, message: Message) -> ClientTask:
        """The task within its deadline, and within the privacy budget."""
        allowance = StepAllowance.until_deadline(message.deadline, self._steps_per_second, message.accept_partial)
        limited_task = allowance.limit_steps(task)
        guard = self._privacy.budget_guard if self._privacy is not None else None
        return limited_task if guard is None else guard.charge_task(limited_task, message, allowance)

    def _timed(self, update: ClientUpdate) -> ClientUpdate:
        if update.work is None:
            return update
        return replace(update, work=replace(update.work, seconds=round(time.perf_counter() - self._started_at, 6)))


@contextmanager
def _declining_as_not_sent() -> Iterator[None]:
    try:
        yield
    except (MessageError, ReplyError, QuorumNotReachedError) as error:
        raise TaskDeclinedError("not_sent", f"not sent: {error}") from error


def _check_outcome(outcome: object, task: str) -> tuple[ClientUpdate, ClientState]:
    match outcome:
        case ClientUpdate() as update, Mapping() as client_state:
            return update, client_state
    raise StrategyContractError(
        f"{task} of a strategy ends with `return ClientUpdate(...), client_state`, not {outcome!r}"
    )
