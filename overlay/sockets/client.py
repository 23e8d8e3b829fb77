"""The client end of streams: sends a request, reads its response, and gives every failure a `FailureKind`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.sockets.connection import Connection, ConnectionClosed
from p2pnode.overlay.sockets.connection_pool import ConnectionPool, PooledConnection, StreamSeal
from p2pnode.overlay.sockets.framing import (
    REASON_CHARACTERS,
    BodyFailed,
    BodyReader,
    BodyWriter,
    Frame,
    HeadTooLong,
    Kind,
    NotOurFrame,
    WholeBody,
    beginning,
    known_size,
    read_frame,
    read_message,
    small_message,
    write_body,
)
from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.transport import Body, ReceivedResponse, SizedBody, TransportError


class _Upload:
    """Sends the message of one request, and keeps the body's error."""

    def __init__(self, name: bytes, head: bytes, body: Body) -> None:
        size_bytes = known_size(body)
        self._in_chunks = size_bytes is None
        self._beginning = beginning(Kind.REQUEST, head, size_bytes, name=name)
        self._body = BodyWriter(body)
        self._task: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    def start(self, connection: Connection) -> None:
        """Send the message."""
        self._task = asyncio.get_running_loop().create_task(self._send(connection), name="upload")

    @property
    def is_sending(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _send(self, connection: Connection) -> None:
        try:
            # Without a timeout of its own: the task that reads the response notices when nothing moves.
            await write_body(connection, self._beginning, self._body, in_chunks=self._in_chunks, pauses_timeouts=True)
        except BodyFailed as failure:
            self.error = failure.error
            connection.abort()
        except ConnectionClosed:
            pass  # the task that reads the response gets the error too, after a response that came first
        finally:
            await self._body.close()

    async def end(self) -> None:
        """Stop sending. The body is not used after this."""
        if self._task is None:
            await self._body.close()
            return
        self._task.cancel()
        # Not `await self._task`: that would mix up a cancellation of the caller with one of the task.
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()


class StreamClient:
    """Sends requests over pooled connections. `is_open`: whether requests may be sent."""

    def __init__(self, seal: StreamSeal | None, clock: Clock, is_open: Callable[[], bool], meter: UploadMeter) -> None:
        self.is_open = is_open
        self.is_sealed = seal is not None
        self.pool = ConnectionPool(seal, clock, meter)
        #: Requests in progress, in the order of their start.
        self.active: dict[StreamRequest, bool] = {}

    def close(self) -> None:
        """Abort the requests in progress and close the idle connections."""
        for request in list(self.active):
            request.abort()
        self.pool.close()


class StreamRequest:
    """One request, as an asynchronous context manager; see `Transport.request`."""

    def __init__(
        self,
        client: StreamClient,
        to: Address,
        name: str,
        head: bytes,
        body: Body,
        timeout_s: float,
        *,
        keep: bool = True,
    ) -> None:
        self._client = client
        self._to = to
        self._name = name.encode()
        self._head = head
        self._body = body
        self._timeout_s = timeout_s
        self._keep = keep
        self._pooled: PooledConnection | None = None
        #: What had moved on the connection before this request began to use it.
        self._before_bytes = 0
        self._upload: _Upload | None = None
        #: The body of the response, once its head is there.
        self._response_body: BodyReader | WholeBody | None = None
        self._is_last = False
        self._waited_s = 0.0

    async def __aenter__(self) -> ReceivedResponse:
        if not self._client.is_open():
            await BodyWriter(self._body).close()
            raise TransportError("closed", self._to, "was not asked: the transport of this node is closed")
        self._client.active[self] = True
        try:
            return await self._obtain_response(self._client.pool)
        except BaseException as error:
            await self._leave(failed=True)
            if isinstance(error, Exception):
                mapped = self._map_error(error)
                if mapped is not error:
                    raise mapped from error
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._leave(failed=False)

    async def _obtain_response(self, pool: ConnectionPool) -> ReceivedResponse:
        self._pooled = pool.take_idle(self._to)
        try:
            frame = await self._exchange(pool)
        except ConnectionClosed:
            # The peer closed an idle connection, for example because it restarted. Try once more on a new one.
            stale = self._pooled
            replayable = isinstance(self._body, list | tuple)
            if stale is None or stale.is_new or not replayable or not self._client.is_open():
                raise
            if self._upload is not None:
                await self._upload.end()
            stale.connection.abort()
            self._pooled = None
            frame = await self._exchange(pool)
        assert self._pooled is not None
        self._is_last = frame.is_last
        head, body = await read_message(self._pooled.connection, frame, self._timeout_s)
        if frame.kind is Kind.REJECTED:
            raise TransportError("rejected", self._to, head.decode("utf-8", "replace")[:REASON_CHARACTERS])
        if frame.kind is not Kind.OK:
            raise TransportError("reset", self._to, f"failed to handle {self._name.decode()!r}")
        self._response_body = body
        if isinstance(body, BodyReader):
            body.map_error = self._map_error
        return ReceivedResponse(head, body, self._pooled.node_id, self._waited_s)

    async def _exchange(self, pool: ConnectionPool) -> Frame:
        """Send the request on `_pooled`, or on a new connection, and wait for the beginning of the response."""
        message = small_message(Kind.REQUEST, self._head, self._body, name=self._name)
        if self._pooled is None:
            async with asyncio.timeout(self._timeout_s):
                self._pooled = await pool.connect(self._to)
        connection = self._pooled.connection
        self._before_bytes = connection.moved_bytes() if self._pooled.is_new else connection.settled_bytes()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if message is not None:
            connection.send(message)
        else:
            if isinstance(self._body, SizedBody):
                sent, before_bytes = connection.sent, connection.sent.acknowledged()
                self._body.track(lambda: sent.acknowledged() - before_bytes)
            upload = self._upload = _Upload(self._name, self._head, self._body)
            upload.start(connection)
        frame = await read_frame(connection, self._timeout_s)
        if frame is None:
            raise ConnectionClosed("the other side closed it")
        self._waited_s = loop.time() - max(began_s, connection.moved_s)
        return frame

    def moved_bytes(self) -> int:
        """See `RequestStream`: on the connection since this request uses it, also before the response.

        What the connection carried before shows nothing: its peer may have died since.
        """
        return 0 if self._pooled is None else max(0, self._pooled.connection.moved_bytes() - self._before_bytes)

    def abort(self) -> None:
        """Close the connection, because this node's transport closes."""
        if self._pooled is not None:
            self._pooled.connection.abort()

    async def _leave(self, *, failed: bool) -> None:
        self._client.active.pop(self, None)
        pooled, upload = self._pooled, self._upload
        if pooled is not None:
            is_sent = upload is None or not upload.is_sending
            is_read = self._response_body is not None and self._response_body.is_at_end
            if failed or self._is_last or not is_sent or not is_read:
                # A message is incomplete, so the connection cannot be used again. The peer notices that it was aborted.
                pooled.connection.abort()
            elif self._keep or not pooled.is_new:
                self._client.pool.release(self._to, pooled)
            else:
                pooled.connection.close()
        if upload is not None:
            await upload.end()
        elif pooled is None:
            await BodyWriter(self._body).close()

    def _map_error(self, error: Exception) -> Exception:
        """The error for the caller. An error of the caller's own body is passed on as it is."""
        if self._upload is not None and self._upload.error is not None:
            return self._upload.error
        if isinstance(error, TransportError):
            return error
        if isinstance(error, HeadTooLong):
            return TransportError("foreign", self._to, f"answered, but {error}")
        if not self._client.is_open():
            return TransportError("closed", self._to, "did not answer before the transport of this node closed")
        if isinstance(error, TimeoutError):
            return TransportError("timeout", self._to, f"did not answer for {self._timeout_s:g} s")
        if isinstance(error, NotOurFrame):
            return TransportError("foreign", self._to, "answered, but not as a p2pnode")
        if isinstance(error, OSError):
            silent = self._response_body is None and not self._client.is_sealed
            hint = "; a swarm with a key does so to those without" if silent else ""
            return TransportError("reset", self._to, f"broke the stream ({error or type(error).__name__}){hint}")
        return error
