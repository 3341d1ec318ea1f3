"""Models of finished runs come to HOME/models/RUN/ one after the other, beside the beats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, Queue

from pipeline.core.errors import HemofedError
from sites.agent.coordinator_client import Link, Told, model_file

OWN = "own"  # the site's own model never comes from outside
AGAIN = 60.0  # seconds after which one that failed is tried again
Say = Callable[[str, str, str, str], None]  # run, name, where it is, or "" and why not


class Fetching:
    def __init__(self, link: Link, home: Path, say: Say) -> None:
        self._link, self._home, self._say = link, home, say
        self._queue: Queue[tuple[str, str]] = Queue()
        self._known: dict[tuple[str, str], float] = {}  # when it may be asked for again
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fetching", daemon=True)

    def start(self) -> Fetching:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def idle(self) -> bool:
        return not self._queue.unfinished_tasks

    def take(self, runs: Iterable[Told]) -> None:
        for run in runs:
            for name in run.models if run.state == "finished" else ():
                wanted = (run.id, name)
                if name == OWN or model_file(self._home, *wanted).exists():
                    continue
                if self._known.get(wanted, 0.0) <= time.monotonic():
                    self._known[wanted] = float("inf")
                    self._queue.put(wanted)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                run, name = self._queue.get(timeout=0.2)
            except Empty:
                continue
            try:
                file = self._link.model(run, name, model_file(self._home, run, name), self._stop)
                self._say(run, name, str(file), "")
            except (HemofedError, OSError, RuntimeError) as error:  # httpx raises the last if it is closed meanwhile
                if not self._stop.is_set():
                    self._say(run, name, "", str(error))
                self._known[run, name] = time.monotonic() + AGAIN
            finally:
                self._queue.task_done()
