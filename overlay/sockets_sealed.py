"""The streams of a closed swarm as aiohttp has them: who is at the other end of a connection, by its certificate.

Both sides show certificates (TLS 1.3); who is behind a connection is known before a byte of a request passes, and
strangers do not get as far as TLS (`overlay.sockets_admission`). Decides nothing about keys: `overlay.credentials`.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp

from overlay.admission import Admission
from overlay.credentials import Credentials, NoNode, id_of_certificate
from overlay.doors import Clock
from overlay.ids import short
from overlay.sealing import CLOCK_BOUND_S
from overlay.transport import Address, TransportError

#: What silence may mean, to one who has a key.
SILENCE = (
    "closed the connection without a word: has it the same swarm key and run, "
    f"and do both clocks agree to {CLOCK_BOUND_S:g} s?"
)


@dataclass(slots=True)
class StreamSeal:
    """What makes the streams of a closed swarm: who may begin, and the contexts of both sides."""

    admission: Admission
    credentials: Credentials


@dataclass(slots=True)
class OtherEnd:
    """Who a request is for, and who was found there."""

    address: Address
    expected: bytes
    found: bytes = b""


#: The one of the request that this task is making: a connector sees nothing of its requests but their URL.
other_end: ContextVar[OtherEnd] = ContextVar("other_end")


def proven_id(transport: asyncio.BaseTransport | None) -> bytes:
    """Who is at the other end, by its certificate; empty where there is none. Raises `NoNode`."""
    tls = transport.get_extra_info("ssl_object") if transport is not None else None
    certificate = tls.getpeercert(True) if tls is not None else None
    return id_of_certificate(certificate) if certificate else b""


def without_tls(error: aiohttp.ClientSSLError) -> str:
    """What a failed handshake means."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "has no certificate of this swarm: another key, or another run"
    return "does not speak TLS as a node of this swarm does: it may belong to an open swarm, and this node's has a key"


class SealedConnector(aiohttp.TCPConnector):
    """Shows a ticket on every new connection, and lets a request pass only to the node it is for.

    The pool is keyed by host and port, so connections that are used again are looked at too.
    """

    def __init__(self, seal: StreamSeal, clock: Clock, **settings: Any) -> None:
        super().__init__(**settings)
        self._seal = seal
        self._clock = clock

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection = await super().connect(req, traces, timeout)
        end = other_end.get()
        try:
            end.found = proven_id(connection.transport)
        except NoNode as error:
            connection.close()
            raise TransportError("foreign", end.address, f"has no node's certificate: {error}") from error
        if end.expected and end.found != end.expected:
            connection.close()
            detail = f"is {short(end.found)}, we asked for {short(end.expected)}"
            raise TransportError("rejected", end.address, detail)
        return connection

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        # Only while connecting: as part of the request it would be part of the pool's key, and no two are the same.
        req.server_hostname = self._seal.admission.ticket(other_end.get().expected, self._clock.wall())
        try:
            return await super()._create_connection(req, traces, timeout)
        finally:
            req.server_hostname = None
