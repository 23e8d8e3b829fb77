"""HTTP heads and bodies read from a connection whose bytes arrive in pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets import http1 as http
from p2pnode.overlay.sockets.connection import BUFFER_BYTES, DIRECT_READ_BYTES, ConnectionClosed
from p2pnode.overlay.sockets.framing import chunk
from p2pnode.overlay.sockets.http1 import HttpBody, NotOurHttp
from tests.unit.overlay.sockets.wire import Wire, all_of

PEER = Address("10.0.0.1", 9)


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
    """Several requests on one connection, with sized or chunked bodies, are read in pieces of any size."""
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
def test_junk_raises_no_other_error(junk: bytes) -> None:
    """Any bytes as request, response or chunks end in a value, `NotOurHttp` or `ConnectionClosed`."""

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
