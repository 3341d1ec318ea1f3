"""The round loop: sample clients, run the strategy's round, evaluate, record, checkpoint. Independent of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import sample_clients
from pipeline.aggregation.exchange import Engine, RequestLog, RoundExchange
from pipeline.aggregation.requests import RoundRequest
from pipeline.aggregation.rules import AggregationRule
from pipeline.coordinator.checkpoint import deserialize_state, serialize_state, shallow_fields
from pipeline.coordinator.evaluation import EvaluationResult, evaluate_round, metric_value
from pipeline.coordinator.metrics import PositiveClass
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, QuorumNotReachedError, RunHaltedError, StrategyContractError
from pipeline.core.parameters import ModelState
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression
from pipeline.protocol.messages import ClientFailure, RoundAttempt, RoundPolicy, SiteId
from pipeline.protocol.tasks import JobResult, LocalJob, Split, TrainJob, TrainResult
from pipeline.records.round_record import RoundRecord, RoundSeconds, RoundTraffic
from pipeline.records.scores import MetricsBySplit
from pipeline.strategies.base import StrategyContext
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from pipeline.aggregation.secure_aggregation import SecureAggregationSetup


class CheckpointableEngine(Engine, Protocol):
    """An engine whose client states are part of the coordinator's checkpoint."""

    @property
    def clock(self) -> float: ...

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]: ...
    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None: ...

    def epsilon_spent(self) -> Mapping[SiteId, float]:
        """By the ledgers of the sites that train with differential privacy, over all studies on their data."""
        ...


@dataclass(frozen=True)
class _Durations:
    """Seconds of a round."""

    train: float
    evaluate: float


@dataclass(frozen=True)
class BestRound:
    round: int
    value: float
    state: Any


@dataclass(frozen=True)
class RunState:
    """The coordinator's state between two rounds."""

    round: int
    state: Any
    best: BestRound | None = None
    evaluations_since_best: int = 0
    last_accepted: Mapping[SiteId, RoundAttempt] = field(default_factory=dict)
    attempt: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    reached_value: float | None = None  # the value that met the target
    exhausted_sites: tuple[SiteId, ...] = ()  # sites whose privacy budget is spent


