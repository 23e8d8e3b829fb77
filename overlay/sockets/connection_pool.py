"""Connections to other nodes: new ones, and those that are kept to be used again.

A sealed one shows a ticket where TLS would name a host, and who is at its other end is read from the certificate before
a byte of a request passes. Decides nothing about keys: `overlay.sealing.tls`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from dataclasses import dataclass

from overlay.addresses import Address, id_behind
from overlay.environment import Clock
from overlay.ids import short
from overlay.sealing.init_filter import CLOCK_BOUND_S
from overlay.sealing.tickets import TicketVerifier
from overlay.sealing.tls import Credentials, NotANodeCertificate, id_of_certificate
from overlay.sockets.connection import Connection
from overlay.transport import TransportError

#: Idle connections: the asking end lets go first, so that it seldom writes into a connection the other just closed.
KEEP_ALIVE_S = 30.0
#: Errors of connecting that mean "nobody there", beside a refusal.
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)
_BROKEN_OFF = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
#: What silence may mean, to one who has a key.
SILENCE = (
    "closed the connection without a word: has it the same swarm key and run, "
    f"and do both clocks agree to {CLOCK_BOUND_S:g} s?"
)


@dataclass(slots=True)
class StreamSeal:
    """What makes the streams of a closed swarm: who may begin, and the contexts of both sides."""

    admission: TicketVerifier
    credentials: Credentials

    def use(self, credentials: Credentials) -> None:
        """New connections use these contexts."""
        self.credentials = credentials


def proven_id(connection: Connection) -> bytes:
    """Who is at the other end, by its certificate; empty where there is none. Raises `NotANodeCertificate`."""
    tls = connection.transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert(True) if tls is not None else None
    return id_of_certificate(certificate) if certificate else b""


class PooledConnection:
    """A connection to a node, and who was found there. `is_new`: nothing has been asked on it yet."""

    __slots__ = ("connection", "context", "found", "is_new", "timer")

    def __init__(self, connection: Connection, context: ssl.SSLContext | None, found: bytes) -> None:
        self.connection = connection
        self.context = context
        self.found = found
        self.is_new = True
        self.timer: asyncio.TimerHandle | None = None


class ConnectionPool:
    """As many connections to a node as there are requests to it at once: how many those are is decided above."""

    def __init__(self, seal: StreamSeal | None, clock: Clock) -> None:
        self._seal = seal
        self._clock = clock
        self._idle: dict[Address, list[PooledConnection]] = {}
        self._closed = False

    def kept(self, to: Address) -> PooledConnection | None:
        """One that stands and was used before. Raises `TransportError` where it leads to another node than asked."""
        while links := self._idle.get(Address(*to)):
            link = links.pop()
            if not links:
                del self._idle[Address(*to)]
            assert link.timer is not None
            link.timer.cancel()
            if link.connection.is_over or link.connection.unread or link.context is not self._context():
                link.connection.abort()
                continue
            self._check(link, to)
            return link
        return None

    async def new(self, to: Address) -> PooledConnection:
        """Connect. Raises `TransportError`; a time-out is the caller's."""
        context, ticket = self._context(), None
        if self._seal is not None:
            ticket = self._seal.admission.ticket(id_behind(to), self._clock.wall())
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, to.host, to.port, ssl=context, server_hostname=ticket
            )
        except OSError as error:
            raise _connect_error(to, error, sealed=self._seal is not None) from error
        try:
            link = PooledConnection(connection, context, proven_id(connection))
        except NotANodeCertificate as error:
            connection.abort()
            raise TransportError("foreign", to, f"has no node's certificate: {error}") from error
        self._check(link, to)
        return link

    def keep(self, to: Address, link: PooledConnection) -> None:
        """Everything asked and answered on it has passed: it may be used again."""
        if self._closed or link.connection.is_over:
            link.connection.abort()
            return
        link.is_new = False
        link.timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._let_go, Address(*to), link)
        self._idle.setdefault(Address(*to), []).append(link)

    def _let_go(self, to: Address, link: PooledConnection) -> None:
        links = self._idle.get(to, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._idle[to]
        link.connection.close()

    def close(self) -> None:
        """End the idle ones; what comes back later is ended too."""
        self._closed = True
        for links in self._idle.values():
            for link in links:
                assert link.timer is not None
                link.timer.cancel()
                link.connection.abort()
        self._idle.clear()

    def _context(self) -> ssl.SSLContext | None:
        return None if self._seal is None else self._seal.credentials.client

    def _check(self, link: PooledConnection, to: Address) -> None:
        expected = id_behind(to)
        if self._seal is not None and expected and link.found != expected:
            link.connection.abort()
            raise TransportError("rejected", to, f"is {short(link.found)}, we asked for {short(expected)}")


def _connect_error(to: Address, error: OSError, *, sealed: bool) -> TransportError:
    """What a failed connection attempt or TLS handshake means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TransportError("foreign", to, "has no certificate of this swarm: another key, or another run")
    if isinstance(error, ssl.SSLError):
        reason = (
            "does not speak TLS as a node of this swarm does: it may belong to an open swarm, and this node's has a key"
        )
        return TransportError("foreign", to, reason)
    number = error.errno
    if number == errno.ECONNREFUSED:
        return TransportError("refused", to, "refused the connection: nobody listens there")
    if number == errno.ETIMEDOUT or isinstance(error, TimeoutError):
        return TransportError("timeout", to, "did not answer")
    if number in _UNREACHABLE:
        return TransportError("refused", to, f"cannot be reached: {os.strerror(number)}")
    if sealed and (number in _BROKEN_OFF or number is None):
        return TransportError("reset", to, SILENCE)
    if number in _BROKEN_OFF:
        return TransportError("reset", to, "broke the connection off")
    return TransportError("refused", to, f"cannot be reached: {error}")
