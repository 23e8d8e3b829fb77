"""The server end of streams: reads requests from connections, runs their handlers and sends the responses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable

from p2pnode.overlay.addresses import Address, NodeAddress, group_of
from p2pnode.overlay.environment import Log
from p2pnode.overlay.sealing.tls import NotANodeCertificate
from p2pnode.overlay.sockets.concurrency import ConnectionPlaces, HandlerLimiter
from p2pnode.overlay.sockets.connection import Connection, ConnectionClosed
from p2pnode.overlay.sockets.connection_pool import TIMER_S, proven_id
from p2pnode.overlay.sockets.framing import (
    MAGIC,
    READ_BYTES,
    REASON_CHARACTERS,
    BodyFailed,
    BodyReader,
    BodyWriter,
    Frame,
    HeadTooLong,
    Kind,
    NotOurFrame,
    beginning,
    known_size,
    read_frame,
    read_message,
    small_message,
    write_body,
)
from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.transport import (
    HANDLER_SILENCE_S,
    MAX_HEAD_BYTES,
    Request,
    RequestHandler,
    RequestRejected,
    TransportError,
    waits_for_none,
)

#: Idle connections are kept longer than clients keep them (`overlay.sockets.connection_pool.KEEP_ALIVE_S`).
KEEP_ALIVE_S = 90.0
#: The head of the first request of a connection is there by then: members send it as soon as they are connected.
FIRST_REQUEST_S = 10.0
#: After an early response the rest of the request is read and discarded for this long, or the response could be lost.
LINGER_S = 5.0
#: For a browser.
_TEXT = b"This port belongs to a p2pnode; its status page is on another one.\n"
_NOT_A_REQUEST = (
    b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(_TEXT), _TEXT)
)


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
        """`places`: connections kept at once (`overlay.sockets.concurrency`). `waits`: see `Transport.open`."""
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

    async def handle(self, connection: Connection, frame: Frame, *, is_last: bool) -> bool:
        """Handle one request; False if the connection cannot be used again. Raises `OSError`."""
        if frame.head_bytes > MAX_HEAD_BYTES:
            _send(connection, Kind.REJECTED, str(HeadTooLong(frame.head_bytes)).encode(), is_last=True)
            await _discard(connection)
            return False
        serving = self._connections.get(connection)
        source, peer = _source(connection) if serving is None else serving.source()
        self._places.begin(connection)
        try:
            async with self._limiter.handler(peer, waits=self._waits(frame.name)):
                head, body = await read_message(connection, frame, HANDLER_SILENCE_S)
                request = Request(frame.name, source, head, body, connection)
                reader = None
                if isinstance(body, BodyReader):
                    reader = body
                    reader.map_error = functools.partial(_transport_error, source)
                reusable = await self._answer(connection, request, reader, is_last=is_last)
        finally:
            self._places.end(connection)
        return await _read_to_end(reader, connection) and reusable

    async def _answer(
        self, connection: Connection, request: Request, reader: BodyReader | None, *, is_last: bool
    ) -> bool:
        """Run the handler and send its response; False if the connection cannot be used again."""
        try:
            response = await self._on_request(request)
        except RequestRejected as refusal:
            _send(connection, Kind.REJECTED, str(refusal)[:REASON_CHARACTERS].encode(), is_last=is_last)
            return not is_last
        except Exception as error:
            self._log_failure(request, reader, error)
            _send(connection, Kind.FAILED, b"", is_last=True)
            return False
        answer = small_message(Kind.OK, response.head, response.body, is_last=is_last)
        if answer is not None:
            connection.send(answer)
            return not is_last
        writer = BodyWriter(response.body)
        size_bytes = known_size(response.body)
        start = beginning(Kind.OK, response.head, size_bytes, is_last=is_last)
        try:
            await write_body(connection, start, writer, in_chunks=size_bytes is None, idle_timeout_s=HANDLER_SILENCE_S)
        except BodyFailed as error:
            # A body that comes from another node (a relay's) breaks off with its stream.
            if not isinstance(error.error, TransportError):
                self._log_failure(request, reader, error.error)
            # The response has begun: an abort is the only way to mark it as incomplete.
            connection.abort()
            return False
        finally:
            await writer.close()
        return not is_last

    def _log_failure(self, request: Request, reader: BodyReader | None, error: Exception) -> None:
        if reader is None or not reader.broken:  # otherwise the handler only reports that the stream broke
            self._log.error(
                "request_handler_failed", request=request.name, source=str(request.source), error=repr(error)
            )


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
            with contextlib.suppress(OSError, NotOurFrame, NotANodeCertificate, asyncio.CancelledError):
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
        # For the whole header: also bounds a peer that sends it slowly.
        self._limit(limit_s)
        await connection.arrival()
        if connection.unread and connection.buffered[0] != MAGIC[0]:
            await self._refuse()
            return False
        frame = await read_frame(connection)
        self._close_at_s = None
        if frame is None or frame.kind is not Kind.REQUEST:
            return False
        self.is_busy = self._has_served = True
        try:
            self.is_last = self.is_last or frame.is_last
            reusable = await self._server.handle(connection, frame, is_last=self.is_last)
            await connection.drain(HANDLER_SILENCE_S)
            return reusable and not self.is_last
        except TimeoutError:
            connection.abort()  # what is still buffered would keep a connection that is closed in order
            raise
        finally:
            self.is_busy = False

    async def _refuse(self) -> None:
        """Tell a browser what it has found; the timer bounds how long it may go on sending."""
        connection = self._connection
        if connection.peek(4) in (b"GET ", b"POST", b"HEAD"):
            connection.send(_NOT_A_REQUEST)
            await _discard(connection)


async def _read_to_end(reader: BodyReader | None, connection: Connection) -> bool:
    """Read and discard the rest of a request that was answered early; whether its end was found."""
    if reader is None or reader.is_at_end or connection.has_ended:
        return reader is None or reader.is_at_end
    await connection.drain(HANDLER_SILENCE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read():
                pass
    return reader.is_at_end


async def _discard(connection: Connection) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await connection.read(READ_BYTES):
                pass


def _send(connection: Connection, kind: Kind, head: bytes, *, is_last: bool) -> None:
    connection.send(beginning(kind, head, 0, is_last=is_last))


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
