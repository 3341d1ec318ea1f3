"""Runs a study across real sites in the coordinator's process, over any engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.aggregation.rules import AggregationRule
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup
from pipeline.coordinator.live_status import LiveStatus, requested_state
from pipeline.coordinator.results import write_results
from pipeline.coordinator.round_loop import CheckpointableEngine, RoundLoop
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import IncompatibleStudyError, ReplyError, RunHaltedError
from pipeline.protocol.messages import SiteId
from pipeline.protocol.serialization import MAX_CLIENT_WEIGHT
from pipeline.reports.run.report import write_report
from pipeline.runs.assembly import build_round_loop
from pipeline.study.offer import StudyOffer
from pipeline.study.run_spec import RunSpec
from pipeline.study.schema import Study
from sites.population.simulated_sites import FederatedDataset, load_public_federated_data
from sites.training.select_trainer import make_training_config, select_device
from sites.training.setup import set_up_training


class RemoteEngine(CheckpointableEngine, Protocol):
    """An engine to real sites."""

    def collect_data_summaries(self) -> Mapping[SiteId, Mapping[str, Any]]:
        """Data summary of each connected site."""


def validate_federated_study(study: Study) -> None:
    """Refuses settings that only a simulation supports; called before a run is offered."""
    problems = list(_simulation_only_settings(study))
    if problems:
        raise IncompatibleStudyError("\n".join(problems))


def _simulation_only_settings(study: Study) -> Iterator[str]:
    if study.evaluation.evaluate_at != "sites":
        yield "across hospitals the coordinator has no test images; set evaluation.evaluate_at = 'sites'"
    if study.public.fraction:
        yield "public.fraction gives images of the sites to the coordinator; across hospitals use public.data, or none"
    if study.strategy.requires_pooled_data:
        yield f"{study.strategy.name} trains on pooled images; across hospitals use a federated strategy"
    if study.sites.stragglers or study.sites.dropout:
        yield "sites.stragglers and sites.dropout simulate unreliable sites; with real sites leave them out"


def run_federated(
    folder: RunFolder, offer: StudyOffer, engine: RemoteEngine, live_status: LiveStatus
) -> dict[str, Any]:
    """Starts or resumes the run and returns the content of results.json."""
    study = folder.load_study()
    data_summaries = engine.collect_data_summaries()
    shape, classes = _agree_on_data_format(data_summaries)
    run_spec = RunSpec(study, shape, classes, len(offer.site_keys))
    dataset = load_public_federated_data(study, None, select_device(study), tuple(offer.site_keys), shape, classes)
    round_loop = _create_round_loop(
        run_spec=run_spec,
        folder=folder,
        offer=offer,
        engine=engine,
        dataset=dataset,
        live_status=live_status,
    )
    if folder.has_checkpoint:
        run_state = round_loop.restore(*folder.load_checkpoint())
        folder.truncate_rounds(run_state.round)
    else:
        folder.truncate_rounds(-1)
        folder.write_json("sites.json", _describe_sites(data_summaries, shape, classes))
        folder.write_json(
            "privacy.json", _describe_privacy(study, offer, data_summaries, round_loop.secure_aggregation)
        )
        run_state = round_loop.start_run(run_spec.initial_state)
    run_state, stop_reason = round_loop.run(run_state)
    state = round_loop.select_result(run_state)[0]
    if study.strategy.personalized or study.strategy.result_in_client_states:
        round_loop.save_personal_models(state, run_state)
    results = write_results(
        round_loop=round_loop,
        folder=folder,
        run_state=run_state,
        stop_reason=stop_reason,
        shape=shape,
        classes=classes,
        intervals=None,
    )
    write_report(folder.path)
    return results


class SiteDataSummary(BaseModel):
    """A site's description of its data, bounded because a model is built from it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    shape: list[Annotated[int, Field(gt=0, le=4096)]] = Field(min_length=1, max_length=4)
    classes: list[Annotated[str, Field(max_length=100)]] = Field(min_length=2, max_length=1000)
    examples: dict[Literal["train", "val", "test"], Annotated[int, Field(ge=0, le=int(MAX_CLIENT_WEIGHT))]]


