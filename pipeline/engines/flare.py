"""Sites behind NVIDIA FLARE: `exchange` as one `send` task a site, in the job process of FLARE's server.

Never `broadcast`: with a payload of their own for each site it has delivered one site's to another. A site that works
says so every second; one that has been silent for a while is not waited for any longer, whatever became of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from torch import Tensor

from pipeline.coordinator.live_status import Live, wanted
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadMessage, Halted, HemofedError
from pipeline.core.files import alone_in, write_atomically
from pipeline.flare.constants import ABOUT, ALIVE, ASK, HOME, PARCEL, RECEIPT, SILENCE, TOLD
from pipeline.protocol.messages import Excuse, SiteId, Wait
from pipeline.protocol.serialization import reply_bytes, task_of
from pipeline.runs.federated import conduct, run_path
from pipeline.study.offer import read_offer, statement
from privacy.ledger.keys import verified

LOOK = 0.02  # seconds between two looks for answers
SLACK = 5.0  # seconds that an answer may be on its way after the deadline
FIRST = 120.0  # seconds that a site may take to read its data before it first says anything
LARGEST = 64 << 20  # bytes that an answer may have, or four times the question


class Flare:
    """All of FLARE that a run needs, behind `Engine`."""

    def __init__(
        self, send: Callable[[Task, SiteId], None], cancel: Callable[[Task], None], sites: MutableMapping[SiteId, float], live: Live,
        halted: Callable[[], str], fewest: int, proven: Callable[[SiteId, str, str], bool],
    ) -> None:  # fmt: skip
        """`proven`: whether a site's answer to a number used once is signed by the key that it is known by."""
        self._send, self._cancel, self._heard, self._live = send, cancel, sites, live
        self._halted, self._fewest, self._proven = halted, fewest, proven
        self._answers: queue.Queue[tuple[SiteId, str, Shareable]] = queue.Queue()
        self._open: dict[SiteId, Task] = {}  # questions whose late answers are welcome
        self._began = time.monotonic()

    @property
    def clock(self) -> float:
        return time.monotonic() - self._began

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Real sites keep their own state."""
        return {"clock": self.clock}, {}

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._began = time.monotonic() - float(header["clock"])

    def about(self) -> dict[SiteId, dict[str, Any]]:
        self._live.phase = "about"
        found: dict[SiteId, dict[str, Any]] = {}
        refused: dict[SiteId, str] = {}
        once, asked = secrets.token_hex(16), len(self._heard)
        for site, answer in self._ask(ABOUT, {site: Shareable({TOLD: once}) for site in self._heard}, None, FIRST):
            try:
                told = json.loads(answer[TOLD])
                if "refused" in told:
                    refused[site] = str(told["refused"])
                elif not self._proven(site, once, str(told.get("proof"))):
                    # an old certificate opens the line, but whoever holds it has to hold the agent's key, too
                    refused[site] = "is not signed by the site's key; did it lose its place to another machine?"
                else:
                    found[site] = told
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
                refused[site] = f"could not say what data it has ({answer.get_return_code()})"
        self._heard_only(found)
        if len(found) < self._fewest:
            reasons = "; ".join(f"{site}: {why}" for site, why in refused.items()) or "they do not answer"
            raise Halted(f"{len(found)} of {asked} sites are ready, {self._fewest} are needed ({reasons})")
        return {site: found[site] for site in self._heard if site in found}

    def _heard_only(self, sites: Mapping[SiteId, object]) -> None:
        """Nobody else is asked in this job."""
        for site in [site for site in self._heard if site not in sites]:
            del self._heard[site]

    def exchange(self, parcels: Mapping[SiteId, bytes], wait: Wait) -> Iterator[tuple[SiteId, bytes]]:
        self._live.phase = next((task_of(parcel) for parcel in parcels.values()), "")
        questions = {site: Shareable({PARCEL: parcel}) for site, parcel in parcels.items() if site in self._heard}
        limit = max([LARGEST, *(4 * len(parcel) for parcel in parcels.values())])
        for site, answer in self._ask(ASK, questions, wait, SILENCE):
            parcel = answer.get(PARCEL)
            if answer.get_return_code() != ReturnCode.OK or not isinstance(parcel, bytes):
                yield site, _excuse(site, f"failed ({answer.get_return_code()}); its log says why")
            elif len(parcel) > limit:
                yield site, _excuse(site, f"quarantined: sent {len(parcel)} bytes, more than {limit}")
            else:
                yield site, parcel

    def _ask(
        self, task: str, questions: Mapping[SiteId, Shareable], wait: Wait | None, silence: float
    ) -> Iterator[tuple[SiteId, Shareable]]:
        began = time.monotonic()
        tasks = {
            site: self._task(task, site, question) for site, question in questions.items() if site not in self._open
        }
        for site, one in tasks.items():
            self._send(one, site)
        live, waiting = self._live, set(tasks)
        live.asked, live.answered, live.missed = list(questions), [], {}
        end = None if wait is None or wait.deadline is None else began + wait.deadline + SLACK
        while waiting:
            live.tell(at_once=False)
            if why := self._halted():
                raise Halted(why)
            try:
                site, of, answer = self._answers.get(timeout=LOOK)
            except queue.Empty:
                waiting -= self._silent(waiting, began, silence)
                if end is not None and time.monotonic() > end:
                    break
                continue
            if site in self._heard:
                self._heard[site] = time.monotonic()
            if site in tasks and of == tasks[site].props["which"]:
                waiting.discard(site)
                live.answered.append(site)
            elif self._open.pop(site, None) is None:
                continue  # an answer that nobody waits for
            yield site, answer
        self._leave(tasks, waiting, wait)
        live.tell()

    def _task(self, name: str, site: SiteId, question: Shareable) -> Task:
        which = f"{name}-{site}-{time.monotonic_ns()}"

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._answers.put((client_task.client.name, which, client_task.result))
            client_task.result = None  # FLARE would keep it until the task is cleared away

        return Task(name=name, data=question, props={"which": which}, result_received_cb=received)

    def _silent(self, waiting: set[SiteId], began: float, silence: float) -> set[SiteId]:
        """Not heard of for so long, and asked as long ago."""
        now = time.monotonic()
        gone = {site for site in waiting if now - max(began, self._heard[site]) > silence}
        self._live.missed |= dict.fromkeys(gone, "silent")
        self._live.lost = sorted(site for site, heard in self._heard.items() if now - heard > SILENCE)
        if gone and len(self._heard) - len(self._live.lost) < self._fewest:
            raise Halted(f"{', '.join(self._live.lost)} cannot be reached, and {self._fewest} sites are needed")
        return gone

    def _leave(self, tasks: Mapping[SiteId, Task], waiting: set[SiteId], wait: Wait | None) -> None:
        for site in waiting:
            if wait is not None and wait.late == "keep":
                self._open[site] = tasks[site]
        for site, task in tasks.items():
            if site not in self._open and task.completion_status is None:
                self._cancel(task)


def _excuse(site: SiteId, reason: str) -> bytes:
    return reply_bytes(Excuse(site, "", 0, reason))


class Federation(Controller):  # type: ignore[misc]
    """The workflow of a job: everything that it does is in the run's folder, which the job only names."""

    def __init__(self, run: str, digest: str, fewest: int = 1) -> None:
        super().__init__(task_check_period=LOOK)
        self._run, self._digest, self._fewest = run, digest, fewest
        self._heard: dict[SiteId, float] = {}
        self._spent: dict[SiteId, float] = {}
        self._lock = threading.Lock()

    def start_controller(self, fl_ctx: FLContext) -> None:
        self._engine.register_aux_message_handler(ALIVE, self._alive)
        self._engine.register_aux_message_handler(RECEIPT, self._receipt)

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"{client.name}: an answer that nobody waits for any more is dropped")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        folder = run_path(Path(os.environ[HOME]), self._run)
        try:
            with alone_in(folder, wait=True):
                self._conduct(RunFolder.open(folder), abort_signal, fl_ctx)
        except Halted as halt:
            _ended(folder, "halted", str(halt))
            self.log_info(fl_ctx, f"halted: {halt}")
        except HemofedError as error:
            _ended(folder, "failed", str(error))
            self.log_error(fl_ctx, str(error))
        except Exception as error:
            _ended(folder, "failed", f"{type(error).__name__}: {error}; the log of the coordinator has more")
            raise

    def _conduct(self, folder: RunFolder, abort: Signal, fl_ctx: FLContext) -> None:
        offer = read_offer((folder.path / "offer.json").read_bytes())
        if offer.digest != self._digest:
            raise BadMessage(f"{folder.path} holds another offer than the one this job is for")
        present = [client.name for client in self._engine.get_clients()]
        now = time.monotonic()
        self._heard.update({site: now for site in offer.sites if site in present})
        study = folder.study()
        live = Live(folder.path, study.rounds)
        live.lost = [site for site in offer.sites if site not in self._heard]
        live.tell()

        def halted() -> str:
            return "aborted" if abort.triggered else "stop" if wanted(folder.path) == "stop" else ""

        def told() -> dict[str, Any]:
            return {"epsilon": dict(self._spent)} if self._spent else {}

        engine = Flare(
            lambda task, site: self.send(task, fl_ctx, targets=[site]),
            lambda task: self.cancel_task(task),
            self._heard,
            live,
            halted,
            max(study.waiting.quorum, self._fewest),
            lambda site, once, proof: verified(offer.sites[site], "possession", statement(offer, site, once), proof),
        )
        conduct(folder, offer, engine, live, told)
        _ended(folder.path, "finished", "")

    def _alive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        site = fl_ctx.get_peer_context().get_identity_name()
        if site in self._heard:
            self._heard[site] = time.monotonic()
        return make_reply(ReturnCode.OK)

    def _receipt(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Countersigns the head of a site's ledger."""
        from pipeline.service.runtime.receipts import countersigned
        from pipeline.service.storage.home import CoordinatorHome
        from pipeline.service.storage.store import Store

        site, home = fl_ctx.get_peer_context().get_identity_name(), CoordinatorHome.open(Path(os.environ[HOME]))
        reply = make_reply(ReturnCode.OK)
        with self._lock, contextlib.closing(Store(home.database)) as store:
            reply[TOLD] = countersigned(home.path, site, request.get(TOLD, ""), store.note_receipt)
            spent = request.get("epsilon")
            granted = "receipt" in json.loads(reply[TOLD])  # signed by that site's key, whoever passed it on
            if granted and isinstance(spent, float) and math.isfinite(spent):
                self._spent[site] = spent
        return reply


def _ended(folder: Path, how: str, why: str) -> None:
    write_atomically(folder / "ended.json", json.dumps({"how": how, "why": why}).encode())
