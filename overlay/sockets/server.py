"""The server end of HTTP/1.1 streams: reads requests from connections, runs their handlers and sends the responses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable

from p2pnode.overlay.addresses import Address, NodeAddress, group_of
from p2pnode.overlay.environment import Log
from p2pnode.overlay.sealing.tls import NotANodeCertificate
from p2pnode.overlay.sockets import http1 as http
from p2pnode.overlay.sockets import small_messages
from p2pnode.overlay.sockets.concurrency import HandlerLimiter
from p2pnode.overlay.sockets.connection import GATHERED_BYTES, Connection, ConnectionClosed
from p2pnode.overlay.sockets.connection_places import ConnectionPlaces
from p2pnode.overlay.sockets.connection_pool import TIMER_S, proven_id
from p2pnode.overlay.sockets.framing import (
    BadFraming,
    BodyFailed,
    BodyReader,
    BodyWriter,
    WholeMessage,
    chunk,
    framed,
    known_size,
    small_message,
    take_whole,
    write_body,
)
from p2pnode.overlay.sockets.http1 import HttpBody, NotOurHttp, RequestHead
from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.transport import (
    HANDLER_SILENCE_S,
    Request,
    RequestHandler,
    RequestRejected,
    Response,
    TransportError,
    waits_for_none,
)

#: Idle connections are kept longer than clients keep them (`overlay.sockets.connection_pool.KEEP_ALIVE_S`).
KEEP_ALIVE_S = 90.0
#: The head of the first request of a connection is there by then: members send it as soon as they are connected.
FIRST_REQUEST_S = 10.0
#: After an early response the rest of the request is read and discarded for this long, or the response could be lost.
LINGER_S = 5.0
_NOT_A_REQUEST = b"This port belongs to a p2pnode; its status page is on another one.\n"


class StreamServer:
    """`new_connection` is the protocol factory for accepted connections."""

    def __init__(
        self,
        on_request: RequestHandler,
        log: Log,
        counters: Counter[str],
        meter: UploadMeter,
        places: int,
        waits: Callable[[str], bool] = waits_for_none,
    ) -> None:
        """`places`: connections kept at once (`overlay.sockets.connection_places`). `waits`: see `Transport.open`."""
        self._waits = waits
        self._meter = meter
        self._places: ConnectionPlaces[Connection] = ConnectionPlaces(places)
        self._on_request = on_request
        self._log = log
        self._counters = counters
        self._limiter = HandlerLimiter()
        self._connections: dict[Connection, _ServerConnection] = {}
        self._closed = False

    def new_connection(self) -> Connection:
        """A connection that is served as soon as it is made."""
        return Connection(self._on_open, self._on_close)

    def _on_open(self, connection: Connection) -> None:
        if self._closed:  # accepted before the listener was closed
            connection.abort()
            return
        self._meter.opened(connection)
        self._connections[connection] = _ServerConnection(self, connection)
        peer = connection.transport.get_extra_info("peername")
        if (crowded := self._places.enter(connection, group_of(peer[0]) if peer else "")) is not None:
            self._counters["streams_dropped_crowded"] += 1
            crowded.abort()

    def _on_close(self, connection: Connection) -> None:
        self._meter.closed(connection)
        self._places.leave(connection)
        serving = self._connections.pop(connection, None)
        if serving is not None:
            serving.on_close()

    def end_idle(self) -> None:
        """Close every connection: now if it is idle, or after the request in progress."""
        for serving in list(self._connections.values()):
            serving.end_soon()

    async def close(self, within_s: float) -> None:
        """Close all connections and cancel their handlers."""
        self._closed = True
        tasks = [serving.task for serving in self._connections.values()]
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        for connection in list(self._connections):
            connection.abort()

    # --- one request ----------------------------------------------------------------------------------------------

    async def handle(
        self, connection: Connection, head: RequestHead, message: WholeMessage | HttpBody, *, is_last: bool
    ) -> bool:
        """Handle one request; False if the connection cannot be used again. Raises `OSError`, `NotOurHttp`."""
        if not head.name:
            _send(connection, http.NOT_FOUND, _NOT_A_REQUEST, kind="text/plain", is_last=True)
            return False
        serving = self._connections.get(connection)
        source, peer = _source(connection) if serving is None else serving.source()
        self._places.begin(connection)
        try:
            async with self._limiter.handler(peer, waits=self._waits(head.name)):
                return await self._run_handler(connection, head, message, source, is_last=is_last)
        finally:
            self._places.end(connection)

    async def _run_handler(
        self,
        connection: Connection,
        head: RequestHead,
        message: WholeMessage | HttpBody,
        source: Address,
        *,
        is_last: bool,
    ) -> bool:
        reader: BodyReader | None = None
        if isinstance(message, HttpBody):
            message = await _gathered(connection, head.size_bytes, message)
        try:
            if not isinstance(message, HttpBody):
                request = Request(head.name, source, *message, connection)
            else:
                reader = BodyReader(message, functools.partial(_transport_error, source))
                request = Request(head.name, source, await reader.head(), reader, connection)
            response = await self._on_request(request)
        except (RequestRejected, BadFraming) as refusal:
            reason = str(refusal)[: http.REASON_CHARACTERS].encode()
            _send(connection, http.REJECTED, reason, kind="text/plain; charset=utf-8", is_last=is_last)
            return not is_last
        except Exception as error:
            if reader is None or not reader.broken:  # otherwise the handler only reports that the stream broke
                self._log.error("request_handler_failed", request=head.name, source=str(source), error=repr(error))
            _send(connection, http.FAILED, b"the handler failed", kind="text/plain", is_last=True)
            return False
        answer = small_message(response.head, response.body)
        if answer is not None:
            if is_last:
                _send(connection, http.OK, answer, is_last=True)
            else:
                connection.send(small_messages.response(answer))
            return not is_last
        writer = BodyWriter(response.body)
        try:
            await _respond(connection, response, writer, is_last=is_last)
        except BodyFailed as error:
            # A body that comes from another node (a relay's) breaks off with its stream.
            if not isinstance(error.error, TransportError) and (reader is None or not reader.broken):
                self._log.error(
                    "request_handler_failed", request=head.name, source=str(source), error=repr(error.error)
                )
            # The response has begun: an abort is the only way to mark it as incomplete.
            connection.abort()
            return False
        finally:
            await writer.close()
        return not is_last


class _ServerConnection:
    """One connection, and the task that serves it."""

    def __init__(self, server: StreamServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self.is_busy = False
        self._has_served = False
        self.is_last = False
        self._source: tuple[Address, bytes | str] | None = None
        self._loop = asyncio.get_running_loop()
        #: Until when the next request must have come; None while one is served. One timer for all of them.
        self._close_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self.task = self._loop.create_task(self._run(), name="connection")

    def source(self) -> tuple[Address, bytes | str]:
        """Where the peer sends from, with its proven id, and whom its requests count for. Raises `ConnectionClosed`."""
        if self._source is None:
            self._source = _source(self._connection)
        return self._source

    def on_close(self) -> None:
        """Cancel a handler that waits for something else; one that waits on the connection gets an error from it."""
        if self.is_busy and not self._connection.has_waiter and self.task is not asyncio.current_task():
            self.task.cancel()

    def end_soon(self) -> None:
        """Close the connection now if it is idle, or after the request in progress."""
        self.is_last = True
        if not self.is_busy:
            self._connection.abort()

    async def _run(self) -> None:
        # Invalid input from a peer ends only its own connection.
        try:
            with contextlib.suppress(OSError, NotOurHttp, NotANodeCertificate, asyncio.CancelledError):
                while await self._once():
                    pass
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._connection.close()

    def _limit(self, seconds: float) -> None:
        """Close the connection unless the head of a request has come by then."""
        close_at_s = self._close_at_s = self._loop.time() + seconds
        if self._timer is None or self._due_s > close_at_s:
            self._set_timer(close_at_s)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = at_s
        self._timer = self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._close_at_s is None:
            return
        if self._close_at_s > self._loop.time() + TIMER_S:
            self._set_timer(self._close_at_s)
        else:
            self._connection.close()

    async def _once(self) -> bool:
        """Serve one request; False if it was the last."""
        connection = self._connection
        limit_s = KEEP_ALIVE_S if self._has_served else FIRST_REQUEST_S
        # For the whole head: also bounds a peer that sends it slowly.
        self._limit(limit_s)
        await connection.arrival()
        taken = small_messages.take_request(connection.buffered)
        head, whole = taken if taken is not None else (await http.read_request_head(connection), None)
        self._close_at_s = None
        if head is None:
            return False
        self.is_busy = self._has_served = True
        try:
            self.is_last = self.is_last or head.is_last
            if whole is not None:
                reusable = await self._server.handle(connection, head, whole, is_last=self.is_last)
                await connection.drain(HANDLER_SILENCE_S)
                return reusable and not self.is_last
            body = HttpBody(connection, head.size_bytes, HANDLER_SILENCE_S)
            reusable = await self._server.handle(connection, head, body, is_last=self.is_last)
            await connection.drain(HANDLER_SILENCE_S)
            if not body.is_at_end and not connection.has_ended:
                await _discard(body)
            return reusable and body.is_at_end and not self.is_last
        except TimeoutError:
            connection.abort()  # what is still buffered would keep a connection that is closed in order
            raise
        finally:
            self.is_busy = False


async def _gathered(connection: Connection, size_bytes: int | None, body: HttpBody) -> WholeMessage | HttpBody:
    """A message that arrives in pieces, as a whole if it is small. Raises `TimeoutError`."""
    if size_bytes is None or size_bytes > GATHERED_BYTES:
        return body
    await connection.gather(size_bytes, HANDLER_SILENCE_S)
    if (whole := take_whole(connection, size_bytes)) is None:
        return body
    body.is_at_end = True
    return whole


async def _discard(body: HttpBody) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await body.read():
                pass


async def _respond(connection: Connection, response: Response, body: BodyWriter, *, is_last: bool) -> None:
    size = known_size(response.body)
    beginning = framed(response.head)
    if size is None:
        beginning = chunk(beginning)
    else:
        size += len(beginning)
    beginning = http.response_head(http.OK, size, is_last=is_last) + beginning
    await write_body(connection, beginning, body, in_chunks=size is None, idle_timeout_s=HANDLER_SILENCE_S)


def _send(
    connection: Connection, status: int, message: bytes, *, kind: str = "application/octet-stream", is_last: bool
) -> None:
    connection.write([http.response_head(status, len(message), kind=kind, is_last=is_last) + message])


def _source(connection: Connection) -> tuple[Address, bytes | str]:
    peer = connection.transport.get_extra_info("peername")
    if not peer:
        raise ConnectionClosed("the peer has closed the connection")
    source = Address.checked(peer[0], peer[1])
    proven = proven_id(connection)
    return NodeAddress.of(source, proven) if proven else source, proven or group_of(source.host)


def _transport_error(source: Address, error: Exception) -> Exception:
    """The error for a handler whose request stream broke."""
    if isinstance(error, TimeoutError):
        return TransportError("timeout", source, f"was silent for {HANDLER_SILENCE_S:g} s")
    return TransportError("reset", source, "broke the stream")
