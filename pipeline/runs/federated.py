"""A study across real sites, as the coordinator's process runs it; which engine carries the messages is not its business."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.study.run_spec import Blueprint
from pipeline.aggregation.rules import Combine
from pipeline.coordinator.round_loop import Coordinator, Simulated
from pipeline.core.errors import BadReply, BadRun, Halted, Refused
from pipeline.coordinator.live_status import Live, wanted
from pipeline.aggregation.secure_aggregation import Masking
from pipeline.protocol.messages import SiteId
from pipeline.coordinator.metrics import Focus
from pipeline.study.offer import RUN_NAME, Offer
from pipeline.protocol.serialization import HEAVIEST
from pipeline.reports.run.report import write_report
from pipeline.coordinator.results import write_results
from pipeline.coordinator.run_folder import RunFolder
from pipeline.study.schema import Study
from pipeline.protocol.tasks import Job, Result
from sites.population.simulated_sites import COORDINATOR, Population, public_population
from sites.training.base import Ticket
from sites.training.select_trainer import bench_of, choose, device_of, make_trainer, recipe_of, threads_for

Told = Callable[[], Mapping[str, Any]]


class Remote(Simulated, Protocol):
    """An engine to real sites."""

    def about(self) -> Mapping[SiteId, Mapping[str, Any]]:
        """What each site that is there says of its data."""


def check_hospital_study(study: Study) -> None:
    """Before anything is offered: parts of a study that only a simulation has."""
    found = list(_unfit(study))
    if found:
        raise Refused("\n".join(found))


def _unfit(study: Study) -> Iterator[str]:
    if study.evaluation.where != "sites":
        yield "across hospitals the coordinator holds no test images; set evaluation.where = 'sites'"
    if study.public.share:
        yield "public.share sets images of the sites apart at the coordinator; across hospitals use public.data, or none"
    if study.strategy.pools:
        yield f"{study.strategy.name} trains on all images in one place; across hospitals use a federated strategy"
    if study.sites.stragglers or study.sites.dropout:
        yield "sites.stragglers and sites.dropout play unreliable sites; real ones need no such settings: leave them out"


def conduct(folder: RunFolder, offer: Offer, engine: Remote, live: Live, told: Told) -> dict[str, Any]:
    """From the start, or from the last checkpoint; what results.json holds. `told`: what sites let be known of spending."""
    study = folder.study()
    abouts = engine.about()
    shape, classes = _agreed(abouts)
    drawn_up = Blueprint(study, shape, classes, len(offer.sites))
    people = public_population(study, None, device_of(study), tuple(offer.sites), shape, classes)
    coordinator = _coordinator(drawn_up, folder, offer, engine, people, told, live)
    if folder.begun:
        progress = coordinator.restore(*folder.load_checkpoint())
        folder.cut_back(progress.round)
    else:
        folder.cut_back(-1)
        folder.write_json("sites.json", _sites(abouts, shape, classes))
        folder.write_json("privacy.json", _privacy(study, offer, abouts, coordinator.masking))
        progress = coordinator.start(drawn_up.start)
    progress, why = coordinator.run(progress)
    state = coordinator.result(progress)[0]
    if study.strategy.personalised or study.strategy.remembers:
        coordinator.keep(state, progress)
    results = write_results(coordinator, folder, progress, why, shape, classes, None)
    write_report(folder.path)
    return results


class About(BaseModel):
    """What a site says of its data; within bounds, for a model is built from it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    shape: list[Annotated[int, Field(gt=0, le=4096)]] = Field(min_length=1, max_length=4)
    classes: list[Annotated[str, Field(max_length=100)]] = Field(min_length=2, max_length=1000)
    examples: dict[Literal["train", "val", "test"], Annotated[int, Field(ge=0, le=int(HEAVIEST))]]


