"""The transport on real sockets: UDP datagrams, and requests over TCP or TLS, on one port number.

Requests and responses are a head and a raw body (`overlay.sockets.framing`). The
request handler decides which names exist. A closed swarm uses TLS. This module composes `overlay.sockets.server` and
`overlay.sockets.client` with the listening sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping

from p2pnode.overlay.addresses import Address, is_loopback
from p2pnode.overlay.environment import Clock, Log
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.sealing.sealer import MAX_SEALED_BYTES
from p2pnode.overlay.sealing.tls import Credentials
from p2pnode.overlay.sockets.client import StreamClient, StreamRequest
from p2pnode.overlay.sockets.concurrency import UNPROVEN_SHARE, places_of
from p2pnode.overlay.sockets.connection_pool import StreamSeal
from p2pnode.overlay.sockets.line_meter import LineMeter, UploadMeter
from p2pnode.overlay.sockets.listener import DatagramSocket, Listener, bind_pair
from p2pnode.overlay.sockets.server import StreamServer
from p2pnode.overlay.sockets.ticket_gate import TicketGate
from p2pnode.overlay.transport import (
    MAX_DATAGRAM_BYTES,
    MAX_HEAD_BYTES,
    Body,
    DatagramHandler,
    RequestHandler,
    waits_for_none,
)

#: Longest wait of `close` for cancelled handlers and handshakes, each.
CLOSE_TIMEOUT_S = 0.4
#: TLS handshakes: running at once, running or waiting, and the longest time of one. All of them have valid tickets.
MAX_CONCURRENT_HANDSHAKES = 64
MAX_PENDING_HANDSHAKES = 1024
HANDSHAKE_TIMEOUT_S = 10.0
#: Counted with where the system has no limit, or a higher one.
MAX_DESCRIPTORS = 1 << 16


class SocketTransport:
    """Implements `overlay.transport.Transport` with real sockets, on asyncio and on uvloop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        log: Log,
        clock: Clock,
        seal: StreamSeal | None = None,
        descriptors: int | None = None,
    ) -> None:
        """`descriptors`: how many this process may open; by default as the system says when the transport is opened."""
        self.address = Address(host, port)
        self._descriptors = descriptors
        self._seal = seal
        self._gate: TicketGate | None = None
        self._counters: Counter[str] = Counter()
        self._handshakes = asyncio.Semaphore(MAX_CONCURRENT_HANDSHAKES)
        self._max_handshakes = MAX_PENDING_HANDSHAKES
        self._handshaking: dict[asyncio.Task[None], socket.socket] = {}
        self._log = log
        self._clock = clock
        self._is_open = False
        self._opened = False
        self._datagrams: DatagramSocket | None = None
        self._listener: Listener | None = None
        self._server: StreamServer | None = None
        self._streams = UploadMeter()
        self._meter = LineMeter(MeasuredLine(), clock, self._streams.read)
        self._client = StreamClient(seal, clock, lambda: self._is_open, self._streams)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def counters(self) -> Mapping[str, int]:
        """See `Transport.counters`."""
        return {**self._datagrams.counters, **self._counters} if self._datagrams is not None else {}

    @property
    def line(self) -> MeasuredLine:
        """See `Transport.line`."""
        return self._meter.line

    def use(self, credentials: Credentials, *, end_others: bool) -> None:
        """New connections use these certificates. `end_others`: a former key is no longer valid, so close the
        connections that were accepted under it, when their requests are done."""
        assert self._seal is not None
        self._seal.use(credentials)
        if end_others and self._server is not None:
            self._server.end_idle()

    async def open(
        self,
        on_datagram: DatagramHandler,
        on_request: RequestHandler,
        waits: Callable[[str], bool] = waits_for_none,
    ) -> Address:
        """See `Transport.open`."""
        if self._opened:
            raise RuntimeError("a transport is opened once")
        self._opened = True
        host = await _literal_address(self.address.host)
        datagrams, stream, self.address = bind_pair(host, self.address.port)
        places = places_of(_open_file_limit() if self._descriptors is None else self._descriptors)
        self._max_handshakes = min(MAX_PENDING_HANDSHAKES, places)
        self._server = StreamServer(on_request, self._log, self._counters, self._streams, places, waits)
        try:
            if self._seal is None:
                self._listener = Listener(stream, lambda stream, _host: self._begin_handshake(stream))
            else:
                seal = self._seal
                self._gate = TicketGate(
                    stream,
                    lambda data: seal.tickets.verify(data, self._clock.wall()),
                    self._begin_handshake,
                    self._counters,
                    int(UNPROVEN_SHARE * places),
                )
        except BaseException:
            stream.close()
            datagrams.close()
            raise
        longest_bytes = MAX_DATAGRAM_BYTES if self._seal is None else MAX_SEALED_BYTES
        self._datagrams = DatagramSocket(datagrams, on_datagram, self._log, longest_bytes=longest_bytes)
        self._is_open = True
        self._meter.start()
        return self.address

    def has_line_to(self, to: Address) -> bool:
        """See `Transport.has_line_to`."""
        return not is_loopback(to.host) and to.host != self.address.host

    def send(self, to: Address, datagram: bytes) -> None:
        """See `Transport.send`."""
        if self._is_open and self._datagrams is not None:
            self._datagrams.send(to, datagram)

    def request(
        self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float, keep: bool = True
    ) -> StreamRequest:
        """See `Transport.request`."""
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a head of {len(head)} bytes: at most {MAX_HEAD_BYTES} are accepted")
        return StreamRequest(self._client, to, name, head, body, timeout_s, keep=keep)

    async def close(self) -> None:
        """See `Transport.close`; takes less than a second."""
        self._is_open = False
        self._meter.stop()
        if self._datagrams is not None:
            self._datagrams.close()
        if self._listener is not None:
            self._listener.close()
        if self._gate is not None:
            self._gate.close()
        for task in self._handshaking:
            task.cancel()
        if self._handshaking:
            await asyncio.wait(list(self._handshaking), timeout=CLOSE_TIMEOUT_S)
        if self._server is not None:
            await self._server.close(CLOSE_TIMEOUT_S)
        self._client.close()
        # `connection_lost` of the connections runs a few turns of the loop later.
        for _ in range(4):
            await asyncio.sleep(0)

    # --- accepting ------------------------------------------------------------------------------------------------

    def _begin_handshake(self, stream: socket.socket) -> None:
        """Serve an accepted connection; in a closed swarm over TLS, after its ticket was verified."""
        if len(self._handshaking) >= self._max_handshakes:
            self._counters["streams_dropped_busy"] += 1
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._handshake(stream), name="handshake")
        self._handshaking[task] = stream
        task.add_done_callback(self._on_handshake_done)

    def _on_handshake_done(self, task: asyncio.Task[None]) -> None:
        stream = self._handshaking.pop(task)
        if not self._is_open:  # the task may have been cancelled before it started
            stream.close()

    async def _handshake(self, stream: socket.socket) -> None:
        assert self._server is not None
        loop = asyncio.get_running_loop()
        try:
            if self._seal is None:
                await loop.connect_accepted_socket(self._server.new_connection, stream)
                return
            async with self._handshakes:
                await loop.connect_accepted_socket(
                    self._server.new_connection,
                    stream,
                    ssl=self._seal.credentials.server,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                )
            self._counters["streams_sealed"] += 1
        except (OSError, ssl.SSLError):  # bad certificate, closed by the peer, or timed out
            self._counters["streams_dropped_handshake"] += 1


def _open_file_limit() -> int:
    """How many descriptors this process may open now."""
    try:
        import resource  # absent on Windows, which has no such limit
    except ImportError:
        return MAX_DESCRIPTORS
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, MAX_DESCRIPTORS)


async def _literal_address(host: str) -> str:
    """The address to listen on; a name such as `localhost` is resolved once."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return str(found[0][4][0])
