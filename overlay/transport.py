"""The one door to the world: everything one node says to another passes through `Transport`.

Two ways out: a *datagram* (small, lossy, cheap) and a *request* with a body that is an iterator of buffers both ways
(large, ordered). `overlay.sockets.transport` is the real door (UDP, and HTTP on the same port number over TCP); the
tests have an in-memory network behind the same interface. Nothing above this line knows which one it has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from overlay.addresses import Address
from overlay.errors import OverlayError

Buffer = bytes | bytearray | memoryview

#: Longest head of a request or an answer, in bytes; a longer one is refused before it is read.
MAX_HEAD_BYTES = 16 * 1024 * 1024
#: Longest datagram we send or accept, in bytes: it fits one Ethernet frame after IPv6 and UDP headers.
MAX_DATAGRAM_BYTES = 1400
#: A handler whose peer neither sends the awaited bytes nor takes its answer for this long gets `TransportError`:
#: longer than any wait inside the exchange (its detection bound is 10 s), short enough not to collect dead streams.
HANDLER_SILENCE_S = 30.0


FailureKind = Literal["refused", "timeout", "reset", "closed", "foreign", "rejected"]


class TransportError(OverlayError):
    """A request that did not succeed.

    `kind`: `refused` (nobody listens), `timeout` (silence for `timeout_s`), `reset` (the stream broke),
    `closed` (our own door is shut), `foreign` (it answered, but not as a p2pnode), `rejected` (the peer's handler
    refused; `detail` is its reason).
    """

    def __init__(self, kind: FailureKind, address: Address, detail: str) -> None:
        super().__init__(f"{address} {detail}")
        self.kind: FailureKind = kind
        self.address = address
        self.detail = detail


class SizedBody:
    """A body that is produced while it is sent, but whose size is known before: a stream that says how long it is costs
    both ends less than one cut into chunks."""

    __slots__ = ("_buffers", "size_bytes")

    def __init__(self, buffers: Iterator[Buffer], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._buffers = buffers

    def __iter__(self) -> Iterator[Buffer]:
        return self._buffers


class DirectBody(Protocol):
    """An arriving body that can put what comes next straight where it is wanted."""

    async def read_into(self, target: memoryview) -> int:
        """Fill the target, bytes; returns how many there were, fewer only where the body has ended. Raises as the
        iterator does."""
        ...


class RequestRejected(OverlayError):
    """Raised by a request handler: its text reaches the caller as `TransportError(kind="rejected")`."""


@dataclass(slots=True)
class Request:
    """A request as its handler sees it. `source.port` is the stream's port, not the peer's listening port."""

    name: str
    source: Address
    head: bytes
    body: AsyncIterator[Buffer]


@dataclass(slots=True)
class Response:
    """What a handler gives back: a head and, optionally, a body that is produced while it is sent."""

    head: bytes
    body: AsyncIterator[Buffer] | Iterable[Buffer] = ()


@dataclass(slots=True)
class ReceivedResponse:
    """What a caller gets back: the head at once, the body as it arrives. `node_id`: who answers, where the door has
    proof of it; empty otherwise."""

    head: bytes
    body: AsyncIterator[Buffer]
    node_id: bytes = b""


DatagramHandler = Callable[[bytes, Address], None]
RequestHandler = Callable[[Request], Awaitable[Response]]
Body = AsyncIterator[Buffer] | Iterable[Buffer]


class Transport(Protocol):
    """What a node needs of a network. One instance per node; `open` once, `close` once."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Datagrams sent, received and dropped before they were handed on, by reason; for `/status`."""
        ...

    async def open(self, on_datagram: DatagramHandler, on_request: RequestHandler) -> Address:
        """Bind and begin to serve; returns the bound address (a port of 0 was replaced by a free one, the same
        for datagrams and streams). Raises `PortInUse` or `OSError`."""
        ...

    def send(self, to: Address, datagram: bytes) -> None:
        """Send one datagram. Lossy by contract: never raises for anything the network or the address does."""
        ...

    def request(
        self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """Send a request and read its answer inside the `async with`. `timeout_s` bounds *silence*: connecting, and
        every wait for the next byte. Raises `TransportError`. Leaving the block early closes the stream."""
        ...

    async def close(self) -> None:
        """Stop serving and end every stream; idempotent."""
        ...


class PortInUse(OverlayError):
    """Another process holds the address we were told to use."""

    def __init__(self, address: Address, detail: str) -> None:
        super().__init__(f"cannot listen on {address}: {detail}")
        self.address = address
