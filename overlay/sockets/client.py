"""The asking end of the real streams: one request and its answer, and every way it fails, by the name it has above."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from overlay.addresses import Address
from overlay.environment import Clock
from overlay.sockets import http1 as http
from overlay.sockets.connection import Connection, ConnectionClosed
from overlay.sockets.connection_pool import ConnectionPool, PooledConnection, StreamSeal
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
from overlay.sockets.http1 import AnswerHead, HttpBody, NotOurHttp
from overlay.transport import Body, ReceivedResponse, TransportError


class _Upload:
    """A request's message on its way. Moves the deadline while there is progress; remembers what the body raised."""

    def __init__(self, head: bytes, body: Body, deadline: asyncio.Timeout, timeout_s: float) -> None:
        size = known_size(body)
        self.size_bytes = None if size is None else len(framed(head)) + size
        self._head = head
        self._body = BodyWriter(body)
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self._is_timed = True
        self.error: Exception | None = None

    def begin(self, connection: Connection, beginning: bytes) -> None:
        """Send the message after `beginning`."""
        self._task = asyncio.get_running_loop().create_task(self._send(connection, beginning), name="upload")

    @property
    def unsent(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _send(self, connection: Connection, beginning: bytes) -> None:
        in_chunks = self.size_bytes is None
        beginning += chunk(framed(self._head)) if in_chunks else framed(self._head)
        try:
            await write_body(
                connection,
                beginning,
                self._body,
                in_chunks=in_chunks,
                on_asking=self._our_turn,
                on_progress=self._peers_turn,
            )
            self._peers_turn()
        except BodyFailed as failure:
            self.error = failure.error
            connection.abort()
        except ConnectionClosed:
            pass  # who waits for the answer learns of it, after an answer that may have come before
        finally:
            await self._body.close()

    def _our_turn(self) -> None:
        """The body is being produced: the silence is our own."""
        self._move_deadline(None)

    def _peers_turn(self) -> None:
        self._move_deadline(asyncio.get_running_loop().time() + self._timeout_s)

    def _move_deadline(self, when: float | None) -> None:
        if self._is_timed and not self._deadline.expired():
            self._deadline.reschedule(when)

    def stop_timing(self) -> None:
        """Leave the deadline alone: the response has begun, or will never come, and reading it has its own bound."""
        self._is_timed = False

    async def end(self) -> None:
        """Stop sending; nothing touches the body any more."""
        if self._task is None:
            await self._body.close()
            return
        self._task.cancel()
        await asyncio.wait([self._task])  # not `await self._task`: our own cancellation must not be taken for its
        if not self._task.cancelled():
            self._task.result()


class StreamClient:
    """Sends requests over pooled connections. `is_open`: whether requests may be sent."""

    def __init__(self, seal: StreamSeal | None, clock: Clock, is_open: Callable[[], bool]) -> None:
        self.is_open = is_open
        self.is_sealed = seal is not None
        self.pool = ConnectionPool(seal, clock)
        #: Requests under way, in the order of their start.
        self.active: dict[StreamRequest, bool] = {}

    def request(self, to: Address, name: str, head: bytes, body: Body, timeout_s: float) -> StreamRequest:
        """See `Transport.request`."""
        return StreamRequest(self, to, name, head, body, timeout_s)

    def close(self) -> None:
        """Abort the requests under way and close every idle connection."""
        for request in list(self.active):
            request.abort()
        self.pool.close()


class StreamRequest:
    """The `async with` around one request."""

    def __init__(self, client: StreamClient, to: Address, name: str, head: bytes, body: Body, timeout_s: float) -> None:
        self._client = client
        self._to = to
        self._name = name
        self._head = head
        self._body = body
        self._timeout_s = timeout_s
        self._link: PooledConnection | None = None
        self._upload: _Upload | None = None
        self._answer: HttpBody | None = None
        self._is_last = False

    async def __aenter__(self) -> ReceivedResponse:
        if not self._client.is_open():
            await BodyWriter(self._body).close()
            raise TransportError("closed", self._to, "was not asked: our own transport is closed")
        self._client.active[self] = True
        try:
            return await self._ask(self._client.pool)
        except BaseException as error:
            await self._leave(failed=True)
            if isinstance(error, Exception):
                translated = self._translate(error)
                if translated is not error:
                    raise translated from error
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._leave(failed=False)

    async def _ask(self, pool: ConnectionPool) -> ReceivedResponse:
        self._link = pool.kept(self._to)
        try:
            head = await self._exchange(pool)
        except ConnectionClosed:
            # The peer had closed an idle connection of ours (it restarted): nothing was answered, so ask once more.
            stale = self._link
            replayable = isinstance(self._body, list | tuple)
            if stale is None or stale.is_new or not replayable or not self._client.is_open():
                raise
            if self._upload is not None:
                await self._upload.end()
            stale.connection.abort()
            self._link = None
            head = await self._exchange(pool)
        assert self._link is not None
        self._is_last = head.is_last
        if not head.is_ours:
            raise _foreign(self._to)
        body = HttpBody(self._link.connection, head.size_bytes, self._timeout_s)
        if head.status == http.REJECTED:
            raise TransportError("rejected", self._to, await _reason(body))
        if head.status != http.OK:
            raise TransportError("reset", self._to, f"failed to handle {self._name!r} (status {head.status})")
        inflow = BodyReader(body, self._translate)
        answer = ReceivedResponse(await inflow.head(), inflow, self._link.found)
        self._answer = body
        return answer

    async def _exchange(self, pool: ConnectionPool) -> AnswerHead:
        """Ask on the link, a new one if there is none, and wait for the head of the answer."""
        message = small_message(self._head, self._body)
        upload = None
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                if self._link is None:
                    self._link = await pool.new(self._to)
                connection = self._link.connection
                if message is not None:
                    connection.write([http.request_head(self._to, self._name, len(message)) + message])
                else:
                    upload = self._upload = _Upload(self._head, self._body, deadline, self._timeout_s)
                    upload.begin(connection, http.request_head(self._to, self._name, upload.size_bytes))
                return await http.read_answer_head(connection)
        finally:
            if upload is not None:
                upload.stop_timing()

    def abort(self) -> None:
        """Our own transport closes."""
        if self._link is not None:
            self._link.connection.abort()

    async def _leave(self, *, failed: bool) -> None:
        self._client.active.pop(self, None)
        link, upload = self._link, self._upload
        if link is not None:
            unsent = upload is not None and upload.unsent
            if failed or unsent or self._is_last or self._answer is None or not self._answer.is_at_end:
                # Half a message is left on the connection: it cannot be used again, and the peer learns that we left.
                link.connection.abort()
            else:
                self._client.pool.keep(self._to, link)
        if upload is not None:
            await upload.end()
        elif link is None:
            await BodyWriter(self._body).close()

    def _translate(self, error: Exception) -> Exception:
        """What the stream raised, as the caller gets it; the body's own failure is the caller's to see."""
        if self._upload is not None and self._upload.error is not None:
            return self._upload.error
        if isinstance(error, TransportError):
            return error
        if isinstance(error, BadFraming):
            return TransportError("foreign", self._to, f"answered, but {error}")
        if not self._client.is_open():
            return TransportError("closed", self._to, "did not answer before our own transport closed")
        if isinstance(error, TimeoutError):
            return TransportError("timeout", self._to, f"did not answer for {self._timeout_s:g} s")
        if isinstance(error, NotOurHttp):
            return _foreign(self._to)
        if isinstance(error, OSError):
            silent = self._answer is None and not self._client.is_sealed
            hint = "; a swarm with a key does so to those without" if silent else ""
            return TransportError("reset", self._to, f"broke the stream ({error or type(error).__name__}){hint}")
        return error


def _foreign(to: Address) -> TransportError:
    return TransportError("foreign", to, "answered, but not as a p2pnode")


async def _reason(body: HttpBody) -> str:
    text = bytearray()
    while len(text) < http.REASON_CHARACTERS * 4 and (data := await body.read()):
        text += data
    return text.decode("utf-8", "replace")[: http.REASON_CHARACTERS]
