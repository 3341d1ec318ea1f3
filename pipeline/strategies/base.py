"""What an algorithm is: a coordinator's half (`start`, `round`, `brief`, `models`) and a site's half (`train`, `judge`).

The site's half yields local work as data and receives results; it does no I/O and no training, so the same object
runs stacked over a hundred simulated sites in one process, or alone in a hospital.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from pipeline.components import Component
from pipeline.messages import Flow, Memory, Message, Reply, SiteId, Total, Update, Vectors
from pipeline.weights import Snapshot, Spec, Vec
from pipeline.work import Evaluate, Fit, Fitted, Job, Result, evaluated, fitted

Sees = Literal["totals", "groups", "each"]


@dataclass(frozen=True)
class Plan:
    """What both halves of a strategy may know."""

    spec: Spec
    sites: int  # population
    lr: Callable[[int], float]  # by round
    seed: int
    epochs: int | None  # the study's local work: epochs or steps
    steps: int | None


class Training(Protocol):
    """The study's `[local]`, as far as a strategy may object to it."""

    @property
    def optimiser(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...


class Ask(Protocol):
    """How a strategy reaches the sites; who waits how long, and turns and attempts, are the coordinator's affair."""

    def total(self, sends: Mapping[SiteId, Vectors]) -> Total: ...
    def each(self, sends: Mapping[SiteId, Vectors]) -> list[Reply]: ...
    def here(self, jobs: Sequence[Job]) -> list[Result]: ...  # on the coordinator's own data


@dataclass(frozen=True)
class Global:
    """The state of every algorithm that keeps one model and nothing else."""

    weights: Vec
    stats: Vec


class Strategy(Component):
    """The defaults are FedAvg: one global model, its weighted mean, plain local training. Override what differs."""

    paper: ClassVar[str] = ""
    tasks: ClassVar[frozenset[str]] = frozenset({"train", "judge"})
    state: ClassVar[type] = Global  # a frozen dataclass; checkpoints need it
    partial: ClassVar[Literal["drop", "keep"]] = "drop"  # what becomes of work cut short, unless the study says
    remembers: ClassVar[bool] = False  # the result lives in the sites' memories, so the last round is the result
    whole: ClassVar[bool] = False  # looks at whole gradients, never at batches: nothing can be drawn or augmented
    pools: ClassVar[bool] = False  # trains on everybody's examples in one place: simulation only

    @property
    def sees(self) -> Sees:
        return "totals"

    def objections(self, local: Training, spec: Spec) -> Iterable[str]:
        """What of the study's local training or model does not go with this algorithm, each with its cure."""
        return ()

    def start(self, start: Snapshot, plan: Plan) -> Any:
        return Global(start.weights, start.stats)

    def round(self, state: Any, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Any:
        """Adds the weighted mean of what the sites moved."""
        total = ask.total({site: self.brief(state, site) for site in sites})
        return replace(state, weights=state.weights + total.mean("delta"), stats=total.mean("stats"))

    def brief(self, state: Any, site: SiteId) -> Vectors:
        """What a site is sent before it trains, is judged, or joins late."""
        return {"weights": state.weights, "stats": state.stats}

    def models(self, state: Any) -> Mapping[str, Snapshot]:
        """What can be saved, evaluated by the coordinator, and exported."""
        return {"global": Snapshot(state.weights, state.stats)}

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        """Trains as long as the study says and sends what moved."""
        w = message.vectors["weights"]
        fit = yield from fitted(Fit(w, message.vectors["stats"], steps=plan.steps, epochs=plan.epochs))
        return moved(w, fit), memory

    def judge(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        return (yield from judge(Snapshot(message.vectors["weights"], message.vectors["stats"]), message, memory))


def judge(model: Snapshot, message: Message, memory: Memory) -> Flow:
    """Sums of `model` on every split the message asks about."""
    sums: dict[str, Tensor] = {}
    for split in message.splits:
        seen = yield from evaluated(Evaluate(model.weights, split, model.stats))
        sums |= {f"{split}/{name}": value for name, value in seen.sums().items()}
    return Update(sum=sums), memory


def moved(start: Vec, fit: Fitted) -> Update:
    """What a site that trained sends: how far it came, its statistics and its work."""
    loss = torch.tensor(fit.loss * fit.work.examples)
    return Update(mean={"delta": fit.weights - start, "stats": fit.stats}, sum={"train_loss": loss}, work=fit.work)
