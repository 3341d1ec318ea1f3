"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging): k models; each site trains the one that fits its data best.

Sites choose by their training loss, so the coordinator needs the sum of each group's answers and no more. The models must
differ at the start: all but the first are drawn anew, with the spread of each of its tensors. If one of them happens to
suit everybody, all sites stay with it; `warmup` rounds of one common model, parted by a little noise, are a surer start (ours):
where the common model stands still the populations pull apart. With k = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.core.parameters import ModelState, NamedTensors, ParamVector
from pipeline.core.seeding import seeded_generator
from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId, Visibility
from pipeline.protocol.tasks import EvaluateJob, JobResult, LocalJob, TrainJob, run_evaluation, run_training
from pipeline.strategies._clustered import FIRST_CLUSTER, ClusteredStrategy, ClusterState
from pipeline.strategies.base import ClientRequests, ModelTask, StrategyContext, make_update


@dataclass(frozen=True)
class IfcaState(ClusterState):
    num_rounds: int = 0


class Ifca(ClusteredStrategy):
    paper: ClassVar[str] = "Ghosh et al. 2020, arXiv 2006.04088"
    state_type: ClassVar[type] = IfcaState
    name: Literal["ifca"] = "ifca"
    k: PositiveInt = 2
    warmup_rounds: NonNegativeInt = 0
    spread: PositiveFloat = 0.1  # of the noise that parts the models after the warm-up, in spreads of each tensor

    @property
    def visibility(self) -> Visibility:
        return "groups" if self.k > 1 else "totals"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> IfcaState:
        num_models = 1 if self.warmup_rounds else self.k
        weights = {
            str(g): draw_weights(initial_model.weights, context, g) if g else initial_model.weights
            for g in range(num_models)
        }
        return IfcaState(weights, dict.fromkeys(weights, initial_model.norm_stats), {})

    def train_payload(self, state: IfcaState, site: SiteId) -> NamedTensors:
        return {
            f"{part}/{g}": values[g]
            for part, values in (("weights", state.weights), ("stats", state.norm_stats))
            for g in values
        }

    def run_round(
        self, state: IfcaState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> IfcaState:
        payloads = {site: self.train_payload(state, site) for site in clients}
        aggregates = (
            requests.aggregate_by_cluster(payloads, len(state.weights))
            if len(state.weights) > 1
            else {0: requests.aggregate(payloads)}
        )
        weights = {**state.weights} | {
            str(g): state.weights[str(g)] + aggregate.mean("delta") for g, aggregate in aggregates.items()
        }
        norm_stats = {**state.norm_stats} | {str(g): aggregate.mean("stats") for g, aggregate in aggregates.items()}
        cluster_of = {**state.cluster_of} | {
            s: str(g) for g, aggregate in aggregates.items() for s in aggregate.clients
        }
        state = IfcaState(weights, norm_stats, cluster_of, state.num_rounds + 1)
        return (
            self._split_warmup_model(state, context) if self.k > 1 and state.num_rounds == self.warmup_rounds else state
        )

    def _split_warmup_model(self, state: IfcaState, context: StrategyContext) -> IfcaState:
        """k copies of the common model, each a little aside of it; all of them together are still its mean."""
        w = state.weights[FIRST_CLUSTER]
        perturbed = torch.stack([draw_weights(w, context, g, bias_scale=0.0) for g in range(self.k)])
        models = w + self.spread * (perturbed - perturbed.mean(0))
        names = [str(g) for g in range(self.k)]
        return replace(
            state,
            weights=dict(zip(names, models, strict=True)),
            norm_stats=dict.fromkeys(names, state.norm_stats[FIRST_CLUSTER]),
        )

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        cluster = yield from self._choose_cluster(message)
        w, norm_stats = message.vectors[f"weights/{cluster}"], message.vectors[f"stats/{cluster}"]
        result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        return replace(make_update(w, result), cluster=cluster), client_state

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        cluster = yield from self._choose_cluster(message)
        return ModelState(message.vectors[f"weights/{cluster}"], message.vectors[f"stats/{cluster}"])

    def _choose_cluster(self, message: Message) -> Generator[LocalJob, JobResult, int]:
        """The model with the least training loss."""
        losses = []
        num_clusters = sum(key.startswith("weights/") for key in message.vectors)
        for g in range(num_clusters if num_clusters > 1 else 0):
            sums = yield from run_evaluation(
                EvaluateJob(message.vectors[f"weights/{g}"], "train", message.vectors[f"stats/{g}"])
            )
            losses.append(float(sums.loss))
        return losses.index(min(losses)) if losses else 0


def draw_weights(weights: ParamVector, context: StrategyContext, index: int, bias_scale: float = 1.0) -> ParamVector:
    """Random weights with the spread of each tensor; vectors, which are biases and normalisations, times `biases`."""
    rng = seeded_generator(context.seed, "ifca", index)
    parts = [
        (
            torch.randn(part.shape, generator=rng) * part.std(correction=0) if part.dim() > 1 else bias_scale * part
        ).flatten()
        for part in context.spec.split_parameters(weights)
    ]
    return torch.cat(parts)
