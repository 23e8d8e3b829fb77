"""Heads and bodies off a connection whose bytes come cut anywhere: what was sent is read, the rest is `NotOurHttp`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.addresses import Address
from overlay.sockets import http1 as http
from overlay.sockets.connection import BUFFER_BYTES, DIRECT_READ_BYTES, Connection, ConnectionClosed
from overlay.sockets.framing import chunk
from overlay.sockets.http1 import HttpBody, NotOurHttp
from tests.harness.virtual_loop import VirtualLoop

PEER = Address("10.0.0.1", 9)


class Wire(asyncio.Transport):
    """The kernel's side of a connection: hands out `data` in pieces of the given sizes, while it is not paused."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        super().__init__()
        self.connection = Connection()
        self.reads = True
        self._data = memoryview(data)
        self._cuts = cuts or [1 << 20]
        self._ended = False
        self.connection.connection_made(self)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        number = 0
        while len(self._data):
            await asyncio.sleep(0)
            if not self.reads:
                continue
            into = self.connection.get_buffer(-1)
            assert len(into)
            size = min(len(into), len(self._data), self._cuts[number % len(self._cuts)])
            into[:size] = self._data[:size]
            self._data = self._data[size:]
            number += 1
            self.connection.buffer_updated(size)
        self.connection.eof_received()
        self._ended = True
        self.connection.connection_lost(None)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self._ended

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (0, None)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


sizes = st.one_of(
    st.integers(0, 40), st.integers(DIRECT_READ_BYTES - 2, DIRECT_READ_BYTES + 2), st.integers(0, 3 * BUFFER_BYTES)
)


@given(
    bodies=st.lists(st.lists(sizes, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 20_000), max_size=6),
    wanted=st.lists(st.integers(1, 3 * DIRECT_READ_BYTES), min_size=1, max_size=4),
    in_chunks=st.booleans(),
    fills=st.booleans(),
)
@settings(deadline=None)
def test_what_is_sent_is_read(
    bodies: list[list[int]], cuts: list[int], wanted: list[int], *, in_chunks: bool, fills: bool
) -> None:
    """Request after request on one connection, their bodies sized or in chunks, read in pieces of any size."""
    pieces = [[bytes([number + 1]) * size for number, size in enumerate(body) if size] for body in bodies]
    sent = b""
    for body in pieces:
        size = None if in_chunks else sum(map(len, body))
        sent += http.request_head(PEER, "a b/c?", size)
        sent += b"".join([*map(chunk, body), b"0\r\n\r\n"]) if in_chunks else b"".join(body)

    async def main() -> None:
        wire = Wire(sent, cuts)
        for body in pieces:
            head = await http.read_request_head(wire.connection)
            assert head is not None
            assert (head.name, head.is_last) == ("a b/c?", False)
            arriving = HttpBody(wire.connection, head.size_bytes, 5.0)
            got = bytearray()
            turn = 0
            while not arriving.is_at_end:
                if fills:
                    target = bytearray(wanted[turn % len(wanted)])
                    got += target[: await arriving.fill(memoryview(target))]
                else:
                    got += await arriving.read()
                turn += 1
            assert got == b"".join(body)
        assert await http.read_request_head(wire.connection) is None
        await wire.stop()

    run(main())


@given(st.binary(max_size=400) | st.text(alphabet="POST /p2: 1\r\nHTP.chunked", max_size=200).map(str.encode))
@settings(deadline=None)
def test_junk_is_not_ours_or_cut_off(junk: bytes) -> None:
    """Any bytes as a request, as an answer and as chunks: an end, or an error of the two kinds, and nothing else."""

    async def main() -> None:
        for read in (http.read_request_head, http.read_response_head):
            wire = Wire(junk, [7])
            try:
                assert await read(wire.connection) is None or b"\r\n\r\n" in junk
            except (NotOurHttp, ConnectionClosed):
                pass
            await wire.stop()
        wire = Wire(junk, [7])
        with contextlib.suppress(NotOurHttp, ConnectionClosed):
            await all_of(HttpBody(wire.connection, None, 5.0))
        await wire.stop()

    run(main())


@pytest.mark.parametrize(
    "head",
    [
        b"POST /p2p/x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\nContent-Length: 9999999999999999999\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /p2p/x HTTP/1.1\r\n folded: 1\r\n\r\n",
        b"POST /p2p/x SPDY/3\r\n\r\n",
        b"POST\r\n\r\n",
        b"A" * (http.MAX_HTTP_HEAD_BYTES + 100),
    ],
    ids=range(10),
)
def test_a_head_that_two_could_read_in_two_ways_is_refused(head: bytes) -> None:
    """Two lengths, a length and chunks, a size that is no number, a head without an end."""

    async def main() -> None:
        wire = Wire(head, [])
        with pytest.raises(NotOurHttp):
            await http.read_request_head(wire.connection)
        await wire.stop()

    run(main())


def test_a_chunk_that_lies_is_refused() -> None:
    """A chunk that does not end where it said, a size that is no number, negative, endless, or with fields behind."""

    async def main() -> None:
        for junk in (
            b"3\r\nabcd\r\n",
            b"zz\r\n",
            b"-1\r\n",
            b"\r\n",
            b"0x4\r\nabcd",
            b"1_0\r\n",
            b"f" * 16 + b"\r\n",
            b"1" * 70,
            b"0\r\nX: y\r\n\r\n",
        ):
            wire = Wire(junk, [])
            with pytest.raises(NotOurHttp):
                await all_of(HttpBody(wire.connection, None, 5.0))
            await wire.stop()

    run(main())


async def all_of(body: HttpBody) -> bytes:
    data = b""
    while piece := await body.read():
        data += piece
    return data


def test_silence_is_told_from_slowness() -> None:
    """A target that fills drop by drop is waited for; one for which nothing comes any more is not."""

    async def main() -> None:
        wire = Wire(b"", [])
        await wire.stop()
        connection = wire.connection
        loop = asyncio.get_running_loop()
        target = memoryview(bytearray(DIRECT_READ_BYTES))

        def drop(left: int) -> None:
            connection.get_buffer(-1)[:1] = b"x"
            connection.buffer_updated(1)
            if left:
                loop.call_later(0.05, drop, left - 1)

        drop(8)
        began = loop.time()
        with pytest.raises(TimeoutError):
            await connection.fill(target, 0.12)
        assert 0.5 < loop.time() - began < 0.7
        assert bytes(target[:9]) == b"x" * 9

    VirtualLoop().run(main(), limit_s=60)
