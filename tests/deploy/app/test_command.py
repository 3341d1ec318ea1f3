"""`hemofed edge serve` as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from deploy.app.serve import serve_edge_app
from deploy.inference.runtime import BundleRuntime
from pipeline.core.errors import ServiceError
from tests.support.dicom_files import encode_dicom, make_dicom

ROOT = Path(__file__).parents[3]


@contextmanager
def serve_bundle(bundle: Path, env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "hemofed", "edge", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "research use only, not a medical device" in line
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            yield process, found[0]
        finally:
            process.kill()


def test_edge_serve_stops_on_interrupt(bundle: Path, trusted_env: dict[str, str], field_paths: list[Path]) -> None:
    with serve_bundle(bundle, trusted_env) as (process, url):
        assert "Read a smear" in httpx.get(url).text
        answer = httpx.post(f"{url}/api/images?name=secret-name.png", content=field_paths[0].read_bytes(), timeout=60)
        assert answer.status_code == 200
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 403
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert (out, err) == ("", ""), "it ends quietly, and no file's name was logged"


def test_edge_serve_stops_between_frames(
    bundle: Path, trusted_env: dict[str, str], rendered_fields: list[np.ndarray]
) -> None:
    frames = encode_dicom(
        make_dicom(np.stack([rendered_fields[0]] * 200))
    )  # many more than are read before the interrupt
    with serve_bundle(bundle, trusted_env) as (process, url), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{url}/api/images?name=many.dcm", content=frames, timeout=120)
        time.sleep(2)
        assert httpx.get(f"{url}/api/model", timeout=10).status_code == 200, "the page stays responsive"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 15
        assert waiting.result().json()["error"] == "the service was stopped; start it again"
    assert (process.returncode, out, err) == (0, "", "")


def test_edge_serve_refuses_public_addresses(runtime: BundleRuntime) -> None:
    never: Callable[[str], None] = lambda url: pytest.fail(url)  # noqa: E731
    with pytest.raises(ServiceError, match=r"use 127\.0\.0\.1"):
        serve_edge_app(runtime, "0.0.0.0", 0, never)


def test_edge_serve_port_in_use(runtime: BundleRuntime) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ServiceError, match="--port 0 takes a free port"),
    ):
        serve_edge_app(runtime, "127.0.0.1", taken.getsockname()[1], lambda url: pytest.fail(url))
