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
from tests.support.dicom_files import file as dicom
from tests.support.dicom_files import image as dicom_image

ROOT = Path(__file__).parents[3]


@contextmanager
def serving(bundle: Path, env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "pipeline.cli.main", "edge", "serve", str(bundle), "--port", "0"]
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


def test_the_command_serves_until_it_is_interrupted(bundle: Path, trusted: dict[str, str], files: list[Path]) -> None:
    with serving(bundle, trusted) as (process, url):
        assert "Read a smear" in httpx.get(url).text
        answer = httpx.post(f"{url}/api/read?name=secret-name.png", content=files[0].read_bytes(), timeout=60)
        assert answer.status_code == 200
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 403
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert (out, err) == ("", ""), "it ends quietly, and no file's name was logged"


def test_it_does_not_wait_for_all_frames_of_a_file(
    bundle: Path, trusted: dict[str, str], rendered: list[np.ndarray]
) -> None:
    frames = dicom(dicom_image(np.stack([rendered[0]] * 200)))  # far more than are read before the interrupt
    with serving(bundle, trusted) as (process, url), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{url}/api/read?name=many.dcm", content=frames, timeout=120)
        time.sleep(2)
        assert httpx.get(f"{url}/api/about", timeout=10).status_code == 200, "the page stays responsive"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 15
        assert waiting.result().json()["error"] == "the service was ended; start it again"
    assert (process.returncode, out, err) == (0, "", "")


def test_others_cannot_be_served(runtime: BundleRuntime) -> None:
    never: Callable[[str], None] = lambda url: pytest.fail(url)  # noqa: E731
    with pytest.raises(ServiceError, match=r"use 127\.0\.0\.1"):
        serve_edge_app(runtime, "0.0.0.0", 0, never)


def test_a_port_that_is_taken_is_told(runtime: BundleRuntime) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ServiceError, match="--port 0 takes a free one"),
    ):
        serve_edge_app(runtime, "127.0.0.1", taken.getsockname()[1], lambda url: pytest.fail(url))
