"""The real door: UDP datagrams, and requests as HTTP/1.1 over TCP on the same port number; in a closed swarm over TLS.

`POST /p2p/{name}`, both ways a length, a head and a raw body (`overlay.sockets_streams`), both ways with the header
`X-P2PNode: 1`: whoever answers without it is not one of us, and a browser cannot be made to send it. Decides nothing
about requests: unknown names are the handler's business. The only module of the overlay that knows aiohttp; its traps
(total timeouts, decompression, large reads, writes that do not yield) are listed in building-blocks.md section 1.

With a `StreamSeal` both sides show certificates (TLS 1.3), who is behind a connection is known before a byte of a
request passes, and strangers do not get as far as TLS (`overlay.sockets_admission`).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from overlay.admission import Admission
from overlay.credentials import Credentials, NoNode, id_of_certificate
from overlay.doors import Clock, Log
from overlay.ids import short
from overlay.sealing import CLOCK_BOUND_S, MAX_SEALED_BYTES
from overlay.sockets_admission import Threshold
from overlay.sockets_binding import BACKLOG, DatagramSocket, bind_pair
from overlay.sockets_streams import BadFraming, BodyFailed, Inflow, Outflow, framed, known_size, pour, whole
from overlay.transport import (
    HANDLER_SILENCE_S,
    MAX_DATAGRAM_BYTES,
    MAX_HEAD_BYTES,
    Address,
    Answer,
    Body,
    DatagramHandler,
    Incoming,
    NodeAddress,
    Rejection,
    Reply,
    RequestHandler,
    TransportError,
    id_behind,
)

MARKER = "X-P2PNode"
PATH = "/p2p/"
OURS = {MARKER: "1"}
#: Status of an answer whose text is the reason of a `Rejection`.
REJECTED = 409
#: Longest reason that is sent or shown, in characters.
REASON_CHARACTERS = 2000
#: Requests handled at once; more wait their turn, their senders' patience bounds the queue.
HANDLERS_AT_ONCE = 256
#: Idle connections: the client lets go first, so that it seldom writes into a connection the server just closed.
CLIENT_KEEP_ALIVE_S = 30.0
SERVER_KEEP_ALIVE_S = 90.0
#: After an early answer the rest of a request is read and thrown away for this long, so that the answer is not lost.
LINGER_S = 5.0
#: `close` waits this long for cancelled handlers and requests.
CLOSE_S = 0.4
#: Errors of connecting that mean "nobody there", beside a refusal.
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)


#: TLS handshakes at once, and the longest one; only members come this far.
HANDSHAKES_AT_ONCE = 64
MOST_HANDSHAKES = 1024
HANDSHAKE_S = 10.0


@dataclass(slots=True)
class StreamSeal:
    """What makes the streams of a closed swarm: who may begin, and the contexts of both sides."""

    admission: Admission
    credentials: Credentials


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
        self._turns = asyncio.Semaphore(HANDLERS_AT_ONCE)
        self._handling: dict[asyncio.Task[Any], bool] = {}
        self._asking: dict[_Request, bool] = {}
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
        self._session = _session(self._seal, self._clock)
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

    def request(self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float) -> _Request:
        """See `Transport.request`."""
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a head of {len(head)} bytes: at most {MAX_HEAD_BYTES} are accepted")
        return _Request(self, self._session, self._seal, self._asking, to, name, head, body, timeout_s)

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
            async with self._turns:
                return await self._serve(request, request.path[len(PATH) :])
        finally:
            del self._handling[task]
            self._busy.pop(request.protocol, None)

    async def _serve(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        assert self._on_request is not None
        source = _source(request)
        inflow = Inflow(request.content, functools.partial(_explain, source), HANDLER_SILENCE_S)
        try:
            reply = await self._on_request(Incoming(name, source, await inflow.head(), inflow))
        except (Rejection, BadFraming) as refusal:
            return web.Response(status=REJECTED, text=str(refusal)[:REASON_CHARACTERS], headers=OURS)
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
    proven = _proven_id(request.transport)
    return NodeAddress.of(source, proven) if proven else source


def _proven_id(transport: asyncio.BaseTransport | None) -> bytes:
    """Who is at the other end, by its certificate; empty where there is none. Raises `NoNode`."""
    tls = transport.get_extra_info("ssl_object") if transport is not None else None
    certificate = tls.getpeercert(True) if tls is not None else None
    return id_of_certificate(certificate) if certificate else b""


def _explain(source: Address, error: Exception) -> TransportError:
    """What broke the stream of a request, as its handler gets it."""
    if isinstance(error, TimeoutError):
        return TransportError("timeout", source, f"was silent for {HANDLER_SILENCE_S:g} s")
    return TransportError("reset", source, "broke the stream")


# --- asking -----------------------------------------------------------------------------------------------------


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


class _Request:
    """The `async with` around one request."""

    def __init__(
        self,
        transport: SocketTransport,
        session: aiohttp.ClientSession | None,
        seal: StreamSeal | None,
        asking: dict[_Request, bool],
        to: Address,
        name: str,
        head: bytes,
        body: Body,
        timeout_s: float,
    ) -> None:
        self._transport = transport
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
        if self._session is None or not self._transport.is_open:
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
        other_end = _OtherEnd(self._to, id_behind(self._to))
        _other_end.set(other_end)
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
            return Answer(await inflow.head(), inflow, other_end.found)
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
        if not self._transport.is_open:
            return TransportError("closed", self._to, "did not answer before our own transport closed")
        if isinstance(error, TimeoutError):
            return TransportError("timeout", self._to, f"did not answer for {self._timeout_s:g} s")
        if isinstance(error, aiohttp.ClientSSLError):
            return TransportError("foreign", self._to, _without_tls(error))
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


#: What silence may mean, to one who has a key.
_SILENCE = (
    "closed the connection without a word: has it the same swarm key and run, "
    f"and do both clocks agree to {CLOCK_BOUND_S:g} s?"
)


def _without_tls(error: aiohttp.ClientSSLError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "has no certificate of this swarm: another key, or another run"
    return "does not speak TLS as a node of this swarm does: it may belong to an open swarm, and this node's has a key"


def _unconnected(to: Address, error: aiohttp.ClientConnectorError, *, sealed: bool) -> TransportError:
    number = error.os_error.errno
    if number == errno.ECONNREFUSED:
        return TransportError("refused", to, "refused the connection: nobody listens there")
    if number == errno.ETIMEDOUT:
        return TransportError("timeout", to, "did not answer")
    if number in UNREACHABLE:
        return TransportError("refused", to, f"cannot be reached: {os.strerror(number)}")
    if sealed and (number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED) or number is None):
        return TransportError("reset", to, _SILENCE)
    if number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return TransportError("reset", to, "broke the connection off")
    return TransportError("refused", to, f"cannot be reached: {error.os_error}")


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.content.read(REASON_CHARACTERS * 4)
    return text.decode("utf-8", "replace")[:REASON_CHARACTERS]


@functools.lru_cache(maxsize=4096)
def _url(to: Address, name: str, sealed: bool) -> URL:
    return URL.build(scheme="https" if sealed else "http", host=to.host, port=to.port, path=PATH + name)


@dataclass(slots=True)
class _OtherEnd:
    """Who a request is for, and who was found there."""

    address: Address
    expected: bytes
    found: bytes = b""


#: The one of the request that this task is making: a connector sees nothing of its requests but their URL.
_other_end: ContextVar[_OtherEnd] = ContextVar("other_end")


class _SealedConnector(aiohttp.TCPConnector):
    """Shows a ticket on every new connection, and lets a request pass only to the node it is for.

    The pool is keyed by host and port, so connections that are used again are looked at too.
    """

    def __init__(self, seal: StreamSeal, clock: Clock, **settings: Any) -> None:
        super().__init__(**settings)
        self._seal = seal
        self._clock = clock

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection = await super().connect(req, traces, timeout)
        other_end = _other_end.get()
        try:
            other_end.found = _proven_id(connection.transport)
        except NoNode as error:
            connection.close()
            raise TransportError("foreign", other_end.address, f"has no node's certificate: {error}") from error
        if other_end.expected and other_end.found != other_end.expected:
            connection.close()
            detail = f"is {short(other_end.found)}, we asked for {short(other_end.expected)}"
            raise TransportError("rejected", other_end.address, detail)
        return connection

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        # Only while connecting: as part of the request it would be part of the pool's key, and no two are the same.
        req.server_hostname = self._seal.admission.ticket(_other_end.get().expected, self._clock.wall())
        try:
            return await super()._create_connection(req, traces, timeout)
        finally:
            req.server_hostname = None


def _session(seal: StreamSeal | None, clock: Clock) -> aiohttp.ClientSession:
    # No limit: to how many peers we talk at once is decided above, and a slow one must not hold up the others.
    pool = {"limit": 0, "keepalive_timeout": CLIENT_KEEP_ALIVE_S, "use_dns_cache": False}
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=(
            aiohttp.TCPConnector(**pool) if seal is None else _SealedConnector(seal, clock, **pool)  # type: ignore[arg-type]
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trace_configs=[trace],
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    context.trace_request_ctx.reused = True


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
