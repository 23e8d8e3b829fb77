"""The meter of the line: differences of counters, and a real stream that is slow."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.line.capacity import class_of
from p2pnode.overlay.line.rate import WINDOW_S, MeasuredLine
from p2pnode.overlay.sockets.line_meter import QUEUED_BYTES, LineMeter, UploadMeter
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import MUCH_QUEUED_BYTES, Request, Response, Upload
from tests.harness.environment.simulated import ListLog
from tests.harness.runner.stories import run_by

MBIT = 125_000


class Counters:
    """Counters of peers that the test sets, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.upload = Upload(0, 0)
        self.meter = LineMeter(MeasuredLine(), cast("Any", self), lambda: self.upload)

    def monotonic(self) -> float:
        return self.now

    def pass_windows(
        self, count: int, sent: float, received: float = 0.0, *, queued: int = QUEUED_BYTES, peers: int = 2
    ) -> None:
        for _ in range(count):
            self.now += WINDOW_S
            before = self.upload
            self.upload = Upload(
                before.acknowledged_bytes + round(sent * WINDOW_S),
                queued,
                before.received_bytes + round(received * WINDOW_S),
                peers,
                peers,
            )
            self.meter.sample()


def test_windows_are_the_differences_of_the_counters() -> None:
    """Sending at 20 Mbit/s and receiving at 50 are measured as that; what little left before shows nothing."""
    counters = Counters()
    counters.pass_windows(9, 1 * MBIT, queued=0)
    counters.pass_windows(6, 20 * MBIT, 50 * MBIT)

    assert counters.meter.line.upload.bytes_per_s == pytest.approx(20 * MBIT)
    assert counters.meter.line.download.bytes_per_s == pytest.approx(50 * MBIT)


def test_what_leaves_while_too_little_is_queued_is_no_measurement() -> None:
    """Small requests on their way at every reading, and their answers, show nothing of the line's rate."""
    counters = Counters()
    counters.pass_windows(200, 20_000, 20_000, queued=QUEUED_BYTES - 1)

    assert counters.meter.line.upload.bytes_per_s is None
    assert counters.meter.line.download.bytes_per_s is None


@pytest.mark.parametrize(("queued", "peers", "is_known"), [(30_000, 2, True), (30_000, 1, False), (15_000, 2, False)])
def test_a_trial_shows_a_line_that_does_not_deliver_what_waits(queued: int, peers: int, is_known: bool) -> None:
    """Within a window, of 16 KiB at least and for two peers, far less than fills a fast line. A line that delivers more
    keeps up."""
    counters = Counters()
    counters.meter.line.begin_trial()
    counters.pass_windows(9, queued / WINDOW_S / 2, queued=queued, peers=peers)
    line = counters.meter.line
    assert (line.capacity == class_of(queued / WINDOW_S / 2)) is is_known

    quick = Counters()
    quick.meter.line.begin_trial()
    quick.pass_windows(200, 2 * queued / WINDOW_S, queued=queued, peers=peers)
    assert not quick.meter.line.is_on_trial


