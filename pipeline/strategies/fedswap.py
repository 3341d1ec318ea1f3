"""FedSwap (Chiu et al. 2020, federated swapping): clients swap models in some rounds instead of averaging them.

    client k  h1 local steps on the model that it holds
    server    every h2-th round: the weighted mean of all models, sent to all clients
              other rounds:      a permutation of the clients' models

So each model is trained on several clients' data before it is averaged. The random permutation is the paper's; swapping
with the least similar model (ours) sends it to the data that differ most. With h2 = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState, NamedTensors, ParameterSpec, ParamVector
from pipeline.protocol.messages import (
    Aggregate,
    ClientState,
    ClientTask,
    ClientUpdate,
    Message,
    Reply,
    SiteId,
    Visibility,
)
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies._activations import check_same_layers, compute_activations, layer_parameter_indices
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    LocalTrainingConfig,
    Strategy,
    StrategyContext,
    make_update,
)

SWAP_SEED_SALT = 0x5A4B
SwapPairs = Sequence[tuple[int, int]]  # indices of sites


@dataclass(frozen=True)
class FedSwapState(GlobalModelState):
    """`weights` is the last aggregated model; the model that a site holds is `weights` plus its delta."""

    deltas: Mapping[SiteId, ParamVector] = field(default_factory=dict)  # of sites that replied since the aggregation
    site_norm_stats: Mapping[SiteId, ParamVector] = field(default_factory=dict)
    client_weights: Mapping[SiteId, float] = field(default_factory=dict)  # aggregation weight of a site
    num_rounds: int = 0


class FedSwap(Strategy):
    description: ClassVar[str] = "between two averages, sites' models go to other sites, which continue their training"
    paper: ClassVar[str] = "Chiu et al. 2020, IEEE Internet of Things Journal 7(10) (random swap)"
    state_type: ClassVar[type] = FedSwapState
    server_state_text: ClassVar[str] = "the last aggregated model, each site's delta from it"
    name: Literal["fedswap"] = "fedswap"
    h1: PositiveInt | None = None  # local steps a round; None: the study's local work
    h2: PositiveInt = 5  # rounds from one aggregation to the next
    # random permutation (the paper's), random pairs, or the least similar pairs by this measure
    swap: Literal["random", "pairs", "cka", "dcka", "debiased_cka", "cca", "hsic", "sumdiff"] = "random"
    kernel: Literal["linear", "polynomial", "gaussian"] = "linear"  # for hsic and the three variants of CKA
    matching: Literal["greedy", "optimal"] = "greedy"  # how the least similar pairs are found
    layerwise: bool = False  # match and swap every layer separately
    num_probes: int = Field(256, ge=4)  # public examples on which networks are compared

    @property
    def visibility(self) -> Visibility:
        return "each"

    @property
    def needs_public_probes(self) -> bool:
        return self.h2 > 1 and self.swap not in ("random", "pairs", "sumdiff")

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        if self.layerwise and spec.num_norm_stats:
            yield "fedswap cannot swap BatchNorm's statistics layer by layer; set model.norm = 'group' or strategy.layerwise = false"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> FedSwapState:
        return FedSwapState(initial_model.weights, initial_model.norm_stats)

    def train_payload(self, state: FedSwapState, site: SiteId) -> NamedTensors:
        delta = state.deltas.get(site)
        weights = state.weights if delta is None else state.weights + delta
        return {"weights": weights, "stats": state.site_norm_stats.get(site, state.norm_stats)}

    def run_round(
        self, state: FedSwapState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> FedSwapState:
        replies = requests.collect({site: self.train_payload(state, site) for site in clients})
        deltas = {**state.deltas}
        for reply in replies:
            delta = reply.update.averaged["delta"]
            deltas[reply.site] = deltas[reply.site] + delta if reply.site in deltas else delta
        state = replace(
            state,
            deltas=deltas,
            site_norm_stats={**state.site_norm_stats} | {r.site: r.update.averaged["stats"] for r in replies},
            client_weights={**state.client_weights} | {r.site: r.weight for r in replies},
            num_rounds=state.num_rounds + 1,
        )
        if state.num_rounds % self.h2 == 0:
            aggregate = requests.aggregate_replies(replies_from_deltas(state))
            weights = state.weights + aggregate.mean("move")
            return FedSwapState(weights, aggregate.mean("stats"), num_rounds=state.num_rounds)
        return self._swap_models(state, requests, context)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w = message.vectors["weights"]
        steps, epochs = (self.h1, None) if self.h1 else (context.steps, context.epochs)
        result = yield from run_training(TrainJob(w, message.vectors["stats"], steps=steps, epochs=epochs))
        return make_update(w, result), client_state

    def global_models(self, state: FedSwapState) -> Mapping[str, ModelState]:
        """The weighted mean of the models that the sites hold now."""
        if not state.deltas:
            return {"global": ModelState(state.weights, state.norm_stats)}
        aggregate = Aggregate.from_replies(replies_from_deltas(state))
        return {"global": ModelState(state.weights + aggregate.mean("move"), aggregate.mean("stats"))}

    def _swap_models(self, state: FedSwapState, requests: ClientRequests, context: StrategyContext) -> FedSwapState:
        sites = tuple(state.deltas)
        if len(sites) < 2:
            return state
        rng = np.random.default_rng([context.seed, SWAP_SEED_SALT, state.num_rounds])
        flat = torch.stack([state.deltas[site] for site in sites])  # (S, P)
        if self.swap in ("random", "pairs"):
            order = sample_permutation(len(sites), rng, self.swap == "pairs")
            swaps = [(slice(None), order)]
        else:
            swaps = self._match_by_similarity(state, sites, requests, context)
        swapped = flat.clone()
        for weight_index, order in swaps:
            swapped[:, weight_index] = flat[order][:, weight_index]
        norm_stats = [state.site_norm_stats[site] for site in sites]
        # norm statistics go with a full model and stay with layerwise swaps
        stats_order = swaps[0][1] if len(swaps) == 1 else list(range(len(sites)))
        return replace(
            state,
            deltas=dict(zip(sites, swapped, strict=True)),
            site_norm_stats={site: norm_stats[n] for site, n in zip(sites, stats_order, strict=True)},
        )

    def _match_by_similarity(
        self, state: FedSwapState, sites: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> list[tuple[Any, list[int]]]:
        """(index of the weights, permutation of the sites) for the full model, or for every layer."""
        from pipeline.strategies._pairing import MATCHING_METHODS

        layer_indices = layer_parameter_indices(context.spec)
        similarities = self._compute_similarity(state, sites, layer_indices, requests, context)  # (L, S, S)
        match_pairs = MATCHING_METHODS[self.matching]
        if not self.layerwise:
            return [(slice(None), permutation_from_pairs(len(sites), match_pairs(similarities.mean(0))))]
        check_same_layers(layer_indices, list(similarities), self.name)
        parameter_index = torch.cat([torch.full((n,), i) for i, n in enumerate(context.spec.parameter_sizes)])
        return [
            (
                torch.isin(parameter_index, torch.tensor(layer)),
                permutation_from_pairs(len(sites), match_pairs(similarity)),
            )
            for layer, similarity in zip(layer_indices, similarities, strict=True)
        ]

    def _compute_similarity(
        self,
        state: FedSwapState,
        sites: Sequence[SiteId],
        layer_indices: list[list[int]],
        requests: ClientRequests,
        context: StrategyContext,
    ) -> Tensor:
        from pipeline.strategies._representation_similarity import pairwise_similarity, weight_similarity

        models = [ModelState(state.weights + state.deltas[site], state.site_norm_stats[site]) for site in sites]
        if self.swap == "sumdiff":
            parts = [context.spec.split_parameters(model.weights) for model in models]
            return weight_similarity(
                [[torch.cat([p[i].flatten() for i in layer_params]) for layer_params in layer_indices] for p in parts]
            )
        activations, inputs = compute_activations(models, requests, self.num_probes)
        max_features = max(layer.shape[1] for layer in activations[0])
        if self.swap == "cca" and max_features >= len(inputs) - 1:
            raise IncompatibleStudyError(
                f"with cca any two layers are alike unless there are more probes than features: {len(inputs)} public "
                f"examples, {max_features} features; raise strategy.num_probes and public.fraction, or use cka"
            )
        return pairwise_similarity(activations, inputs, self.swap, self.kernel)


def replies_from_deltas(state: FedSwapState) -> list[Reply]:
    """Each site's delta since the last aggregation as a reply, so that a rule can aggregate them."""

    def as_reply(site: SiteId, delta: ParamVector) -> Reply:
        update = ClientUpdate({"move": delta, "stats": state.site_norm_stats[site]})
        return Reply(site, "train", state.num_rounds, 0, update, state.client_weights[site])

    return [as_reply(site, delta) for site, delta in state.deltas.items()]


def sample_permutation(count: int, rng: np.random.Generator, pairs: bool) -> list[int]:
    """order[i]: the site whose model site i gets. `pairs`: random disjoint pairs; otherwise, as in the paper, each site
    in turn swaps with a random one."""
    if pairs:
        shuffled = [int(i) for i in rng.permutation(count)]
        return permutation_from_pairs(count, list(zip(shuffled[::2], shuffled[1::2], strict=False)))
    order = list(range(count))
    for k in range(count):
        r = int(rng.integers(count))
        order[k], order[r] = order[r], order[k]
    return order


def permutation_from_pairs(count: int, pairs: SwapPairs) -> list[int]:
    order = list(range(count))
    for a, b in pairs:
        order[a], order[b] = b, a
    return order
