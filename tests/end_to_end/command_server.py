"""Runs `hemofed` commands in forks of one process that has imported torch and other heavy packages already.

Every command is still a process of its own, with its own arguments, folder, environment and standard streams; only the
seconds of importing are saved. What is about processes (signals, servers, import times) starts real ones instead.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# third-party packages only: ours read the environment when they are imported
HEAVY_PACKAGES = (
    "torch",
    "numpy",
    "scipy.stats",
    "sklearn.metrics",
    "matplotlib.figure",
    "safetensors.torch",
    "pydantic",
)
CLIENT = """#!{python} -ISE
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
command = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(connection, [json.dumps(command).encode() + b"\\n"], [0, 1, 2])
sys.exit(int(connection.recv(8) or 1))
"""


@contextmanager
def open_command_server(folder: Path) -> Iterator[Path]:
    """Yields an executable `hemofed` in `folder`, to be put first on PATH."""
    address = str(folder / "socket")
    executable = folder / "hemofed"
    executable.write_text(CLIENT.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    code = f"from tests.end_to_end.command_server import serve; serve({address!r})"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield executable
        finally:
            server.terminate()


def serve(address: str) -> NoReturn:
    for name in HEAVY_PACKAGES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Runs the command in a child, and kills it if the caller goes away."""
    received, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not received.endswith(b"\n"):
        received += connection.recv(1 << 20)
    if (child := os.fork()) == 0:
        connection.close()
        _run_command(json.loads(received), streams)
    for stream in streams:
        os.close(stream)
    exit_descriptor = os.pidfd_open(child)
    readable, _, _ = select.select([connection, exit_descriptor], [], [])
    if exit_descriptor not in readable:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with connection:
        if exit_descriptor in readable:
            connection.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
    os._exit(0)


def _run_command(command: dict[str, Any], streams: list[int]) -> NoReturn:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    python_path = command["environment"].get("PYTHONPATH", "")
    sys.path[:] = [
        folder for folder in (*python_path.split(os.pathsep), *sys.path) if folder
    ]  # not the server's folder
    sys.argv = ["hemofed", *command["arguments"]]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (open to the end of the process)
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
    os._exit(_run_main())


def _run_main() -> int:
    code: object = 0
    try:
        from hemofed.__main__ import main

        main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
