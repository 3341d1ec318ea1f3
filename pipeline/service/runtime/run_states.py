"""The state machine of a run: which action a lead may request in which state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.core.errors import ServiceError
from pipeline.records.run_control import DesiredState

LifecycleState = Literal[
    "offered", "starting", "running", "waiting", "pausing", "paused", "stopping", "stopped", "finished", "failed"
]
LIFECYCLE_STATES: tuple[LifecycleState, ...] = get_args(LifecycleState)
STOPPING: LifecycleState = "stopping"
TERMINAL_STATES: frozenset[str] = frozenset({"stopped", "finished", "failed"})


class InvalidStateError(ServiceError):
    """The requested action is not possible in the run's state."""


@dataclass(frozen=True)
class RunAction:
    """`transitions`: state -> next state. `no_op_states`: the action changes nothing. `remedies`: state -> what to do instead."""

    desired_state: DesiredState
    transitions: Mapping[str, LifecycleState]
    no_op_states: frozenset[str]
    remedies: Mapping[str, str] = field(default_factory=dict)

    def next_state(self, action_name: str, run: str, state: str) -> LifecycleState | None:
        """None if there is nothing to do."""
        if state in self.no_op_states:
            return None
        if state not in self.transitions:
            raise InvalidStateError(
                f"{run} is {state} and cannot {action_name}: {self.remedies.get(state, 'wait until the run has ended')}"
            )
        return self.transitions[state]


RUN_ACTIONS: Mapping[str, RunAction] = {
    "begin": RunAction(
        "run",
        {"offered": "starting"},
        frozenset({"starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until the round has ended, then resume the run")
        | dict.fromkeys(("paused", "stopped", "failed"), "resume it instead")
        | {"finished": "offer a new run of the study"},
    ),
    "pause": RunAction(
        "pause",
        dict.fromkeys(("starting", "running", "waiting"), "pausing"),
        frozenset({"pausing", "paused"}),
        {"offered": "it has not begun; stop it to withdraw the offer"}
        | dict.fromkeys(("stopping", "stopped", "finished", "failed"), "only an active run can pause"),
    ),
    "resume": RunAction(
        "run",
        dict.fromkeys(("paused", "stopped", "failed"), "starting"),
        frozenset({"offered", "starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until the round has ended, then resume the run")
        | {"finished": "offer a new run of the study"},
    ),
    "stop": RunAction(
        "stop",
        {
            **dict.fromkeys(("starting", "running", "waiting", "pausing"), STOPPING),
            "offered": "stopped",
            "paused": "stopped",
        },
        frozenset({"stopping", "stopped"}),
        dict.fromkeys(("finished", "failed"), "it has already ended"),
    ),
}
