"""Fakes for tests of one half of a federated round: replies for a strategy, bytes for the coordinator, results for a client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from pipeline.aggregation.exchange import RoundExchange
from pipeline.aggregation.requests import RoundRequest
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.compression import NO_COMPRESSION
from pipeline.protocol.messages import Aggregate, ClientTask, ClientUpdate, Message, Reply, RoundPolicy, SiteId
from pipeline.protocol.serialization import serialize_reply
from pipeline.protocol.tasks import ActivationsResult, JobResult, LocalJob
from pipeline.strategies.base import Strategy, StrategyContext

EMPTY = torch.zeros(0)
TWO_WEIGHTS = ParameterSpec(("w",), ((2,),), ("head",))


def vec(*numbers: float) -> torch.Tensor:
    return torch.tensor([float(n) for n in numbers])


def make_context(
    spec: ParameterSpec = TWO_WEIGHTS,
    num_sites: int = 2,
    lr_schedule: Callable[[int], float] = lambda round_number: 0.1,
    seed: int = 0,
    epochs: int | None = 5,
    steps: int | None = None,
) -> StrategyContext:
    return StrategyContext(spec, num_sites, lr_schedule, seed, epochs=epochs, steps=steps)


FOUR_SITES = make_context(num_sites=4)


def make_message(
    weights: torch.Tensor, stats: torch.Tensor = EMPTY, task: str = "train", round_number: int = 1, **fields: Any
) -> Message:
    return Message(task, round_number, {"weights": weights, "stats": stats}, **fields)


def make_reply(
    site: SiteId,
    weight: float = 1.0,
    stats: torch.Tensor | None = EMPTY,
    summed: Mapping[str, torch.Tensor] | None = None,
    round_number: int = 1,
    cluster: int = 0,
    **averaged: torch.Tensor,
) -> Reply:
    """stats: None for an update without norm statistics."""
    means = averaged if stats is None else averaged | {"stats": stats}
    update = ClientUpdate(means, dict(summed or {}), cluster=cluster)
    return Reply(site, "train", round_number, 0, update, float(weight))


class FakeRequests:
    """`ClientRequests` with given replies; the other clients stay silent.

    late: clients whose reply arrives although they were not asked in this round.
    activations: "inputs" -> tensor; a model's weights as a tuple -> the outputs of its layers.
    """

    def __init__(
        self, *replies: Reply, late: Collection[SiteId] = (), activations: Mapping[Any, Any] | None = None
    ) -> None:
        self.replies, self.late, self.activations = replies, late, activations or {}
        self.jobs: Sequence[LocalJob] = ()

    def collect(self, payloads: Mapping[SiteId, Any]) -> list[Reply]:
        return [r for r in self.replies if r.site in payloads or r.site in self.late]

    def aggregate(self, payloads: Mapping[SiteId, Any]) -> Aggregate:
        return Aggregate.from_replies(self.collect(payloads))

    def aggregate_by_cluster(self, payloads: Mapping[SiteId, Any], num_clusters: int) -> dict[int, Aggregate]:
        replies = self.collect(payloads)
        by_cluster = {g: [r for r in replies if r.update.cluster == g] for g in range(num_clusters)}
        return {g: Aggregate.from_replies(of_cluster) for g, of_cluster in by_cluster.items() if of_cluster}

    def aggregate_replies(self, replies: Sequence[Reply]) -> Aggregate:
        return Aggregate.from_replies(replies)

    def run_on_coordinator(self, jobs: Sequence[Any]) -> list[JobResult]:
        self.jobs = jobs
        inputs = self.activations["inputs"]
        return [ActivationsResult(inputs, self.activations[tuple(job.weights.tolist())]) for job in jobs]


class FakeEngine:
    """Delivers the given replies, or (site, bytes) pairs as they are."""

    def __init__(self, *replies: Reply | tuple[SiteId, bytes]) -> None:
        self.replies = replies

    def exchange(
        self, message_bytes: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]:
        yield from ((r.site, serialize_reply(r)) if isinstance(r, Reply) else r for r in self.replies)


def finish_task(task: ClientTask, *results: JobResult) -> Any:
    """What a client's task returns after these results; the last one ends it."""
    for result in results[:-1]:
        task.send(result)
    with pytest.raises(StopIteration) as end:
        task.send(results[-1]) if results else next(task)
    return end.value.value


def init_state(strategy: Strategy, *weights: float, context: StrategyContext = FOUR_SITES) -> Any:
    return strategy.init_state(ModelState(vec(*weights), EMPTY), context)


def run_round(
    strategy: Strategy,
    state: Any,
    deltas: Mapping[SiteId, torch.Tensor],
    sites: Sequence[SiteId] | None = None,
    *,
    round_number: int = 1,
    weights: Mapping[SiteId, float] | None = None,
    stats: Mapping[SiteId, torch.Tensor] | None = None,
    clusters: Mapping[SiteId, int] | None = None,
    late: Mapping[SiteId, int] | None = None,
    activations: Mapping[Any, Any] | None = None,
    context: StrategyContext = FOUR_SITES,
) -> Any:
    """The state after a round in which these clients reply with these deltas; `late`: client -> the round it replies to."""
    late = late or {}
    replies = [
        make_reply(
            site,
            (weights or {}).get(site, 1.0),
            (stats or {}).get(site, EMPTY),
            round_number=late.get(site, round_number),
            cluster=(clusters or {}).get(site, 0),
            delta=delta,
        )
        for site, delta in deltas.items()
    ]
    requests = FakeRequests(*replies, late=late, activations=activations)
    return strategy.run_round(state, list(sites or sorted(deltas)), requests, context)


def make_round_request(
    engine,
    *,
    round_number=1,
    attempt=0,
    round_policy=None,
    last_accepted=None,
    compression=NO_COMPRESSION,
    weighting=None,
    run_jobs=None,
    **settings,
):
    exchange = RoundExchange(
        engine=engine,
        task="train",
        round=round_number,
        attempt=attempt,
        round_policy=round_policy or RoundPolicy(),
        last_accepted=last_accepted or {},
        compression=compression,
        weighting=weighting,
    )
    return RoundRequest(exchange=exchange, run_jobs=run_jobs, **settings)
