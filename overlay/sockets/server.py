"""The serving end of the real streams: conversations, each one connection with one request after the other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter

from overlay.addresses import Address, NodeAddress, group_of, id_behind
from overlay.environment import Log
from overlay.sealing.tls import NotANodeCertificate
from overlay.sockets import http1 as http
from overlay.sockets.concurrency import LARGE_HEAD_BYTES, HandlerLimiter, TooManyRequests
from overlay.sockets.connection import Connection, ConnectionClosed
from overlay.sockets.connection_pool import proven_id
from overlay.sockets.framing import (
    BadFraming,
    BodyFailed,
    BodyReader,
    BodyWriter,
    chunk,
    framed,
    known_size,
    small_message,
    write_body,
)
from overlay.sockets.http1 import HttpBody, NotOurHttp, RequestHead
from overlay.transport import HANDLER_SILENCE_S, Request, RequestHandler, RequestRejected, Response, TransportError

#: Idle connections: longer than the asking end keeps them (`overlay.sockets.connection_pool.KEEP_ALIVE_S`).
KEEP_ALIVE_S = 90.0
#: After an early answer the rest of a request is read and thrown away for this long, so that the answer is not lost.
LINGER_S = 5.0
_ELSEWHERE = b"This port belongs to a p2pnode; its status page is on another one.\n"


class StreamServer:
    """`begin` is the protocol factory of the connections that come."""

    def __init__(self, on_request: RequestHandler, log: Log, counters: Counter[str]) -> None:
        self._on_request = on_request
        self._log = log
        self._counters = counters
        self._turns = HandlerLimiter()
        self._conversations: dict[Connection, _ServerConnection] = {}
        self._closed = False

    def begin(self) -> Connection:
        """A connection that is served from when it is there."""
        return Connection(self._begun, self._ended)

    def _begun(self, connection: Connection) -> None:
        if self._closed:  # it was accepted before the listener was closed
            connection.abort()
            return
        self._conversations[connection] = _ServerConnection(self, connection)

    def _ended(self, connection: Connection) -> None:
        conversation = self._conversations.pop(connection, None)
        if conversation is not None:
            conversation.left()

    def end_idle(self) -> None:
        """What open connections were admitted by is not valid any more: they end, at once or when what passes on them
        has passed."""
        for conversation in list(self._conversations.values()):
            conversation.end_soon()

    async def close(self, within_s: float) -> None:
        """End all conversations; their handlers are cancelled."""
        self._closed = True
        tasks = [conversation.task for conversation in self._conversations.values()]
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        for connection in list(self._conversations):
            connection.abort()

    # --- of one conversation ---------------------------------------------------------------------------------------

    async def serve(self, connection: Connection, head: RequestHead, body: HttpBody, *, is_last: bool) -> bool:
        """Answer one request; False where the connection cannot be used again. Raises `OSError`, `NotOurHttp`."""
        if not head.name:
            _send(connection, http.NOT_FOUND, _ELSEWHERE, kind="text/plain", is_last=True)
            return False
        source = _source(connection)
        party = id_behind(source) or group_of(source.host)
        try:
            async with self._turns.of(party):
                return await self._handle(connection, head, body, source, party, is_last=is_last)
        except TooManyRequests as reason:
            self._counters["streams_dropped_quota"] += 1
            _send(connection, http.REJECTED, str(reason).encode(), is_last=True)
            return False

    async def _handle(
        self,
        connection: Connection,
        head: RequestHead,
        body: HttpBody,
        source: Address,
        party: bytes | str,
        *,
        is_last: bool,
    ) -> bool:
        inflow = BodyReader(
            body,
            functools.partial(_explain, source),
            small_head_bytes=LARGE_HEAD_BYTES,
            large_head=functools.partial(self._turns.large_head, party),
        )
        try:
            reply = await self._on_request(Request(head.name, source, await inflow.head(), inflow))
        except (RequestRejected, BadFraming) as refusal:
            reason = str(refusal)[: http.REASON_CHARACTERS].encode()
            _send(connection, http.REJECTED, reason, kind="text/plain; charset=utf-8", is_last=is_last)
            return not is_last
        except TooManyRequests:
            raise
        except Exception as error:
            if not inflow.broken:  # otherwise the handler only noticed that the peer has left
                self._log.error("request_handler_failed", request=head.name, source=str(source), error=repr(error))
            _send(connection, http.FAILED, b"the handler failed", kind="text/plain", is_last=True)
            return False
        outflow = BodyWriter(reply.body)
        try:
            await _answer(connection, reply, outflow, is_last=is_last)
        except BodyFailed as error:
            if not inflow.broken:
                self._log.error(
                    "request_handler_failed", request=head.name, source=str(source), error=repr(error.error)
                )
            # The answer has begun: breaking off is the only way to say that it is not complete.
            connection.abort()
            return False
        finally:
            await outflow.close()
        return not is_last


class _ServerConnection:
    """One connection, and the task that serves it."""

    def __init__(self, server: StreamServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self.is_busy = False
        self.is_last = False
        self.task = asyncio.get_running_loop().create_task(self._run(), name="conversation")

    def left(self) -> None:
        """The connection is gone. Who waits on it hears so; a handler that waits for something else is cancelled."""
        if self.is_busy and not self._connection.is_awaited and self.task is not asyncio.current_task():
            self.task.cancel()

    def end_soon(self) -> None:
        """Close the connection now if it is idle, or else after the request under way."""
        self.is_last = True
        if not self.is_busy:
            self._connection.abort()

    async def _run(self) -> None:
        # Whatever the other side does ends its own connection, and is counted there: strangers send junk.
        with contextlib.suppress(OSError, NotOurHttp, NotANodeCertificate, asyncio.CancelledError):
            while await self._once():
                pass
        self._connection.close()

    async def _once(self) -> bool:
        """One request and its answer; False when it was the last."""
        connection = self._connection
        async with asyncio.timeout(KEEP_ALIVE_S):  # all of it: who sends a head drop by drop waits here no longer
            head = await http.read_request_head(connection)
        if head is None:
            return False
        self.is_busy = True
        try:
            self.is_last = self.is_last or head.is_last
            body = HttpBody(connection, head.size_bytes, HANDLER_SILENCE_S)
            goes_on = await self._server.serve(connection, head, body, is_last=self.is_last)
            await connection.drain(HANDLER_SILENCE_S)
            if not body.is_at_end and not connection.is_over:
                await _throw_away(body)
            return goes_on and body.is_at_end and not self.is_last
        finally:
            self.is_busy = False


async def _throw_away(body: HttpBody) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await body.read():
                pass


async def _answer(connection: Connection, reply: Response, body: BodyWriter, *, is_last: bool) -> None:
    message = small_message(reply.head, reply.body)
    if message is not None:
        _send(connection, http.OK, message, is_last=is_last)
        return
    size = known_size(reply.body)
    beginning = framed(reply.head)
    if size is None:
        beginning = chunk(beginning)
    else:
        size += len(beginning)
    beginning = http.answer_head(http.OK, size, is_last=is_last) + beginning
    await write_body(connection, beginning, body, in_chunks=size is None, silence_s=HANDLER_SILENCE_S)


def _send(
    connection: Connection, status: int, message: bytes, *, kind: str = "application/octet-stream", is_last: bool
) -> None:
    connection.write([http.answer_head(status, len(message), kind=kind, is_last=is_last) + message])


def _source(connection: Connection) -> Address:
    peer = connection.transport.get_extra_info("peername")
    if not peer:
        raise ConnectionClosed("the peer has left")
    source = Address.checked(peer[0], peer[1])
    proven = proven_id(connection)
    return NodeAddress.of(source, proven) if proven else source


def _explain(source: Address, error: Exception) -> Exception:
    """What broke the stream of a request, as its handler gets it."""
    if isinstance(error, TimeoutError):
        return TransportError("timeout", source, f"was silent for {HANDLER_SILENCE_S:g} s")
    return TransportError("reset", source, "broke the stream")
