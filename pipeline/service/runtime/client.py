"""HTTP client of `hemofed coordinator`: HTTPS, verified with the home's certificate authority."""

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

from pipeline.core.errors import ServiceError
from pipeline.service.storage.home import CoordinatorHome

URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "HEMOFED_URL", "HEMOFED_TOKEN", "HEMOFED_CA"
REQUEST_TIMEOUT_SECONDS = 60.0  # the service validates an offered study before it answers
STREAM_TIMEOUT_SECONDS = 30.0  # the service sends a keep-alive comment every ten seconds


@dataclass(frozen=True)
class StreamEvent:
    name: str
    data: Any


class ApiClient:
    """Calls the coordinator's API. Every error is a `ServiceError` with the service's text, or with `remedy`."""

    def __init__(self, url: str, token: str, ssl_context: ssl.SSLContext | bool, remedy: str, is_local: bool) -> None:
        """`remedy`: what to do if the service does not answer. `is_local`: on this machine, so no proxy is used."""
        self._remedy = remedy
        self._http = httpx.Client(
            base_url=url,
            verify=ssl_context,
            trust_env=not is_local,
            timeout=httpx.Timeout(REQUEST_TIMEOUT_SECONDS, connect=10),
            headers={"authorization": f"Bearer {token}"},
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        return self._request("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._request("POST", path, json=dict(body or {}))

    def stream_events(self, path: str, after_round: int) -> Iterator[StreamEvent]:
        """Yields events until the service ends the stream. A lost connection raises `httpx.TransportError`; the caller may retry."""
        with self._http.stream("GET", path, params={"after": after_round}, timeout=STREAM_TIMEOUT_SECONDS) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _service_error(response)
            name = "message"
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield StreamEvent(name, json.loads(value))

    def _request(self, method: str, path: str, **request_options: Any) -> Any:
        try:
            response = self._http.request(method, path, **request_options)
        except httpx.TransportError as error:
            raise ServiceError(
                f"{self._http.base_url} does not answer ({_describe_error(error)}); {self._remedy}"
            ) from error
        if response.is_error:
            raise _service_error(response)
        return response.json()


def connect(home: Path | None) -> ApiClient:
    """A client for the service of a home on this machine, or for the one that `HEMOFED_URL` names."""
    env = os.environ
    if url := env.get(URL_VARIABLE):
        token = env.get(TOKEN_VARIABLE) or (_read_token(CoordinatorHome.open(home)) if home else "")
        if not token:
            raise ServiceError(
                f"{URL_VARIABLE} is set but {TOKEN_VARIABLE} is not; set it to the token that the lead gave you"
            )
        ca_path = env.get(CA_VARIABLE)
        return ApiClient(
            url,
            token,
            _create_ssl_context(Path(ca_path)) if ca_path else True,
            f"check {URL_VARIABLE}, and that this machine is on the network",
            is_local=False,
        )
    if home is None:
        raise ServiceError(
            f"name the coordinator's home, or set {URL_VARIABLE}, {TOKEN_VARIABLE} and {CA_VARIABLE} for a remote coordinator"
        )
    coordinator_home = CoordinatorHome.open(home)
    remedy = f"start it with: hemofed coordinator serve {home}"
    return ApiClient(
        f"https://127.0.0.1:{coordinator_home.port}",
        _read_token(coordinator_home),
        _create_ssl_context(home / "ca.pem"),
        remedy,
        is_local=True,
    )


def _read_token(home: CoordinatorHome) -> str:
    if not home.token_path.is_file():
        raise ServiceError(f"{home.token_path} does not exist; put a lead's token into it, or set {TOKEN_VARIABLE}")
    return home.token_path.read_text("utf-8").strip()


def _create_ssl_context(ca_path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_path))
    except (OSError, ssl.SSLError) as error:
        raise ServiceError(
            f"{ca_path} is not a valid CA certificate ({error}); copy ca.pem from the coordinator"
        ) from error


def _service_error(response: httpx.Response) -> ServiceError:
    try:
        text = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the service answered {response.status_code}"
    return ServiceError(text)


def _describe_error(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
