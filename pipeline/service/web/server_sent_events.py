"""Server-sent events: every change is sent once, in order, to each open stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from pipeline.records.round_record import RoundRecord
from pipeline.service.runtime.run_states import TERMINAL_STATES

POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE_COMMENT = ": keep-alive\n\n"
StateReader = Callable[[], Any]


@dataclass
class EventStream:
    """Source of all streams. `close` ends them, because a server waits for open responses when it shuts down."""

    poll_seconds: float = POLL_SECONDS
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True

    async def stream_changes(self, readers: dict[str, StateReader], is_authorized: StateReader) -> AsyncIterator[str]:
        """An event for each of `readers` (event name -> function that returns the data) whenever its data changed."""
        last_texts: dict[str, str] = {}

        def collect_events() -> list[str]:
            texts = {name: _to_json(read_state()) for name, read_state in readers.items()}
            events = [_format_event(name, text) for name, text in texts.items() if last_texts.get(name) != text]
            last_texts.update(texts)
            return events

        async for text in self._stream_paced(collect_events, is_authorized, lambda: False):
            yield text

    async def stream_run(
        self,
        read_run: StateReader,
        read_rounds: Callable[[], Sequence[RoundRecord]],
        after_round: int,
        is_authorized: StateReader,
    ) -> AsyncIterator[str]:
        """Events `run`, `round`, `live` and finally `end` of a run. `after_round`: the last round that the client has."""
        last_round = after_round
        last_sent = {"run": "", "live": "null", "over": False}

        def collect_events() -> list[str]:
            nonlocal last_round
            run_view = read_run()
            live_text = _to_json(run_view.get("live"))
            run_text = _to_json(run_view | {"live": None})
            # the state is read before the rounds: if the run has ended, no more rounds can follow
            new_records = [record for record in read_rounds() if record.round > last_round]
            state_events = [_format_event("run", _to_json(run_view))] if run_text != last_sent["run"] else []
            round_events = [_format_event("round", _to_json(record.to_dict()), record.round) for record in new_records]
            # a new client gets the run first; later a round comes before the change of state that it caused
            events = [*round_events, *state_events] if last_sent["run"] else [*state_events, *round_events]
            events += [_format_event("live", live_text)] if live_text != last_sent["live"] else []
            is_over = run_view["state"] in TERMINAL_STATES
            last_sent.update(run=run_text, live=live_text, over=is_over)
            last_round = new_records[-1].round if new_records else last_round
            return [*events, _format_event("end", _to_json({"state": run_view["state"]}))] if is_over else events

        async for text in self._stream_paced(collect_events, is_authorized, lambda: bool(last_sent["over"])):
            yield text

    async def _stream_paced(
        self, collect_events: Callable[[], list[str]], is_authorized: StateReader, is_over: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """Polls for events, sends keep-alives, and ends when the caller is no longer authorized."""
        last_sent_time = last_checked_time = time.monotonic()
        while not self.is_closed:
            for text in await run_in_threadpool(collect_events):
                last_sent_time = time.monotonic()
                yield text
            if is_over():
                return
            if time.monotonic() - last_sent_time >= self.keep_alive_seconds:
                last_sent_time = time.monotonic()
                yield KEEP_ALIVE_COMMENT
            if time.monotonic() - last_checked_time >= self.keep_alive_seconds:
                last_checked_time = time.monotonic()
                if not await run_in_threadpool(is_authorized):
                    return
            await asyncio.sleep(self.poll_seconds)


def _to_json(value: Any) -> str:
    return json.dumps(value)


def _format_event(name: str, data: str, event_id: int | None = None) -> str:
    return f"event: {name}\n" + ("" if event_id is None else f"id: {event_id}\n") + f"data: {data}\n\n"
