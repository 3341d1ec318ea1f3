"""Runs the coordinator: one public port, the web service, FLARE's server as a child process, and the run supervisor."""

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

from pipeline.core.errors import ServiceError
from pipeline.core.files import exclusive_lock, write_atomically
from pipeline.engines.flare_server import FlareServer
from pipeline.ops.certificates import CertificateAuthority, write_private_file
from pipeline.ops.child_processes import ChildProcess, RestartingProcess, kill_by_mark
from pipeline.ops.json_log import JsonLog, LogLevel, open_log
from pipeline.runs.federated import validate_federated_study
from pipeline.service.runtime.supervisor import RunSupervisor
from pipeline.service.runtime.tls_router import TlsRouter
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web.app import create_app

LOOPBACK = "127.0.0.1"
StatusCallback = Callable[[str], None]


@dataclass
class RunningService:
    """Handle of a running coordinator."""

    home: CoordinatorHome
    router: TlsRouter
    url: str


def serve_coordinator(path: Path, bind: str, on_status: StatusCallback, stop: threading.Event | None = None) -> None:
    """Serves until SIGTERM, Ctrl-C or `stop`, then ends all child processes."""
    stop_event = stop or threading.Event()
    with contextlib.suppress(ValueError):  # outside the main thread, where only `stop` ends it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop_event.set())
    with running_service(path, bind) as service:
        on_status(f"{service.home.name}: {service.url}")
        stop_event.wait()
        on_status("stopping; runs continue when the coordinator is served again")


@contextlib.contextmanager
def running_service(path: Path, bind: str = "0.0.0.0") -> Iterator[RunningService]:
    """Starts all parts of the coordinator and stops them on exit. Processes left by a killed coordinator are ended first."""
    home = CoordinatorHome.open(path)
    process_mark = f"coordinator-{home.path.resolve()}"
    with exclusive_lock(home.path), contextlib.ExitStack() as stack:
        log = open_log(home.log_path)
        if num_killed := kill_by_mark(process_mark):
            log.write_event("stale processes killed", "warning", processes=num_killed, why="the coordinator was killed")
        _renew_certificate(home, log)
        store = CoordinatorStore(home.database_url)
        stack.callback(store.close)
        ports = find_free_ports(2)
        flare = FlareServer(home.path.resolve(), ports[0], home.host)
        router = _create_router(bind, home.port, ports)
        stack.callback(router.stop)
        supervisor = RunSupervisor(home.runs_folder, store, flare, log)
        app = create_app(
            home,
            store,
            lambda: supervisor.registered_sites,
            validate_federated_study,
            log,
            lambda host, port: router.peer_address(port) or host,
        )
        stack.enter_context(_run_web_server(app, home, ports[1]))
        stack.callback(app.state.context.event_stream.close)
        router.start()
        stack.enter_context(_run_supervisor(supervisor, flare, log, process_mark))
        log.write_event("serving", url=home.url, pid=threading.get_native_id())
        yield RunningService(home, router, home.url)
        log.write_event("stopped")


def _renew_certificate(home: CoordinatorHome, log: JsonLog) -> None:
    """Replaces the web certificate before it expires. Clients trust the authority, which is valid for longer."""
    authority, certificate_file = CertificateAuthority.open(home.path), home.path / "web.crt"
    if authority.is_current(certificate_file.read_text("utf-8")):
        return
    issued = authority.issue_server([home.host, "localhost", LOOPBACK])
    (home.path / "web.key").unlink(missing_ok=True)
    write_private_file(home.path / "web.key", issued.key_pem.encode())
    write_atomically(certificate_file, issued.certificate_pem.encode())
    log.write_event("web certificate renewed")


def _create_router(bind: str, port: int, ports: list[int]) -> TlsRouter:
    try:
        return TlsRouter(bind, port, (LOOPBACK, ports[1]), (LOOPBACK, ports[0]))
    except OSError as error:
        raise ServiceError(
            f"port {port} cannot be opened ({error.strerror}); stop the service that uses it, or choose a port above 1023"
        ) from error


@contextlib.contextmanager
def _run_web_server(app: FastAPI, home: CoordinatorHome, port: int) -> Iterator[None]:
    config = uvicorn.Config(
        app,
        host=LOOPBACK,
        port=port,
        ssl_certfile=str(home.path / "web.crt"),
        ssl_keyfile=str(home.path / "web.key"),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="web", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.02)
    if not server.started:
        raise ServiceError(f"the web service did not start; see {home.log_path} for the reason")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def _run_supervisor(supervisor: RunSupervisor, flare: FlareServer, log: JsonLog, process_mark: str) -> Iterator[None]:
    """Restarts FLARE's server whenever it exits, and polls the runs, each in a thread."""
    stop_event = threading.Event()

    def start_flare() -> ChildProcess:
        flare.provision_kits()
        return flare.start(process_mark)

    flare_process = RestartingProcess(start_flare, max_delay=10.0)

    def keep_flare_running() -> None:
        last_process = None
        while not stop_event.wait(0.5):
            try:
                process = flare_process.tick()
            except OSError as error:
                log.write_event("FLARE's server did not start", "error", why=str(error))
                continue
            if process is not last_process:
                level: LogLevel = "info" if last_process is None else "warning"
                log.write_event("FLARE's server", level, pid=process.pid if process else None)
                supervisor.on_server_died()
                last_process = process

    threads = [
        threading.Thread(target=keep_flare_running, name="flare-restarter", daemon=True),
        threading.Thread(target=supervisor.poll_until_stopped, args=(stop_event,), name="supervisor", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop_event.set()
        for thread in threads:
            thread.join(15)
        flare.close()
        flare_process.stop(3.0)
        kill_by_mark(process_mark)


def find_free_ports(count: int) -> list[int]:
    """Distinct free TCP ports of the loopback interface."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
