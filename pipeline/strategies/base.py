"""What an algorithm is: a coordinator's half (`start`, `round`, `brief`, `models`) and a site's half (`train`, `judge`).

The site's half yields local work as data and receives results; it does no I/O and no training, so the same object
runs stacked over a hundred simulated sites in one process, or alone in a hospital.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from pipeline.codecs.base import Chain
from pipeline.core.parameters import Snapshot, Spec, Vec
from pipeline.core.registry import Component
from pipeline.protocol.messages import Flow, Memory, Message, Reply, Sees, SiteId, Total, Update, Vectors
from pipeline.protocol.tasks import (
    Evaluate,
    Fit,
    Fitted,
    Job,
    Profile,
    Result,
    Work,
    evaluated,
    fitted,
    lens_from,
    profiled,
    toward,
)

Thought = Generator[Job, Result, Snapshot]  # jobs that end in a model
OWN = "own"  # the view of a site's own model; others have a name of their own


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
    def groups(self, sends: Mapping[SiteId, Vectors], count: int) -> dict[int, Total]: ...  # by Update.group
    def each(self, sends: Mapping[SiteId, Vectors]) -> list[Reply]: ...
    def combined(self, replies: Sequence[Reply]) -> Total: ...  # of some of them, by the study's rule
    def here(self, jobs: Sequence[Job]) -> list[Result]: ...  # on the coordinator's own data


@dataclass(frozen=True)
class Global:
    """The state of every algorithm that keeps one model and nothing else."""

    weights: Vec
    stats: Vec


class Strategy(Component):
    """The defaults are FedAvg: one global model, its weighted mean, plain local training. Override what differs."""

    paper: ClassVar[str] = ""
    tasks: ClassVar[frozenset[str]] = frozenset({"train", "judge", "keep", "profile", "profile_own"})
    state: ClassVar[type] = Global  # a frozen dataclass; checkpoints need it
    partial: ClassVar[Literal["drop", "keep"]] = "drop"  # what becomes of work cut short, unless the study says
    remembers: ClassVar[bool] = False  # the result lives in the sites' memories, so the last round is the result
    whole: ClassVar[bool] = False  # looks at whole gradients, never at batches: nothing can be drawn or augmented
    pools: ClassVar[bool] = False  # trains on everybody's examples in one place: simulation only
    personalised: ClassVar[bool] = False  # `personal` gives every site a model of its own
    own_sums: ClassVar[bool] = False  # what it adds up itself changes the models, past the study's `combine`
    holds: ClassVar[str] = "the model"  # the coordinator's state, in words
    remembered: ClassVar[str] = "nothing"  # the site's memory, in words

    @property
    def sees(self) -> Sees:
        return "totals"

    @property
    def probes(self) -> bool:
        """Whether the coordinator compares networks on public examples."""
        return False

    @property
    def codec(self) -> Chain:
        """What updates travel in unless the study says."""
        return ()

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

    def exam(self, state: Any, site: SiteId) -> Vectors:
        """What a site is sent to be judged, or to make its own model of."""
        return self.brief(state, site)

    def models(self, state: Any) -> Mapping[str, Snapshot]:
        """What can be saved, evaluated by the coordinator, and exported."""
        return {"global": Snapshot(state.weights, state.stats)}

    def groups(self, state: Any) -> Mapping[SiteId, str]:
        """Who is in which group, where there are groups; recorded every round."""
        return {}

    def tree(self, state: Any) -> Tree | None:
        """How the groups hang together, where that is known; recorded every round."""
        return None

    def candidates(self, state: Any) -> Mapping[str, Snapshot]:
        """Groups that a site could join after training; it takes the one whose model fits its examples best."""
        return {}

    def place(self, state: Any, site: SiteId, group: str) -> Any:
        """The state with a new site in that group."""
        return state

    def welcome(self, state: Any, reply: Reply) -> Any:
        """What the coordinator notes of a new site's training. The common models stay as they are."""
        return state

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        """Trains as long as the study says and sends what moved."""
        return (yield from fit_near(message, memory, plan, mu=0.0))

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        """The model that this site would use."""
        return sent(message)
        yield  # no work: the common model is the site's

    def judge(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        own = yield from self.personal(message, memory, plan)
        return (yield from judge({OWN: own, **self.views(message)}, message, memory))

    def views(self, message: Message) -> Mapping[str, Snapshot]:
        """Other models that a site's own one is to be held against."""
        return {"global": sent(message)} if self.personalised else {}

    def profile(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        """What an exported model has to know of the images that it was chosen by: sums over them."""
        return (yield from profile(sent(message), message, memory))

    def profile_own(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        own = yield from self.personal(message, memory, plan)
        return (yield from profile(own, message, memory))

    def keep(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        """What the runner stores as the site's own model. It does not leave the site."""
        own = yield from self.personal(message, memory, plan)
        return Update(), {"weights": own.weights, "stats": own.stats}


@dataclass(frozen=True)
class Tree:
    """A dendrogram: merges[i] = (a, b, distance, leaves) makes node len(leaves) + i, as scipy's linkage has it."""

    leaves: tuple[SiteId, ...]
    merges: tuple[tuple[int, int, float, int], ...]


def sent(message: Message) -> Snapshot:
    return Snapshot(message.vectors["weights"], message.vectors["stats"])


def judge(views: Mapping[str, Snapshot], message: Message, memory: Memory) -> Flow:
    """Sums of every model on every split the message asks about; `OWN` is the one that the site stands for."""
    sums: dict[str, Tensor] = {}
    for view, model in views.items():
        for split in message.splits:
            seen = yield from evaluated(Evaluate(model.weights, split, model.stats))
            sums |= {f"{view}:{split}/{name}": value for name, value in seen.sums().items()}
    return Update(sum=sums), memory


def profile(model: Snapshot, message: Message, memory: Memory) -> Flow:
    got = message.vectors
    lens = lens_from(got) if "lens/mean" in got else None
    (split,) = message.splits
    turns = int(got["turns"]) if "turns" in got else 1
    seen = yield from profiled(Profile(model.weights, split, model.stats, lens, turns))
    return Update(sum=seen.sums()), memory


def moved(
    start: Vec, fit: Fitted, *, delta: Vec | None = None, loss: float | None = None, work: Work | None = None
) -> Update:
    """What a site that trained sends: how far it came, its statistics and its work."""
    work = work or fit.work
    total = torch.tensor((fit.loss if loss is None else loss) * work.examples)
    move = fit.weights - start if delta is None else delta
    return Update(mean={"delta": move, "stats": fit.stats}, sum={"train_loss": total}, work=work)


def fit_near(message: Message, memory: Memory, plan: Plan, mu: float, gamma: float | None = None) -> Flow:
    """The study's local work with a pull of strength mu towards the model that was sent."""
    w = message.vectors["weights"]
    pull = toward(w, mu)
    job = Fit(w, message.vectors["stats"], steps=plan.steps, epochs=plan.epochs, gamma=gamma, pull=pull)
    fit = yield from fitted(job)
    return moved(w, fit), memory


def remembered(memory: Memory, message: Message) -> Snapshot:
    """The model in the site's memory, or at first the one that it was sent."""
    have = memory or message.vectors
    return Snapshot(have["weights"], have["stats"])


def only_plain_sgd(name: str, local: Training) -> Iterator[str]:
    """For algorithms that divide by the sum of learning rates."""
    if local.optimiser != "sgd" or local.momentum or local.weight_decay:
        yield f"{name} counts on plain steps; set local.optimiser = 'sgd' without momentum and weight_decay"
