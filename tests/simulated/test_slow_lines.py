"""Lines with a rate and a delay: what moves is waited for, all streams of a line share it, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.overlay.transport import Request, Response, SizedBody, TransportError
from tests.harness.environment.virtual_loop import run
from tests.harness.network.network import Network
from tests.harness.network.transport import MemoryTransport
from tests.harness.runner.stories import run_by

MBIT = 1e6 / 8
MB = 1 << 20


async def two_hosts(up: float, down: float | None = None) -> tuple[Network, MemoryTransport, MemoryTransport]:
    """A host behind a line, and one without."""
    network = Network(seed=1, delay=(0.03, 0.03))
    near, far = network.transport("10.0.0.1"), network.transport("10.0.0.2")

    async def count(incoming: Request) -> Response:
        total = sum([len(chunk) async for chunk in incoming.body])
        return Response(str(total).encode(), iter([bytes(MB)] * int(incoming.head or b"0")))

    for transport in (near, far):
        await transport.open(lambda *_: None, count)
    network.line("10.0.0.1", up, down)
    return network, near, far


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def sized(megabytes: int) -> SizedBody:
    return SizedBody(iter([bytes(MB)] * megabytes), megabytes * MB)


@run_by(run)
async def test_a_body_takes_its_time_on_a_line() -> None:
    """4 MiB up at 5 Mbit/s take 6.7 s and are not given up with a timeout of 1 s; the way back takes as long."""
    _, near, far = await two_hosts(5 * MBIT)
    began, body = loop_time(), sized(4)
    async with near.request(far.address, "count", b"4", body, timeout_s=1.0) as answer:
        assert answer.head == str(4 * MB).encode()
        assert loop_time() - began == pytest.approx(4 * MB / (5 * MBIT), abs=0.3)
        assert answer.waited_s is not None
        assert answer.waited_s < 0.2
        assert body.moved_bytes() == 4 * MB
        back: Any = answer.body
        assert sum([len(chunk) async for chunk in back]) == 4 * MB
        assert 4 * MB <= back.received_bytes < 4 * MB + 100
    assert loop_time() - began == pytest.approx(8 * MB / (5 * MBIT), abs=0.5)
    assert near.upload()[:2] == (4 * MB + 1, 0)


@run_by(run)
async def test_streams_share_a_line_in_turn() -> None:
    """Two bodies of 2 MiB end together, and a small request between them does not wait for either."""
    _, near, far = await two_hosts(5 * MBIT)
    ended: dict[str, float] = {}

    async def send(name: str, body: Any) -> None:
        async with near.request(far.address, "count", b"", body, timeout_s=1.0):
            ended[name] = loop_time() - began

    began = loop_time()
    large = [asyncio.create_task(send(name, sized(2))) for name in ("a", "b")]
    await asyncio.sleep(1.0)
    assert near.upload().queued_bytes > MB
    await send("small", [b"x"])
    await asyncio.gather(*large)

    whole_s = 4 * MB / (5 * MBIT)
    assert ended["small"] < 1.4
    assert ended["a"] == pytest.approx(whole_s, abs=0.4)
    assert ended["b"] == pytest.approx(whole_s, abs=0.4)


@run_by(run)
async def test_a_peer_that_dies_in_the_middle_is_given_up_in_time() -> None:
    """A second after its last byte, however much was still to come."""
    network, near, far = await two_hosts(5 * MBIT)
    asyncio.get_running_loop().call_later(3.0, network.pause, far.address)
    began = loop_time()
    with pytest.raises(TransportError) as caught:
        async with near.request(far.address, "count", b"", sized(8), timeout_s=1.0):
            pass
    assert caught.value.kind == "timeout"
    assert 3.0 < loop_time() - began < 4.2
