"""HTTP/1.1 heads and chunked bodies: what is written, what is read, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets import http1 as http
from p2pnode.overlay.sockets.connection import ConnectionClosed
from p2pnode.overlay.sockets.http1 import HttpBody, NotOurHttp, RequestHead, ResponseHead
from tests.unit.overlay.sockets.wire import Wire, all_of


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_golden_heads() -> None:
    """The bytes of heads never change: nodes of different versions talk to each other."""
    sized = http.request_head(Address("10.0.0.1", 9), "exchange/push a", 5)
    chunked = http.request_head(Address("2001:db8::1", 9), "hello", None)
    ok = http.response_head(http.OK, 5, is_last=False)
    last = http.response_head(http.REJECTED, None, kind="text/plain", is_last=True)

    assert sized == (
        b"POST /p2p/exchange/push%20a HTTP/1.1\r\nHost: 10.0.0.1:9\r\nX-P2PNode: 1\r\nContent-Length: 5\r\n\r\n"
    )
    assert chunked == (
        b"POST /p2p/hello HTTP/1.1\r\nHost: [2001:db8::1]:9\r\nX-P2PNode: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert ok == (
        b"HTTP/1.1 200 OK\r\nX-P2PNode: 1\r\nContent-Type: application/octet-stream\r\nContent-Length: 5\r\n\r\n"
    )
    assert last == (
        b"HTTP/1.1 409 Conflict\r\nX-P2PNode: 1\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (http.request_head(Address("10.0.0.1", 9), "a b", 5), RequestHead("a b", 5, is_last=False)),
        (b"POST /p2p/x HTTP/1.1\r\nx-p2pnode: 1\r\nconnection: Close\r\n\r\n", RequestHead("x", 0, is_last=True)),
        (b"POST /p2p/x HTTP/1.0\r\nX-P2PNode: 1\r\n\r\n", RequestHead("x", 0, is_last=True)),
        (b"POST /p2p/x HTTP/1.1\r\n\r\n", RequestHead("", 0, is_last=False)),
        (b"GET /p2p/x HTTP/1.1\r\nX-P2PNode: 1\r\n\r\n", RequestHead("", 0, is_last=False)),
        (b"POST /x HTTP/1.1\r\nX-P2PNode: 1\r\n\r\n", RequestHead("", 0, is_last=False)),
        (b"", None),
    ],
    ids=["ours", "last", "HTTP/1.0", "no marker", "GET", "another path", "closed"],
)
def test_request_heads(data: bytes, head: RequestHead | None) -> None:
    """A request without the marker, the method or the path has no name."""

    async def main() -> None:
        wire = Wire(data)
        assert await http.read_request_head(wire.connection) == head
        await wire.stop()

    run(main())


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (
            http.response_head(200, None, is_last=False),
            ResponseHead(200, is_p2pnode=True, size_bytes=None, is_last=False),
        ),
        (
            b"HTTP/1.1 307 Go\r\nContent-Length: x\r\n\r\n",
            ResponseHead(307, is_p2pnode=False, size_bytes=0, is_last=False),
        ),
        (b"HTTP/1.1 200\r\nX-P2PNode: 1\r\n\r\n", ResponseHead(200, is_p2pnode=True, size_bytes=0, is_last=False)),
    ],
    ids=["ours", "another server", "no reason"],
)
def test_response_heads(data: bytes, head: ResponseHead) -> None:
    """The body size of another server is not parsed."""

    async def main() -> None:
        wire = Wire(data)
        assert await http.read_response_head(wire.connection) == head
        await wire.stop()

    run(main())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ConnectionClosed),
        (b"HTTP/1.1 200 OK\r\n", ConnectionClosed),
        (b"220 mail.example ESMTP\r\n", NotOurHttp),
        (b"HTTP/1.1 2000 OK\r\n\r\n", NotOurHttp),
        (b"HTTP/1.1\r\n\r\n", NotOurHttp),
    ],
    ids=["closed", "half a head", "SMTP", "a long status", "no status"],
)
def test_other_responses(data: bytes, error: type[Exception]) -> None:
    """An incomplete response is a closed connection; another protocol is `NotOurHttp`."""

    async def main() -> None:
        wire = Wire(data)
        with pytest.raises(error):
            await http.read_response_head(wire.connection)
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
def test_ambiguous_heads_are_refused(head: bytes) -> None:
    """Two lengths, a length with chunks, a size that is no number, and a head without an end are refused."""

    async def main() -> None:
        wire = Wire(head, [])
        with pytest.raises(NotOurHttp):
            await http.read_request_head(wire.connection)
        await wire.stop()

    run(main())


def test_invalid_chunks_are_refused() -> None:
    """A chunk of another length, a size that is no number, negative or endless, and trailer fields are refused."""

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


def test_a_body_that_is_cut_short() -> None:
    """A connection that ends before the end of the body raises `ConnectionClosed`, whichever way the body is read."""

    async def main() -> None:
        for size, data in ((10, b"12345"), (None, b"a\r\n12345"), (None, b"5\r\n12345\r\n"), (None, b"")):
            wire = Wire(data)
            with pytest.raises(ConnectionClosed):
                await all_of(HttpBody(wire.connection, size, 5.0))
            await wire.stop()
            wire = Wire(data)
            with pytest.raises(ConnectionClosed):
                await HttpBody(wire.connection, size, 5.0).fill(memoryview(bytearray(20)))
            await wire.stop()

    run(main())


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (
            b"POST /p2p/x HTTP/1.1\r\nX-P2PNode: 1\r\nY:  Content-Length: 5\r\n\r\n",
            RequestHead("x", 0, is_last=False),
        ),
        (
            b"POST /p2p/x HTTP/1.1\r\nX-P2PNode: 1\r\nConnection: close\r\nContent-Length: 5\r\n\r\n",
            RequestHead("x", 5, is_last=True),
        ),
        (b"GET /x HTTP/1.1\r\nContent-Length: 5\r\n\r\n", RequestHead("", 5, is_last=False)),
    ],
    ids=["a length inside a field", "the last", "not ours"],
)
def test_a_head_that_was_seen_before_is_read_as_the_first_time(data: bytes, head: RequestHead) -> None:
    """Heads are remembered without their length; what looks like a length elsewhere is none."""

    async def main() -> None:
        wire = Wire(data + data)
        assert await http.read_request_head(wire.connection) == head
        assert await http.read_request_head(wire.connection) == head
        await wire.stop()

    run(main())


@pytest.mark.parametrize(
    "field", [b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"no field\r\n"], ids=["two", "both", "bad"]
)
def test_a_length_at_the_end_hides_no_wrong_field_before_it(field: bytes) -> None:
    """Two lengths, a length beside chunks, and a line that is no field are refused, also the second time."""

    async def main() -> None:
        for _ in range(2):
            wire = Wire(b"POST /p2p/x HTTP/1.1\r\nX-P2PNode: 1\r\n" + field + b"Content-Length: 5\r\n\r\n")
            with pytest.raises(NotOurHttp):
                await http.read_request_head(wire.connection)
            await wire.stop()

    run(main())
