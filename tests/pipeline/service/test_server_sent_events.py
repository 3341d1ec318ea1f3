"""Server-sent events: each change once, in order, until the run ends."""

import asyncio
import json

from pipeline.service.web.server_sent_events import KEEP_ALIVE_COMMENT, EventStream
from tests.support.run_folder_factory import make_record


def parse_events(texts):
    """Yields event name, data and id."""
    for text in texts:
        if text != KEEP_ALIVE_COMMENT:
            lines = dict(line.split(": ", 1) for line in text.strip().splitlines())
            yield lines["event"], json.loads(lines["data"]), lines.get("id")


class FakeRun:
    """A run that advances at every poll. `steps`: state, number of rounds, live status."""

    def __init__(self, steps):
        self.steps, self.index = steps, -1

    def read_run(self):
        self.index = min(self.index + 1, len(self.steps) - 1)
        state, _, live = self.steps[self.index]
        return {"state": state, "live": live}

    def read_rounds(self):
        return [make_record(n) for n in range(self.steps[self.index][1])]


async def collect_texts(stream, limit=1000):
    texts = []
    async for text in stream:
        texts.append(text)
        if len(texts) >= limit:
            break
    await stream.aclose()
    return texts


def test_rounds_come_once_in_order_and_then_the_end():
    run = FakeRun(
        [
            ("running", 0, None),
            ("running", 2, {"round": 2}),
            ("running", 2, {"round": 2}),
            ("running", 3, {"round": 3}),
            ("finished", 4, None),
        ]
    )
    events = list(
        parse_events(
            asyncio.run(
                collect_texts(EventStream(poll_seconds=0).stream_run(run.read_run, run.read_rounds, -1, lambda: True))
            )
        )
    )
    assert [data["round"] for name, data, _ in events if name == "round"] == [0, 1, 2, 3]
    assert [id for name, _, id in events if name == "round"] == ["0", "1", "2", "3"]
    assert [data["state"] for name, data, _ in events if name == "run"] == ["running", "finished"]
    assert [data for name, data, _ in events if name == "live"] == [{"round": 2}, {"round": 3}, None]
    assert [name for name, _, _ in events][-1] == "end"


def test_reconnecting_client_gets_only_new_rounds():
    run = FakeRun([("finished", 5, None)])
    events = list(
        parse_events(
            asyncio.run(
                collect_texts(EventStream(poll_seconds=0).stream_run(run.read_run, run.read_rounds, 2, lambda: True))
            )
        )
    )
    assert [data["round"] for name, data, _ in events if name == "round"] == [3, 4]


def test_keep_alives_are_sent_until_authorization_ends():
    run, checks = FakeRun([("running", 0, None)]), []

    def is_authorized():
        checks.append(1)
        return len(checks) < 3

    texts = asyncio.run(
        collect_texts(
            EventStream(poll_seconds=0, keep_alive_seconds=0.0).stream_run(
                run.read_run, run.read_rounds, -1, is_authorized
            )
        )
    )
    assert texts[1:] == [KEEP_ALIVE_COMMENT] * 3
    assert len(checks) == 3


def test_close_ends_open_streams():
    event_stream = EventStream(poll_seconds=0)

    async def read_and_close():
        texts = []
        async for text in event_stream.stream_changes({"runs": lambda: [1]}, lambda: True):
            texts.append(text)
            event_stream.close()
        return texts

    assert [name for name, _, _ in parse_events(asyncio.run(read_and_close()))] == ["runs"]


def test_unchanged_data_is_not_sent_again():
    sites = iter([["a"], ["a"], ["a", "b"], ["a", "b"]])

    def read_sites():
        return next(sites, ["a", "b"])

    texts = asyncio.run(
        collect_texts(
            EventStream(poll_seconds=0).stream_changes({"runs": lambda: [], "sites": read_sites}, lambda: True), limit=3
        )
    )
    assert [(name, data) for name, data, _ in parse_events(texts)] == [
        ("runs", []),
        ("sites", ["a"]),
        ("sites", ["a", "b"]),
    ]
