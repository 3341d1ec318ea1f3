"""A site's own state between turns: one committed memory and at most one pending, kept only if its reply counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pipeline.protocol.messages import Identity, Memory


@dataclass
class SiteMemory:
    committed: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, Tensor] = field(default_factory=dict)
    identity: Identity | None = None  # (turn, attempt) the pending one belongs to
    kept: dict[str, Tensor] = field(default_factory=dict)  # the site's own model, once it was asked to make it

    def settle(self, counted: Identity | None) -> Memory:
        """The memory to work with, now that the coordinator has said what it counted."""
        if self.identity is not None and counted == self.identity:
            self.committed = self.pending
        self.pending, self.identity = {}, None
        return self.committed

    def propose(self, memory: Memory, identity: Identity) -> None:
        self.pending, self.identity = dict(memory), identity

    def newest(self, counted: Identity | None) -> Memory:
        """What a judge sees: like `settle`, without letting go of anything."""
        return self.pending if self.identity is not None and counted == self.identity else self.committed
