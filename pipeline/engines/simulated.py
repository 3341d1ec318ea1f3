"""The engine with all sites in this process; their task sessions advance together, so that a trainer gets all jobs at once.

Time is virtual: a site does `speed` steps per second, stragglers are slowed at random, unavailable sites do not reply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.core.seeding import seeded_uniform
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression
from pipeline.protocol.messages import (
    SECURE_AGGREGATION_TASKS,
    Declined,
    Message,
    Reply,
    RoundPolicy,
    SiteId,
    Weighting,
)
from pipeline.protocol.serialization import deserialize_message, serialize_reply
from pipeline.strategies.base import Strategy, StrategyContext
from sites.training.base import Trainer, TrainRequest
from sites.worker.client_state import ClientStateStore
from sites.worker.task_session import TaskSession

if TYPE_CHECKING:
    from sites.privacy.site_privacy import SitePrivacy


@dataclass(frozen=True)
class ClientSpeedModel:
    """Speed, availability and stragglers of the sites on the virtual clock."""

    steps_per_second: Mapping[SiteId, float]
    dropout_probability: Mapping[SiteId, float]
    straggler_fraction: float
    seed: int

    def sample_speeds(self, clients: Sequence[SiteId], round_number: int) -> dict[SiteId, float]:
        """Slows exactly `straggler_fraction` of the clients, each to a random part of its speed."""
        shuffled = sorted(clients, key=lambda s: seeded_uniform(self.seed, "straggler", s, round_number))
        stragglers = set(shuffled[: round(self.straggler_fraction * len(clients))])
        return {
            s: self.steps_per_second[s]
            * (seeded_uniform(self.seed, "pace", s, round_number) if s in stragglers else 1.0)
            for s in clients
        }

    def is_available(self, site: SiteId, round_number: int) -> bool:
        return seeded_uniform(self.seed, "dropout", site, round_number) >= self.dropout_probability[site]


@dataclass(frozen=True)
class LateReply:
    """A reply that missed its round's deadline and counts in a later round."""

    site: SiteId
    due_round: int  # in which it arrives
    encoded_reply: bytes


