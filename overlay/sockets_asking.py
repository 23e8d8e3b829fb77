"""The asking end of the real streams: one request and its answer, and every way it fails, by the name it has above.

The HTTP client is aiohttp's; its traps (total timeouts, decompression, large reads, writes that do not yield, idle
connections the peer has just closed) are listed in building-blocks.md section 1.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import aiohttp
from yarl import URL

from overlay.doors import Clock
from overlay.sockets_sealed import SILENCE, OtherEnd, SealedConnector, StreamSeal, other_end, without_tls
from overlay.sockets_streams import BadFraming, BodyFailed, Inflow, Outflow, framed, known_size, pour, whole
from overlay.transport import Address, Answer, Body, TransportError, id_behind

MARKER = "X-P2PNode"
PATH = "/p2p/"
OURS = {MARKER: "1"}
#: Status of an answer whose text is the reason of a `Rejection`.
REJECTED = 409
#: Longest reason that is sent or shown, in characters.
REASON_CHARACTERS = 2000
#: Idle connections: the client lets go first, so that it seldom writes into a connection the server just closed.
CLIENT_KEEP_ALIVE_S = 30.0
#: Errors of connecting that mean "nobody there", beside a refusal.
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)


class _Upload(aiohttp.Payload):
    """A request's message as aiohttp takes it. Moves the deadline while there is progress; remembers what the body
    itself raised, and when it is done with it."""

    def __init__(self, head: bytes, body: Body, deadline: asyncio.Timeout, timeout_s: float) -> None:
        super().__init__(body)
        size = known_size(body)
        self._size = None if size is None else len(framed(head)) + size
        self._head = head
        self._body = Outflow(body)
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._begun = False
        self._done = asyncio.Event()
        #: False once the answer is there, or will never be: reading it has its own bound.
        self.timed = True
        self.error: Exception | None = None

    @property
    def unsent(self) -> bool:
        return not self._done.is_set()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError(f"a body that flows has no text, neither {encoding} nor {errors}")

    async def write(self, writer: Any) -> None:
        """Called by aiohttp, in a task of its own that it cancels when the answer is complete or abandoned."""
        self._begun = True
        transport = getattr(writer, "transport", None)
        try:
            await pour(
                writer, transport, self._head, self._body, on_asking=self._our_turn, on_progress=self._peers_turn
            )
            self._peers_turn()
        except BodyFailed as failure:
            self.error = failure.error
            raise
        finally:
            try:
                await self._body.close()
            finally:
                self._done.set()

    def _our_turn(self) -> None:
        """The body is being produced: the silence is our own."""
        self._move_deadline(None)

    def _peers_turn(self) -> None:
        self._move_deadline(asyncio.get_running_loop().time() + self._timeout_s)

    def _move_deadline(self, when: float | None) -> None:
        if self.timed and not self._deadline.expired():
            self._deadline.reschedule(when)

    async def ended(self) -> None:
        """Wait until nothing touches the body any more; the writing task must have been cancelled or be done."""
        if self._begun:
            await self._done.wait()
        else:
            await self._body.close()


class StreamRequest:
    """The `async with` around one request."""

    def __init__(
        self,
        is_open: Callable[[], bool],
        session: aiohttp.ClientSession | None,
        seal: StreamSeal | None,
        asking: dict[StreamRequest, bool],
        to: Address,
        name: str,
        head: bytes,
        body: Body,
        timeout_s: float,
    ) -> None:
        self._is_open = is_open
        self._session = session
        self._seal = seal
        self._asking = asking
        self._to = to
        self._name = name
        self._head = head
        self._body = body
        self._timeout_s = timeout_s
        self._response: aiohttp.ClientResponse | None = None
        self._upload: _Upload | None = None

    async def __aenter__(self) -> Answer:
        if self._session is None or not self._is_open():
            await Outflow(self._body).close()
            raise TransportError("closed", self._to, "was not asked: our own transport is closed")
        self._asking[self] = True
        try:
            return await self._ask(self._session)
        except BaseException as error:
            await self._leave(failed=True)
            if isinstance(error, Exception):
                translated = self._translate(error)
                if translated is not error:
                    raise translated from error
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(failed=False)

    async def _ask(self, session: aiohttp.ClientSession) -> Answer:
        message = whole(self._head, self._body)
        end = OtherEnd(self._to, id_behind(self._to))
        other_end.set(end)
        stale = SimpleNamespace(reused=False)
        try:
            response = await self._post(session, message, stale)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # The peer had closed an idle connection of ours (it restarted): nothing was answered, so ask once more.
            replayable = isinstance(self._body, list | tuple)
            if not replayable or not stale.reused or isinstance(error, aiohttp.ClientConnectorError):
                raise
            if self._upload is not None:
                await self._upload.ended()
            response = await self._post(session, message, SimpleNamespace(reused=False))
        self._response = response
        if response.headers.get(MARKER) != "1":
            raise _foreign(self._to)
        if response.status == REJECTED:
            raise TransportError("rejected", self._to, await _reason(response))
        if response.status != 200:
            raise TransportError("reset", self._to, f"failed to handle {self._name!r} (status {response.status})")
        inflow = Inflow(response.content, self._translate)
        try:
            return Answer(await inflow.head(), inflow, end.found)
        except BadFraming as error:
            raise TransportError("foreign", self._to, f"answered, but {error}") from error

    async def _post(
        self, session: aiohttp.ClientSession, message: bytes | None, stale: SimpleNamespace
    ) -> aiohttp.ClientResponse:
        bounds = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s, ceil_threshold=1e9
        )
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                data: bytes | _Upload | None = message
                if message is None:
                    data = self._upload = _Upload(self._head, self._body, deadline, self._timeout_s)
                return await session.post(
                    _url(Address(*self._to), self._name, self._seal is not None),
                    data=data,
                    headers=OURS,
                    ssl=True if self._seal is None else self._seal.credentials.client,
                    timeout=bounds,
                    allow_redirects=False,
                    trace_request_ctx=stale,
                )
        finally:
            if self._upload is not None:
                self._upload.timed = False

    def abort(self) -> None:
        """Our own transport closes."""
        if self._response is not None:
            self._response.close()

    async def _leave(self, *, failed: bool) -> None:
        self._asking.pop(self, None)
        upload, response = self._upload, self._response
        if response is not None:
            unsent = upload is not None and upload.unsent
            if failed or unsent or not response.content.at_eof():
                # Half a message is left on the connection: it cannot be used again, and the peer learns that we left.
                response.close()
            else:
                response.release()
        if upload is not None:
            await upload.ended()

    def _translate(self, error: Exception) -> Exception:
        """What aiohttp raised, as the caller gets it; the body's own failure is the caller's to see."""
        if self._upload is not None and self._upload.error is not None:
            return self._upload.error
        if isinstance(error, TransportError):
            return error
        if not self._is_open():
            return TransportError("closed", self._to, "did not answer before our own transport closed")
        if isinstance(error, TimeoutError):
            return TransportError("timeout", self._to, f"did not answer for {self._timeout_s:g} s")
        if isinstance(error, aiohttp.ClientSSLError):
            return TransportError("foreign", self._to, without_tls(error))
        if isinstance(error, aiohttp.ClientConnectorError):
            return _unconnected(self._to, error, sealed=self._seal is not None)
        if isinstance(error, aiohttp.ClientResponseError):
            return _foreign(self._to)
        if isinstance(error, aiohttp.ClientError | OSError):
            silent = self._response is None and self._seal is None
            hint = "; a swarm with a key does so to those without" if silent else ""
            return TransportError("reset", self._to, f"broke the stream ({error or type(error).__name__}){hint}")
        return error


def _foreign(to: Address) -> TransportError:
    return TransportError("foreign", to, "answered, but not as a p2pnode")


def _unconnected(to: Address, error: aiohttp.ClientConnectorError, *, sealed: bool) -> TransportError:
    number = error.os_error.errno
    if number == errno.ECONNREFUSED:
        return TransportError("refused", to, "refused the connection: nobody listens there")
    if number == errno.ETIMEDOUT:
        return TransportError("timeout", to, "did not answer")
    if number in UNREACHABLE:
        return TransportError("refused", to, f"cannot be reached: {os.strerror(number)}")
    if sealed and (number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED) or number is None):
        return TransportError("reset", to, SILENCE)
    if number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return TransportError("reset", to, "broke the connection off")
    return TransportError("refused", to, f"cannot be reached: {error.os_error}")


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.content.read(REASON_CHARACTERS * 4)
    return text.decode("utf-8", "replace")[:REASON_CHARACTERS]


@functools.lru_cache(maxsize=4096)
def _url(to: Address, name: str, sealed: bool) -> URL:
    return URL.build(scheme="https" if sealed else "http", host=to.host, port=to.port, path=PATH + name)


def new_session(seal: StreamSeal | None, clock: Clock) -> aiohttp.ClientSession:
    """The client of one transport; with a seal it speaks TLS, to nodes of the swarm alone."""
    # No limit: to how many peers we talk at once is decided above, and a slow one must not hold up the others.
    pool: dict[str, Any] = {"limit": 0, "keepalive_timeout": CLIENT_KEEP_ALIVE_S, "use_dns_cache": False}
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(**pool) if seal is None else SealedConnector(seal, clock, **pool),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trace_configs=[trace],
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    context.trace_request_ctx.reused = True