def test_a_line_is_full_where_two_peers_wait_and_where_there_was_one_alone_for_long() -> None:
    """One peer beside others may be the slow one; a node with one peer measures its line by that."""
    for peers, several, is_known in ((2, True, True), (1, True, False), (1, False, True), (0, False, False)):
        counters = Counters()
        counters.now = 1000.0
        counters.pass_windows(2, 20 * MBIT, peers=2 if several else 1)
        counters.pass_windows(100, 20 * MBIT, peers=peers)
        assert (counters.meter.line.upload_bytes_per_s is not None) is is_known, (peers, several)
        assert counters.meter.line.upload.bytes_per_s == pytest.approx(20 * MBIT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts acknowledged bytes")
@run_by(asyncio.run)
async def test_the_rate_of_a_real_stream_is_that_of_its_slow_reader_and_not_that_of_the_kernels_buffers() -> None:
    """A reader takes 16 MB/s; megabytes fit into the buffers at once, and are not counted before they arrive."""
    rate = 16_000_000
    seconds = 2.0

    took: list[float] = []

    async def serve(incoming: Request) -> Response:
        loop = asyncio.get_running_loop()
        began = free = loop.time()
        async for piece in incoming.body:
            # It makes up for nothing: on a loaded machine it is slower, and never faster.
            free = max(free, loop.time()) + len(piece) / rate
            await asyncio.sleep(max(0.0, free - loop.time()))
        took.append(loop.time() - began)
        return Response(b"done")

    async def refuse(incoming: Request) -> Response:
        raise AssertionError(incoming.name)

    server, client = (
        SocketTransport("127.0.0.1", 0, log=ListLog([], "t", SystemClock()), clock=SystemClock()) for _ in "ab"
    )
    home = await server.open(lambda *_: None, serve)
    await client.open(lambda *_: None, refuse)
    body = [bytes(1 << 18)] * round(rate * seconds / (1 << 18))
    async with client.request(Address(*home), "swallow", b"", body, timeout_s=60) as answer:
        assert answer.head == b"done"
    measured, theirs = client.line.upload.bytes_per_s, server.line.download.bytes_per_s
    await client.close()
    await server.close()
    print(measured, theirs)
    assert measured is not None
    assert theirs is not None
    reached = rate * seconds / took[0]
    assert 0.7 * reached < measured < 1.5 * rate
    assert 0.7 * reached < theirs < 1.5 * rate


class Ending:
    """What the meter uses of a connection."""

    def __init__(self, acknowledged: int, queued: int, received: int = 0, host: str = "10.0.0.1") -> None:
        self.looks = 0
        self.received = received
        self.sent = SimpleNamespace(written=acknowledged + queued, acknowledged=self._acknowledged, queued=self._queued)
        self.queued_bytes = queued
        self.transport = SimpleNamespace(get_extra_info={"peername": (host, 1)}.get)

    def _acknowledged(self) -> int:
        self.looks += 1
        return int(self.sent.written) - self.queued_bytes

    def _queued(self) -> int:
        return self.queued_bytes


def connection(acknowledged: int, queued: int, received: int = 0, host: str = "10.0.0.1") -> Any:
    return Ending(acknowledged, queued, received, host)


def test_open_and_ended_connections_are_added_up() -> None:
    """A connection that ends keeps its acknowledged bytes in the sum, once, and has none queued."""
    meter, one, two = UploadMeter(), connection(100, 7, 11), connection(20, 3, 5)
    assert meter.read() == Upload(0, 0)
    meter.opened(one)
    meter.opened(two)
    assert meter.read() == Upload(120, 10, 16)
    meter.closed(one)
    meter.closed(one)
    assert meter.read() == Upload(120, 3, 16)


def test_an_idle_connection_is_not_looked_at_again_before_it_sends() -> None:
    """With nothing queued its last number stands until something is written."""
    meter, one = UploadMeter(), connection(100, 0)
    meter.opened(one)
    for _ in range(3):
        assert meter.read() == Upload(100, 0)
    assert one.looks == 1
    one.sent.written, one.queued_bytes = 150, 20
    assert meter.read() == Upload(130, 20)
    one.queued_bytes = 0
    assert meter.read() == Upload(150, 0)
    assert meter.read() == Upload(150, 0)
    assert one.looks == 3


def test_peers_for_which_much_is_queued_are_counted() -> None:
    """Two of three have at least 64 KiB to take; the streams to one peer add up."""
    meter, half = UploadMeter(), MUCH_QUEUED_BYTES // 2
    for host, queued in (("a", half), ("a", half), ("b", MUCH_QUEUED_BYTES - 1), ("c", 10 * half), ("c", 10 * half)):
        meter.opened(connection(0, queued, host=host))

    assert meter.read().queued_peers == 2
