"""The network interface of a node: everything that one node sends to another passes through `Transport`.

A *datagram* is small, lossy and cheap. A *request* is large and ordered, with a body that is an iterator of buffers in
both directions. `overlay.sockets.transport` is the real implementation (UDP, and TCP on the same port
number); the tests use an in-memory network. The layers above do not know which one they have.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeGuard

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.line.rate import MeasuredLine

Buffer = bytes | bytearray | memoryview

#: Longest head of a request or an answer, in bytes; a longer one is refused before it is read. What may be longer
#: travels in the body.
MAX_HEAD_BYTES = 1024 * 1024
#: Bytes of a part of a message in a body.
PART_BYTES = 1024 * 1024
#: Longest datagram that is sent or accepted, in bytes: with IPv6 and UDP headers it fits one Ethernet frame.
MAX_DATAGRAM_BYTES = 1400
#: A handler whose peer for this long neither sends one of the awaited bytes nor acknowledges one of the response gets a
#: `TransportError`. It is longer than any wait inside the exchange, which detects a failure within 10 s. It is short
#: enough that dead streams do not accumulate.
HANDLER_SILENCE_S = 30.0


#: How the text of a rejection begins where no handler of that name is registered. Nodes of all versions send it.
NOT_SERVED = "this node does not serve"

FailureKind = Literal["refused", "timeout", "reset", "closed", "foreign", "rejected"]


class TransportError(OverlayError):
    """A request that did not succeed. `detail` says why; `kind` is one of:

    * `refused`: no process listens there.
    * `timeout`: for `timeout_s` no byte arrived, and the peer's kernel acknowledged none.
    * `reset`: the stream broke.
    * `closed`: the transport of this node is closed.
    * `foreign`: the response is not from a p2pnode.
    * `rejected`: the peer's handler refused; `detail` is its reason.
    """

    def __init__(self, kind: FailureKind, address: Address, detail: str) -> None:
        super().__init__(f"{address} {detail}")
        self.kind: FailureKind = kind
        self.address = address
        self.detail = detail

    @property
    def is_not_served(self) -> bool:
        """Whether the peer has no handler for the request, because it has just started or is of another version."""
        return self.kind == "rejected" and self.detail.startswith(NOT_SERVED)


class SizedBody:
    """A body that is produced while it is sent, but whose size is known before.

    A stream of known length costs both ends less than a chunked one. While it is sent, `moved_bytes` shows how far it
    has come.
    """

    __slots__ = ("_buffers", "_moved", "size_bytes")

    def __init__(self, buffers: Iterator[Buffer], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._buffers = buffers
        self._moved: Callable[[], int] | None = None

    def track(self, moved: Callable[[], int]) -> None:
        """The transport sends it now; `moved` gives the bytes of the request that the other end has acknowledged."""
        self._moved = moved

    def moved_bytes(self) -> int:
        """About how many of its bytes the other end's kernel has acknowledged; 0 before it is sent."""
        return 0 if self._moved is None else min(max(self._moved(), 0), self.size_bytes)

    def __iter__(self) -> Iterator[Buffer]:
        return self._buffers


class Background:
    """A body that gives way to everything else on the line: it is sent in slices, each once the peer has acknowledged
    the one before, and smaller ones while they wait in a queue (`overlay.sockets.send_queue.BackgroundPace`)."""

    __slots__ = ("_buffers",)

    def __init__(self, buffers: Iterator[Buffer]) -> None:
        self._buffers = buffers

    def __iter__(self) -> Iterator[Buffer]:
        return self._buffers


class DirectBody(Protocol):
    """A received body that can write its next bytes directly into a buffer of the reader."""

    async def read_into(self, target: memoryview) -> int:
        """Fill `target` and return the number of bytes written; fewer than its size only at the end of the body.

        Raises what the iterator raises.
        """
        ...


class ArrivedBody(Protocol):
    """A received body that has arrived completely."""

    def take(self, size_bytes: int) -> memoryview:
        """The next bytes, without a copy; fewer only at the end of the body."""
        ...


class RequestRejected(OverlayError):
    """Raised by a request handler; its text reaches the caller as `TransportError(kind="rejected")`."""


class RequestStream(Protocol):
    """The connection below a request."""

    def moved_bytes(self) -> int:
        """Bytes received, and bytes that the peer's kernel has acknowledged, so far; 0 before it opens and once it has
        ended."""
        ...


def shows_movement(request: object) -> TypeGuard[RequestStream]:
    """Whether a request of a transport is a `RequestStream`. An `isinstance` of a protocol takes forty times as long
    before Python 3.12, and each request asks."""
    return hasattr(request, "moved_bytes")


