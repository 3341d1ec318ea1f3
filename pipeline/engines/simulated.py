"""All sites in this process: Flows advance together, so that a trainer sees the work of all sites at once.

Time is virtual: a site does `speed` steps a second, stragglers are slowed at random, and whoever drops out is silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.core.seeding import uniform
from pipeline.protocol.compression import PLAIN, Wire
from pipeline.protocol.messages import Excuse, Message, Reply, SiteId, Wait, Weighting
from pipeline.protocol.serialization import read_message, reply_bytes
from pipeline.strategies.base import Plan, Strategy
from sites.training.base import Ticket, Trainer
from sites.worker.client_state import SiteMemory
from sites.worker.task_session import Visit

if TYPE_CHECKING:
    from sites.privacy.secure_agg_client import Desk

ASIDE = frozenset({"advertise", "share", "unmask"})  # a secure sum's steps around the training


@dataclass(frozen=True)
class Profile:
    """How sites behave on the virtual clock."""

    speed: Mapping[SiteId, float]
    dropout: Mapping[SiteId, float]
    stragglers: float
    seed: int

    def speeds(self, asked: Sequence[SiteId], turn: int) -> dict[SiteId, float]:
        """Exactly the given share of the asked sites is slow in a turn, each to a random part of its speed."""
        drawn = sorted(asked, key=lambda s: uniform(self.seed, "straggler", s, turn))
        slow = set(drawn[: round(self.stragglers * len(asked))])
        return {s: self.speed[s] * (uniform(self.seed, "pace", s, turn) if s in slow else 1.0) for s in asked}

    def present(self, site: SiteId, turn: int) -> bool:
        return uniform(self.seed, "dropout", site, turn) >= self.dropout[site]


@dataclass(frozen=True)
class Late:
    site: SiteId
    due: int  # the turn in which it arrives
    parcel: bytes


@dataclass
class InProcess:
    sites: Sequence[SiteId]
    trainer: Trainer
    strategy: Strategy
    plan: Plan
    weighting: Weighting
    profile: Profile
    wire: Wire = PLAIN
    clock: float = 0.0
    memories: dict[SiteId, SiteMemory] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    desks: Mapping[SiteId, Desk] = field(default_factory=dict)  # where the study protects anything

    def exchange(self, parcels: Mapping[SiteId, bytes], wait: Wait) -> Iterator[tuple[SiteId, bytes]]:
        asked = [s for s in self.sites if s in parcels]
        messages = {s: read_message(parcels[s], self.wire.open_down) for s in asked}
        if any(m.task in ASIDE for m in messages.values()):
            yield from ((s, reply_bytes(self.desks[s].answer(messages[s]))) for s in asked)
            return
        training = [s for s in asked if messages[s].task == "train"]
        turn = max((m.turn for m in messages.values()), default=0)
        arrived = [item for item in self.late if training and item.due <= turn]
        self.late = [item for item in self.late if item not in arrived]
        busy = {item.site for item in self.late}
        occupied = busy | {item.site for item in arrived}  # whoever answers now worked until now
        speeds = self.profile.speeds(training, turn)
        waits_for_all = wait.late == "keep" and wait.partial == "drop"
        visits = []
        for site in asked:
            message = messages[site]
            if site in training:
                if site in occupied or not self.profile.present(site, turn):
                    continue
                message = replace(message, deadline=None) if waits_for_all else message
            visits.append(self._visit(site, message, speeds.get(site, 1.0)))
        self._advance(visits)
        yield from ((item.site, item.parcel) for item in arrived)
        yield from self._deliver(visits, speeds, turn, wait)
        yield from ((s, reply_bytes(Excuse(s, "train", turn, "busy with an earlier turn"))) for s in asked if s in busy)

    def _visit(self, site: SiteId, message: Message, speed: float) -> Visit:
        memory = self.memories.setdefault(site, SiteMemory())
        return Visit(
            site, message, self.strategy, self.plan, memory, self.weighting, speed, self.wire, self.desks.get(site)
        )

    def _advance(self, visits: Sequence[Visit]) -> None:
        while waiting := [v for v in visits if v.job is not None]:
            tickets = [Ticket(v.site, v.message.turn, v.nth, v.job, v.private) for v in waiting if v.job is not None]
            for visit, result in zip(waiting, self.trainer.run(tickets), strict=True):
                visit.give(result)

    def _deliver(
        self, visits: Sequence[Visit], speeds: Mapping[SiteId, float], turn: int, wait: Wait
    ) -> Iterator[tuple[SiteId, bytes]]:
        """What arrives in this turn; what does not is kept for the turn in which it does."""
        longest, on_time = 0.0, len(visits) == len(speeds)  # who is busy or has dropped out is waited for
        for visit in visits:
            work = visit.work
            took = (work.done + work.looks) / speeds[visit.site] if work is not None and visit.site in speeds else 0.0
            if wait.deadline and took > wait.deadline + 1e-9:
                self.late.append(Late(visit.site, turn + math.ceil(took / wait.deadline) - 1, visit.parcel()))
                on_time = False
                continue
            on_time = on_time and isinstance(visit.answer, Reply) and not (work is not None and work.partial)
            longest = max(longest, took)
            yield visit.site, visit.parcel()
        if speeds:
            self.clock += longest if on_time or wait.deadline is None else wait.deadline

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that a resumed run needs of the sites, as JSON and tensors."""
        tensors = {f"late/{i}": _bytes(item.parcel) for i, item in enumerate(self.late)}
        for site, memory in self.memories.items():
            tensors |= {f"memory/{site}/committed/{k}": v for k, v in memory.committed.items()}
            tensors |= {f"memory/{site}/pending/{k}": v for k, v in memory.pending.items()}
        header = {
            "clock": self.clock,
            "late": [[item.site, item.due] for item in self.late],
            "identities": {site: memory.identity for site, memory in self.memories.items()},
        }
        return header, tensors

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.clock = float(header["clock"])
        self.late = [Late(s, due, tensors[f"late/{i}"].numpy().tobytes()) for i, (s, due) in enumerate(header["late"])]
        self.memories = {}
        for site, identity in header["identities"].items():
            parts: dict[str, dict[str, Tensor]] = {"committed": {}, "pending": {}}
            for part, found in parts.items():
                prefix = f"memory/{site}/{part}/"
                found.update({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
            self.memories[site] = SiteMemory(
                parts["committed"], parts["pending"], identity and (identity[0], identity[1])
            )


def _bytes(parcel: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(parcel, np.uint8).copy())
