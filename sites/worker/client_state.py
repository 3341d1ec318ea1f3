"""A site's own state between turns: one committed memory and at most one pending, kept only if its reply counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pipeline.protocol.messages import ClientState, RoundAttempt


@dataclass
class ClientStateStore:
    committed: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, Tensor] = field(default_factory=dict)
    pending_attempt: RoundAttempt | None = None  # (turn, attempt) the pending one belongs to
    personal_model: dict[str, Tensor] = field(
        default_factory=dict
    )  # the site's own model, once it was asked to make it

    def resolve_pending(self, last_accepted: RoundAttempt | None) -> ClientState:
        """The memory to work with, now that the coordinator has said what it counted."""
        if self.pending_attempt is not None and last_accepted == self.pending_attempt:
            self.committed = self.pending
        self.pending, self.pending_attempt = {}, None
        return self.committed

    def set_pending(self, client_state: ClientState, attempt: RoundAttempt) -> None:
        self.pending, self.pending_attempt = dict(client_state), attempt

    def latest_state(self, last_accepted: RoundAttempt | None) -> ClientState:
        """What a judge sees: like `settle`, without letting go of anything."""
        return (
            self.pending
            if self.pending_attempt is not None and last_accepted == self.pending_attempt
            else self.committed
        )
