"""The real door: UDP datagrams, and requests as HTTP/1.1 over TCP on the same port number; in a closed swarm over TLS.

`POST /p2p/{name}`, both ways a length, a head and a raw body (`overlay.sockets_streams`), both ways with the header
`X-P2PNode: 1`: whoever answers without it is not one of us, and a browser cannot be made to send it. Decides nothing
about requests: unknown names are the handler's business. This is the serving end, and the two put together; the asking
end is `overlay.sockets_asking`. No other module of the overlay knows aiohttp.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from overlay.credentials import Credentials
from overlay.doors import Clock, Log
from overlay.sealing import MAX_SEALED_BYTES
from overlay.sockets_admission import Threshold
from overlay.sockets_asking import MARKER, OURS, PATH, REASON_CHARACTERS, REJECTED, StreamRequest, new_session
from overlay.sockets_binding import BACKLOG, DatagramSocket, bind_pair
from overlay.sockets_sealed import StreamSeal, proven_id
from overlay.sockets_streams import BadFraming, BodyFailed, Inflow, Outflow, framed, known_size, pour, whole
from overlay.sockets_turns import LARGE_HEAD_BYTES, TooMany, Turns
from overlay.transport import (
    HANDLER_SILENCE_S,
    MAX_DATAGRAM_BYTES,
    MAX_HEAD_BYTES,
    Address,
    Body,
    DatagramHandler,
    Incoming,
    NodeAddress,
    Rejection,
    Reply,
    RequestHandler,
    TransportError,
    group_of,
    id_behind,
)

#: Idle connections: longer than the client keeps them (`overlay.sockets_asking.CLIENT_KEEP_ALIVE_S`).
SERVER_KEEP_ALIVE_S = 90.0
#: After an early answer the rest of a request is read and thrown away for this long, so that the answer is not lost.
LINGER_S = 5.0
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
        self._threshold: Threshold | None = None
        self._counters: Counter[str] = Counter()
        self._handshakes = asyncio.Semaphore(HANDSHAKES_AT_ONCE)
        self._handshaking: dict[asyncio.Task[None], bool] = {}
        self._log = log
        self._clock = clock
        self._is_open = False
        self._opened = False
        self._datagrams: DatagramSocket | None = None
        self._listener: asyncio.AbstractServer | None = None
        self._server: web.Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self._on_request: RequestHandler | None = None
        self._turns = Turns()
        self._handling: dict[asyncio.Task[Any], bool] = {}
        self._asking: dict[StreamRequest, bool] = {}
        #: Connections on which a request is being handled.
        self._busy: dict[asyncio.BaseProtocol, bool] = {}

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
        self._seal.credentials = credentials
        if not end_others or self._server is None:
            return
        for connection in self._server.connections:
            if connection in self._busy:
                connection.keep_alive(False)
            else:
                connection.force_close()

    async def open(self, on_datagram: DatagramHandler, on_request: RequestHandler) -> Address:
        """See `Transport.open`."""
        if self._opened:
            raise RuntimeError("a transport is opened once")
        self._opened = True
        loop = asyncio.get_running_loop()
        host = await _literal(self.address.host)
        datagrams, stream, self.address = bind_pair(host, self.address.port)
        self._on_request = on_request
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            logger=_silence(),
            keepalive_timeout=SERVER_KEEP_ALIVE_S,
            lingering_time=LINGER_S,
        )
        self._session = new_session(self._seal, self._clock)
        try:
            if self._seal is None:
                self._listener = await loop.create_server(self._server, sock=stream, backlog=BACKLOG)
            else:
                seal = self._seal
                self._threshold = Threshold(
                    stream,
                    lambda beginning: seal.admission.judge(beginning, self._clock.wall()),
                    self._admit,
                    self._counters,
                )
        except BaseException:
            stream.close()
            datagrams.close()
            await self._session.close()
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
        return StreamRequest(
            lambda: self._is_open, self._session, self._seal, self._asking, to, name, head, body, timeout_s
        )

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
        handling = [task for task in self._handling if task is not asyncio.current_task()]
        for task in handling:
            task.cancel()
        if handling:
            await asyncio.wait(handling, timeout=CLOSE_S)
        if self._server is not None:
            server, self._server = self._server, None
            await server.shutdown(CLOSE_S / 4)
        if self._session is not None:
            for asked in list(self._asking):
                asked.abort()
            await self._session.close()
            # Connections are gone only after their `connection_lost`, a few turns of the loop later.
            for _ in range(4):
                await asyncio.sleep(0)

    # --- admitting ----------------------------------------------------------------------------------------------

    def _admit(self, stream: socket.socket) -> None:
        """Begin TLS with one who has shown a ticket."""
        if len(self._handshaking) >= MOST_HANDSHAKES:
            self._counters["streams_dropped_busy"] += 1
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(stream), name="handshake")
        self._handshaking[task] = True
        task.add_done_callback(self._handshaking.pop)

    async def _shake_hands(self, stream: socket.socket) -> None:
        assert self._seal is not None
        assert self._server is not None
        try:
            async with self._handshakes:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._server,
                    stream,
                    ssl=self._seal.credentials.server,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
            self._counters["streams_sealed"] += 1
        except (OSError, ssl.SSLError):  # refused certificates, those who left, those who took too long
            self._counters["streams_dropped_handshake"] += 1
        finally:
            if not self._is_open:
                stream.close()

    # --- serving ------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST" or not request.path.startswith(PATH) or request.headers.get(MARKER) != "1":
            text = "This port belongs to a p2pnode; its status page is on another one.\n"
            return web.Response(status=404, text=text, headers=OURS)
        task = asyncio.current_task()
        assert task is not None
        self._handling[task] = True
        self._busy[request.protocol] = True
        try:
            source = _source(request)
            party = id_behind(source) or group_of(source.host)
            async with self._turns.of(party):
                return await self._serve(request, request.path[len(PATH) :], source, party)
        except TooMany as reason:
            self._counters["streams_dropped_quota"] += 1
            refusal = web.Response(status=REJECTED, text=str(reason), headers=OURS)
            refusal.force_close()
            return refusal
        finally:
            del self._handling[task]
            self._busy.pop(request.protocol, None)

    async def _serve(
        self, request: web.BaseRequest, name: str, source: Address, party: bytes | str
    ) -> web.StreamResponse:
        assert self._on_request is not None
        inflow = Inflow(request.content, functools.partial(_explain, source), HANDLER_SILENCE_S)
        inflow.small_head_bytes = LARGE_HEAD_BYTES
        inflow.large_head = functools.partial(self._turns.large_head, party)
        try:
            reply = await self._on_request(Incoming(name, source, await inflow.head(), inflow))
        except (Rejection, BadFraming) as refusal:
            return web.Response(status=REJECTED, text=str(refusal)[:REASON_CHARACTERS], headers=OURS)
        except TooMany:
            raise
        except Exception as error:
            if not inflow.broken:  # otherwise the handler only noticed that the peer has left
                self._log.error("request_handler_failed", request=name, source=str(source), error=repr(error))
            failure = web.Response(status=500, text="the handler failed", headers=OURS)
            failure.force_close()
            return failure
        body = Outflow(reply.body)
        try:
            return await self._answer(request, reply, body)
        except (BodyFailed, OSError) as error:  # OSError: the peer has left, or takes nothing (TimeoutError)
            if isinstance(error, BodyFailed) and not inflow.broken:
                self._log.error("request_handler_failed", request=name, source=str(source), error=repr(error.error))
            # The answer has begun: breaking off is the only way to say that it is not complete.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the answer could not be completed") from error
        finally:
            await body.close()

    async def _answer(self, request: web.BaseRequest, reply: Reply, body: Outflow) -> web.StreamResponse:
        message = whole(reply.head, reply.body)
        if message is not None:
            return web.Response(body=message, headers=OURS, content_type="application/octet-stream")
        response = web.StreamResponse(headers=OURS)
        size = known_size(reply.body)
        if size is None:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(framed(reply.head)) + size
        writer = await response.prepare(request)
        assert writer is not None
        await pour(writer, request.transport, reply.head, body, silence_s=HANDLER_SILENCE_S)
        await response.write_eof()
        return response


def _source(request: web.BaseRequest) -> Address:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not peer:
        raise ConnectionResetError("the peer has left")
    source = Address.checked(peer[0], peer[1])
    proven = proven_id(request.transport)
    return NodeAddress.of(source, proven) if proven else source


def _explain(source: Address, error: Exception) -> TransportError:
    """What broke the stream of a request, as its handler gets it."""
    if isinstance(error, TimeoutError):
        return TransportError("timeout", source, f"was silent for {HANDLER_SILENCE_S:g} s")
    return TransportError("reset", source, "broke the stream")


async def _literal(host: str) -> str:
    """The address to listen on; a name (`localhost`) is resolved once."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return str(found[0][4][0])


def _silence() -> logging.Logger:
    """aiohttp reports every stranger's junk to its logger; we count on the peer's side instead."""
    logger = logging.Logger("p2pnode.http")
    logger.addHandler(logging.NullHandler())
    return logger
