"""Connections to other nodes: opens new ones and keeps idle ones for reuse.

In a closed swarm a connection sends an admission ticket as its TLS server name. The node id of the peer is read from
its certificate before any byte of a request is sent.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from dataclasses import dataclass

from p2pnode.overlay.addresses import Address, id_behind
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.ids import short
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.tickets import TicketVerifier
from p2pnode.overlay.sealing.tls import Credentials, NotANodeCertificate, id_of_certificate
from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.transport import TransportError

#: Idle connections are closed after this, before the server does, so a request rarely meets a closed connection.
KEEP_ALIVE_S = 30.0
#: Timers fire a little early on some loops.
TIMER_S = 0.01
#: Errors of connecting that mean an unreachable host, beside ECONNREFUSED.
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)
_RESET = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
#: The likely causes, for the operator of a node that has a swarm key.
CLOSED_WITHOUT_RESPONSE = (
    "closed the connection without an answer: has it the same swarm key and run, "
    f"and do both clocks agree to {CLOCK_BOUND_S:g} s?"
)


@dataclass(slots=True)
class StreamSeal:
    """What the streams of a closed swarm need: admission tickets, and the TLS contexts of both ends."""

    tickets: TicketVerifier
    credentials: Credentials

    def use(self, credentials: Credentials) -> None:
        """New connections use these contexts."""
        self.credentials = credentials


def proven_id(connection: Connection) -> bytes:
    """The node id in the peer's certificate; empty without TLS. Raises `NotANodeCertificate`."""
    tls = connection.transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert(True) if tls is not None else None
    return id_of_certificate(certificate) if certificate else b""


class PooledConnection:
    """A connection and the proven id of its peer. `is_new`: no request has been sent on it yet. `idle_s`: since when it
    is idle, in seconds of the loop."""

    __slots__ = ("connection", "context", "idle_s", "is_new", "node_id")

    def __init__(self, connection: Connection, context: ssl.SSLContext | None, node_id: bytes) -> None:
        self.connection = connection
        self.context = context
        self.node_id = node_id
        self.is_new = True
        self.idle_s = 0.0


class ConnectionPool:
    """Has no limit: there are as many connections to a node as concurrent requests, which the caller limits."""

    def __init__(self, seal: StreamSeal | None, clock: Clock, meter: UploadMeter) -> None:
        self._meter = meter
        self._seal = seal
        self._clock = clock
        self._idle: dict[Address, list[PooledConnection]] = {}
        self._closed = False
        #: Closes what has been idle for too long. One for all: a request that uses a connection again costs no timer.
        self._timer: asyncio.TimerHandle | None = None

    def take_idle(self, to: Address) -> PooledConnection | None:
        """An open connection that was used before. Raises `TransportError` if its peer has another id than `to`."""
        while idle := self._idle.get(to):  # an empty list stays until the next `_expire`
            pooled = idle.pop()
            if pooled.connection.has_ended or pooled.connection.unread or pooled.context is not self._context():
                pooled.connection.abort()
                continue
            if self._seal is not None:
                self._check(pooled, to)
            return pooled
        return None

    async def connect(self, to: Address) -> PooledConnection:
        """Connect. Raises `TransportError`; the caller sets the timeout."""
        context, ticket = self._context(), None
        if self._seal is not None:
            ticket = self._seal.tickets.make_ticket(id_behind(to), self._clock.wall())
        connection = Connection(self._meter.opened, self._meter.closed)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                to.host,
                to.port,
                ssl=context,
                server_hostname=ticket,
            )
        except OSError as error:
            raise _connect_error(to, error, sealed=self._seal is not None) from error
        except BaseException:
            # uvloop closes a connection that was made before the caller was cancelled, and does not say so.
            self._meter.closed(connection)
            raise
        try:
            pooled = PooledConnection(connection, context, proven_id(connection))
        except NotANodeCertificate as error:
            connection.abort()
            raise TransportError("foreign", to, f"presented no certificate of a node: {error}") from error
        self._check(pooled, to)
        return pooled

    def release(self, to: Address, pooled: PooledConnection) -> None:
        """Take back a connection whose request and response are complete."""
        if self._closed or pooled.connection.has_ended:
            pooled.connection.abort()
            return
        pooled.is_new = False
        loop = asyncio.get_running_loop()
        pooled.idle_s = loop.time()
        idle = self._idle.get(to)
        if idle is None:
            idle = self._idle[Address(*to)] = []
        idle.append(pooled)
        if self._timer is None:
            self._timer = loop.call_at(pooled.idle_s + KEEP_ALIVE_S, self._expire)

    def _expire(self) -> None:
        """Close what has been idle for `KEEP_ALIVE_S`, and come back for the next."""
        loop, self._timer = asyncio.get_running_loop(), None
        now_s, next_s = loop.time() + TIMER_S, float("inf")
        for to, idle in list(self._idle.items()):
            kept = []
            for pooled in idle:
                if pooled.idle_s + KEEP_ALIVE_S > now_s:
                    kept.append(pooled)
                else:
                    pooled.connection.close()
            if kept:
                self._idle[to] = kept
                next_s = min(next_s, kept[0].idle_s + KEEP_ALIVE_S)
            else:
                del self._idle[to]
        if self._idle:
            self._timer = loop.call_at(next_s, self._expire)

    def close(self) -> None:
        """Close the idle connections now, and the others when they are released."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for idle in self._idle.values():
            for pooled in idle:
                pooled.connection.abort()
        self._idle.clear()

    def _context(self) -> ssl.SSLContext | None:
        return None if self._seal is None else self._seal.credentials.client

    def _check(self, pooled: PooledConnection, to: Address) -> None:
        expected = id_behind(to)
        if self._seal is not None and expected and pooled.node_id != expected:
            pooled.connection.abort()
            raise TransportError("rejected", to, f"is {short(pooled.node_id)}, this node asked for {short(expected)}")


def _connect_error(to: Address, error: OSError, *, sealed: bool) -> TransportError:
    """What a failed connection attempt or TLS handshake means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TransportError("foreign", to, "has no certificate of this swarm: it has another key or another run")
    if isinstance(error, ssl.SSLError):
        reason = (
            "does not use TLS as a node of this swarm does: it may belong to an open swarm, and this node's has a key"
        )
        return TransportError("foreign", to, reason)
    number = error.errno
    if number == errno.ECONNREFUSED:
        return TransportError("refused", to, "refused the connection: no process listens there")
    if number == errno.ETIMEDOUT or isinstance(error, TimeoutError):
        return TransportError("timeout", to, "did not answer")
    if number in _UNREACHABLE:
        return TransportError("refused", to, f"cannot be reached: {os.strerror(number)}")
    if sealed and (number in _RESET or number is None):
        return TransportError("reset", to, CLOSED_WITHOUT_RESPONSE)
    if number in _RESET:
        return TransportError("reset", to, "broke the connection off")
    return TransportError("refused", to, f"cannot be reached: {error}")