def _agree_on_data_format(
    data_summaries: Mapping[SiteId, Mapping[str, Any]],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    for site, summary in data_summaries.items():
        try:
            SiteDataSummary.model_validate(summary)
        except ValidationError as error:
            invalid_fields = ", ".join(sorted({str(e["loc"][0]) for e in error.errors()}))
            raise ReplyError(
                f"{site} sent an invalid data summary ({invalid_fields}); use the same version of hemofed on all sites"
            ) from error
    data_formats = {site: (tuple(s["shape"]), tuple(s["classes"])) for site, s in data_summaries.items()}
    first_site = next(iter(data_formats))
    for site, data_format in data_formats.items():
        if data_format != data_formats[first_site]:
            raise ReplyError(
                f"{site} has images of shape {data_format[0]} and the classes {', '.join(data_format[1])}, but {first_site} has {data_formats[first_site][0]} and "
                f"{', '.join(data_formats[first_site][1])}; set data.size and data.classes in the study"
            )
    return data_formats[first_site]


def _create_round_loop(
    run_spec: RunSpec,
    folder: RunFolder,
    offer: StudyOffer,
    engine: RemoteEngine,
    dataset: FederatedDataset,
    live_status: LiveStatus,
) -> RoundLoop:
    training = set_up_training(run_spec, dataset, make_training_config(run_spec.study, run_spec.lr))
    aggregation_rule, secure_aggregation = _setup_privacy(run_spec, offer)

    def on_round_end(record: dict[str, Any]) -> None:
        """Writes the live status; halts the run here, after a checkpoint, if requested."""
        live_status.round = record["round"]
        live_status.write()
        if (desired_state := requested_state(folder.path)) != "run":
            raise RunHaltedError(desired_state)

    return build_round_loop(
        run_spec,
        sites=tuple(offer.site_keys),
        engine=engine,
        training=training,
        folder=folder,
        on_round_end=on_round_end,
        aggregation_rule=aggregation_rule,
        secure_aggregation=secure_aggregation,
        across_hospitals=True,
    )


def _setup_privacy(
    run_spec: RunSpec, offer: StudyOffer
) -> tuple[AggregationRule | None, SecureAggregationSetup | None]:
    if not run_spec.dry_run_rounds:
        return None, None
    from pipeline.runs.privacy_setup import create_client_level_dp, describe_privacy
    from sites.privacy.plan import create_secure_aggregation

    public_keys = {site: bytes.fromhex(key) for site, key in offer.site_keys.items()}
    secure_aggregation = create_secure_aggregation(run_spec.study, public_keys, run_spec.dry_run_rounds, offer.digest)
    return create_client_level_dp(
        run_spec.study, describe_privacy(run_spec.study, tuple(offer.site_keys), {}, secure_aggregation)
    ), secure_aggregation


def _describe_sites(
    data_summaries: Mapping[SiteId, Mapping[str, Any]], shape: Sequence[int], classes: Sequence[str]
) -> dict[str, Any]:
    """sites.json as of a simulation, but without class counts: sites report only their numbers of examples."""
    counts = {
        site: {split: [n] for split, n in summary["examples"].items()} for site, summary in data_summaries.items()
    }
    return {"classes": list(classes), "shape": list(shape), "sites": counts, "fingerprint": "", "skipped": []}


def _describe_privacy(
    study: Study,
    offer: StudyOffer,
    data_summaries: Mapping[SiteId, Mapping[str, Any]],
    secure_aggregation: SecureAggregationSetup | None,
) -> dict[str, Any]:
    privacy_plans = {
        site: summary["privacy_plan"] for site, summary in data_summaries.items() if "privacy_plan" in summary
    }
    if not privacy_plans and secure_aggregation is None and study.privacy.client_level_dp is None:
        return {}
    from pipeline.runs.privacy_setup import describe_privacy

    return describe_privacy(study, tuple(offer.site_keys), {}, secure_aggregation) | {"dp_sgd": privacy_plans}
