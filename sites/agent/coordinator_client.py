"""Requests of an enrolled site to its coordinator: heartbeats, model downloads, leaving."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipeline.core.errors import MessageError, ServiceError
from pipeline.core.files import raise_no_space
from pipeline.study.offer import RunName, StudyOffer
from sites.agent.enrolment import SiteMembership
from sites.agent.http import call_with_retries, open_http_client, request_json, stream_response

MAX_OFFERS, MAX_RUNS = 200, 2000
MAX_MODEL_BYTES = 8 * 2**30
NAME_PART_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
# "global", "cluster/2"
ModelName = Annotated[str, StringConstraints(pattern=rf"^{NAME_PART_PATTERN}(/{NAME_PART_PATTERN}){{0,2}}$")]


class DownloadCancelledError(ServiceError):
    """The agent stops during a download."""


class RunInfo(BaseModel):
    """A run and its models that this site may download."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: RunName
    state: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")]
    models: tuple[ModelName, ...] = Field((), max_length=200)


class RawHeartbeatReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    offers: list[dict[str, Any]] = Field(max_length=MAX_OFFERS)
    runs: tuple[RunInfo, ...] = Field(max_length=MAX_RUNS)
    time: AwareDatetime
    registered: bool | None = None


@dataclass(frozen=True)
class HeartbeatReply:
    offers: tuple[StudyOffer, ...]
    unreadable_offers: tuple[tuple[str, str], ...]  # run and version of offers from another version
    runs: tuple[RunInfo, ...]
    coordinator_time: AwareDatetime
    registered: bool | None  # our client at FLARE's server; None: unknown


class CoordinatorClient:
    def __init__(self, membership: SiteMembership) -> None:
        self.membership = membership
        self._http_client = open_http_client(membership.url, membership.ca, membership.credential)

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http_client.close()

    def send_heartbeat(
        self,
        status: Mapping[str, Any],
        approval_notices: Sequence[Mapping[str, Any]],
        revocations: Sequence[Mapping[str, Any]],
    ) -> HeartbeatReply:
        """One attempt; the caller decides on retries."""
        payload = {
            "version": version("hemofed"),
            "status": dict(status),
            "approvals": list(approval_notices),
            "revoked": list(revocations),
        }
        raw = request_json(self._http_client, "POST", "/site/heartbeat", payload)
        try:
            raw_reply = RawHeartbeatReply.model_validate(raw)
        except ValidationError as error:
            raise MessageError(
                f"{self.membership.url}: this version does not understand the heartbeat reply ({error.error_count()} "
                "invalid fields); install the coordinator's version"
            ) from error
        offers, unreadable_offers = _parse_offers(raw_reply.offers)
        return HeartbeatReply(offers, unreadable_offers, raw_reply.runs, raw_reply.time, raw_reply.registered)

    def download_model(self, run: str, name: str, target: Path, stop: threading.Event | None = None) -> Path:
        """Creates `target` only after the complete file has arrived and is a valid safetensors file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        return call_with_retries(
            lambda: self._download(f"/site/runs/{run}/models/{name}", target, stop or threading.Event())
        )

    def _download(self, path: str, target: Path, stop: threading.Event) -> Path:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with raise_no_space(target), os.fdopen(handle, "wb") as file:

                def write_chunk(chunk: bytes) -> None:
                    if stop.is_set():
                        raise DownloadCancelledError(
                            f"{path}: the agent stops; it downloads the model after its restart"
                        )
                    file.write(chunk)

                stream_response(self._http_client, "GET", path, write_chunk, max_bytes=MAX_MODEL_BYTES)
                file.flush()
                os.fsync(file.fileno())
            _check_tensors(Path(name), path)
            return Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)

    def leave_federation(self) -> None:
        call_with_retries(lambda: request_json(self._http_client, "POST", "/site/leave"), attempts=2)


def _parse_offers(raw: Sequence[Mapping[str, Any]]) -> tuple[tuple[StudyOffer, ...], tuple[tuple[str, str], ...]]:
    offers, unreadable_offers = [], []
    for raw_offer in raw:
        try:
            offers.append(StudyOffer.model_validate(raw_offer))
        except ValidationError:
            unreadable_offers.append((_sanitize_label(raw_offer.get("run")), _sanitize_label(raw_offer.get("version"))))
    return tuple(offers), tuple(unreadable_offers)


def _sanitize_label(value: Any) -> str:
    return "".join(c for c in str(value)[:80] if c.isalnum() or c in "._-+") or "?"


def _check_tensors(file: Path, source: str) -> None:
    """The library checks the header, types and sizes, and that no bytes follow or separate the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            names = list(tensors.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise MessageError(f"{source}: the download is not a safetensors file ({error}); it was deleted") from error
    if not names:
        raise MessageError(f"{source}: the model has no tensors; it was deleted")


def model_file(home: Path, run: str, name: str) -> Path:
    """The pattern of `ModelName` excludes parts that begin with a dot."""
    return home / "models" / run / f"{name.removesuffix('.safetensors')}.safetensors"
