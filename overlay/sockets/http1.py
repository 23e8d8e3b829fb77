"""The little of HTTP/1.1 (RFC 9112) that nodes speak: heads, and bodies of a known size or in chunks.

Only what our own two ends send is understood; anything else is `NotOurHttp`, and its connection ends. Both ends say
`X-P2PNode: 1`: whoever answers without it is not one of us, and a browser cannot be made to send it.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from overlay.addresses import Address
from overlay.errors import OverlayError
from overlay.sockets.connection import Connection, ConnectionClosed

MARKER = b"x-p2pnode"
PATH = "/p2p/"
OK, REJECTED, NOT_FOUND, FAILED = 200, 409, 404, 500
_REASONS = {OK: "OK", REJECTED: "Conflict", NOT_FOUND: "Not Found", FAILED: "Internal Server Error"}
_VERSION = b"HTTP/1."
_HEX_DIGITS = b"0123456789abcdefABCDEF"
#: Longest reason of a refusal that is sent or shown, in characters.
REASON_CHARACTERS = 2000
#: Longest head of a request or an answer; ours have about 150 bytes.
MOST_HEAD_BYTES = 8192
#: Longest line that says how long a chunk is; ours have at most 10 bytes.
MOST_LINE_BYTES = 64
#: Larger sizes than any of ours: a body that says so is not ours.
MOST_SIZE_DIGITS = 15
#: Read at once by one who wants whatever comes.
READ_BYTES = 1 << 16


class NotOurHttp(OverlayError):
    """The other side speaks something else; the text says what was wrong with it."""


class RequestHead(NamedTuple):
    """`size_bytes` None: the body comes in chunks. `name` empty: no request of ours."""

    name: str
    size_bytes: int | None
    is_last: bool


class AnswerHead(NamedTuple):
    """`is_ours`: it has the mark."""

    status: int
    is_ours: bool
    size_bytes: int | None
    is_last: bool


def request_head(to: Address, name: str, size_bytes: int | None) -> bytes:
    """The head of a request; without a size its body comes in chunks."""
    path = PATH + quote(name, safe="/")
    host = f"[{to.host}]:{to.port}" if ":" in to.host else f"{to.host}:{to.port}"
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\nX-P2PNode: 1\r\n{_length(size_bytes)}\r\n".encode("ascii")


def answer_head(status: int, size_bytes: int | None, *, kind: str = "application/octet-stream", is_last: bool) -> bytes:
    """The head of an answer."""
    last = "Connection: close\r\n" if is_last else ""
    fields = f"X-P2PNode: 1\r\nContent-Type: {kind}\r\n{_length(size_bytes)}{last}"
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{fields}\r\n".encode("ascii")


def _length(size_bytes: int | None) -> str:
    return "Transfer-Encoding: chunked\r\n" if size_bytes is None else f"Content-Length: {size_bytes}\r\n"


async def read_request_head(connection: Connection) -> RequestHead | None:
    """The next request on a connection; None where the other side has ended it. Raises `NotOurHttp`,
    `ConnectionClosed`."""
    found = await _read_head(connection)
    if found is None:
        return None
    start, fields = found
    words = start.split(b" ")
    if len(words) != 3 or not words[2].startswith(_VERSION):
        raise NotOurHttp("not a request of HTTP/1.1")
    method, target, version = words
    path = unquote(target.decode("latin-1"))
    is_ours = method == b"POST" and path.startswith(PATH) and fields.get(MARKER) == b"1"
    return RequestHead(path[len(PATH) :] if is_ours else "", _size(fields), _is_last(version, fields))


async def read_answer_head(connection: Connection) -> AnswerHead:
    """The head of the answer. Raises `NotOurHttp`, `ConnectionClosed`."""
    try:
        found = await _read_head(connection)
    except ConnectionClosed as error:
        beginning = connection.take(len(_VERSION))
        if beginning != _VERSION[: len(beginning)]:
            raise NotOurHttp("not an answer of HTTP/1.1") from error
        raise
    if found is None:
        raise ConnectionClosed("the other side closed it")
    start, fields = found
    words = start.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(_VERSION) or not words[1].isdigit() or len(words[1]) != 3:
        raise NotOurHttp("not an answer of HTTP/1.1")
    is_ours = fields.get(MARKER) == b"1"
    # What a stranger says of its body is not looked at: nobody will read it.
    size_bytes = _size(fields) if is_ours else 0
    return AnswerHead(int(words[1]), is_ours, size_bytes, _is_last(words[0], fields))


async def _read_head(connection: Connection) -> tuple[bytes, dict[bytes, bytes]] | None:
    try:
        head = await connection.read_line(MOST_HEAD_BYTES, b"\r\n\r\n")
    except ValueError as error:
        raise NotOurHttp(f"a head with {error}") from error
    if not head:
        return None
    start, *lines = head[:-4].split(b"\r\n")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise NotOurHttp("a field of a head without a name")
        if fields.setdefault(name.lower(), value.strip()) != value.strip():
            raise NotOurHttp("a head that says two things of one field")
    return start, fields


def _size(fields: dict[bytes, bytes]) -> int | None:
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None:
            raise NotOurHttp("a body of another coding")
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > MOST_SIZE_DIGITS:
        raise NotOurHttp("a body whose size is no number")
    return int(length)


def _is_last(version: bytes, fields: dict[bytes, bytes]) -> bool:
    return version != b"HTTP/1.1" or fields.get(b"connection", b"").lower() == b"close"


class HttpBody:
    """A body as it arrives; `size_bytes` None: in chunks. `silence_s` bounds every wait. What is wrong with its chunks
    raises `NotOurHttp`."""

    def __init__(self, connection: Connection, size_bytes: int | None, silence_s: float | None) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._is_chunked = size_bytes is None
        self._left = size_bytes or 0
        self._has_begun = False
        self.is_at_end = size_bytes == 0

    async def read(self) -> bytes:
        """What comes next, at least one byte; empty at the end. Raises `TimeoutError`, `ConnectionClosed`,
        `NotOurHttp`."""
        if not await self._more():
            return b""
        data = await self._connection.read(min(self._left, READ_BYTES), self._silence_s)
        if not data:
            raise ConnectionClosed("the other side closed it")
        self._took(len(data))
        return data

    async def fill(self, target: memoryview) -> int:
        """Fill the target with what comes next; returns how many bytes there were, fewer only at the end. Raises as
        `read` does."""
        filled = 0
        while filled < len(target) and await self._more():
            piece = target[filled : filled + self._left]
            await self._connection.fill(piece, self._silence_s)
            filled += len(piece)
            self._took(len(piece))
        return filled

    async def _more(self) -> bool:
        """Whether there is more, after the line that says so."""
        if self.is_at_end or self._left:
            return not self.is_at_end
        if self._has_begun and await self._line():
            raise NotOurHttp("a chunk that does not end where it said")
        self._has_begun = True
        digits = (await self._line()).partition(b";")[0].strip()
        if not digits or digits.strip(_HEX_DIGITS) or len(digits) > MOST_SIZE_DIGITS:
            raise NotOurHttp("a chunk whose size is no number")
        self._left = int(digits, 16)
        if not self._left:
            if await self._line():
                raise NotOurHttp("fields after the last chunk")
            self.is_at_end = True
        return not self.is_at_end

    async def _line(self) -> bytes:
        try:
            line = await self._connection.read_line(MOST_LINE_BYTES, b"\r\n", self._silence_s)
        except ValueError as error:
            raise NotOurHttp(f"a chunk with {error}") from error
        if not line:
            raise ConnectionClosed("the other side closed it")
        return line[:-2]

    def _took(self, count: int) -> None:
        self._left -= count
        if not self._left and not self._is_chunked:
            self.is_at_end = True
