"""The worker of a run at one site: answers the coordinator's messages with the site's data, trainer and client state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.core.errors import IncompatibleStudyError, RunFolderError
from pipeline.core.tensor_io import load_tensors, save_tensors
from pipeline.protocol.messages import SECURE_AGGREGATION_TASKS, Declined, Message, SiteId
from pipeline.protocol.serialization import deserialize_message, serialize_reply
from pipeline.records.data_summary import SiteDataSummary
from pipeline.study.offer import StudyOffer
from pipeline.study.run_spec import RunSpec, model_header
from pipeline.study.schema import Study
from pipeline.study.validation import validate_study
from sites.governance.settings import SiteSettings
from sites.population.own_site import load_own_data
from sites.population.simulated_sites import FederatedDataset
from sites.training.base import Trainer, TrainRequest
from sites.training.select_trainer import make_training_config, select_device
from sites.training.setup import set_up_training
from sites.worker.client_state import ClientStateStore
from sites.worker.task_session import TaskSession

if TYPE_CHECKING:
    from privacy.ledger.receipts import ReceiptRequest
    from privacy.ledger.records import LedgerReceipt
    from sites.privacy.site_privacy import SitePrivacy

CLIENT_STATE_FORMAT = 2
DEADLINE_SPEED_FACTOR = 0.8  # fraction of the measured speed for deadlines; the rest is for the transfer


@dataclass
class RunWorker:
    """One run at one site, for the lifetime of a process. Its client state is stored after every message."""

    site: SiteId
    offer: StudyOffer
    study: Study
    run_spec: RunSpec
    dataset: FederatedDataset
    trainer: Trainer
    state_file: Path  # of the client state
    privacy: SitePrivacy | None = None
    steps_per_second: float | None = None  # None: not measured yet
    is_speed_measured: bool = False
    state_store: ClientStateStore = field(default_factory=ClientStateStore)

    def describe_site(self) -> SiteDataSummary:
        """The summary that the coordinator needs before the first round, without data of single examples."""
        site_indices = self.dataset.split_indices[self.site]
        privacy_plan = self.privacy.privacy_plan if self.privacy else None
        return SiteDataSummary(
            classes=list(self.dataset.classes),
            shape=list(self.dataset.shape),
            examples={
                "train": len(site_indices.train),
                "val": len(site_indices.val),
                "test": len(site_indices.test),
            },
            privacy_unit=self.dataset.privacy_unit,
            privacy_plan=privacy_plan.to_record() if privacy_plan else None,
        )

    def answer_message(self, payload: bytes) -> bytes:
        message = deserialize_message(payload, self.run_spec.compression.decode_downlink)
        if message.task in SECURE_AGGREGATION_TASKS:
            masker = self.privacy.update_masker if self.privacy else None
            if masker is None:
                text = "this study has no secure aggregation"
                return serialize_reply(Declined(self.site, message.task, message.round, "secure_aggregation", text))
            return serialize_reply(masker.handle_message(message))
        started_at = time.perf_counter()
        session = self._open_session(message)
        while session.job is not None:
            request = TrainRequest(self.site, session.message.round, session.job_index, session.job, session.is_private)
            (result,) = self.trainer.run([request])
            session.submit_result(result)
        if self.is_speed_measured and session.work is not None and session.work.steps_done:
            self.steps_per_second = (session.work.steps_done + session.work.eval_steps) / max(
                time.perf_counter() - started_at, 1e-6
            )
        if message.task == "save_personal":
            self._save_personal_model(message.round)
        self._save_state()  # before the reply leaves: an accepted reply needs its state
        return session.encode_reply()

    def _open_session(self, message: Message) -> TaskSession:
        if self.study.round_policy.waits_for_all or self.steps_per_second is None:
            message = replace(message, deadline=None)
        planned_speed = (self.steps_per_second or 1.0) * (DEADLINE_SPEED_FACTOR if self.is_speed_measured else 1.0)
        study, run_spec = self.study, self.run_spec
        return TaskSession(
            site=self.site,
            message=message,
            strategy=study.strategy,
            context=run_spec.context,
            state_store=self.state_store,
            weighting=study.weighting,
            steps_per_second=planned_speed,
            compression=run_spec.compression,
            privacy=self.privacy,
        )

    def _save_personal_model(self, round_number: int) -> None:
        """Writes the personalized model to HOME/models/RUN/own.safetensors; it stays at the site."""
        dataset = self.dataset
        header = model_header(self.study, dataset.shape, dataset.classes, round_number)
        save_tensors(
            self.state_file.parents[2] / "models" / self.offer.run / "own.safetensors",
            header,
            self.state_store.personal_model,
        )

    def _save_state(self) -> None:
        parts = (
            ("committed", self.state_store.committed),
            ("pending", self.state_store.pending),
            ("personal_model", self.state_store.personal_model),
        )
        tensors = {f"{part}/{key}": value for part, named_tensors in parts for key, value in named_tensors.items()}
        save_tensors(
            self.state_file,
            {
                "format": CLIENT_STATE_FORMAT,
                "offer": self.offer.digest,
                "pending_attempt": self.state_store.pending_attempt,
                "steps_per_second": self.steps_per_second,
            },
            tensors,
        )

    def restore_state(self) -> None:
        """Loads the state of an earlier process of the same run. A damaged file raises an error."""
        if not self.state_file.exists():
            return
        header, tensors = load_tensors(self.state_file)
        if header.get("format") != CLIENT_STATE_FORMAT:
            raise RunFolderError(
                f"{self.state_file} has another format than this version of hemofed reads; run the study again"
            )
        if header["offer"] != self.offer.digest:
            raise RunFolderError(
                f"{self.state_file} belongs to another offer of this run; move it away if that run is over"
            )
        parts: dict[str, dict[str, torch.Tensor]] = {"committed": {}, "pending": {}, "personal_model": {}}
        for name, value in tensors.items():
            part, _, key = name.partition("/")
            parts[part][key] = value
        pending_attempt = header["pending_attempt"]
        self.state_store = ClientStateStore(
            parts["committed"],
            parts["pending"],
            pending_attempt and (pending_attempt[0], pending_attempt[1]),
            parts["personal_model"],
        )
        self.steps_per_second = header["steps_per_second"] if self.is_speed_measured else self.steps_per_second


def open_run_worker(
    home: Path,
    site: SiteId,
    offer: StudyOffer,
    countersign: Callable[[ReceiptRequest], LedgerReceipt],
    settings: SiteSettings,
) -> RunWorker:
    """Loads the site's data and builds its trainer. Takes seconds, once for each run and process."""
    study = offer.read_study()
    if study.hash != offer.study_hash:
        raise IncompatibleStudyError(
            f"the study of {offer.run} has another hash here ({study.hash[:12]} instead of {offer.study_hash[:12]}): hemofed "
            f"or a plugin has another version; install hemofed {offer.version}"
        )
    device = select_device(study)
    if device.type == "cuda" and settings.limits.max_gpu_memory_gb is not None:
        total_memory = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, settings.limits.max_gpu_memory_gb * 2**30 / total_memory), device
        )
    dataset = load_own_data(study, settings, site, device)
    run_spec = RunSpec(study, dataset.shape, dataset.classes, len(offer.site_keys))
    training_config = make_training_config(study, run_spec.lr)
    validate_study(study, run_spec.parameter_spec, dataset, run_spec.dry_run_rounds, len(offer.site_keys))
    privacy, dp_sgd = None, None
    if run_spec.dry_run_rounds:
        from sites.privacy.plan import dp_sgd_training  # opacus and cryptography are optional

        dataset, privacy = _set_up_privacy(home, site, offer, run_spec, dataset, countersign)
        dp_sgd = dp_sgd_training(study, {site: privacy.privacy_plan}) if privacy.privacy_plan else None
    training = set_up_training(run_spec, dataset, training_config, dp_sgd=dp_sgd, max_threads=settings.limits.max_cores)
    steps_per_second, is_speed_measured = settings.steps_per_second, settings.steps_per_second is None
    if settings.simulated_site is not None and settings.steps_per_second is None:
        steps_per_second, is_speed_measured = _simulated_speed(study, list(offer.site_keys), site), False
    worker = RunWorker(
        site=site,
        offer=offer,
        study=study,
        run_spec=run_spec,
        dataset=dataset,
        trainer=training.trainer,
        state_file=home / "runs" / offer.run / "client_state.safetensors",
        privacy=privacy,
        steps_per_second=steps_per_second,
        is_speed_measured=is_speed_measured,
    )
    worker.restore_state()
    return worker


