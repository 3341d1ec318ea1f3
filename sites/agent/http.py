"""One HTTPS call to the coordinator: pinned to its certificate authority, bounded in size and time, errors in words."""

from __future__ import annotations

import json
import random
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from pipeline.core.errors import BadMessage, BadService
from sites.agent.environment import proxy_for

LIMIT = 64 * 2**20  # bytes of an answer that is no model
SECONDS = httpx.Timeout(20.0, connect=10.0)
Answer = TypeVar("Answer")


class Unreachable(BadService):
    """It may pass: nobody answers, or says that it cannot now."""


class Denied(BadService):
    """It answers, and does not take this site."""


def open_client(url: str, ca: str | None, credential: str | None = None) -> httpx.Client:
    """`ca` None: believes nobody and checks nothing; good for fetching what a fingerprint is checked against."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.username or parts.path.strip("/") or parts.query:
        raise BadService(f"{url} is no coordinator's address; it looks like https://fl.example.org:8443")
    context = ssl.create_default_context(cadata=ca) if ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    return httpx.Client(
        base_url=f"https://{parts.netloc}", verify=context, proxy=proxy_for(url), trust_env=False, timeout=SECONDS, headers=headers
    )  # fmt: skip


def ask(client: httpx.Client, method: str, path: str, body: Any = None, limit: int = LIMIT) -> Any:
    """The answer's JSON."""
    raw = fetch(client, method, path, body, limit)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"{_where(client, path)} did not answer in JSON; is it a hemofed coordinator?") from error


def fetch(client: httpx.Client, method: str, path: str, body: Any = None, limit: int = LIMIT) -> bytes:
    parts: list[bytes] = []
    receive(client, method, path, parts.append, body, limit)
    return b"".join(parts)


def receive(
    client: httpx.Client, method: str, path: str, take: Callable[[bytes], Any], body: Any = None, limit: int = LIMIT
) -> None:
    """Gives the answer to `take` piece by piece."""
    where = _where(client, path)
    try:
        with client.stream(method, path, json=body) as response:
            if response.status_code != 200:
                _refuse(where, response)
            size = 0
            for piece in response.iter_bytes():
                size += len(piece)
                if size > limit:
                    raise BadMessage(f"{where} answers with more than {limit} bytes, which nothing here needs")
                take(piece)
    except (httpx.HTTPError, ssl.SSLError) as error:
        raise Unreachable(f"{where}: {_words(error)}") from error


def patiently(call: Callable[[], Answer], attempts: int = 4, first: float = 0.5) -> Answer:
    """Again after about 0.5, 1, 2 s if it may pass; not all sites at the same moment."""
    for attempt in range(attempts - 1):
        try:
            return call()
        except Unreachable:
            time.sleep(first * 2**attempt * random.uniform(0.5, 1.5))
    return call()


def _where(client: httpx.Client, path: str) -> str:
    return f"{str(client.base_url).rstrip('/')}{path}"


def _refuse(where: str, response: httpx.Response) -> None:
    status, said = response.status_code, ""
    for piece in response.iter_bytes(4096):
        said = _error(piece)
        break
    text = f"{where} answers {status}" + (f": {said}" if said else "")
    if status in (401, 403):
        raise Denied(text)
    raise (Unreachable if status in (408, 425, 429) or status >= 500 else BadService)(text)


def _error(piece: bytes) -> str:
    """The coordinator's own words, which must not reach a terminal as they are."""
    try:
        said = json.loads(piece)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return "".join(c for c in str(said) if c.isprintable())[:500]


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate is not from this federation's authority, or for another host. Somebody may sit in between; "
            "if the coordinator was made anew, leave and join with a new invitation"
        )
    if isinstance(error, httpx.ConnectTimeout):
        return "nobody answers there; is the port open for outgoing connections, or is a proxy needed (HTTPS_PROXY)?"
    return f"the proxy refuses: {text}" if isinstance(error, httpx.ProxyError) else text
