"""One site's place in a run: its data, its trainer and its memory, which answer the coordinator's messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.coordinator.checkpoint import load_tensors, save_tensors
from pipeline.core.errors import BadRun, Refused
from pipeline.protocol.messages import Excuse, Message, SiteId
from pipeline.protocol.serialization import read_message, reply_bytes
from pipeline.study.offer import Offer
from pipeline.study.run_spec import Blueprint, model_header
from pipeline.study.schema import Study
from pipeline.study.validation import check
from sites.governance.settings import Settings
from sites.population.own_site import own_population
from sites.population.simulated_sites import Population
from sites.training.base import Ticket, Trainer
from sites.training.select_trainer import bench_of, choose, device_of, make_trainer, recipe_of, threads_for
from sites.worker.client_state import SiteMemory
from sites.worker.task_session import Visit

if TYPE_CHECKING:
    from privacy.ledger.receipts import Request
    from privacy.ledger.records import Receipt
    from sites.privacy.plan import Promise
    from sites.privacy.secure_agg_client import Desk

ASIDE = frozenset({"advertise", "share", "unmask"})  # a secure sum's steps around the training
HASTE = 0.8  # of the measured speed is what a deadline is planned with: the answer has to travel, too


@dataclass
class Place:
    site: SiteId
    offer: Offer
    study: Study
    blueprint: Blueprint
    people: Population
    trainer: Trainer
    file: Path  # where the site's memory of this run is kept
    desk: Desk | None = None
    promise: Promise | None = None
    speed: float | None = None  # steps a second; None: not known yet
    measured: bool = False
    memory: SiteMemory = field(default_factory=SiteMemory)

    def about(self) -> dict[str, Any]:
        """What the coordinator has to know before the first round; nothing about single examples."""
        mine = self.people.examples[self.site]
        told = {
            "site": self.site,
            "classes": list(self.people.classes),
            "shape": list(self.people.shape),
            "examples": {"train": len(mine.train), "val": len(mine.val), "test": len(mine.test)},
            "unit": self.people.unit,
        }
        return told | ({"promise": self.promise.dump()} if self.promise else {})

    def answer(self, parcel: bytes) -> bytes:
        message = read_message(parcel, self.blueprint.wire.open_down)
        if message.task in ASIDE:
            if self.desk is None:
                return reply_bytes(Excuse(self.site, message.task, message.turn, "this study has no secure sum"))
            return reply_bytes(self.desk.answer(message))
        began = time.perf_counter()
        visit = self._visit(message)
        while visit.job is not None:
            ticket = Ticket(self.site, visit.message.turn, visit.nth, visit.job, visit.private)
            (result,) = self.trainer.run([ticket])
            visit.give(result)
        if self.measured and visit.work is not None and visit.work.done:
            self.speed = (visit.work.done + visit.work.looks) / max(time.perf_counter() - began, 1e-6)
        if message.task == "keep":
            self._store_own(message.turn)
        self._save()  # before the answer leaves: once it is counted, the memory has to be there
        return visit.parcel()

    def _visit(self, message: Message) -> Visit:
        waits_for_all = self.study.wait.late == "keep" and self.study.wait.partial == "drop"
        if waits_for_all or self.speed is None:
            message = replace(message, deadline=None)
        pace = (self.speed or 1.0) * (HASTE if self.measured else 1.0)
        study, drawn_up = self.study, self.blueprint
        return Visit(
            self.site, message, study.strategy, drawn_up.plan, self.memory, study.weighting, pace, drawn_up.wire, self.desk
        )  # fmt: skip

    def _store_own(self, turn: int) -> None:
        """The site's own model stays here, for the site to use."""
        people = self.people
        header = model_header(self.study, people.shape, people.classes, turn)
        save_tensors(self.file.parents[2] / "models" / self.offer.run / "own.safetensors", header, self.memory.kept)

    def _save(self) -> None:
        parts = (("committed", self.memory.committed), ("pending", self.memory.pending), ("kept", self.memory.kept))
        tensors = {f"{part}/{key}": value for part, found in parts for key, value in found.items()}
        save_tensors(
            self.file, {"identity": self.memory.identity, "speed": self.speed, "offer": self.offer.digest}, tensors
        )

    def restore(self) -> None:
        """What an earlier process of the same run left; a damaged file is not guessed at."""
        if not self.file.exists():
            return
        header, tensors = load_tensors(self.file)
        if header["offer"] != self.offer.digest:
            raise BadRun(f"{self.file} belongs to another offer of this run; move it away if that one is over")
        parts: dict[str, dict[str, torch.Tensor]] = {"committed": {}, "pending": {}, "kept": {}}
        for name, value in tensors.items():
            part, _, key = name.partition("/")
            parts[part][key] = value
        identity = header["identity"]
        self.memory = SiteMemory(
            parts["committed"], parts["pending"], identity and (identity[0], identity[1]), parts["kept"]
        )
        self.speed = header["speed"] if self.measured else self.speed


def open_place(
    home: Path, site: SiteId, offer: Offer, countersign: Callable[[Request], Receipt], settings: Settings
) -> Place:
    """Reads the site's data and builds its trainer: seconds, once a run and process."""
    study = offer.read_study()
    if study.hash != offer.plan:
        raise Refused(
            f"the study of {offer.run} is another one here ({study.hash[:12]} instead of {offer.plan[:12]}): hemofed or a "
            f"plugin has another version; install {offer.version}"
        )
    device = device_of(study)
    if device.type == "cuda" and settings.limits.gpu_memory_gb is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.limits.gpu_memory_gb * 2**30 / whole), device)
    people = own_population(study, settings, site, device)
    drawn_up = Blueprint(study, people.shape, people.classes, len(offer.sites))
    recipe = recipe_of(study, drawn_up.lr)
    check(study, drawn_up.spec, people, drawn_up.turns, len(offer.sites))
    desk, promise = None, None
    if drawn_up.turns:
        from sites.privacy.setup import protected_site

        people, desk, promise = protected_site(home, site, offer, drawn_up, people, recipe, countersign)
    bench = bench_of(drawn_up, people, recipe)
    threads = min(threads_for(study.threads, bench), settings.limits.cores or 1024)
    torch.set_num_threads(threads)
    kind = choose(study.trainer, bench, threads, promise is not None)
    if promise is not None:
        from pipeline.runs.privacy_setup import mode_of

        trainer = make_trainer(kind, bench, {site: promise.terms}, mode_of(study, bench, {site: promise}))
    else:
        trainer = make_trainer(kind, bench)
    speed, measured = settings.speed, settings.speed is None
    if settings.plays is not None and settings.speed is None:
        speed, measured = _played_speed(study, list(offer.sites), site), False
    place = Place(site, offer, study, drawn_up, people, trainer, home / "runs" / offer.run / "memory.safetensors", desk,
                  promise, speed, measured)  # fmt: skip
    place.restore()
    return place


def _played_speed(study: Study, sites: list[SiteId], site: SiteId) -> float:
    """On the study's virtual clock, so that a rehearsal repeats the simulation."""
    speed = study.sites.speed
    return speed[sites.index(site)] if isinstance(speed, tuple) else speed