def _set_up_privacy(
    home: Path,
    site: SiteId,
    offer: StudyOffer,
    run_spec: RunSpec,
    dataset: FederatedDataset,
    countersign: Callable[[ReceiptRequest], LedgerReceipt],
) -> tuple[FederatedDataset, SitePrivacy]:
    from sites.governance.home import SiteHome
    from sites.privacy.plan import create_secure_aggregation
    from sites.privacy.setup import RunPrivacy, set_up_site_privacy

    study, rounds = run_spec.study, run_spec.dry_run_rounds
    public_keys = {name: bytes.fromhex(key) for name, key in offer.site_keys.items()}
    run_privacy = RunPrivacy(
        study=study,
        run_digest=offer.digest,
        sites=tuple(offer.site_keys),
        dry_run_rounds=rounds,
        training_config=make_training_config(study, run_spec.lr),
        secure_aggregation=create_secure_aggregation(study, public_keys, rounds, offer.digest),
        countersign=countersign,
        coordinator_key=offer.coordinator_key,
    )
    return set_up_site_privacy(run_privacy, SiteHome.open(home), site, dataset)


def _simulated_speed(study: Study, sites: list[SiteId], site: SiteId) -> float:
    """The site's speed on the study's virtual clock, so that a rehearsal repeats the simulation."""
    speed = study.sites.speed
    return speed[sites.index(site)] if isinstance(speed, tuple) else speed
