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

from pipeline.codecs.base import CodecChain
from pipeline.core.parameters import ModelState, NamedTensors, ParameterSpec, ParamVector
from pipeline.core.registry import Component
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
from pipeline.protocol.tasks import (
    EvaluateJob,
    JobResult,
    LocalJob,
    LocalWork,
    ProfileJob,
    TrainJob,
    TrainResult,
    proximal_term,
    run_evaluation,
    run_profile,
    run_training,
    whitening_from_dict,
)

ModelTask = Generator[LocalJob, JobResult, ModelState]  # jobs that end in a model
PERSONAL = "own"  # the view of a site's own model; others have a name of their own


@dataclass(frozen=True)
class StrategyContext:
    """What both halves of a strategy may know."""

    spec: ParameterSpec
    num_sites: int  # population
    lr_schedule: Callable[[int], float]  # by round
    seed: int
    epochs: int | None  # the study's local work: epochs or steps
    steps: int | None


class LocalTrainingConfig(Protocol):
    """The study's `[local]`, as far as a strategy may object to it."""

    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...


class ClientRequests(Protocol):
    """How a strategy reaches the sites; who waits how long, and turns and attempts, are the coordinator's affair."""

    def aggregate(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate: ...
    def aggregate_by_cluster(
        self, payloads: Mapping[SiteId, NamedTensors], num_clusters: int
    ) -> dict[int, Aggregate]: ...  # by Update.group
    def collect(self, payloads: Mapping[SiteId, NamedTensors]) -> list[Reply]: ...
    def aggregate_replies(self, replies: Sequence[Reply]) -> Aggregate: ...  # of some of them, by the study's rule
    def run_on_coordinator(self, jobs: Sequence[LocalJob]) -> list[JobResult]: ...  # on the coordinator's own data


@dataclass(frozen=True)
class GlobalModelState:
    """The state of every algorithm that keeps one model and nothing else."""

    weights: ParamVector
    norm_stats: ParamVector


# task of a message -> the method of a strategy that a client runs for it
CLIENT_METHODS: Mapping[str, str] = {
    "train": "client_train",
    "evaluate": "client_evaluate",
    "profile": "client_profile",
    "profile_personal": "client_profile_personal",
    "save_personal": "client_save_personal",
}


class Strategy(Component):
    """The defaults are FedAvg: one global model, its weighted mean, plain local training. Override what differs."""

    paper: ClassVar[str] = ""
    tasks: ClassVar[frozenset[str]] = frozenset(CLIENT_METHODS)
    state_type: ClassVar[type] = GlobalModelState  # a frozen dataclass; checkpoints need it
    partial_updates: ClassVar[Literal["drop", "keep"]] = "drop"  # what becomes of work cut short, unless the study says
    stateful_clients: ClassVar[bool] = False  # the result lives in the sites' memories, so the last round is the result
    full_batch_only: ClassVar[bool] = (
        False  # looks at whole gradients, never at batches: nothing can be drawn or augmented
    )
    requires_pooled_data: ClassVar[bool] = False  # trains on everybody's examples in one place: simulation only
    personalized: ClassVar[bool] = False  # `personal` gives every site a model of its own
    bypasses_aggregation_rule: ClassVar[bool] = (
        False  # what it adds up itself changes the models, past the study's `combine`
    )
    server_state_text: ClassVar[str] = "the model"  # the coordinator's state, in words
    client_state_text: ClassVar[str] = "nothing"  # the site's memory, in words

    @property
    def visibility(self) -> Visibility:
        return "totals"

    @property
    def needs_public_probes(self) -> bool:
        """Whether the coordinator compares networks on public examples."""
        return False

    @property
    def default_codec(self) -> CodecChain:
        """What updates travel in unless the study says."""
        return ()

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterable[str]:
        """What of the study's local training or model does not go with this algorithm, each with its cure."""
        return ()

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> Any:
        return GlobalModelState(initial_model.weights, initial_model.norm_stats)

    def run_round(
        self, state: Any, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> Any:
        """Adds the weighted mean of what the sites moved."""
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        return replace(state, weights=state.weights + aggregate.mean("delta"), norm_stats=aggregate.mean("stats"))

    def train_payload(self, state: Any, site: SiteId) -> NamedTensors:
        """What a site is sent before it trains, is judged, or joins late."""
        return {"weights": state.weights, "stats": state.norm_stats}

    def eval_payload(self, state: Any, site: SiteId) -> NamedTensors:
        """What a site is sent to be judged, or to make its own model of."""
        return self.train_payload(state, site)

    def global_models(self, state: Any) -> Mapping[str, ModelState]:
        """What can be saved, evaluated by the coordinator, and exported."""
        return {"global": ModelState(state.weights, state.norm_stats)}

    def cluster_assignment(self, state: Any) -> Mapping[SiteId, str]:
        """Who is in which group, where there are groups; recorded every round."""
        return {}

    def dendrogram(self, state: Any) -> Dendrogram | None:
        """How the groups hang together, where that is known; recorded every round."""
        return None

    def joinable_clusters(self, state: Any) -> Mapping[str, ModelState]:
        """Groups that a site could join after training; it takes the one whose model fits its examples best."""
        return {}

    def assign_cluster(self, state: Any, site: SiteId, cluster: str) -> Any:
        """The state with a new site in that group."""
        return state

    def on_client_joined(self, state: Any, reply: Reply) -> Any:
        """What the coordinator notes of a new site's training. The common models stay as they are."""
        return state

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """Trains as long as the study says and sends what moved."""
        return (yield from train_with_proximal_term(message, client_state, context, mu=0.0))

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        """The model that this site would use."""
        return received_model(message)
        yield  # no work: the common model is the site's

    def client_evaluate(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        personal = yield from self.personal_model(message, client_state, context)
        return (
            yield from evaluate_models({PERSONAL: personal, **self.comparison_models(message)}, message, client_state)
        )

    def comparison_models(self, message: Message) -> Mapping[str, ModelState]:
        """Other models that a site's own one is to be held against."""
        return {"global": received_model(message)} if self.personalized else {}

    def client_profile(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """What an exported model has to know of the images that it was chosen by: sums over them."""
        return (yield from profile_model(received_model(message), message, client_state))

    def client_profile_personal(
        self, message: Message, client_state: ClientState, context: StrategyContext
    ) -> ClientTask:
        personal = yield from self.personal_model(message, client_state, context)
        return (yield from profile_model(personal, message, client_state))

    def client_save_personal(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """What the runner stores as the site's own model. It does not leave the site."""
        personal = yield from self.personal_model(message, client_state, context)
        return ClientUpdate(), {"weights": personal.weights, "stats": personal.norm_stats}


@dataclass(frozen=True)
class Dendrogram:
    """A dendrogram: merges[i] = (a, b, distance, leaves) makes node len(leaves) + i, as scipy's linkage has it."""

    leaves: tuple[SiteId, ...]
    merges: tuple[tuple[int, int, float, int], ...]


def received_model(message: Message) -> ModelState:
    return ModelState(message.vectors["weights"], message.vectors["stats"])


def evaluate_models(views: Mapping[str, ModelState], message: Message, client_state: ClientState) -> ClientTask:
    """Sums of every model on every split the message asks about; `OWN` is the one that the site stands for."""
    sums: dict[str, Tensor] = {}
    for view, model in views.items():
        for split in message.splits:
            sums_of_split = yield from run_evaluation(EvaluateJob(model.weights, split, model.norm_stats))
            sums |= {f"{view}:{split}/{name}": value for name, value in sums_of_split.to_dict().items()}
    return ClientUpdate(summed=sums), client_state


def profile_model(model: ModelState, message: Message, client_state: ClientState) -> ClientTask:
    vectors = message.vectors
    whitening = whitening_from_dict(vectors) if "whitening/mean" in vectors else None
    (split,) = message.splits
    num_tta_views = int(vectors["tta_views"]) if "tta_views" in vectors else 1
    profile_sums = yield from run_profile(ProfileJob(model.weights, split, model.norm_stats, whitening, num_tta_views))
    return ClientUpdate(summed=profile_sums.to_dict()), client_state


def make_update(
    initial_weights: ParamVector,
    result: TrainResult,
    *,
    delta: ParamVector | None = None,
    loss: float | None = None,
    work: LocalWork | None = None,
) -> ClientUpdate:
    """What a site that trained sends: how far it came, its statistics and its work."""
    work = work or result.work
    total_loss = torch.tensor((result.loss if loss is None else loss) * work.num_examples)
    sent_delta = result.weights - initial_weights if delta is None else delta
    return ClientUpdate(
        averaged={"delta": sent_delta, "stats": result.norm_stats}, summed={"train_loss": total_loss}, work=work
    )


def train_with_proximal_term(
    message: Message, client_state: ClientState, context: StrategyContext, mu: float, inexactness: float | None = None
) -> ClientTask:
    """The study's local work with a pull of strength mu towards the model that was sent."""
    w = message.vectors["weights"]
    regularizer = proximal_term(w, mu)
    job = TrainJob(
        w,
        message.vectors["stats"],
        steps=context.steps,
        epochs=context.epochs,
        inexactness=inexactness,
        regularizer=regularizer,
    )
    result = yield from run_training(job)
    return make_update(w, result), client_state


def stored_model(client_state: ClientState, message: Message) -> ModelState:
    """The model in the site's memory, or at first the one that it was sent."""
    vectors = client_state or message.vectors
    return ModelState(vectors["weights"], vectors["stats"])


def require_plain_sgd(name: str, local: LocalTrainingConfig) -> Iterator[str]:
    """For algorithms that divide by the sum of learning rates."""
    if local.optimizer != "sgd" or local.momentum or local.weight_decay:
        yield f"{name} counts on plain steps; set local.optimizer = 'sgd' without momentum and weight_decay"
