"""The service as its own commands call it: HTTPS with the home's authority, errors as text with a cure."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from pipeline.core.errors import BadService
from pipeline.service.storage.home import CoordinatorHome

URL, TOKEN, CA = "HEMOFED_URL", "HEMOFED_TOKEN", "HEMOFED_CA"
SECONDS = 60.0  # a study is read before it is answered
SILENCE = 30.0  # streams speak every ten seconds


@dataclass(frozen=True)
class Event:
    name: str
    data: Any


class Client:
    def __init__(self, url: str, token: str, context: ssl.SSLContext | bool, cure: str, near: bool) -> None:
        """`near`: on this machine; no proxy leads there."""
        self._cure = cure
        self._http = httpx.Client(
            base_url=url,
            verify=context,
            trust_env=not near,
            timeout=httpx.Timeout(SECONDS, connect=10),
            headers={"authorization": f"Bearer {token}"},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._told("GET", path, params=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._told("POST", path, json=dict(body or {}))

    def events(self, path: str, after: int) -> Iterator[Event]:
        """Until the service ends the stream; a connection that is lost is an error of httpx, for the caller to retry."""
        with self._http.stream("GET", path, params={"after": after}, timeout=SILENCE) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise _refusal(answer)
            name = "message"
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield Event(name, json.loads(value))

    def _told(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise BadService(f"{self._http.base_url} does not answer ({_short(error)}); {self._cure}") from error
        if answer.is_error:
            raise _refusal(answer)
        return answer.json()


def connect(home: Path | None) -> Client:
    """The service of a home on this machine, or the one that the environment names."""
    env = os.environ
    if url := env.get(URL):
        token = env.get(TOKEN) or (_token(CoordinatorHome.open(home)) if home else "")
        if not token:
            raise BadService(f"{URL} is set and {TOKEN} is not; set it to the token that the lead gave you")
        ca = env.get(CA)
        return Client(url, token, _context(Path(ca)) if ca else True, f"is {URL} right, and the machine on the network?", near=False)  # fmt: skip
    if home is None:
        raise BadService(f"name the coordinator's home, or set {URL}, {TOKEN} and {CA} to reach one elsewhere")
    own = CoordinatorHome.open(home)
    cure = f"start it with: hemofed coordinator serve {home}"
    return Client(f"https://127.0.0.1:{own.port}", _token(own), _context(home / "ca.pem"), cure, near=True)


def _token(home: CoordinatorHome) -> str:
    if not home.token.is_file():
        raise BadService(f"{home.token} is not there; put a lead's token into it, or set {TOKEN}")
    return home.token.read_text("utf-8").strip()


def _context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise BadService(
            f"{ca} is no certificate of an authority ({error}); copy ca.pem from the coordinator"
        ) from error


def _refusal(answer: httpx.Response) -> BadService:
    try:
        text = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the service answered {answer.status_code}"
    return BadService(text)


def _short(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
