"""The strategy API: a federated algorithm is one `Strategy` with a coordinator's half and a client's half.

Coordinator: `init_state` once, then `run_round` every round, which sends `train_payload` to the sampled clients and
aggregates their updates. Client: `client_train` for every message, and `personal_model` if sites have models of their
own. The defaults are FedAvg; an algorithm overrides the hooks in which it differs.

A strategy is a frozen pydantic model, and its fields are the keys of `[strategy]` in a study. What changes from round
to round is the state, which goes into a hook and comes out of it. Client hooks are generators: they yield local jobs as
data and receive the results, but neither train nor do any I/O. So the same object runs stacked over a hundred simulated
sites in one process, alone in a hospital, and without training in a dry run.
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

ModelTask = Generator[LocalJob, JobResult, ModelState]  # yields local jobs, returns a model
PERSONAL = "own"  # in an evaluation, the model that the site would use; comparison models have names of their own


@dataclass(frozen=True)
class StrategyContext:
    """What both halves of a strategy may know of a study. Constant over the run."""

    spec: ParameterSpec  # names, shapes and roles of the model's parameters
    num_sites: int  # all sites of the study, not the sampled ones
    lr_schedule: Callable[[int], float]  # round (1, 2, ...) -> local learning rate; trainers apply it to every job
    seed: int
    epochs: int | None  # local work per round: either epochs or steps, the other is None
    steps: int | None


class LocalTrainingConfig(Protocol):
    """The settings of `[local]` that a strategy may be incompatible with."""

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
    """How `run_round` reaches the clients: payloads go out, validated replies come back.

    A round makes one request: a second call of `aggregate`, `aggregate_by_cluster` or `collect` is refused. Deadlines,
    late replies, compression, quarantine and secure aggregation are the coordinator's task. With fewer replies than the
    quorum a request raises, and the round is void.
    """

    def aggregate(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate:
        """Sends each client its payload; returns means and sums over their updates, by the study's aggregation rule."""
        ...

    def aggregate_by_cluster(self, payloads: Mapping[SiteId, NamedTensors], num_clusters: int) -> dict[int, Aggregate]:
        """The same for each cluster that a client chose (`ClientUpdate.cluster`). Needs visibility "groups"."""
        ...

    def collect(self, payloads: Mapping[SiteId, NamedTensors]) -> list[Reply]:
        """Sends each client its payload; returns the single replies. Needs visibility "each"."""
        ...

    def aggregate_replies(self, replies: Sequence[Reply]) -> Aggregate:
        """Aggregates some of the collected replies by the study's rule. Asks no client: call it as often as needed."""
        ...

    def run_on_coordinator(self, jobs: Sequence[LocalJob]) -> list[JobResult]:
        """Runs jobs on the coordinator's own examples. Asks no client: call it as often as needed."""
        ...


@dataclass(frozen=True)
class GlobalModelState:
    """Coordinator state of an algorithm that has one global model and nothing else."""

    weights: ParamVector
    norm_stats: ParamVector


@dataclass(frozen=True)
class Dendrogram:
    """A hierarchical clustering of sites: merges[i] = (a, b, distance, num_leaves) creates node len(leaves) + i, as in
    scipy's linkage matrix."""

    leaves: tuple[SiteId, ...]
    merges: tuple[tuple[int, int, float, int], ...]


# task of a message -> the strategy's method that a client runs for it
CLIENT_METHODS: Mapping[str, str] = {
    "train": "client_train",
    "evaluate": "client_evaluate",
    "profile": "client_profile",
    "profile_personal": "client_profile_personal",
    "save_personal": "client_save_personal",
}


