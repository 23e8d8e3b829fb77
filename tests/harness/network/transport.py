"""The transport of one simulated process: the end of its streams and datagrams on a `Network`."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.sockets.line_meter import LineMeter
from p2pnode.overlay.transport import (
    MAX_DATAGRAM_BYTES,
    MAX_HEAD_BYTES,
    MUCH_QUEUED_BYTES,
    SOME_QUEUED_BYTES,
    Body,
    DatagramHandler,
    RequestHandler,
    TransportError,
    Upload,
)
from tests.harness.network.pipe import Pipe
from tests.harness.network.streams import Stream, StreamRequest

if TYPE_CHECKING:
    from tests.harness.network.network import Network


class LoopTime:
    """The clock of the network's loop, for what measures its lines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._loop.time()


class MemoryTransport:
    """The transport of one simulated process. Implements `overlay.transport.Transport`."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self.network = network
        self.loop = network.loop
        self.address = Address(host, port)
        self.crashed = False
        self.counters: dict[str, int] = {}
        self.line = MeasuredLine()
        self._meter: LineMeter | None = None
        self.streams: dict[Stream, bool] = {}
        self.handlers: dict[asyncio.Task[None], bool] = {}
        self.on_request: RequestHandler | None = None
        self.longest_datagram_bytes = MAX_DATAGRAM_BYTES
        self._on_datagram: DatagramHandler | None = None
        self._open = False
        self.context: Context | None = None  # of the process that opened it
        #: Bytes of streams that were written here, and that have arrived at the other ends.
        self.written_bytes = 0
        self.arrived_bytes = 0
        self.received_bytes = 0
        #: Bytes on their way, by stream.
        self.queued: dict[Pipe, int] = {}

    @property
    def is_open(self) -> bool:
        return self._open

    async def open(self, on_datagram: DatagramHandler, on_request: RequestHandler, waits: object = None) -> Address:
        self.address = self.network.bind(self, self.address)
        self._on_datagram = on_datagram
        self.on_request = on_request
        self.context = copy_context()
        self._open = True
        if self.network.has_line(self.address.host):
            self._meter = LineMeter(self.line, LoopTime(self.loop), self.upload)
            self._meter.start()
        return self.address

    def send(self, to: Address, datagram: bytes) -> None:
        if len(datagram) > self.longest_datagram_bytes:
            raise ValueError(f"a datagram of {len(datagram)} bytes: at most {self.longest_datagram_bytes} fit a frame")
        if self._open:
            self.network.carry(self, to, datagram)

    def receive(self, datagram: bytes, source: Address) -> None:
        if self._open and self._on_datagram is not None:
            self._on_datagram(datagram, source)

    def request(
        self,
        to: Address,
        name: str,
        head: bytes,
        body: Body = (),
        *,
        timeout_s: float,
        keep: bool = True,
    ) -> StreamRequest:
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a head of {len(head)} bytes: at most {MAX_HEAD_BYTES} are accepted")
        return StreamRequest(self, to, name, head, body, timeout_s)

    def closed_error(self, to: Address) -> TransportError:
        return TransportError("closed", to, "was not asked: the transport of this node is closed")

    def upload(self) -> Upload:
        queued_for: Counter[str] = Counter()
        for pipe, queued in self.queued.items():
            queued_for[pipe.target.host] += queued
        peers = sum(queued >= MUCH_QUEUED_BYTES for queued in queued_for.values())
        waiting = sum(queued >= SOME_QUEUED_BYTES for queued in queued_for.values())
        return Upload(self.arrived_bytes, self.written_bytes - self.arrived_bytes, self.received_bytes, peers, waiting)

    def has_line_to(self, to: Address) -> bool:
        """A host without a line of its own is as fast as the network: there is no rate to find."""
        return to.host != self.address.host and self.network.has_line(self.address.host)

    async def close(self) -> None:
        if self._open:
            self.network.unbind(self)
            self.end(notify=True)
        handlers = list(self.handlers)
        if handlers:
            await asyncio.gather(*handlers, return_exceptions=True)

    def end(self, *, notify: bool) -> None:
        """End all streams; with `notify` the other ends get a reset, otherwise they get nothing more."""
        self._open = False
        if self._meter is not None:
            self._meter.stop()
        for stream in list(self.streams):
            stream.end_of(self, notify=notify)
        self.streams.clear()
        for task in list(self.handlers):
            task.cancel()
