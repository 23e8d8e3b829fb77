"""`/stream` over a real socket: what its readers get, how many there may be, and how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from typing import Any

import pytest

from p2pnode.status import live
from p2pnode.status import server as status_server
from tests.harness.runner.stories import played_by
from tests.process.harness.fake_node import PEER
from tests.process.harness.served_status import Asked, served


class OpenStream:
    """One reader of /stream, on a thread's blocking socket."""

    def __init__(self, address: str, path: str = "/stream", headers: dict[str, str] | None = None) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.connection.request("GET", path, headers=headers or {})
        self.response = self.connection.getresponse()

    def message(self) -> tuple[str, Any]:
        """The next message: its event, and its data."""
        event, data = "", b""
        while line := self.response.readline().rstrip(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"event":
                event = value.decode()
            else:
                data = value
        return event, json.loads(data) if data else None

    def close(self) -> None:
        self.connection.close()


async def updates(stream: OpenStream, wanted: str, *, least: int = 1) -> tuple[Any, Any]:
    """The last of the updates before a message of another kind, and that message. A reader that is late finds more
    than one."""
    last, count = None, 0
    while True:
        event, data = await asyncio.to_thread(stream.message)
        if event != "update":
            assert (event, count >= least) == (wanted, True)
            return last, data
        last, count = data, count + 1


@played_by(served)
async def test_the_stream_sends_the_present_then_a_message_a_second_and_the_end(asked: Asked) -> None:
    """A reader gets the node at once, new events once each, an update a second later, and is told of the end."""
    asked.source.events.add("info", "one", {}, wall=1.0)
    stream = await asyncio.to_thread(OpenStream, asked.address)
    assert stream.response.getheader("Content-Type") == "text/event-stream"
    event, update = await asyncio.to_thread(stream.message)
    assert (event, update["schema"], update["peers"][0]["lag"]) == ("update", 1, 1)
    event, events = await asyncio.to_thread(stream.message)
    assert (event, [one["event"] for one in events["events"]]) == ("events", ["one"])
    asked.source.events.add("info", "two", {}, wall=2.0)
    update, events = await updates(stream, "events")
    assert update["sample"]["population"] == 2.0
    assert [one["event"] for one in events["events"]] == ["two"]
    await asked.server.stop()
    await updates(stream, "end", least=0)
    stream.close()


@played_by(served)
async def test_a_stream_begins_where_it_is_told_to(asked: Asked) -> None:
    """`since` is the last event that a page has: after a reconnection none comes twice."""
    for name in ("one", "two"):
        asked.source.events.add("info", name, {}, wall=1.0)
    stream = await asyncio.to_thread(OpenStream, asked.address, "/stream?since=1")
    await asyncio.to_thread(stream.message)
    assert [one["event"] for one in (await asyncio.to_thread(stream.message))[1]["events"]] == ["two"]
    stream.close()
    assert (await asked("GET", "/stream?since=x")).status == 400


@played_by(served)
async def test_streams_are_bounded_and_a_closed_one_makes_room(
    asked: Asked, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit the answer is 429 with a time; a reader that has gone is noticed within seconds."""
    monkeypatch.setattr(status_server, "MAX_STREAMS", 2)
    streams = [await asyncio.to_thread(OpenStream, asked.address) for _ in range(2)]
    refused = await asked("GET", "/stream")
    assert (refused.status, refused.headers["retry-after"]) == (429, "5")
    streams[0].close()
    deadline = time.monotonic() + 60
    while asked.server._streams == 2 and time.monotonic() < deadline:  # noqa: ASYNC110 -- the server does not tell
        await asyncio.sleep(0.05)
    third = await asyncio.to_thread(OpenStream, asked.address)
    assert third.response.status == 200
    for stream in (streams[1], third):
        stream.close()


@played_by(served)
async def test_a_reader_that_takes_nothing_is_closed(asked: Asked, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled browser holds no memory and no place for longer than the write's time limit."""
    monkeypatch.setattr(status_server, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    big = [PEER] * 200
    asked.source.peers = lambda: big
    host, _, port = asked.address.partition(":")
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect((host, int(port)))
        idle.sendall(f"GET /stream HTTP/1.1\r\nHost: {asked.address}\r\n\r\n".encode())
        deadline = time.monotonic() + 60
        while not asked.server._streams and time.monotonic() < deadline:  # noqa: ASYNC110 -- see above
            await asyncio.sleep(0.01)
        assert asked.server._streams == 1
        while asked.server._streams and time.monotonic() < deadline:  # noqa: ASYNC110 -- see above
            await asyncio.sleep(0.05)
    assert asked.server._streams == 0
