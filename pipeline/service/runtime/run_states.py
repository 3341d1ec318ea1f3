"""What a lead may ask of a run, and in which state: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.core.errors import BadService

State = Literal[
    "offered", "starting", "running", "waiting", "pausing", "paused", "stopping", "stopped", "finished", "failed"
]
Want = Literal["run", "pause", "stop", "regroup"]
STATES: tuple[State, ...] = get_args(State)
STOPPING: State = "stopping"
OVER: frozenset[str] = frozenset({"stopped", "finished", "failed"})


class NotNow(BadService):
    """What is asked makes no sense in the run's state; the text says the cure."""


@dataclass(frozen=True)
class Action:
    """`moves`: from a state to the next; a run that is in one of these states already is left as it is."""

    want: Want
    moves: Mapping[str, State]
    already: frozenset[str]
    cures: Mapping[str, str] = field(default_factory=dict)

    def after(self, name: str, run: str, state: str) -> State | None:
        """None: nothing to do."""
        if state in self.already:
            return None
        if state not in self.moves:
            raise NotNow(f"{run} is {state} and cannot {name}: {self.cures.get(state, 'wait until it is over')}")
        return self.moves[state]


ACTIONS: Mapping[str, Action] = {
    "begin": Action(
        "run",
        {"offered": "starting"},
        frozenset({"starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until it has, then resume it")
        | dict.fromkeys(("paused", "stopped", "failed"), "resume it")
        | {"finished": "make a new run of the study"},
    ),
    "pause": Action(
        "pause",
        dict.fromkeys(("starting", "running", "waiting"), "pausing"),
        frozenset({"pausing", "paused"}),
        {"offered": "it has not begun; stop it to take the offer back"}
        | dict.fromkeys(("stopping", "stopped", "finished", "failed"), "nothing runs that could pause"),
    ),
    "resume": Action(
        "run",
        dict.fromkeys(("paused", "stopped", "failed"), "starting"),
        frozenset({"offered", "starting", "running", "waiting"}),
        dict.fromkeys(("pausing", "stopping"), "wait until it has, then resume it")
        | {"finished": "make a new run of the study"},
    ),
    "stop": Action(
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
