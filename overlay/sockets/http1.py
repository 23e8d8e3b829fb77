"""The part of HTTP/1.1 (RFC 9112) that nodes use: heads, and bodies of a known size or in chunks.

Only what the two ends of this project send is accepted. Anything else raises `NotOurHttp`, and the connection is
closed. Both ends send `X-P2PNode: 1`: a response without it is not from a node, and a browser cannot send it across
origins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.sockets.connection import Connection, ConnectionClosed

MARKER = b"x-p2pnode"
PATH = "/p2p/"
OK, REJECTED, NOT_FOUND, FAILED = 200, 409, 404, 500
_REASONS = {OK: "OK", REJECTED: "Conflict", NOT_FOUND: "Not Found", FAILED: "Internal Server Error"}
_VERSION = b"HTTP/1."
_HEX_DIGITS = b"0123456789abcdefABCDEF"
#: Longest reason of a rejection that is sent or shown, in characters.
REASON_CHARACTERS = 2000
#: Longest head of a request or response; those of p2pnode have about 150 bytes.
MAX_HTTP_HEAD_BYTES = 8192
#: Heads up to this size are remembered as they are read.
MAX_KNOWN_BYTES = 512
#: Longest line with the size of a chunk; those of p2pnode have at most 10 bytes.
MAX_CHUNK_LINE_BYTES = 64
#: Most digits of a size.
MAX_SIZE_DIGITS = 15
#: Most bytes of one read.
READ_BYTES = 1 << 16


class NotOurHttp(OverlayError):
    """The peer sent something else; the text is the reason."""


class RequestHead(NamedTuple):
    """`size_bytes` is None for a chunked body. `name` is empty if it is no request of a node."""

    name: str
    size_bytes: int | None
    is_last: bool


class ResponseHead(NamedTuple):
    """`is_p2pnode`: it has the marker field."""

    status: int
    is_p2pnode: bool
    size_bytes: int | None
    is_last: bool


def request_head(to: Address, name: str, size_bytes: int | None) -> bytes:
    """The head of a request; the body is chunked if there is no size."""
    return request_start(to.host, to.port, name) + _length(size_bytes) + b"\r\n"


@lru_cache(maxsize=1024)
def request_start(host: str, port: int, name: str) -> bytes:
    """All of a head but the length of its body."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"POST {PATH}{quote(name, safe='/')} HTTP/1.1\r\nHost: {where}\r\nX-P2PNode: 1\r\n".encode("ascii")


def response_head(
    status: int, size_bytes: int | None, *, kind: str = "application/octet-stream", is_last: bool
) -> bytes:
    """The head of a response."""
    start = response_start(status, kind) + _length(size_bytes)
    return start + (b"Connection: close\r\n\r\n" if is_last else b"\r\n")


@lru_cache(maxsize=64)
def response_start(status: int, kind: str = "application/octet-stream") -> bytes:
    """All of a head but the length of its body, and whether it is the last."""
    fields = f"X-P2PNode: 1\r\nContent-Type: {kind}\r\n"
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{fields}".encode("ascii")


def _length(size_bytes: int | None) -> bytes:
    return b"Transfer-Encoding: chunked\r\n" if size_bytes is None else b"Content-Length: %d\r\n" % size_bytes


async def read_request_head(connection: Connection) -> RequestHead | None:
    """The next request on a connection; None if the peer has closed it. Raises `NotOurHttp`, `ConnectionClosed`."""
    raw = await _read_raw(connection)
    if raw is None:
        return None
    start, size_bytes = _cut_length(raw)
    is_short = size_bytes is not None and len(start) <= MAX_KNOWN_BYTES
    if is_short and (known := request_without_length(start)) is not None:
        return RequestHead(known.name, size_bytes, known.is_last)
    return _request(raw)


def _request(raw: bytes) -> RequestHead:
    start, fields = _parsed(raw)
    parts = start.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(_VERSION):
        raise NotOurHttp("not a request of HTTP/1.1")
    method, target, version = parts
    path = unquote(target.decode("latin-1"))
    is_ours = method == b"POST" and path.startswith(PATH) and fields.get(MARKER) == b"1"
    return RequestHead(path[len(PATH) :] if is_ours else "", _size(fields), _is_last(version, fields))


def _cut_length(raw: bytes) -> tuple[bytes, int | None]:
    """What is before the length of the body, where that is the last field as both ends send it; None: it is not."""
    start, field, rest = raw.rpartition(b"Content-Length: ")
    digits = rest[:-4]
    return (start, int(digits)) if field and digits.isdigit() and len(digits) <= MAX_SIZE_DIGITS else (start, None)


@lru_cache(maxsize=256)
def request_without_length(start: bytes) -> RequestHead | None:
    """The head of which this is all but the length, which is a line of its own; None for one that is to be read as a
    whole. Peers send the same few again and again."""
    if not start.endswith(b"\r\n"):
        return None
    try:
        head = _request(start + b"\r\n")
    except NotOurHttp:
        return None
    return head if head.size_bytes == 0 and b"content-length" not in start.lower() else None


