"""The coordinator at work: one public port, the web service, FLARE's server as a child, and the supervisor."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from pipeline.core.errors import BadService
from pipeline.core.files import alone_in, write_atomically
from pipeline.engines.flare_server import FlareServer
from pipeline.ops.certificates import Authority, write_private
from pipeline.ops.child_processes import Kept, Restarting, sweep
from pipeline.ops.json_log import Log, open_log
from pipeline.runs.federated import check_hospital_study
from pipeline.service.runtime.supervisor import Supervisor
from pipeline.service.runtime.tls_router import Front
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import Store
from pipeline.service.web.app import make_app

LOOPBACK = "127.0.0.1"
Say = Callable[[str], None]


@dataclass
class Served:
    """Everything that runs while the coordinator does."""

    home: CoordinatorHome
    front: Front
    url: str


def serve(path: Path, bind: str, say: Say, stop: threading.Event | None = None) -> None:
    """Until SIGTERM, Ctrl-C or `stop`; leaves no process behind."""
    over = stop or threading.Event()
    with contextlib.suppress(ValueError):  # not in the main thread: whoever started us stops us
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: over.set())
    with serving(path, bind) as served:
        say(f"{served.home.name}: {served.url}")
        over.wait()
        say("stopping; runs go on when the coordinator is served again")


@contextlib.contextmanager
def serving(path: Path, bind: str = "0.0.0.0") -> Iterator[Served]:
    home = CoordinatorHome.open(path)
    mark = f"coordinator-{home.path.resolve()}"
    with alone_in(home.path), contextlib.ExitStack() as stack:
        log = open_log(home.log)
        if swept := sweep(mark):
            log.event("swept", "warning", processes=swept, why="left by a coordinator that was killed")
        _renewed(home, log)
        store = Store(home.database)
        stack.callback(store.close)
        ports = free_ports(2)
        flare = FlareServer(home.path.resolve(), ports[0], home.host)
        front = _front(bind, home.port, ports)
        stack.callback(front.stop)
        supervisor = Supervisor(home.runs, store, flare, log)
        app = make_app(home, store, lambda: supervisor.registered, check_hospital_study, log,
                       lambda host, port: front.peer(port) or host)  # fmt: skip
        stack.enter_context(_web(app, home, ports[1]))
        stack.callback(app.state.parts.streams.close)
        front.start()
        stack.enter_context(_supervised(supervisor, flare, log, mark))
        log.event("serving", url=home.url, pid=threading.get_native_id())
        yield Served(home, front, home.url)
        log.event("stopped")


def _renewed(home: CoordinatorHome, log: Log) -> None:
    """The web certificate, before it expires; agents and browsers know the authority, which lasts longer."""
    authority, file = Authority.open(home.path), home.path / "web.crt"
    if authority.stands(file.read_text("utf-8")):
        return
    issued = authority.issue_server([home.host, "localhost", LOOPBACK])
    (home.path / "web.key").unlink(missing_ok=True)
    write_private(home.path / "web.key", issued.key.encode())
    write_atomically(file, issued.certificate.encode())
    log.event("web certificate renewed")


def _front(bind: str, port: int, ports: list[int]) -> Front:
    try:
        return Front(bind, port, (LOOPBACK, ports[1]), (LOOPBACK, ports[0]))
    except OSError as error:
        raise BadService(
            f"port {port} cannot be opened ({error.strerror}); is another coordinator served, or does it need root?"
        ) from error


@contextlib.contextmanager
def _web(app: FastAPI, home: CoordinatorHome, port: int) -> Iterator[None]:
    config = uvicorn.Config(
        app, host=LOOPBACK, port=port, ssl_certfile=str(home.path / "web.crt"), ssl_keyfile=str(home.path / "web.key"),
        log_config=None, access_log=False, timeout_graceful_shutdown=2, server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="web", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.02)
    if not server.started:
        raise BadService(f"the web service did not start; {home.log} may say why")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def _supervised(supervisor: Supervisor, flare: FlareServer, log: Log, mark: str) -> Iterator[None]:
    over = threading.Event()

    def start() -> Kept:
        flare.lay_out()
        return flare.start(mark)

    child = Restarting(start, most=10.0)

    def keep() -> None:
        known = None
        while not over.wait(0.5):
            try:
                kept = child.tick()
            except OSError as error:
                log.event("FLARE's server cannot be started", "error", why=str(error))
                continue
            if kept is not known:
                log.event("FLARE's server", "info" if known is None else "warning", pid=kept.pid if kept else None)
                supervisor.server_died()
                known = kept

    threads = [threading.Thread(target=keep, name="keeper", daemon=True),
               threading.Thread(target=supervisor.watch, args=(over,), name="supervisor", daemon=True)]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(15)
        flare.close()
        child.stop(3.0)
        sweep(mark)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
