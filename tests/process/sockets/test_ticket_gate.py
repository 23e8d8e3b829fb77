"""The ticket gate on real sockets: connections without a ticket are bounded and do not block members."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter

from p2pnode.overlay.sealing.tickets import TicketVerdict
from p2pnode.overlay.sockets.ticket_gate import TicketGate
from tests.harness.runner.stories import run_by
from tests.process.harness.members import Member, ask, until
from tests.process.harness.sockets import LOCAL, run

__all__ = ["run"]

#: Why a connection without a ticket is dropped.
REASONS = ("silent", "crowded", "left")


@run_by("run")
async def test_stalled_connections_do_not_block_members() -> None:
    """Hundreds of connections with no bytes, or half a ClientHello, are bounded and dropped within seconds; a member's
    requests succeed meanwhile."""
    async with Member() as one, Member() as two:
        sockets = []
        for number in range(700):
            stalled = socket.socket()
            stalled.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stalled.connect(tuple(two.sockets.address))
            sockets.append(stalled)
            if number % 100 == 99:
                assert (await ask(one, two.home))[2] == two.identity.node_id
                one.sockets._client.pool._idle.clear()
        for stalled in sockets[::2]:
            with contextlib.suppress(OSError):
                stalled.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert len(two.sockets._gate._pending) <= 512
        await until(lambda: not two.sockets._gate._pending, "all are dropped")
        await until(lambda: sum(map(two.dropped().get, REASONS, (0, 0, 0))) == 700, "each is counted")
        assert (await ask(one, two.home))[2] == two.identity.node_id
        for stalled in sockets:
            stalled.close()


@run_by("run")
async def test_an_incomplete_hello_is_rechecked_at_growing_intervals() -> None:
    """Half a ClientHello is checked a few times until its timeout; if the rest arrives, the connection is admitted."""
    whole = b"\x16\x03\x01\x02\x00"
    checks: list[bytes] = []
    admitted: list[socket.socket] = []
    counters: Counter[str] = Counter()

    def verify(beginning: bytes) -> TicketVerdict:
        checks.append(beginning)
        return TicketVerdict.ADMITTED if beginning == whole else TicketVerdict.INCOMPLETE

    listening = socket.create_server((LOCAL, 0))
    listening.setblocking(False)
    gate = TicketGate(listening, verify, admitted.append, counters)
    try:
        with socket.create_connection(listening.getsockname()) as half:
            half.send(whole[:3])
            await until(lambda: counters["streams_dropped_silent"] == 1, "it times out")
            assert 3 <= len(checks) <= 10
        with socket.create_connection(listening.getsockname()) as late:
            late.send(whole[:3])
            before = len(checks)
            await until(lambda: len(checks) > before + 1, "it is checked again")
            late.send(whole[3:])
            await until(lambda: bool(admitted), "it is admitted")
            admitted[0].close()
    finally:
        gate.close()
