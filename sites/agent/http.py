"""HTTPS requests to the coordinator: pinned to its certificate authority, with limits on size and time."""

from __future__ import annotations

import json
import random
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from pipeline.core.errors import MessageError, ServiceError
from sites.agent.environment import proxy_for

MAX_REPLY_BYTES = 64 * 2**20  # of all replies except models
REQUEST_TIMEOUT = httpx.Timeout(20.0, connect=10.0)
ResultT = TypeVar("ResultT")


class UnreachableError(ServiceError):
    """A temporary failure: no answer, or a status that allows a retry."""


class AccessDeniedError(ServiceError):
    """The coordinator answers with 401 or 403."""


def open_http_client(url: str, ca_pem: str | None, credential: str | None = None) -> httpx.Client:
    """`ca_pem` None: verifies nothing; only to fetch ca.pem, which the caller checks against a fingerprint."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.username or parts.path.strip("/") or parts.query:
        raise ServiceError(f"{url} is not a coordinator's address; the form is https://fl.example.org:8443")
    context = ssl.create_default_context(cadata=ca_pem) if ca_pem else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not ca_pem:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    return httpx.Client(
        base_url=f"https://{parts.netloc}",
        verify=context,
        proxy=proxy_for(url),
        trust_env=False,
        timeout=REQUEST_TIMEOUT,
        headers=headers,
    )


def request_json(
    client: httpx.Client, method: str, path: str, body: Any = None, max_bytes: int = MAX_REPLY_BYTES
) -> Any:
    """Returns the parsed JSON of the reply."""
    raw = request_bytes(client, method, path, body, max_bytes)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{_full_url(client, path)}: the reply is not JSON; is it a hemofed coordinator?") from error


def request_bytes(
    client: httpx.Client, method: str, path: str, body: Any = None, max_bytes: int = MAX_REPLY_BYTES
) -> bytes:
    chunks: list[bytes] = []
    stream_response(client, method, path, chunks.append, body, max_bytes)
    return b"".join(chunks)


def stream_response(
    client: httpx.Client,
    method: str,
    path: str,
    on_chunk: Callable[[bytes], Any],
    body: Any = None,
    max_bytes: int = MAX_REPLY_BYTES,
) -> None:
    """Passes the reply to `on_chunk` in chunks."""
    url = _full_url(client, path)
    try:
        with client.stream(method, path, json=body) as response:
            if response.status_code != 200:
                _raise_for_status(url, response)
            num_bytes = 0
            for chunk in response.iter_bytes():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise MessageError(f"{url}: the reply has more than {max_bytes} bytes, the limit for this request")
                on_chunk(chunk)
    except (httpx.HTTPError, ssl.SSLError) as error:
        raise UnreachableError(f"{url}: {_describe_error(error)}") from error


def call_with_retries(call: Callable[[], ResultT], attempts: int = 4, initial_delay: float = 0.5) -> ResultT:
    """Retries temporary failures after about 0.5, 1 and 2 s, with jitter."""
    for attempt in range(attempts - 1):
        try:
            return call()
        except UnreachableError:
            time.sleep(initial_delay * 2**attempt * random.uniform(0.5, 1.5))
    return call()


def _full_url(client: httpx.Client, path: str) -> str:
    return f"{str(client.base_url).rstrip('/')}{path}"


def _raise_for_status(url: str, response: httpx.Response) -> None:
    status, detail = response.status_code, ""
    for chunk in response.iter_bytes(4096):
        detail = _error_detail(chunk)
        break
    text = f"{url} answers {status}" + (f": {detail}" if detail else "")
    if status in (401, 403):
        raise AccessDeniedError(text)
    raise (UnreachableError if status in (408, 425, 429) or status >= 500 else ServiceError)(text)


def _error_detail(chunk: bytes) -> str:
    """The coordinator's error text without control characters, because it may reach a terminal."""
    try:
        detail = json.loads(chunk)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return "".join(c for c in str(detail) if c.isprintable())[:500]


def _describe_error(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate is not from this federation's authority, or for another host. The connection may be intercepted; "
            "if the coordinator was set up again, leave and join with a new invitation"
        )
    if isinstance(error, httpx.ConnectTimeout):
        return "no answer; is the port open for outgoing connections, or is a proxy needed (HTTPS_PROXY)?"
    return f"the proxy refused: {text}" if isinstance(error, httpx.ProxyError) else text