@dataclass(slots=True)
class Request:
    """A request as its handler sees it. `source.port` is the stream's port, not the peer's listening port. `stream`:
    what it came on, where the transport shows that."""

    name: str
    source: Address
    head: bytes
    body: AsyncIterator[Buffer]
    stream: RequestStream | None = None


@dataclass(slots=True)
class Response:
    """What a handler returns: a head and, optionally, a body that is produced while it is sent."""

    head: bytes
    body: AsyncIterator[Buffer] | Iterable[Buffer] = ()


@dataclass(slots=True)
class ReceivedResponse:
    """What a caller gets: the head at once, the body as it arrives.

    `node_id` is the responding node where the transport has proof of it, and empty otherwise. `waited_s` is the time
    from the last movement of the request, as far as the transport saw it, to the head: how long the peer took to
    respond, without the transfer of the request. None if the transport does not know it.
    """

    head: bytes
    body: AsyncIterator[Buffer]
    node_id: bytes = b""
    waited_s: float | None = None


#: A peer for which so many bytes are queued counts in `Upload.queued_peers`. On most lines fewer bytes than that are
#: only waiting for their acknowledgement.
MUCH_QUEUED_BYTES, SOME_QUEUED_BYTES = 1 << 16, 1 << 12


class Upload(NamedTuple):
    """What all streams of a node have sent, requests and responses. Bytes that other nodes' kernels have acknowledged
    since the start, and bytes written and not acknowledged yet. Two readings between which bytes were always queued
    give the rate of the line: the difference of `acknowledged_bytes` over the time between them. `received_bytes`: what
    they have received since the start. `queued_peers`: hosts with `MUCH_QUEUED_BYTES` or more queued. `waiting_peers`:
    those with `SOME_QUEUED_BYTES`."""

    acknowledged_bytes: int
    queued_bytes: int
    received_bytes: int = 0
    queued_peers: int = 0
    waiting_peers: int = 0


DatagramHandler = Callable[[bytes, Address], None]
RequestHandler = Callable[[Request], Awaitable[Response]]
Body = AsyncIterator[Buffer] | Iterable[Buffer]


def waits_for_none(_name: str) -> bool:
    """No request of any name waits for other nodes."""
    return False


class Transport(Protocol):
    """What a node needs of a network. One instance per node; `open` once, `close` once."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Datagrams sent, received and dropped before they were handed on, by reason; for `/status`."""
        ...

    @property
    def line(self) -> MeasuredLine:
        """The measured rates of this node's line."""
        ...

    async def open(
        self,
        on_datagram: DatagramHandler,
        on_request: RequestHandler,
        waits: Callable[[str], bool] = waits_for_none,
    ) -> Address:
        """Bind and begin to serve; returns the bound address (a port of 0 was replaced by a free one, the same
        for datagrams and streams). `waits`: whether a request of this name may wait for an answer of another node
        before it is answered. Raises `PortInUse` or `OSError`."""
        ...

    def send(self, to: Address, datagram: bytes) -> None:
        """Send one datagram. Lossy by contract: never raises for anything the network or the address does."""
        ...

    def request(
        self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float, keep: bool = True
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """Send a request and read its answer inside the `async with`. `keep`: whether the stream is kept for another
        request to this node, which is likely soon. `timeout_s` bounds *silence*: connecting, and every time in which no
        byte arrives and the peer's kernel acknowledges none. Raises `TransportError`. Leaving the block early closes
        the stream."""
        ...

    def has_line_to(self, to: Address) -> bool:
        """Whether what is sent to this address passes the line of this machine; it does not on the loopback."""
        ...

    async def close(self) -> None:
        """Stop serving and end every stream; idempotent."""
        ...


class PortInUse(OverlayError):
    """Another process uses the address that this node is to listen on."""

    def __init__(self, address: Address, detail: str) -> None:
        super().__init__(f"cannot listen on {address}: {detail}")
        self.address = address


def in_parts(message: bytes) -> list[memoryview]:
    """A message as a body: it may be longer than a head."""
    view = memoryview(message)
    return [view[first : first + PART_BYTES] for first in range(0, len(view), PART_BYTES)]


async def gathered(body: AsyncIterator[Buffer], most_bytes: int) -> bytes:
    """The message in a body. Raises `ValueError` for more than `most_bytes`, and what the body raises."""
    found = bytearray()
    async for part in body:
        if len(found) + len(part) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        found += part
    return bytes(found)
