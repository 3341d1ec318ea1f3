"""Assembles the round loop of a run, the same for a simulation and across hospitals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipeline.aggregation.rules import AggregationRule
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup
from pipeline.coordinator.metrics import PositiveClass
from pipeline.coordinator.round_loop import CheckpointableEngine, RoundLoop
from pipeline.coordinator.run_folder import RunFolder
from pipeline.protocol.messages import SiteId
from pipeline.records.round_record import RoundRecord
from pipeline.study.run_spec import RunSpec
from sites.population.simulated_sites import COORDINATOR
from sites.training.setup import TrainingSetup


def build_round_loop(
    run_spec: RunSpec,
    *,
    sites: Sequence[SiteId],
    engine: CheckpointableEngine,
    training: TrainingSetup,
    folder: RunFolder,
    on_round_end: Callable[[RoundRecord], None],
    aggregation_rule: AggregationRule | None = None,
    secure_aggregation: SecureAggregationSetup | None = None,
    across_hospitals: bool = False,
) -> RoundLoop:
    """`training`: of the coordinator's own examples. `across_hospitals`: sites come back, and replies may be large."""
    study = run_spec.study
    class_name = study.evaluation.positive_class
    return RoundLoop(
        study=study,
        context=run_spec.context,
        sites=tuple(sites),
        engine=engine,
        run_jobs=partial(training.run_jobs, COORDINATOR),
        folder=folder,
        positive_class=PositiveClass(
            None if class_name is None else run_spec.classes.index(class_name), study.evaluation.target_specificity
        ),
        environment=training.environment,
        compression=run_spec.compression,
        aggregation_rule=aggregation_rule,
        secure_aggregation=secure_aggregation,
        on_round_end=on_round_end,
        retry_below_quorum=across_hospitals,
        stream_aggregation=across_hospitals,
    )