class Strategy(Component):
    """Base class of all federated algorithms. The defaults are FedAvg: one global model, plain local training, and the
    weighted mean of the clients' deltas."""

    # Declarations: what an algorithm needs and permits

    paper: ClassVar[str] = ""
    state_type: ClassVar[type] = GlobalModelState  # the frozen dataclass of the state; restores checkpoints
    partial_updates: ClassVar[Literal["drop", "keep"]] = "drop"  # what "auto" means for work that a deadline cut short
    personalized: ClassVar[bool] = False  # `personal_model` gives every site a model of its own
    result_in_client_states: ClassVar[bool] = (
        False  # personalized models are in the client states, so the last round counts (not for control variates)
    )
    full_batch_only: ClassVar[bool] = False  # uses full gradients: no batches to augment or to balance
    requires_pooled_data: ClassVar[bool] = False  # trains on all sites' examples in one place: simulation only
    bypasses_aggregation_rule: ClassVar[bool] = False  # changes the models by sums or means of its own
    tasks: ClassVar[frozenset[str]] = frozenset(CLIENT_METHODS)  # what a client may be asked to do
    server_state_text: ClassVar[str] = "the model"  # in words: what the coordinator keeps between rounds
    client_state_text: ClassVar[str] = "nothing"  # in words: what a client keeps between rounds
    # in words: what a client sends besides normalization statistics, training loss and work; "": nothing
    update_text: ClassVar[str] = "the change of every weight"

    @property
    def visibility(self) -> Visibility:
        """What the coordinator has to see of the updates: their "totals", sums by cluster ("groups"), or "each" one."""
        return "totals"

    @property
    def needs_public_probes(self) -> bool:
        """Whether the coordinator compares networks on public examples, which the study must then have."""
        return False

    @property
    def default_codec(self) -> CodecChain:
        """Codecs of the updates if the study does not set `compression.uplink`."""
        return ()

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterable[str]:
        """Called when a study is validated. Returns one sentence, with the cure, for every setting of `[local]` and
        every property of the model that the algorithm cannot work with; any such sentence refuses the study."""
        return ()

    # The coordinator's half

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> Any:
        """Called before round 1, and by the dry run, with the initial model. Returns the first state, a `state_type`."""
        return GlobalModelState(initial_model.weights, initial_model.norm_stats)

    def run_round(
        self, state: Any, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> Any:
        """Called every round with the clients that are sampled for it. Makes one request to them and returns the next
        state, a new `state_type`; the old state must not change, because it may be the best round's."""
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        return replace(state, weights=state.weights + aggregate.mean("delta"), norm_stats=aggregate.mean("stats"))

    def train_payload(self, state: Any, site: SiteId) -> NamedTensors:
        """Called by `run_round`, by the dry run, and when a site joins late. Returns the tensors that this site
        receives to train; they are the `vectors` of its message."""
        return {"weights": state.weights, "stats": state.norm_stats}

    def eval_payload(self, state: Any, site: SiteId) -> NamedTensors:
        """Called for every evaluation, and when personalized models are profiled or saved. Returns the tensors that
        this site receives for it, including all that `personal_model` reads."""
        return self.train_payload(state, site)

    def global_models(self, state: Any) -> Mapping[str, ModelState]:
        """Called after every round and at the end. Returns the models at the coordinator by name, "global",
        "cluster/NAME" or "site/NAME": they are evaluated there, saved and exported."""
        return {"global": ModelState(state.weights, state.norm_stats)}

    def cluster_assignment(self, state: Any) -> Mapping[SiteId, str]:
        """Called after every round, for the record. Returns the cluster of each site; empty without clusters."""
        return {}

    def dendrogram(self, state: Any) -> Dendrogram | None:
        """Called after every round, for the record. Returns the tree that the clusters were cut from, if any."""
        return None

    def joinable_clusters(self, state: Any) -> Mapping[str, ModelState]:
        """Called when a site joins a finished run. Returns the model of each cluster that it may join; it joins the one
        whose model has the least loss on its training examples. Empty: it joins none."""
        return {}

    def assign_cluster(self, state: Any, site: SiteId, cluster: str) -> Any:
        """Called when a site that joins a finished run has chosen a cluster. Returns the state with the site in it."""
        return state

    def on_client_joined(self, state: Any, reply: Reply) -> Any:
        """Called after every training round of a site that joins a finished run. Returns the state with what the
        coordinator keeps of this site. The global models must not change."""
        return state

    # The client's half: generators that yield local jobs and receive their results

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """Called at a client for every training message. Returns its update and its next client state, which the client
        keeps only if the coordinator accepts the update."""
        return (yield from train_with_proximal_term(message, client_state, context, mu=0.0))

    def personal_model(self, message: Message, client_state: ClientState, context: StrategyContext) -> ModelTask:
        """Called at a client before evaluation, profiling and saving. Returns the model that this site would use."""
        return received_model(message)
        yield  # makes this a generator; it has no job

    def comparison_models(self, message: Message) -> Mapping[str, ModelState]:
        """Called at a client during evaluation. Returns models to evaluate next to the site's own one, by name."""
        return {"global": received_model(message)} if self.personalized else {}

    def client_evaluate(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """Called at a client for every evaluation message. Returns evaluation sums of `personal_model` and of the
        `comparison_models`, and the client state unchanged."""
        personal = yield from self.personal_model(message, client_state, context)
        models = {PERSONAL: personal, **self.comparison_models(message)}
        return (yield from evaluate_models(models, message, client_state))

    def client_profile(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """Called at a client at the end of a run, for each exportable model. Returns sums over the outputs of the
        received model on validation images: they calibrate the exported model."""
        return (yield from profile_model(received_model(message), message, client_state))

    def client_profile_personal(
        self, message: Message, client_state: ClientState, context: StrategyContext
    ) -> ClientTask:
        """The same for the site's own model."""
        personal = yield from self.personal_model(message, client_state, context)
        return (yield from profile_model(personal, message, client_state))

    def client_save_personal(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        """Called at a client at the end of a run. Returns an empty update, and the site's own model for the client to
        store. It does not leave the site."""
        personal = yield from self.personal_model(message, client_state, context)
        return ClientUpdate(), {"weights": personal.weights, "stats": personal.norm_stats}


# Building blocks of client halves


def received_model(message: Message) -> ModelState:
    """The model in the message's payload."""
    return ModelState(message.vectors["weights"], message.vectors["stats"])


def stored_model(client_state: ClientState, message: Message) -> ModelState:
    """The model in the client state, or in the client's first round the received one."""
    vectors = client_state or message.vectors
    return ModelState(vectors["weights"], vectors["stats"])


def train_with_proximal_term(
    message: Message, client_state: ClientState, context: StrategyContext, mu: float, inexactness: float | None = None
) -> ClientTask:
    """A whole `client_train`: the study's local work from the received model w_t, with (mu/2) |w - w_t|^2 added to the
    objective. `inexactness`: FedProx's gamma, see `TrainJob`."""
    w = message.vectors["weights"]
    job = TrainJob(
        w,
        message.vectors["stats"],
        steps=context.steps,
        epochs=context.epochs,
        inexactness=inexactness,
        regularizer=proximal_term(w, mu),
    )
    result = yield from run_training(job)
    return make_update(w, result), client_state


def make_update(
    initial_weights: ParamVector,
    result: TrainResult,
    *,
    delta: ParamVector | None = None,
    loss: float | None = None,
    work: LocalWork | None = None,
) -> ClientUpdate:
    """The usual update: `delta` = trained - initial weights and the norm statistics to be averaged, the training loss
    to be summed, and the work. `delta`, `loss` and `work` replace what follows from `result`."""
    work = work or result.work
    total_loss = torch.tensor((result.loss if loss is None else loss) * work.num_examples)
    sent_delta = result.weights - initial_weights if delta is None else delta
    return ClientUpdate(
        averaged={"delta": sent_delta, "stats": result.norm_stats}, summed={"train_loss": total_loss}, work=work
    )


def evaluate_models(models: Mapping[str, ModelState], message: Message, client_state: ClientState) -> ClientTask:
    """Evaluation sums of each model on each split that the message asks for; `PERSONAL` is the site's result."""
    sums: dict[str, Tensor] = {}
    for name, model in models.items():
        for split in message.splits:
            split_sums = yield from run_evaluation(EvaluateJob(model.weights, split, model.norm_stats))
            sums |= {f"{name}:{split}/{key}": value for key, value in split_sums.to_dict().items()}
    return ClientUpdate(summed=sums), client_state


def profile_model(model: ModelState, message: Message, client_state: ClientState) -> ClientTask:
    """Validation profile sums of a model; the message has the whitening (second pass) and the number of TTA views."""
    vectors = message.vectors
    whitening = whitening_from_dict(vectors) if "whitening/mean" in vectors else None
    (split,) = message.splits
    num_tta_views = int(vectors["tta_views"]) if "tta_views" in vectors else 1
    profile_sums = yield from run_profile(ProfileJob(model.weights, split, model.norm_stats, whitening, num_tta_views))
    return ClientUpdate(summed=profile_sums.to_dict()), client_state


def require_plain_sgd(name: str, local: LocalTrainingConfig) -> Iterator[str]:
    """`incompatibilities` of algorithms that divide by the sum of learning rates."""
    if local.optimizer != "sgd" or local.momentum or local.weight_decay:
        yield f"{name} assumes plain SGD steps; set local.optimizer = 'sgd' without momentum and weight_decay"
