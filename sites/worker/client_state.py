"""A site's client state between rounds: the committed state, and a pending one until the coordinator accepts its reply."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pipeline.protocol.messages import ClientState, RoundAttempt


@dataclass
class ClientStateStore:
    """The client state of one site in one run."""

    committed: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, Tensor] = field(default_factory=dict)
    pending_attempt: RoundAttempt | None = None  # (round, attempt) of the pending state
    personal_model: dict[str, Tensor] = field(default_factory=dict)  # set by the task `save_personal`

    def resolve_pending(self, last_accepted: RoundAttempt | None) -> ClientState:
        """Commits the pending state if the coordinator accepted its reply, discards it otherwise, and returns the state."""
        if self.pending_attempt is not None and last_accepted == self.pending_attempt:
            self.committed = self.pending
        self.pending, self.pending_attempt = {}, None
        return self.committed

    def set_pending(self, client_state: ClientState, attempt: RoundAttempt) -> None:
        self.pending, self.pending_attempt = dict(client_state), attempt

    def latest_state(self, last_accepted: RoundAttempt | None) -> ClientState:
        """The state that `resolve_pending` would return, without a change; for evaluation."""
        is_accepted = self.pending_attempt is not None and last_accepted == self.pending_attempt
        return self.pending if is_accepted else self.committed
