"""The real door: UDP datagrams, and requests as HTTP/1.1 over TCP on the same port number; in a closed swarm over TLS.

`POST /p2p/{name}`, both ways a length, a head and a raw body (`overlay.sockets.framing`). Decides nothing about
requests: unknown names are the handler's business. This puts the ends together: `overlay.sockets.server` and
`overlay.sockets.client`, on `overlay.sockets.connection`, and `overlay.sockets.listener` for datagrams.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Mapping

from overlay.addresses import Address
from overlay.environment import Clock, Log
from overlay.sealing.sealer import MAX_SEALED_BYTES
from overlay.sealing.tls import Credentials
from overlay.sockets.client import StreamClient, StreamRequest
from overlay.sockets.connection_pool import StreamSeal
from overlay.sockets.listener import Listener, bind_pair
from overlay.sockets.server import StreamServer
from overlay.sockets.ticket_gate import TicketGate
from overlay.sockets.udp import DatagramSocket
from overlay.transport import MAX_DATAGRAM_BYTES, MAX_HEAD_BYTES, Body, DatagramHandler, RequestHandler

#: `close` waits this long for cancelled handlers and requests.
CLOSE_S = 0.4
#: TLS handshakes at once, and the longest one; only members come this far.
HANDSHAKES_AT_ONCE = 64
MOST_HANDSHAKES = 1024
HANDSHAKE_S = 10.0


class SocketTransport:
    """Implements `overlay.transport.Transport` with real sockets, on asyncio and on uvloop."""

    def __init__(self, host: str, port: int, *, log: Log, clock: Clock, seal: StreamSeal | None = None) -> None:
        self.address = Address(host, port)
        self._seal = seal
        self._threshold: TicketGate | None = None
        self._counters: Counter[str] = Counter()
        self._handshakes = asyncio.Semaphore(HANDSHAKES_AT_ONCE)
        self._handshaking: dict[asyncio.Task[None], socket.socket] = {}
        self._log = log
        self._clock = clock
        self._is_open = False
        self._opened = False
        self._datagrams: DatagramSocket | None = None
        self._listener: Listener | None = None
        self._server: StreamServer | None = None
        self._client = StreamClient(seal, clock, lambda: self._is_open)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def counters(self) -> Mapping[str, int]:
        """See `Transport.counters`."""
        return {**self._datagrams.counters, **self._counters} if self._datagrams is not None else {}

    def use(self, credentials: Credentials, *, end_others: bool) -> None:
        """New connections show and accept these certificates. `end_others`: what open ones were admitted by is not
        valid any more, so they end, at once or when what passes on them has passed."""
        assert self._seal is not None
        self._seal.use(credentials)
        if end_others and self._server is not None:
            self._server.end_idle()

    async def open(self, on_datagram: DatagramHandler, on_request: RequestHandler) -> Address:
        """See `Transport.open`."""
        if self._opened:
            raise RuntimeError("a transport is opened once")
        self._opened = True
        host = await _literal(self.address.host)
        datagrams, stream, self.address = bind_pair(host, self.address.port)
        self._server = StreamServer(on_request, self._log, self._counters)
        try:
            if self._seal is None:
                self._listener = Listener(stream, lambda stream, _host: self._admit(stream))
            else:
                seal = self._seal
                self._threshold = TicketGate(
                    stream,
                    lambda beginning: seal.admission.judge(beginning, self._clock.wall()),
                    self._admit,
                    self._counters,
                )
        except BaseException:
            stream.close()
            datagrams.close()
            raise
        longest_bytes = MAX_DATAGRAM_BYTES if self._seal is None else MAX_SEALED_BYTES
        self._datagrams = DatagramSocket(datagrams, on_datagram, self._log, longest_bytes=longest_bytes)
        self._is_open = True
        return self.address

    def send(self, to: Address, datagram: bytes) -> None:
        """See `Transport.send`."""
        if self._is_open and self._datagrams is not None:
            self._datagrams.send(to, datagram)

    def request(self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float) -> StreamRequest:
        """See `Transport.request`."""
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a head of {len(head)} bytes: at most {MAX_HEAD_BYTES} are accepted")
        return self._client.request(to, name, head, body, timeout_s)

    async def close(self) -> None:
        """See `Transport.close`; takes less than a second."""
        self._is_open = False
        if self._datagrams is not None:
            self._datagrams.close()
        if self._listener is not None:
            self._listener.close()
        if self._threshold is not None:
            self._threshold.close()
        for task in self._handshaking:
            task.cancel()
        if self._handshaking:
            await asyncio.wait(list(self._handshaking), timeout=CLOSE_S)
        if self._server is not None:
            await self._server.close(CLOSE_S)
        self._client.close()
        # Connections are gone only after their `connection_lost`, a few turns of the loop later.
        for _ in range(4):
            await asyncio.sleep(0)

    # --- admitting ----------------------------------------------------------------------------------------------

    def _admit(self, stream: socket.socket) -> None:
        """Begin with one who is in; in a closed swarm with TLS, for it has shown a ticket."""
        if len(self._handshaking) >= MOST_HANDSHAKES:
            self._counters["streams_dropped_busy"] += 1
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(stream), name="handshake")
        self._handshaking[task] = stream
        task.add_done_callback(self._admitted)

    def _admitted(self, task: asyncio.Task[None]) -> None:
        stream = self._handshaking.pop(task)
        if not self._is_open:  # it may have been cancelled before it began
            stream.close()

    async def _shake_hands(self, stream: socket.socket) -> None:
        assert self._server is not None
        loop = asyncio.get_running_loop()
        try:
            if self._seal is None:
                await loop.connect_accepted_socket(self._server.begin, stream)
                return
            async with self._handshakes:
                await loop.connect_accepted_socket(
                    self._server.begin,
                    stream,
                    ssl=self._seal.credentials.server,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
            self._counters["streams_sealed"] += 1
        except (OSError, ssl.SSLError):  # refused certificates, those who left, those who took too long
            self._counters["streams_dropped_handshake"] += 1


async def _literal(host: str) -> str:
    """The address to listen on; a name (`localhost`) is resolved once."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return str(found[0][4][0])
