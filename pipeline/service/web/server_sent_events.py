"""Server-sent events: what changes is sent once, in order, to whoever listens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from pipeline.service.runtime.run_states import OVER

POLL = 0.5  # seconds
KEEP_ALIVE = 10.0
QUIET = ": still here\n\n"
Look = Callable[[], Any]


@dataclass
class Streams:
    """`close` ends all of them: a server that shuts down would else wait for its listeners."""

    poll: float = POLL
    keep_alive: float = KEEP_ALIVE
    closed: bool = False

    def close(self) -> None:
        self.closed = True

    async def changes(self, looks: dict[str, Look], welcome: Look) -> AsyncIterator[str]:
        """Each of several things, whenever it has changed."""
        last: dict[str, str] = {}

        def look() -> list[str]:
            found = {name: _text(one()) for name, one in looks.items()}
            news = [_event(name, text) for name, text in found.items() if last.get(name) != text]
            last.update(found)
            return news

        async for text in self._paced(look, welcome, lambda: False):
            yield text

    async def run(
        self, run: Look, rounds: Callable[[], list[dict[str, Any]]], after: int, welcome: Look
    ) -> AsyncIterator[str]:
        """A run until it is over. `after`: the last round that the listener has."""
        last = {"round": after, "run": "", "live": "null", "over": False}

        def look() -> list[str]:
            shown = run()
            live = _text(shown.get("live"))
            rest = _text(shown | {"live": None})
            # the state is read before the rounds: when it says that all is over, no round comes any more
            fresh = [record for record in rounds() if record["round"] > last["round"]]
            state = [_event("run", _text(shown))] if rest != last["run"] else []
            records = [_event("round", _text(record), record["round"]) for record in fresh]
            # who comes hears first what the run is; later a round is told before what it led to
            news = [*records, *state] if last["run"] else [*state, *records]
            news += [_event("live", live)] if live != last["live"] else []
            over = shown["state"] in OVER
            last.update(run=rest, live=live, over=over, round=fresh[-1]["round"] if fresh else last["round"])
            return [*news, _event("end", _text({"state": shown["state"]}))] if over else news

        async for text in self._paced(look, welcome, lambda: bool(last["over"])):
            yield text

    async def _paced(
        self, look: Callable[[], list[str]], welcome: Look, over: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """Who is not welcome any more hears nothing more."""
        spoke = checked = time.monotonic()
        while not self.closed:
            for text in await run_in_threadpool(look):
                spoke = time.monotonic()
                yield text
            if over():
                return
            if time.monotonic() - spoke >= self.keep_alive:
                spoke = time.monotonic()
                yield QUIET
            if time.monotonic() - checked >= self.keep_alive:
                checked = time.monotonic()
                if not await run_in_threadpool(welcome):
                    return
            await asyncio.sleep(self.poll)


def _text(value: Any) -> str:
    return json.dumps(value)


def _event(name: str, data: str, id: int | None = None) -> str:
    return f"event: {name}\n" + ("" if id is None else f"id: {id}\n") + f"data: {data}\n\n"
