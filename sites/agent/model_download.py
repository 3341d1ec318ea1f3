"""Downloads models of finished runs to HOME/models/RUN/, one after the other, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, Queue

from pipeline.core.errors import HemofedError
from sites.agent.coordinator_client import CoordinatorClient, RunInfo, model_file

PERSONAL_MODEL_NAME = "own"  # the site trains this model itself
RETRY_SECONDS = 60.0  # after a failed download
DownloadCallback = Callable[[str, str, str, str], None]  # run, name, file or "", problem


class ModelDownloader:
    def __init__(self, coordinator_client: CoordinatorClient, home: Path, on_result: DownloadCallback) -> None:
        self._coordinator_client, self._home, self._on_result = coordinator_client, home, on_result
        self._queue: Queue[tuple[str, str]] = Queue()
        self._next_attempt_at: dict[tuple[str, str], float] = {}  # monotonic time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model-download", daemon=True)

    def start(self) -> ModelDownloader:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def is_idle(self) -> bool:
        return not self._queue.unfinished_tasks

    def enqueue_models(self, runs: Iterable[RunInfo]) -> None:
        for run_info in runs:
            for name in run_info.models if run_info.state == "finished" else ():
                model_key = (run_info.id, name)
                if name == PERSONAL_MODEL_NAME or model_file(self._home, *model_key).exists():
                    continue
                if self._next_attempt_at.get(model_key, 0.0) <= time.monotonic():
                    self._next_attempt_at[model_key] = float("inf")
                    self._queue.put(model_key)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                run, name = self._queue.get(timeout=0.2)
            except Empty:
                continue
            try:
                file = self._coordinator_client.download_model(run, name, model_file(self._home, run, name), self._stop)
                self._on_result(run, name, str(file), "")
            except (HemofedError, OSError, RuntimeError) as error:  # httpx raises RuntimeError for a closed client
                if not self._stop.is_set():
                    self._on_result(run, name, "", str(error))
                self._next_attempt_at[run, name] = time.monotonic() + RETRY_SECONDS
            finally:
                self._queue.task_done()
