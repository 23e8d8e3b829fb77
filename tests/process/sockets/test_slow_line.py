"""Requests over a line that is slower than any timeout: what moves is waited for, what stands still is given up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.sockets import connection as connection_module
from p2pnode.overlay.sockets import send_queue
from p2pnode.overlay.transport import Background, Body, SizedBody
from tests.harness.runner.stories import played_by, run_by
from tests.process.harness.members import Member, until
from tests.process.harness.members import ask as ask_member
from tests.process.harness.slow_line import SlowLine
from tests.process.harness.sockets import LATE_S, MB, Node, ask, failure, paced, pattern, run

__all__ = ["paced", "run"]


def line_to(target: Address, timeout_s: float) -> SlowLine:
    """A line that takes a quarter longer than the timeout for a megabyte, and as long for what its buffers hold."""
    return SlowLine(target, rate=0.8 * MB / timeout_s)


@pytest.fixture(params=["counts", "queue"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact counts of acknowledged bytes, and with the length of the send queue alone."""
    if request.param == "queue":

        def without_counts(transport: Any) -> send_queue.SendQueue:
            return send_queue.SendQueue(transport, None)

        monkeypatch.setattr(connection_module, "SendQueue", without_counts)


@pytest.mark.usefixtures("kernel")
@played_by("paced")
async def test_an_upload_that_moves_is_not_given_up(timeout_s: float) -> None:
    """3 MB in almost four timeouts: a megabyte takes longer than one, and so does what the kernel still holds at the
    end."""
    async with Node() as one, Node() as two, line_to(two.address, timeout_s) as line:
        began = time.monotonic()
        body = SizedBody(iter([bytes(3 * MB)]), 3 * MB)
        head, _ = await ask(one, line, "count", b"", body, timeout_s=timeout_s)
        assert head == str(3 * MB).encode()
        assert time.monotonic() - began > 3 * timeout_s
        assert body.moved_bytes() == 3 * MB


@pytest.mark.usefixtures("kernel")
@played_by("paced")
async def test_both_ends_see_the_stream_of_a_request_move(timeout_s: float) -> None:
    """While an upload is on a slow line its bytes move at both ends, before there is any answer."""
    async with Node() as one, Node() as two, line_to(two.address, timeout_s) as line:
        body = SizedBody(iter([bytes(2 * MB)]), 2 * MB)
        outgoing = one.transport.request(line, "count", b"", body, timeout_s=timeout_s)
        assert outgoing.moved_bytes() == 0
        asking = asyncio.create_task(outgoing.__aenter__())
        await until(lambda: bool(two.streams), "the request begins")
        for stream in (outgoing, two.streams[0]):
            await until(lambda stream=stream: stream.moved_bytes() > 100_000, "something has moved")
        before = two.streams[0].moved_bytes()
        await until(lambda: two.streams[0].moved_bytes() > before, "more has moved")
        assert not asking.done()
        assert (await asking).head == str(2 * MB).encode()
        await outgoing.__aexit__(None, None, None)
    assert two.streams[0].moved_bytes() == 0  # a stream that has ended shows nothing


@pytest.mark.usefixtures("kernel")
@played_by("paced")
async def test_a_sealed_upload_that_moves_is_not_given_up(timeout_s: float) -> None:
    """The same over TLS, whose own buffers hide from the sender what the kernel has not taken yet."""
    async with Member() as one, Member() as two, line_to(two.sockets.address, timeout_s) as line:
        home = NodeAddress.of(line, two.identity.node_id)
        _, back, _ = await ask_member(one, home, "echo", pattern(2 * MB), timeout_s=timeout_s)
        assert len(back) == 2 * MB


@pytest.mark.usefixtures("kernel")
@played_by("paced")
async def test_a_line_that_stops_is_given_up_as_soon_as_ever(timeout_s: float) -> None:
    """In the middle of an upload: the timeout after the last byte that got through, not one more."""
    async with Node() as one, Node() as two:
        line = line_to(two.address, timeout_s)
        async with line as address:
            stop_s = 2.5 * timeout_s
            asyncio.get_running_loop().call_later(stop_s, line.stop)
            began = time.monotonic()
            error = await failure(ask(one, address, "count", b"", [bytes(8 * MB)], timeout_s=timeout_s))
            assert error.kind == "timeout"
            assert stop_s < time.monotonic() - began < stop_s + 2 * timeout_s


@played_by("paced")
async def test_a_response_that_moves_is_not_given_up(timeout_s: float, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the client, nor by the server, whose slices take longer than its own bound too."""
    monkeypatch.setattr("p2pnode.overlay.sockets.server.HANDLER_SILENCE_S", timeout_s)
    back = 0.8 * MB / timeout_s
    async with Node() as one, Node() as two, SlowLine(two.address, rate_back=back) as line:
        _, body = await ask(one, line, "give", str(3 * MB).encode(), timeout_s=timeout_s)
        assert len(body) == 3 * MB


@run_by("run")
async def test_a_reader_that_takes_nothing_is_given_up_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel's buffer fills; then nothing is acknowledged, and the server ends the connection."""
    monkeypatch.setattr("p2pnode.overlay.sockets.server.HANDLER_SILENCE_S", 0.4)
    async with (
        Node() as one,
        Node() as two,
        one.transport.request(two.address, "give", str(64 * MB).encode(), timeout_s=LATE_S),
    ):
        await until(lambda: not two.transport._server._connections, "it was closed")


@run_by("run")
async def test_the_meter_shows_the_rate_of_the_line() -> None:
    """Between two readings with bytes queued, the acknowledged bytes are those that the line carried."""
    async with Node() as one, Node() as two:
        line = SlowLine(two.address, rate=2 * MB)
        async with line as address:
            task = asyncio.ensure_future(ask(one, address, "count", b"", [bytes(4 * MB)]))
            await until(lambda: line.carried[0] > MB, "a quarter is carried")
            first, before, began = one.transport._streams.read(), line.carried[0], time.monotonic()
            await until(lambda: line.carried[0] > 3 * MB, "three quarters are carried")
            second, carried, took_s = (
                one.transport._streams.read(),
                line.carried[0] - before,
                time.monotonic() - began,
            )
            assert first.queued_bytes
            assert second.queued_bytes
            acknowledged = second.acknowledged_bytes - first.acknowledged_bytes
            assert acknowledged == pytest.approx(carried, abs=0.2 * MB)  # the line has small buffers
            assert acknowledged / took_s < 1.3 * 2 * MB  # a busy machine slows it; it is never faster
            await task
        assert one.transport._streams.read().acknowledged_bytes >= 4 * MB


@run_by("run")
async def test_a_body_that_gives_way_leaves_the_queue_short() -> None:
    """An ordinary body of a megabyte waits in the kernel as a whole; one in the background a tenth of a second's bytes
    at a time, and arrives as well."""

    async def most_queued(one: Node, address: Address, body: Body) -> int:
        task = asyncio.ensure_future(ask(one, address, "count", b"", body))
        most = 0
        while not task.done():
            most = max(most, one.transport._streams.read().queued_bytes)
            await asyncio.sleep(0.005)
        assert (await task)[0] == str(MB).encode()
        return most

    async with Node() as one, Node() as two, SlowLine(two.address, rate=MB) as address:
        pieces = [bytes(MB // 8)] * 8
        ordinary = await most_queued(one, address, pieces)
        background = await most_queued(one, address, Background(iter(pieces)))
        assert background < ordinary / 2