@dataclass
class SimulatedEngine:
    """The `Engine` protocol with simulated clients."""

    sites: Sequence[SiteId]
    trainer: Trainer
    strategy: Strategy
    context: StrategyContext
    weighting: Weighting
    speed_model: ClientSpeedModel
    compression: UpdateCompression = NO_COMPRESSION
    clock: float = 0.0
    client_states: dict[SiteId, ClientStateStore] = field(default_factory=dict)
    late_replies: list[LateReply] = field(default_factory=list)
    privacy_by_site: Mapping[SiteId, SitePrivacy] = field(default_factory=dict)  # with [privacy]

    def exchange(
        self, encoded_messages: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]:
        clients = [s for s in self.sites if s in encoded_messages]
        messages = {s: deserialize_message(encoded_messages[s], self.compression.decode_downlink) for s in clients}
        if any(m.task in SECURE_AGGREGATION_TASKS for m in messages.values()):
            yield from ((s, serialize_reply(self._answer_secure_aggregation(messages[s], s))) for s in clients)
            return
        training_clients = [s for s in clients if messages[s].task == "train"]
        round_number = max((m.round for m in messages.values()), default=0)
        arrived_replies = [
            late_reply for late_reply in self.late_replies if training_clients and late_reply.due_round <= round_number
        ]
        self.late_replies = [late_reply for late_reply in self.late_replies if late_reply not in arrived_replies]
        busy_sites = {late_reply.site for late_reply in self.late_replies}
        # a site whose late reply arrives in this round was busy until now
        occupied_sites = busy_sites | {late_reply.site for late_reply in arrived_replies}
        speeds = self.speed_model.sample_speeds(training_clients, round_number)
        sessions = []
        for site in clients:
            message = messages[site]
            if site in training_clients:
                if site in occupied_sites or not self.speed_model.is_available(site, round_number):
                    continue
                message = replace(message, deadline=None) if round_policy.waits_for_all else message
            sessions.append(self._open_session(site, message, speeds.get(site, 1.0)))
        self._advance_sessions(sessions)
        yield from ((late_reply.site, late_reply.encoded_reply) for late_reply in arrived_replies)
        yield from self._deliver_replies(sessions, speeds, round_number, round_policy)
        yield from (
            (s, serialize_reply(Declined(s, "train", round_number, "busy", "busy with an earlier round")))
            for s in clients
            if s in busy_sites
        )

    def _answer_secure_aggregation(self, message: Message, site: SiteId) -> Reply | Declined:
        masker = self.privacy_by_site[site].update_masker
        assert masker is not None  # the coordinator has the same study
        return masker.handle_message(message)

    def epsilon_spent(self) -> dict[SiteId, float]:
        """By the ledger of each site that trains with differential privacy."""
        return {
            site: privacy.budget_guard.epsilon_spent
            for site, privacy in self.privacy_by_site.items()
            if privacy.budget_guard is not None
        }

    def _open_session(self, site: SiteId, message: Message, speed: float) -> TaskSession:
        client_state = self.client_states.setdefault(site, ClientStateStore())
        return TaskSession(
            site=site,
            message=message,
            strategy=self.strategy,
            context=self.context,
            state_store=client_state,
            weighting=self.weighting,
            steps_per_second=speed,
            compression=self.compression,
            privacy=self.privacy_by_site.get(site),
        )

    def _advance_sessions(self, sessions: Sequence[TaskSession]) -> None:
        while pending_sessions := [s for s in sessions if s.job is not None]:
            train_requests = [
                TrainRequest(s.site, s.message.round, s.job_index, s.job, s.is_private)
                for s in pending_sessions
                if s.job is not None
            ]
            for session, result in zip(pending_sessions, self.trainer.run(train_requests), strict=True):
                session.submit_result(result)

    def _deliver_replies(
        self,
        sessions: Sequence[TaskSession],
        speeds: Mapping[SiteId, float],
        round_number: int,
        round_policy: RoundPolicy,
    ) -> Iterator[tuple[SiteId, bytes]]:
        """Yields the replies of this round, stores late ones for the round in which they arrive, and advances the clock."""
        max_seconds = 0.0
        all_on_time = len(sessions) == len(speeds)  # the clock also waits for busy and unavailable sites
        for session in sessions:
            work = session.work
            seconds = (
                (work.steps_done + work.eval_steps) / speeds[session.site]
                if work is not None and session.site in speeds
                else 0.0
            )
            if round_policy.deadline and seconds > round_policy.deadline + 1e-9:
                due_round = round_number + math.ceil(seconds / round_policy.deadline) - 1
                self.late_replies.append(LateReply(session.site, due_round, session.encode_reply()))
                all_on_time = False
                continue
            is_partial = work is not None and work.is_partial
            all_on_time = all_on_time and isinstance(session.reply, Reply) and not is_partial
            max_seconds = max(max_seconds, seconds)
            yield session.site, session.encode_reply()
        if speeds:
            self.clock += max_seconds if all_on_time or round_policy.deadline is None else round_policy.deadline

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """State of the sites that a resumed run needs, as JSON and tensors."""
        tensors = {
            f"late/{i}": _bytes_to_tensor(late_reply.encoded_reply) for i, late_reply in enumerate(self.late_replies)
        }
        for site, client_state in self.client_states.items():
            tensors |= {f"client_state/{site}/committed/{k}": v for k, v in client_state.committed.items()}
            tensors |= {f"client_state/{site}/pending/{k}": v for k, v in client_state.pending.items()}
        header = {
            "clock": self.clock,
            "late": [[late_reply.site, late_reply.due_round] for late_reply in self.late_replies],
            "pending_attempts": {
                site: client_state.pending_attempt for site, client_state in self.client_states.items()
            },
        }
        return header, tensors

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.clock = float(header["clock"])
        self.late_replies = [
            LateReply(s, due_round, tensors[f"late/{i}"].numpy().tobytes())
            for i, (s, due_round) in enumerate(header["late"])
        ]
        self.client_states = {}
        for site, pending_attempt in header["pending_attempts"].items():
            tensors_by_section: dict[str, dict[str, Tensor]] = {"committed": {}, "pending": {}}
            for section, section_tensors in tensors_by_section.items():
                prefix = f"client_state/{site}/{section}/"
                section_tensors.update({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
            self.client_states[site] = ClientStateStore(
                tensors_by_section["committed"],
                tensors_by_section["pending"],
                pending_attempt and (pending_attempt[0], pending_attempt[1]),
            )


def _bytes_to_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
