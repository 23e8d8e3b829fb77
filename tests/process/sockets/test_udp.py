"""Datagrams over real sockets: invalid addresses and failing handlers do not stop the socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import (
    MAX_DATAGRAM_BYTES,
)
from tests.harness.runner.stories import run_by
from tests.process.harness.sockets import LOCAL, Node, run

__all__ = ["run"]


@run_by("run")
async def test_datagrams() -> None:
    """A datagram arrives with its sender's listening address; one that is too long is dropped and logged once."""
    async with Node() as one, Node() as two:
        one.transport.send(two.address, b"x" * (MAX_DATAGRAM_BYTES + 1))
        one.transport.send(two.address, b"x" * (MAX_DATAGRAM_BYTES + 1))
        one.transport.send(two.address, b"hello")
        async with asyncio.timeout(60):
            assert await two.datagrams.get() == (b"hello", one.address)
        assert [event for event, _ in one.log.events] == ["datagram_too_long"]


@pytest.mark.parametrize(
    "address",
    [
        (LOCAL, 99999),
        (LOCAL, -1),
        (LOCAL, 0),
        (None, 5),
        ("::1", 9),
        ("nowhere.invalid", 9),
        ("", 9),
        ("255.255.255.255", 9),
        (LOCAL, "x"),
        ("10\0", 9),
    ],
    ids=repr,
)
@run_by("run")
async def test_invalid_addresses_are_dropped(address: Any) -> None:
    """A datagram to an invalid address is dropped, and the next one to a valid address arrives."""
    async with Node() as one, Node() as two:
        one.transport.send(Address(*address), b"lost")
        one.transport.send(two.address, b"hello")
        async with asyncio.timeout(60):
            assert (await two.datagrams.get())[0] == b"hello"


@run_by("run")
async def test_a_handler_may_raise() -> None:
    """A datagram handler that raises is logged once, and the socket continues."""
    async with Node() as one, Node() as two:
        got = asyncio.Event()

        def handler(data: bytes, _source: Address) -> None:
            if data == b"bad":
                raise IndexError("hostile")
            got.set()

        third = SocketTransport(LOCAL, 0, log=two.log, clock=SystemClock())
        await third.open(handler, two.handle)
        for data in (b"bad", b"bad", b"good"):
            one.transport.send(third.address, data)
        async with asyncio.timeout(60):
            await got.wait()
        await third.close()
        assert [event for event, _ in two.log.events] == ["datagram_handler_failed"]