def _agreed(abouts: Mapping[SiteId, Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    for site, about in abouts.items():
        try:
            About.model_validate(about)
        except ValidationError as error:
            wrong = ", ".join(sorted({str(e["loc"][0]) for e in error.errors()}))
            raise BadReply(f"{site} says of its data what cannot be ({wrong}); is it of the same version?") from error
    forms = {site: (tuple(a["shape"]), tuple(a["classes"])) for site, a in abouts.items()}
    first = next(iter(forms))
    for site, form in forms.items():
        if form != forms[first]:
            raise BadReply(
                f"{site} has images of shape {form[0]} and the classes {', '.join(form[1])}, {first} {forms[first][0]} and "
                f"{', '.join(forms[first][1])}; set data.size and data.classes in the study"
            )
    return forms[first]


def _coordinator(
    drawn_up: Blueprint,
    folder: RunFolder,
    offer: Offer,
    engine: Remote,
    people: Population,
    told: Told,
    live: Live,
) -> Coordinator:
    study, recipe = drawn_up.study, recipe_of(drawn_up.study, drawn_up.lr)
    bench = bench_of(drawn_up, people, recipe)
    threads = threads_for(study.threads, bench)
    torch.set_num_threads(threads)
    kind = choose(study.trainer, bench, threads)
    trainer = make_trainer(kind, bench)

    def run_here(jobs: Sequence[Job], turn: int) -> list[Result]:
        return trainer.run([Ticket(COORDINATOR, turn, nth, job) for nth, job in enumerate(jobs)])

    def watch(record: dict[str, Any]) -> None:
        """A round is over and on disk: here the run may rest."""
        live.round = record["round"]
        live.tell()
        if (want := wanted(folder.path)) != "run":
            raise Halted(want)

    machine = {"trainer": kind, "threads": threads, "device": people.pool.device.type, "torch": torch.__version__}
    combine, masking = _protection(drawn_up, offer)
    positive = study.evaluation.positive
    focus = Focus(None if positive is None else people.classes.index(positive), study.evaluation.specificity)
    return Coordinator(study, drawn_up.plan, tuple(offer.sites), engine, run_here, folder, focus, machine, drawn_up.wire,
                       combine, masking, watch, patient=True, frugal=True, told=told)  # fmt: skip


def _protection(drawn_up: Blueprint, offer: Offer) -> tuple[Combine | None, Masking | None]:
    if not drawn_up.turns:
        return None, None
    from pipeline.runs.privacy_setup import about_privacy, masking_of, site_noise

    roster = {site: bytes.fromhex(key) for site, key in offer.sites.items()}
    masking = masking_of(drawn_up.study, roster, drawn_up.turns, offer.digest)
    return site_noise(drawn_up.study, about_privacy(drawn_up.study, tuple(offer.sites), {}, masking)), masking


def _sites(abouts: Mapping[SiteId, Mapping[str, Any]], shape: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """As a simulation writes it, without counts by class: sites tell how many examples they have, and no more."""
    counts = {site: {split: [n] for split, n in about["examples"].items()} for site, about in abouts.items()}
    return {"classes": list(classes), "shape": list(shape), "sites": counts, "fingerprint": "", "skipped": []}


def _privacy(
    study: Study, offer: Offer, abouts: Mapping[SiteId, Mapping[str, Any]], masking: Masking | None
) -> dict[str, Any]:
    promised = {site: about["promise"] for site, about in abouts.items() if "promise" in about}
    if not promised and masking is None and study.privacy.at_coordinator is None:
        return {}
    from pipeline.runs.privacy_setup import about_privacy

    return about_privacy(study, tuple(offer.sites), {}, masking) | {"at_site": promised}


def run_path(home: Path, run: str) -> Path:
    """Of a run that there is: a job's words lead nowhere else, and leave nothing behind where there is none."""
    folder = home / "runs" / run
    if not re.fullmatch(RUN_NAME, run) or not (folder / "offer.json").is_file():
        raise BadRun(f"there is no run {run!r} in {home}; a job is for one that was offered")
    return folder