async def read_response_head(connection: Connection, idle_timeout_s: float | None = None) -> ResponseHead:
    """The head of the response; `idle_timeout_s` bounds the time in which nothing of the request moves. Raises
    `TimeoutError`, `NotOurHttp`, `ConnectionClosed`."""
    try:
        raw = await _read_raw(connection, idle_timeout_s)
    except ConnectionClosed as error:
        beginning = connection.take(len(_VERSION))
        if beginning != _VERSION[: len(beginning)]:
            raise NotOurHttp("not a response of HTTP/1.1") from error
        raise
    if raw is None:
        raise ConnectionClosed("the other side closed it")
    begin, size_bytes = _cut_length(raw)
    if size_bytes is not None and begin == _OK_START:
        return ResponseHead(OK, True, size_bytes, False)
    start, fields = _parsed(raw)
    parts = start.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(_VERSION) or not parts[1].isdigit() or len(parts[1]) != 3:
        raise NotOurHttp("not a response of HTTP/1.1")
    is_ours = fields.get(MARKER) == b"1"
    # The body of a response that is not from a node is never read.
    size_bytes = _size(fields) if is_ours else 0
    return ResponseHead(int(parts[1]), is_ours, size_bytes, _is_last(parts[0], fields))


#: How nearly every response begins.
_OK_START = response_start(OK, "application/octet-stream")


async def _read_raw(connection: Connection, idle_timeout_s: float | None = None) -> bytes | None:
    """A head with its empty line; None if the peer has closed the connection."""
    try:
        head = await connection.read_line(MAX_HTTP_HEAD_BYTES, b"\r\n\r\n", idle_timeout_s, is_prompt=True)
    except ValueError as error:
        raise NotOurHttp(f"a head with {error}") from error
    return head or None


def _parsed(head: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The first line of a head, and its fields."""
    start, *lines = head[:-4].split(b"\r\n")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise NotOurHttp("a field of a head without a name")
        if fields.setdefault(name.lower(), value.strip()) != value.strip():
            raise NotOurHttp("a head with two values of one field")
    return start, fields


def _size(fields: dict[bytes, bytes]) -> int | None:
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None:
            raise NotOurHttp("a body of another coding")
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > MAX_SIZE_DIGITS:
        raise NotOurHttp("a body whose size is no number")
    return int(length)


def _is_last(version: bytes, fields: dict[bytes, bytes]) -> bool:
    return version != b"HTTP/1.1" or fields.get(b"connection", b"").lower() == b"close"


class HttpBody:
    """Reads a body, which is chunked if `size_bytes` is None. `idle_timeout_s` bounds every wait for bytes."""

    def __init__(self, connection: Connection, size_bytes: int | None, idle_timeout_s: float | None) -> None:
        self._connection = connection
        self._idle_timeout_s = idle_timeout_s
        self._is_chunked = size_bytes is None
        self._left = size_bytes or 0
        self._started = False
        self._received_before = connection.received
        self.is_at_end = size_bytes == 0

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived since the head, also within a read that is not complete."""
        return self._connection.received - self._received_before

    async def read(self) -> bytes:
        """The next bytes, at least one; empty at the end. Raises `TimeoutError`, `ConnectionClosed`, `NotOurHttp`."""
        if not await self._more():
            return b""
        data = await self._connection.read(min(self._left, READ_BYTES), self._idle_timeout_s)
        if not data:
            raise ConnectionClosed("the other side closed it")
        self._consume(len(data))
        return data

    async def fill(self, target: memoryview) -> int:
        """Fill the target; returns the number of bytes, fewer only at the end. Raises as `read` does."""
        filled = 0
        while filled < len(target) and await self._more():
            piece = target[filled : filled + self._left]
            await self._connection.fill(piece, self._idle_timeout_s)
            filled += len(piece)
            self._consume(len(piece))
        return filled

    async def _more(self) -> bool:
        """Whether more bytes follow; reads the size of the next chunk if needed."""
        if self.is_at_end or self._left:
            return not self.is_at_end
        if self._started and await self._line():
            raise NotOurHttp("a chunk that is longer than its size")
        self._started = True
        digits = (await self._line()).partition(b";")[0].strip()
        if not digits or digits.strip(_HEX_DIGITS) or len(digits) > MAX_SIZE_DIGITS:
            raise NotOurHttp("a chunk whose size is no number")
        self._left = int(digits, 16)
        if not self._left:
            if await self._line():
                raise NotOurHttp("fields after the last chunk")
            self.is_at_end = True
        return not self.is_at_end

    async def _line(self) -> bytes:
        try:
            line = await self._connection.read_line(MAX_CHUNK_LINE_BYTES, b"\r\n", self._idle_timeout_s)
        except ValueError as error:
            raise NotOurHttp(f"a chunk with {error}") from error
        if not line:
            raise ConnectionClosed("the other side closed it")
        return line[:-2]

    def _consume(self, count: int) -> None:
        self._left -= count
        if not self._left and not self._is_chunked:
            self.is_at_end = True
