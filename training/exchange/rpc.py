"""Requests of the exchange: encoding, adaptive timeouts, and handlers that check the genesis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response
from training.encoding.frames import BadFrame
from training.exchange.messages import decode

A = TypeVar("A", bound=msgspec.Struct)
Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]


def checked(
    kind: type[A], genesis: bytes, handle: Callable[[Contact, A, AsyncIterator[Buffer]], Awaitable[Response]]
) -> Handler:
    """A request handler that decodes its message and turns away another swarm's."""

    async def handler(sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        try:
            message = decode(payload, kind)
        except msgspec.DecodeError as error:
            raise RequestRejected(f"malformed {kind.__name__}: {error}") from error
        if message.genesis != genesis:  # type: ignore[attr-defined]
            raise RequestRejected("another swarm: the genesis differs")
        try:
            return await handle(sender, message, stream)
        except BadFrame as error:
            raise RequestRejected(f"bad body: {error}") from error

    return handler
