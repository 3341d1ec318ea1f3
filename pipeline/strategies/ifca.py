"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging): k models; each client trains the one that fits its data best.

    client i  j = argmin_j F_i(w_j);  trains w_j and sends its delta and j
    server    w_j <- w_j + weighted mean of the deltas of the clients that chose j

The choice is by the training loss, so the coordinator needs only the sum of each cluster. The initial models must
differ: all but the first are random, each tensor with its initial spread. If one of them suits all clients, they all
stay with it. A safer start (ours) is `warmup_rounds` with one global model, which is then split into k models with a
little noise: where the global model is stationary the populations pull apart. With k = 1 it is FedAvg.
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
    description: ClassVar[str] = (
        "there are several models; each site trains the one that fits its images best, and reports which"
    )
    paper: ClassVar[str] = "Ghosh et al. 2020, arXiv 2006.04088"
    state_type: ClassVar[type] = IfcaState
    name: Literal["ifca"] = "ifca"
    k: PositiveInt = 2  # models
    warmup_rounds: NonNegativeInt = 0  # rounds with one global model before it is split into k
    spread: PositiveFloat = 0.1  # standard deviation of the noise of the split, in standard deviations of each tensor

    @property
    def visibility(self) -> Visibility:
        return "groups" if self.k > 1 else "totals"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> IfcaState:
        num_models = 1 if self.warmup_rounds else self.k
        weights = {
            str(j): randomize_weights(initial_model.weights, context, j) if j else initial_model.weights
            for j in range(num_models)
        }
        return IfcaState(weights, dict.fromkeys(weights, initial_model.norm_stats), {})

    def train_payload(self, state: IfcaState, site: SiteId) -> NamedTensors:
        """All models, whatever the site's cluster was: `weights/0`, `stats/0`, `weights/1`, ..."""
        return {
            f"{part}/{j}": values[j]
            for part, values in (("weights", state.weights), ("stats", state.norm_stats))
            for j in values
        }

    def run_round(
        self, state: IfcaState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> IfcaState:
        payloads = {site: self.train_payload(state, site) for site in clients}
        if len(state.weights) > 1:
            aggregates = requests.aggregate_by_cluster(payloads, len(state.weights))
        else:
            aggregates = {0: requests.aggregate(payloads)}
        weights, norm_stats, cluster_of = {**state.weights}, {**state.norm_stats}, {**state.cluster_of}
        for j, aggregate in aggregates.items():
            weights[str(j)] = state.weights[str(j)] + aggregate.mean("delta")
            norm_stats[str(j)] = aggregate.mean("stats")
            cluster_of |= dict.fromkeys(aggregate.clients, str(j))
        state = IfcaState(weights, norm_stats, cluster_of, state.num_rounds + 1)
        ends_warmup = self.k > 1 and state.num_rounds == self.warmup_rounds
        return self._split_warmup_model(state, context) if ends_warmup else state

    def _split_warmup_model(self, state: IfcaState, context: StrategyContext) -> IfcaState:
        """k copies of the global model with noise; their mean is the global model."""
        w = state.weights[FIRST_CLUSTER]
        noise = torch.stack([randomize_weights(w, context, j, bias_scale=0.0) for j in range(self.k)])
        models = w + self.spread * (noise - noise.mean(0))
        names = [str(j) for j in range(self.k)]
        return replace(
            state,
            weights=dict(zip(names, models, strict=True)),
            norm_stats=dict.fromkeys(names, state.norm_stats[FIRST_CLUSTER]),
        )

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        j = yield from self._choose_cluster(message)
        w, norm_stats = message.vectors[f"weights/{j}"], message.vectors[f"stats/{j}"]
        result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        return replace(make_update(w, result), cluster=j), client_state

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        j = yield from self._choose_cluster(message)
        return ModelState(message.vectors[f"weights/{j}"], message.vectors[f"stats/{j}"])

    def _choose_cluster(self, message: Message) -> Generator[LocalJob, JobResult, int]:
        """The index of the model with the least training loss; a single model needs no evaluation."""
        losses = []
        num_models = sum(key.startswith("weights/") for key in message.vectors)
        for j in range(num_models if num_models > 1 else 0):
            job = EvaluateJob(message.vectors[f"weights/{j}"], "train", message.vectors[f"stats/{j}"])
            sums = yield from run_evaluation(job)
            losses.append(float(sums.loss))
        return losses.index(min(losses)) if losses else 0


def randomize_weights(
    weights: ParamVector, context: StrategyContext, index: int, bias_scale: float = 1.0
) -> ParamVector:
    """Gaussian weights with the standard deviation of each tensor. One-dimensional tensors, that is biases and
    normalization layers, are not random but multiplied by `bias_scale`."""
    generator = seeded_generator(context.seed, "ifca", index)
    parts = []
    for part in context.spec.split_parameters(weights):
        if part.dim() > 1:
            sampled = torch.randn(part.shape, generator=generator) * part.std(correction=0)
        else:
            sampled = bias_scale * part
        parts.append(sampled.flatten())
    return torch.cat(parts)
