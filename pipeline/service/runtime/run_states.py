"""What a lead may ask of a run, and in which state: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.core.errors import ServiceError

LifecycleState = Literal[
    "offered", "starting", "running", "waiting", "pausing", "paused", "stopping", "stopped", "finished", "failed"
]
DesiredState = Literal["run", "pause", "stop", "regroup"]
LIFECYCLE_STATES: tuple[LifecycleState, ...] = get_args(LifecycleState)
STOPPING: LifecycleState = "stopping"
TERMINAL_STATES: frozenset[str] = frozenset({"stopped", "finished", "failed"})


class InvalidStateError(ServiceError):
    """What is asked makes no sense in the run's state; the text says the cure."""


@dataclass(frozen=True)
class RunAction:
    """`moves`: from a state to the next; a run that is in one of these states already is left as it is."""

    desired_state: DesiredState
    transitions: Mapping[str, LifecycleState]
    no_op_states: frozenset[str]
    remedies: Mapping[str, str] = field(default_factory=dict)

    def next_state(self, action_name: str, run: str, state: str) -> LifecycleState | None:
        """None: nothing to do."""
        if state in self.no_op_states:
            return None
        if state not in self.transitions:
            raise InvalidStateError(
                f"{run} is {state} and cannot {action_name}: {self.remedies.get(state, 'wait until it is over')}"
            )
        return self.transitions[state]


RUN_ACTIONS: Mapping[str, RunAction] = {
    "begin": RunAction(
        "run",
        {"offered": "starting"},
        frozenset({"starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until it has, then resume it")
        | dict.fromkeys(("paused", "stopped", "failed"), "resume it")
        | {"finished": "make a new run of the study"},
    ),
    "pause": RunAction(
        "pause",
        dict.fromkeys(("starting", "running", "waiting"), "pausing"),
        frozenset({"pausing", "paused"}),
        {"offered": "it has not begun; stop it to take the offer back"}
        | dict.fromkeys(("stopping", "stopped", "finished", "failed"), "nothing runs that could pause"),
    ),
    "resume": RunAction(
        "run",
        dict.fromkeys(("paused", "stopped", "failed"), "starting"),
        frozenset({"offered", "starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until it has, then resume it")
        | {"finished": "make a new run of the study"},
    ),
    "stop": RunAction(
        "stop",
        {
            **dict.fromkeys(("starting", "running", "waiting", "pausing"), STOPPING),
            "offered": "stopped",
            "paused": "stopped",
        },
        frozenset({"stopping", "stopped"}),
        dict.fromkeys(("finished", "failed"), "it is over already"),
    ),
}