@dataclass
class RoundLoop:
    study: Study
    context: StrategyContext
    sites: Sequence[SiteId]
    engine: CheckpointableEngine
    run_jobs: Callable[[Sequence[LocalJob], int], list[JobResult]]
    folder: RunFolder
    positive_class: PositiveClass
    environment: Mapping[str, Any]  # trainer, threads, device; a resumed run must use the same
    compression: UpdateCompression = NO_COMPRESSION
    aggregation_rule: AggregationRule | None = None  # None: the study's
    secure_aggregation: SecureAggregationSetup | None = None
    on_round_end: Callable[[RoundRecord], None] = lambda record: None
    retry_below_quorum: bool = (
        False  # below the quorum halt, to repeat the round later, instead of recording it as void
    )
    stream_aggregation: bool = False  # add replies one by one, to bound the memory

    def __post_init__(self) -> None:
        self._study_hash = self.study.hash  # reads the installed packages, so only once

    def start_run(self, initial_model: ModelState) -> RunState:
        """The state before round 1: warm-up on public data, the strategy's initial state and its evaluation, as round 0."""
        if epochs := self.study.public.warmup_epochs:
            job = TrainJob(
                initial_model.weights,
                initial_model.norm_stats,
                epochs=epochs,
                dataset="public",
                lr=self.study.public.lr,
            )
            (result,) = self.run_jobs([job], 0)
            assert isinstance(result, TrainResult)
            initial_model = ModelState(result.weights, result.norm_stats)
        state = self.study.strategy.init_state(initial_model, self.context)
        run_state = RunState(0, self._check_state_type(state, "init_state"))
        started_at = time.perf_counter()
        evaluation = self._evaluate_round(run_state)
        return self._finish_round(
            run_state, RequestLog(), evaluation, _Durations(0.0, time.perf_counter() - started_at), None
        )

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RunState:
        run_state = self.read_run_state(header, tensors)
        self.engine.restore(header["engine"], tensors)
        # the interrupted round keeps its number
        return replace(run_state, attempt=self.folder.next_attempt(run_state.round + 1))

    def read_run_state(
        self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], state_type: type | None = None
    ) -> RunState:
        """The run state of a checkpoint. state_type: None for the study's strategy."""
        values = deserialize_state(header["progress"], tensors)
        state_type = state_type or self.study.strategy.state_type
        best = values["best"] and BestRound(**(values["best"] | {"state": state_type(**values["best"]["state"])}))
        return RunState(**(values | {"state": state_type(**values["state"]), "best": best}))

    def run(self, run_state: RunState) -> tuple[RunState, str]:
        """Runs until the last round, the target, or the end of patience; returns the reason for the end."""
        while run_state.round < self.study.rounds:
            if run_state.reached_value is not None:
                break
            if self._is_out_of_patience(run_state):
                return (
                    run_state,
                    f"early: no better {self.study.evaluation.selection_metric} in {run_state.evaluations_since_best} evaluations",
                )
            if set(run_state.exhausted_sites) >= set(self.sites):
                return run_state, "early: every site's privacy budget is spent"
            run_state = self._run_round(replace(run_state, round=run_state.round + 1))
        if run_state.reached_value is not None:
            return (
                run_state,
                f"target: {self.study.evaluation.selection_metric} {run_state.reached_value:.4f} in round {run_state.round}",
            )
        return run_state, "finished"

    def select_result(self, run_state: RunState) -> tuple[Any, int, str]:
        """The selected state, its round, and how it was selected."""
        if run_state.best is None or self.study.strategy.result_in_client_states:
            return run_state.state, run_state.round, "last round"
        return run_state.best.state, run_state.best.round, f"val {self.study.evaluation.selection_metric}"

    def evaluate(self, state: Any, splits: tuple[Split, ...], run_state: RunState) -> EvaluationResult:
        return evaluate_round(
            self.study, state, self.sites, self.create_request("evaluate", run_state, RoundPolicy(quorum=0), splits)
        )

    def save_personal_models(self, state: Any, run_state: RunState) -> None:
        """Asks every site to compute and store its personal model."""
        request = self.create_request("save_personal", run_state, RoundPolicy(quorum=0))
        request.collect({site: self.study.strategy.eval_payload(state, site) for site in self.sites})

    def _run_round(self, run_state: RunState) -> RunState:
        started_at = time.perf_counter()
        sampled = sample_clients(self.sites, self.study.client_sampling.fraction, self.study.seed, run_state.round)
        request = self.create_request("train", run_state, self.study.round_policy)
        void_reason = None
        try:
            state = self._check_state_type(
                self.study.strategy.run_round(run_state.state, sampled, request, self.context), "run_round"
            )
        except QuorumNotReachedError as error:
            if self.retry_below_quorum and not _exhausted_sites(request.log.failures):
                reasons = "; ".join(f"{site}: {failure.text}" for site, failure in [*request.log.failures.items()][:3])
                raise RunHaltedError(f"{error} ({reasons})") from error
            state, void_reason = run_state.state, str(error)
            request.log.discard_accepted()
        self._check_finite(state, run_state.round)
        trained_at = time.perf_counter()
        last_accepted = dict(run_state.last_accepted) | {r.site: (r.round, r.attempt) for r in request.log.accepted}
        exhausted = _exhausted_sites(request.log.failures)
        run_state = replace(
            run_state,
            state=state,
            last_accepted=last_accepted,
            exhausted_sites=tuple(sorted({*run_state.exhausted_sites, *exhausted})),
        )
        should_evaluate = run_state.round % self.study.evaluation.every == 0 or run_state.round == self.study.rounds
        evaluation = self._evaluate_round(run_state) if should_evaluate else EvaluationResult()
        durations = _Durations(trained_at - started_at, time.perf_counter() - trained_at)
        return self._finish_round(run_state, request.log, evaluation, durations, void_reason)

    def _evaluate_round(self, run_state: RunState) -> EvaluationResult:
        return self.evaluate(run_state.state, self.study.evaluation.splits, run_state)

    def _finish_round(
        self,
        run_state: RunState,
        log: RequestLog,
        evaluation: EvaluationResult,
        durations: _Durations,
        void_reason: str | None,
    ) -> RunState:
        """Updates the best round, appends the record, saves the checkpoint: in this order, so that a kill loses no record."""
        metrics = evaluation.metrics_by_split(self.positive_class)
        run_state = run_state if void_reason else self._update_best(run_state, metrics)
        run_state = replace(
            run_state,
            bytes_up=run_state.bytes_up + log.bytes_up,
            bytes_down=run_state.bytes_down + log.bytes_down,
            seconds=run_state.seconds + durations.train + durations.evaluate,
        )
        record = self._make_record(run_state, log, evaluation, durations, void_reason, metrics)
        self.folder.append_round(record)
        self._save_checkpoint(run_state)
        self.on_round_end(record)
        return replace(run_state, attempt=0)

    def _make_record(
        self,
        run_state: RunState,
        log: RequestLog,
        evaluation: EvaluationResult,
        durations: _Durations,
        void_reason: str | None,
        metrics: MetricsBySplit,
    ) -> RoundRecord:
        return RoundRecord(
            round=run_state.round,
            lr=self.context.lr_schedule(run_state.round) if run_state.round else None,
            sampled_clients=tuple(log.requested),
            accepted=tuple(r.site for r in log.accepted),
            failures=log.failures,
            work={r.site: r.update.work for r in log.accepted if r.update.work},
            train_loss={
                r.site: float(r.update.summed["train_loss"]) / r.update.work.num_examples
                for r in log.accepted
                if r.update.work and "train_loss" in r.update.summed
            },
            bytes=RoundTraffic(
                up=log.bytes_up,
                down=log.bytes_down,
                evaluate_up=evaluation.bytes_up,
                evaluate_down=evaluation.bytes_down,
            ),
            seconds=RoundSeconds(
                train=round(durations.train, 4),
                evaluate=round(durations.evaluate, 4),
                save=round(self.folder.checkpoint_seconds, 4),
            ),
            clock=round(self.engine.clock, 6),
            void=void_reason,
            evaluation_failures=evaluation.failures,
            metrics=metrics,
            **self._optional_fields(run_state),
        )

    def _optional_fields(self, run_state: RunState) -> dict[str, Any]:
        """Fields that only some studies have; see RoundRecord."""
        strategy, state = self.study.strategy, run_state.state
        fields = {
            "clusters": strategy.cluster_assignment(state),
            "dendrogram": strategy.dendrogram(state),
            "epsilon": self.engine.epsilon_spent(),
        }
        recorded = {name: value for name, value in fields.items() if value}
        # a repeated round adds new noise and spends budget again
        return recorded | ({"attempt": run_state.attempt} if self.aggregation_rule else {})

    def _update_best(self, run_state: RunState, metrics: MetricsBySplit) -> RunState:
        evaluation = self.study.evaluation
        if evaluation.target is not None and evaluation.splits:
            target_metric = metric_value(metrics, evaluation.selection_metric, evaluation.splits[0])
            goal = -evaluation.target if evaluation.selection_metric == "loss" else evaluation.target
            run_state = replace(
                run_state,
                reached_value=abs(target_metric) if target_metric is not None and target_metric >= goal else None,
            )
        value = metric_value(metrics, evaluation.selection_metric)
        if value is None or run_state.round == 0:
            return run_state
        if run_state.best is None or value > run_state.best.value:
            return replace(run_state, best=BestRound(run_state.round, value, run_state.state), evaluations_since_best=0)
        return replace(run_state, evaluations_since_best=run_state.evaluations_since_best + 1)

    def _is_out_of_patience(self, run_state: RunState) -> bool:
        patience = self.study.evaluation.patience
        return patience is not None and run_state.evaluations_since_best >= patience

    def create_request(
        self, task: str, run_state: RunState, round_policy: RoundPolicy, splits: tuple[Split, ...] = ()
    ) -> RoundRequest:
        is_training = task == "train"
        secure_aggregation = self.secure_aggregation if is_training else None
        exchange = RoundExchange(
            engine=self.engine,
            task=task,
            round=run_state.round,
            attempt=run_state.attempt,
            round_policy=round_policy,
            last_accepted=run_state.last_accepted,
            splits=splits,
            compression=self.compression,
            weighting=None if secure_aggregation else self.study.weighting,  # masked replies show no weight
        )
        return RoundRequest(
            exchange=exchange,
            run_jobs=self.run_jobs,
            visibility=self.study.strategy.visibility if is_training else "each",
            aggregation_rule=self.aggregation_rule or self.study.aggregation,
            secure_aggregation=secure_aggregation,
            stream_aggregation=self.stream_aggregation,
        )

    def _check_state_type(self, state: Any, method: str) -> Any:
        strategy = self.study.strategy
        if type(state) is not strategy.state_type:
            raise StrategyContractError(
                f"{strategy.name}.{method} returned a {type(state).__name__}, but the class says "
                f"state_type = {strategy.state_type.__name__}; a resumed run could not restore it"
            )
        return state

    def _check_finite(self, state: Any, round_number: int) -> None:
        for name, model in self.study.strategy.global_models(state).items():
            if not bool(torch.isfinite(model.weights).all()):
                raise HemofedError(
                    f"round {round_number}: the {name} model is no longer finite; lower local.lr. "
                    f"The run folder holds the run up to round {round_number - 1}."
                )

    def _save_checkpoint(self, run_state: RunState) -> None:
        tensors: dict[str, Tensor] = {}
        best = run_state.best and shallow_fields(run_state.best) | {"state": shallow_fields(run_state.best.state)}
        full_state = shallow_fields(run_state) | {"state": shallow_fields(run_state.state), "best": best}
        serialized = serialize_state(full_state, "progress", tensors)
        engine_header, site_tensors = self.engine.snapshot()
        header = {
            "study": self._study_hash,
            "progress": serialized,
            "engine": engine_header,
            "environment": dict(self.environment),
        }
        self.folder.write_checkpoint(run_state.round, header, tensors | site_tensors)


def _exhausted_sites(failures: Mapping[SiteId, ClientFailure]) -> set[SiteId]:
    return {site for site, failure in failures.items() if failure.kind == "privacy_budget"}
