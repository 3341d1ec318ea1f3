"""The round loop: select, ask, step, judge, record, checkpoint. Knows nothing of where sites are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import select
from pipeline.aggregation.requests import Asking, Engine, Log
from pipeline.aggregation.rules import Combine
from pipeline.coordinator.checkpoint import freeze, shallow, thaw
from pipeline.coordinator.evaluation import Judged, judge_round, value_of
from pipeline.coordinator.metrics import Focus
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStrategy, Halted, HemofedError, TooFew
from pipeline.core.parameters import Snapshot
from pipeline.protocol.compression import PLAIN, Wire
from pipeline.protocol.messages import BUDGET, Identity, SiteId, Wait
from pipeline.protocol.tasks import Fit, Fitted, Job, Result, Split
from pipeline.strategies.base import Plan
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from pipeline.aggregation.secure_aggregation import Masking


class Simulated(Engine, Protocol):
    """An engine whose sites' state is checkpointed with the coordinator's."""

    @property
    def clock(self) -> float: ...

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]: ...
    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Best:
    round: int
    value: float
    state: Any


@dataclass(frozen=True)
class Progress:
    """Everything between two rounds that is not the sites'."""

    round: int
    state: Any
    best: Best | None = None
    looks: int = 0  # judgements since the best one
    counted: Mapping[SiteId, Identity] = field(default_factory=dict)
    attempt: int = 0
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    reached: float | None = None  # the value that met the target
    spent: tuple[SiteId, ...] = ()  # sites whose privacy budget is used up


