"""Server-sent events: once, in order, and to an end."""

import asyncio
import json

from pipeline.service.web.server_sent_events import KEEP_ALIVE_COMMENT, EventStream


def parsed(texts):
    for text in texts:
        if text != KEEP_ALIVE_COMMENT:
            lines = dict(line.split(": ", 1) for line in text.strip().splitlines())
            yield lines["event"], json.loads(lines["data"]), lines.get("id")


class Fake:
    """A run that moves on at every look."""

    def __init__(self, steps):
        self.steps, self.at = steps, -1

    def run(self):
        self.at = min(self.at + 1, len(self.steps) - 1)
        state, _, live = self.steps[self.at]
        return {"state": state, "live": live}

    def rounds(self):
        return [{"round": n} for n in range(self.steps[self.at][1])]


async def gather(stream, most=1000):
    found = []
    async for text in stream:
        found.append(text)
        if len(found) >= most:
            break
    await stream.aclose()
    return found


def test_rounds_come_once_in_order_and_then_the_end():
    fake = Fake(
        [
            ("running", 0, None),
            ("running", 2, {"round": 2}),
            ("running", 2, {"round": 2}),
            ("running", 3, {"round": 3}),
            ("finished", 4, None),
        ]
    )
    response = list(
        parsed(asyncio.run(gather(EventStream(poll_seconds=0).stream_run(fake.run, fake.rounds, -1, lambda: True))))
    )
    assert [data["round"] for name, data, _ in response if name == "round"] == [0, 1, 2, 3]
    assert [id for name, _, id in response if name == "round"] == ["0", "1", "2", "3"]
    assert [data["state"] for name, data, _ in response if name == "run"] == ["running", "finished"]
    assert [data for name, data, _ in response if name == "live"] == [{"round": 2}, {"round": 3}, None]
    assert [name for name, _, _ in response][-1] == "end"


def test_who_comes_back_gets_only_what_is_new():
    fake = Fake([("finished", 5, None)])
    response = list(
        parsed(asyncio.run(gather(EventStream(poll_seconds=0).stream_run(fake.run, fake.rounds, 2, lambda: True))))
    )
    assert [data["round"] for name, data, _ in response if name == "round"] == [3, 4]


def test_silence_is_filled_and_the_unwelcome_are_let_go():
    fake, asked = Fake([("running", 0, None)]), []

    def welcome():
        asked.append(1)
        return len(asked) < 3

    response = asyncio.run(
        gather(EventStream(poll_seconds=0, keep_alive_seconds=0.0).stream_run(fake.run, fake.rounds, -1, welcome))
    )
    assert response[1:] == [KEEP_ALIVE_COMMENT] * 3
    assert len(asked) == 3


def test_a_closed_service_lets_its_listeners_go():
    streams = EventStream(poll_seconds=0)

    async def go():
        found = []
        async for text in streams.stream_changes({"runs": lambda: [1]}, lambda: True):
            found.append(text)
            streams.close()
        return found

    assert [name for name, _, _ in parsed(asyncio.run(go()))] == ["runs"]


def test_only_what_changed_is_sent():
    sites, looks = iter([["a"], ["a"], ["a", "b"], ["a", "b"]]), []

    def look():
        looks.append(next(sites, ["a", "b"]))
        return looks[-1]

    response = asyncio.run(
        gather(EventStream(poll_seconds=0).stream_changes({"runs": lambda: [], "sites": look}, lambda: True), most=3)
    )
    assert [(name, data) for name, data, _ in parsed(response)] == [
        ("runs", []),
        ("sites", ["a"]),
        ("sites", ["a", "b"]),
    ]
