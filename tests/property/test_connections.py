"""Frames read from a connection whose bytes arrive in pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.overlay.sockets.connection import BUFFER_BYTES, DIRECT_READ_BYTES, ConnectionClosed
from p2pnode.overlay.sockets.framing import (
    CHUNK_LENGTH,
    MAGIC,
    BodyReader,
    HeadTooLong,
    Kind,
    NotOurFrame,
    beginning,
    read_frame,
    read_message,
)
from tests.unit.overlay.sockets.wire import Wire, all_of


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
        sent += beginning(Kind.REQUEST, b"head", None if in_chunks else sum(map(len, body)), name="a b/ç?".encode())
        for piece in body:
            sent += CHUNK_LENGTH.pack(len(piece)) + piece if in_chunks else piece
        sent += CHUNK_LENGTH.pack(0) if in_chunks else b""

    async def main() -> None:
        wire = Wire(sent, cuts)
        for body in pieces:
            frame = await read_frame(wire.connection)
            assert frame is not None
            assert (frame.name, frame.is_last) == ("a b/ç?", False)
            head, arriving = await read_message(wire.connection, frame, 5.0)
            assert head == b"head"
            got = bytearray()
            turn = 0
            while len(got) < sum(map(len, body)) or (isinstance(arriving, BodyReader) and not arriving.is_at_end):
                if fills:
                    target = bytearray(wanted[turn % len(wanted)])
                    got += target[: await arriving.read_into(memoryview(target))]
                else:
                    got += await anext(arriving, b"")
                turn += 1
            assert got == b"".join(body)
        assert await read_frame(wire.connection) is None
        await wire.stop()

    run(main())


@given(st.binary(max_size=400) | st.binary(max_size=200).map(MAGIC.__add__))
@settings(deadline=None)
def test_junk_raises_no_other_error(junk: bytes) -> None:
    """Any bytes as message or chunks end in a value, `NotOurFrame`, `HeadTooLong` or `ConnectionClosed`."""

    async def main() -> None:
        for is_body in (False, True):
            wire = Wire(junk, [7])
            with contextlib.suppress(NotOurFrame, HeadTooLong, ConnectionClosed):
                if is_body:
                    await all_of(BodyReader(wire.connection, None, 5.0))
                elif (frame := await read_frame(wire.connection)) is not None:
                    await read_message(wire.connection, frame, 5.0)
            await wire.stop()

    run(main())
