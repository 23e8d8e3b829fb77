"""The pool without sockets: what a failed connection means, and which connections are reused."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.connection_pool import KEEP_ALIVE_S, ConnectionPool, PooledConnection
from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.sockets.send_queue import SendQueue
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import TransportError
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.unit.overlay.sockets.wire import SocketWire, Wire

PEER = Address("10.0.0.1", 9)


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def failure_of(error: OSError, seal: Any = None) -> TransportError:
    """What `connect` raises if the loop raises `error`."""

    async def main() -> TransportError:
        async def create_connection(*_arguments: Any, **_options: Any) -> None:
            raise error

        asyncio.get_running_loop().create_connection = create_connection  # type: ignore[method-assign, assignment]
        with pytest.raises(TransportError) as caught:
            await ConnectionPool(seal, SystemClock(), UploadMeter()).connect(PEER)
        assert caught.value.__cause__ is error
        return caught.value

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (failed(errno.ECONNREFUSED), "refused", "no process listens"),
        (failed(errno.EHOSTUNREACH), "refused", "cannot be reached"),
        (failed(errno.ENETUNREACH), "refused", "cannot be reached"),
        (failed(errno.ETIMEDOUT), "timeout", "did not answer"),
        (TimeoutError(), "timeout", "did not answer"),
        (failed(errno.ECONNRESET), "reset", "broke the connection off"),
        (OSError("getaddrinfo failed"), "refused", "cannot be reached: getaddrinfo failed"),
        (ssl.SSLError(1, "WRONG_VERSION_NUMBER"), "foreign", "does not use TLS"),
        (ssl.SSLCertVerificationError(1, "unable to get local issuer"), "foreign", "no certificate of this swarm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_kinds_of_failed_connections(error: OSError, kind: str, detail: str) -> None:
    """Every error of connecting has its kind and names the reason."""
    failure = failure_of(error)

    assert failure.kind == kind
    assert detail in failure.detail


@pytest.mark.parametrize("error", [failed(errno.ECONNRESET), ConnectionAbortedError()], ids=["reset", "no number"])
def test_a_closed_swarm_names_the_likely_causes(error: OSError) -> None:
    """A member whose connection is closed without an answer gets the hint to check key, run and clock."""

    class Tickets:
        def make_ticket(self, _recipient: bytes, _wall: float) -> str:
            return "ticket"

    class Seal:
        tickets = Tickets()
        credentials = type("Credentials", (), {"client": None})()

    failure = failure_of(error, Seal())

    assert failure.kind == "reset"
    assert "same swarm key and run" in failure.detail


@run_by(asyncio.run)
async def test_a_connection_of_a_cancelled_caller_is_forgotten() -> None:
    """A connection made just before its caller was cancelled is closed without a word, and is not counted for ever."""
    meter, wire = UploadMeter(), SocketWire()
    made = asyncio.Event()

    async def create_connection(factory: Any, *_arguments: Any, **_options: Any) -> None:
        connection = factory()
        connection.connection_made(wire)
        connection._sent = SendQueue(wire, None, None)
        connection.sent.written = wire.buffered_bytes = 400
        made.set()
        await asyncio.Event().wait()

    asyncio.get_running_loop().create_connection = create_connection  # type: ignore[method-assign, assignment]
    caller = asyncio.create_task(ConnectionPool(None, SystemClock(), meter).connect(PEER))
    async with asyncio.timeout(60):
        await made.wait()
    assert meter.read().queued_bytes == 400
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert meter.read().queued_bytes == 0


@run_by(asyncio.run)
async def test_connections_are_reused_last_in_first_out() -> None:
    """A released connection is taken again, the newest one first; there is none for another address."""
    pool = ConnectionPool(None, SystemClock(), UploadMeter())
    first, second = (PooledConnection(Wire(b"", [1]).connection, None, b"") for _ in range(2))
    for pooled in (first, second):
        assert pooled.is_new
        pool.release(PEER, pooled)
    assert pool.take_idle(Address("10.0.0.2", 9)) is None
    assert pool.take_idle(PEER) is second
    assert pool.take_idle(PEER) is first
    assert pool.take_idle(PEER) is None
    assert not first.is_new


@run_by(run, limit_s=300.0)
async def test_an_idle_connection_is_closed_half_a_minute_after_its_last_use() -> None:
    """Each by its own last use, whichever became idle first; one that is in use then stays open."""
    loop, pool = asyncio.get_running_loop(), ConnectionPool(None, SystemClock(), UploadMeter())
    first, second, third = wires = [Wire() for _ in range(3)]
    for wire in wires:
        wire._task.cancel()  # nothing comes, and the other side stays
    pooled = [PooledConnection(wire.connection, None, b"") for wire in wires]
    pool.release(PEER, pooled[0])
    await asyncio.sleep(10.0)
    pool.release(PEER, pooled[1])
    pool.release(Address("10.0.0.2", 9), pooled[2])
    await asyncio.sleep(10.0)
    assert pool.take_idle(PEER) is pooled[1]
    await asyncio.sleep(KEEP_ALIVE_S - 20.5)
    assert not first.connection.has_ended
    await asyncio.sleep(1.0)
    assert [wire.connection.has_ended for wire in wires] == [True, False, False]
    pool.release(PEER, pooled[1])
    await asyncio.sleep(10.0)
    assert [wire.connection.has_ended for wire in wires] == [True, False, True]
    last_s = loop.time() - 10.0
    await asyncio.sleep(last_s + KEEP_ALIVE_S - 0.1 - loop.time())
    assert not second.connection.has_ended
    await asyncio.sleep(0.2)
    assert second.connection.has_ended
    assert third.connection.has_ended
    assert (pool._idle, pool._timer) == ({}, None)
    pool.close()


@run_by(asyncio.run)
async def test_connections_that_have_ended_are_not_reused() -> None:
    """A connection that the peer has closed, or that has unread bytes, is dropped."""
    pool = ConnectionPool(None, SystemClock(), UploadMeter())
    ended, unread = Wire(), Wire()
    await unread.stop()
    for wire in (ended, unread):
        pool.release(PEER, PooledConnection(wire.connection, None, b""))
    ended.close_now()
    unread.connection.get_buffer(-1)[:1] = b"x"
    unread.connection.buffer_updated(1)
    assert not unread.connection.has_ended
    assert pool.take_idle(PEER) is None


@run_by(asyncio.run)
async def test_a_closed_pool_keeps_nothing() -> None:
    """`close` drops idle connections, and one that is released later is dropped too."""
    pool = ConnectionPool(None, SystemClock(), UploadMeter())
    for _ in range(2):
        pool.release(PEER, PooledConnection(Wire().connection, None, b""))
        pool.close()
        assert pool.take_idle(PEER) is None