@dataclass
class Coordinator:
    study: Study
    plan: Plan
    sites: Sequence[SiteId]
    engine: Simulated
    run_here: Callable[[Sequence[Job], int], list[Result]]
    folder: RunFolder
    focus: Focus
    machine: Mapping[str, Any]  # trainer, threads, device: a resumed run has to repeat them
    wire: Wire = PLAIN
    combine: Combine | None = None  # the study's, if not given
    masking: Masking | None = None
    watch: Callable[[dict[str, Any]], None] = lambda record: None
    patient: bool = False  # a round with too few answers is not void, but done again when more are there
    frugal: bool = False  # with memory: answers are added up one by one
    told: Callable[[], Mapping[str, Any]] = dict  # what sites let be known of their spending, for the record

    def __post_init__(self) -> None:
        self._hash = self.study.hash  # looks at installed packages: once, not every round

    def start(self, start: Snapshot) -> Progress:
        if epochs := self.study.public.warmup_epochs:
            (fit,) = self.run_here(
                [Fit(start.weights, start.stats, epochs=epochs, data="public", lr=self.study.public.lr)], 0
            )
            assert isinstance(fit, Fitted)
            start = Snapshot(fit.weights, fit.stats)
        progress = Progress(0, self._checked(self.study.strategy.start(start, self.plan), "start"))
        began = time.perf_counter()
        judged = self._judge(progress)
        return self._close(progress, Log(), judged, {"train": 0.0, "judge": time.perf_counter() - began}, None)

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
        progress = self.saved(header, tensors)
        self.engine.restore(header["engine"], tensors)
        # the turn that was cut short keeps its number
        return replace(progress, attempt=self.folder.next_attempt(progress.round + 1))

    def saved(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], make: type | None = None) -> Progress:
        """As a checkpoint has it; `make`: the class of its state, if another strategy's."""
        values = thaw(header["progress"], tensors)
        make = make or self.study.strategy.state
        best = values["best"] and Best(**(values["best"] | {"state": make(**values["best"]["state"])}))
        return Progress(**(values | {"state": make(**values["state"]), "best": best}))

    def run(self, progress: Progress) -> tuple[Progress, str]:
        """To the last round, the target, or until patience ends; and why it ended."""
        while progress.round < self.study.rounds:
            if progress.reached is not None:
                break
            if self._out_of_patience(progress):
                return progress, f"early: no better {self.study.evaluation.best} in {progress.looks} looks"
            if set(progress.spent) >= set(self.sites):
                return progress, "early: every site's privacy budget is spent"
            progress = self._round(replace(progress, round=progress.round + 1))
        if progress.reached is not None:
            return progress, f"target: {self.study.evaluation.best} {progress.reached:.4f} in round {progress.round}"
        return progress, "finished"

    def result(self, progress: Progress) -> tuple[Any, int, str]:
        """The state that counts, its round, and how it was chosen."""
        if progress.best is None or self.study.strategy.remembers:
            return progress.state, progress.round, "last round"
        return progress.best.state, progress.best.round, f"val {self.study.evaluation.best}"

    def judge(self, state: Any, splits: tuple[Split, ...], progress: Progress) -> Judged:
        return judge_round(self.study, state, self.sites, self.asking("judge", progress, Wait(quorum=0), splits))

    def keep(self, state: Any, progress: Progress) -> None:
        """Every site makes and stores its own model."""
        asking = self.asking("keep", progress, Wait(quorum=0))
        asking.each({site: self.study.strategy.exam(state, site) for site in self.sites})

    def _round(self, progress: Progress) -> Progress:
        began = time.perf_counter()
        chosen = select(self.sites, self.study.selection.fraction, self.study.seed, progress.round)
        asking = self.asking("train", progress, self.study.wait)
        void = None
        try:
            state = self._checked(self.study.strategy.round(progress.state, chosen, asking, self.plan), "round")
        except TooFew as error:
            if self.patient and not any(why.startswith(BUDGET) for why in asking.log.missed.values()):
                reasons = "; ".join(f"{site}: {why}" for site, why in list(asking.log.missed.items())[:3])
                raise Halted(f"{error} ({reasons})") from error
            state, void, asking.log.accepted = progress.state, str(error), []
        self._check_finite(state, progress.round)
        trained = time.perf_counter()
        counted = dict(progress.counted) | {r.site: (r.turn, r.attempt) for r in asking.log.accepted}
        broke = {site for site, why in asking.log.missed.items() if why.startswith(BUDGET)}
        progress = replace(progress, state=state, counted=counted, spent=tuple(sorted({*progress.spent, *broke})))
        due = progress.round % self.study.evaluation.every == 0 or progress.round == self.study.rounds
        judged = self._judge(progress) if due else Judged()
        spent = {"train": trained - began, "judge": time.perf_counter() - trained}
        return self._close(progress, asking.log, judged, spent, void)

    def _judge(self, progress: Progress) -> Judged:
        return self.judge(progress.state, self.study.evaluation.watch, progress)

    def _close(
        self, progress: Progress, log: Log, judged: Judged, spent: dict[str, float], void: str | None
    ) -> Progress:
        """Best so far, the record's line, the checkpoint: in this order, so that a kill loses no line."""
        found = judged.metrics(self.focus)
        progress = progress if void else self._weigh(progress, found)
        progress = replace(
            progress,
            up=progress.up + log.up,
            down=progress.down + log.down,
            seconds=progress.seconds + sum(spent.values()),
        )
        record = {
            "round": progress.round,
            "lr": self.plan.lr(progress.round) if progress.round else None,
            "asked": log.asked,
            "counted": [r.site for r in log.accepted],
            "missed": log.missed,
            "work": {r.site: vars(r.update.work) for r in log.accepted if r.update.work},
            "train_loss": {
                r.site: float(r.update.sum["train_loss"]) / r.update.work.examples
                for r in log.accepted
                if r.update.work and "train_loss" in r.update.sum
            },
            "bytes": {"up": log.up, "down": log.down, "judge_up": judged.up, "judge_down": judged.down},
            "seconds": {k: round(v, 4) for k, v in spent.items()} | {"save": round(self.folder.save_seconds, 4)},
            "clock": round(self.engine.clock, 6),
            "void": void,
            **self._grouping(progress.state),
            **self.told(),
            # a repeated round is noised anew, and spends again
            **({"attempt": progress.attempt} if self.combine else {}),
            "unjudged": judged.missed,
            "metrics": found,
        }
        self.folder.append(record)
        self._checkpoint(progress)
        self.watch(record)
        return replace(progress, attempt=0)

    def _grouping(self, state: Any) -> dict[str, Any]:
        """Who is with whom, where the algorithm has groups."""
        groups, tree = self.study.strategy.groups(state), self.study.strategy.tree(state)
        found: dict[str, Any] = {"groups": dict(groups)} if groups else {}
        return found | ({"tree": {"leaves": tree.leaves, "merges": tree.merges}} if tree else {})

    def _weigh(self, progress: Progress, found: Mapping[str, Any]) -> Progress:
        evaluation = self.study.evaluation
        if evaluation.target is not None and evaluation.watch:
            seen = value_of(found, evaluation.best, evaluation.watch[0])
            goal = -evaluation.target if evaluation.best == "loss" else evaluation.target
            progress = replace(progress, reached=abs(seen) if seen is not None and seen >= goal else None)
        value = value_of(found, evaluation.best)
        if value is None or progress.round == 0:
            return progress
        if progress.best is None or value > progress.best.value:
            return replace(progress, best=Best(progress.round, value, progress.state), looks=0)
        return replace(progress, looks=progress.looks + 1)

    def _out_of_patience(self, progress: Progress) -> bool:
        patience = self.study.evaluation.patience
        return patience is not None and progress.looks >= patience

    def asking(self, task: str, progress: Progress, wait: Wait, splits: tuple[Split, ...] = ()) -> Asking:
        sees = self.study.strategy.sees if task == "train" else "each"
        return Asking(
            self.engine,
            self.run_here,
            task,
            progress.round,
            progress.attempt,
            wait,
            progress.counted,
            splits,
            sees,
            self.wire,
            self.combine or self.study.combine,
            self.study.weighting,
            self.masking if task == "train" else None,
            self.frugal,
        )

    def _checked(self, state: Any, method: str) -> Any:
        strategy = self.study.strategy
        if type(state) is not strategy.state:
            raise BadStrategy(
                f"{strategy.name}.{method} returned a {type(state).__name__}, but the class says "
                f"state = {strategy.state.__name__}; a resumed run could not restore it"
            )
        return state

    def _check_finite(self, state: Any, round: int) -> None:
        for name, model in self.study.strategy.models(state).items():
            if not bool(torch.isfinite(model.weights).all()):
                raise HemofedError(
                    f"round {round}: the {name} model is no longer finite; lower local.lr. "
                    f"The run is kept as of round {round - 1}."
                )

    def _checkpoint(self, progress: Progress) -> None:
        tensors: dict[str, Tensor] = {}
        best = progress.best and shallow(progress.best) | {"state": shallow(progress.best.state)}
        whole = shallow(progress) | {"state": shallow(progress.state), "best": best}
        frozen = freeze(whole, "progress", tensors)
        engine, site_tensors = self.engine.snapshot()
        header = {"study": self._hash, "progress": frozen, "engine": engine, "machine": dict(self.machine)}
        self.folder.checkpoint(progress.round, header, tensors | site_tensors)
