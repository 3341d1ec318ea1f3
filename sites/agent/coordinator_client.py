"""What a member says to its coordinator and hears from it: beats, models, and that it leaves."""

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

from pipeline.core.errors import BadMessage, BadService
from pipeline.core.files import full_disk_is_named
from pipeline.study.offer import Offer, RunName
from sites.agent.enrolment import Membership
from sites.agent.http import ask, open_client, patiently, receive

MOST_OFFERS, MOST_RUNS = 200, 2000
MODEL_BYTES = 8 * 2**30
PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
ModelName = Annotated[str, StringConstraints(pattern=rf"^{PART}(/{PART}){{0,2}}$")]  # "global", "group/2"


class Stopped(BadService):
    """The agent is told to end while it fetches."""


class Told(BaseModel):
    """A run, and which of its models this site may fetch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: RunName
    state: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")]
    models: tuple[ModelName, ...] = Field((), max_length=200)


class Beat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    offers: list[dict[str, Any]] = Field(max_length=MOST_OFFERS)
    runs: tuple[Told, ...] = Field(max_length=MOST_RUNS)
    time: AwareDatetime
    registered: bool | None = None


@dataclass(frozen=True)
class Heard:
    offers: tuple[Offer, ...]
    unread: tuple[tuple[str, str], ...]  # run and version of offers that this version does not understand
    runs: tuple[Told, ...]
    time: AwareDatetime
    registered: bool | None  # whether FLARE's server knows our client; None: it cannot say


class Link:
    def __init__(self, member: Membership) -> None:
        self.member = member
        self._client = open_client(member.url, member.ca, member.credential)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def beat(
        self, status: Mapping[str, Any], approvals: Sequence[Mapping[str, Any]], withdrawn: Sequence[Mapping[str, Any]]
    ) -> Heard:
        """Once; who calls decides when to try again."""
        said = {"version": version("hemofed"), "status": dict(status), "approvals": list(approvals), "withdrawn": list(withdrawn)}  # fmt: skip
        raw = ask(self._client, "POST", "/site/beat", said)
        try:
            beat = Beat.model_validate(raw)
        except ValidationError as error:
            raise BadMessage(f"{self.member.url} answers a beat with what this version does not understand ({error.error_count()} fields); install the coordinator's version") from error  # fmt: skip
        offers, unread = _offers(beat.offers)
        return Heard(offers, unread, beat.runs, beat.time, beat.registered)

    def model(self, run: str, name: str, into: Path, stop: threading.Event | None = None) -> Path:
        """`into`: the file. It has that name only once it is whole and known to hold tensors and nothing else."""
        into.parent.mkdir(parents=True, exist_ok=True)
        return patiently(lambda: self._fetch(f"/site/runs/{run}/models/{name}", into, stop or threading.Event()))

    def _fetch(self, path: str, into: Path, stop: threading.Event) -> Path:
        handle, name = tempfile.mkstemp(dir=into.parent, prefix=f".{into.name}.", suffix=".tmp")
        try:
            with full_disk_is_named(into), os.fdopen(handle, "wb") as file:

                def take(piece: bytes) -> None:
                    if stop.is_set():
                        raise Stopped(f"{path}: the agent stops; it is fetched when it runs again")
                    file.write(piece)

                receive(self._client, "GET", path, take, limit=MODEL_BYTES)
                file.flush()
                os.fsync(file.fileno())
            _check_tensors(Path(name), path)
            return Path(name).replace(into)
        finally:
            Path(name).unlink(missing_ok=True)

    def leave(self) -> None:
        patiently(lambda: ask(self._client, "POST", "/site/leave"), attempts=2)


def _offers(raw: Sequence[Mapping[str, Any]]) -> tuple[tuple[Offer, ...], tuple[tuple[str, str], ...]]:
    offers, unread = [], []
    for one in raw:
        try:
            offers.append(Offer.model_validate(one))
        except ValidationError:
            unread.append((_short(one.get("run")), _short(one.get("version"))))
    return tuple(offers), tuple(unread)


def _short(value: Any) -> str:
    return "".join(c for c in str(value)[:80] if c.isalnum() or c in "._-+") or "?"


def _check_tensors(file: Path, where: str) -> None:
    """The library checks header, types, sizes and that nothing lies between or after the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            names = list(tensors.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise BadMessage(f"{where} sent what is no safetensors file ({error}); it was thrown away") from error
    if not names:
        raise BadMessage(f"{where} sent a model without tensors; it was thrown away")


def model_file(home: Path, run: str, name: str) -> Path:
    """Names were checked when they were heard: no part of one begins with a dot."""
    return home / "models" / run / f"{name.removesuffix('.safetensors')}.safetensors"
