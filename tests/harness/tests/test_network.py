"""The simulated network: what passes, what each fault does, and that it agrees with the rules of the real transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.transport import (
    HANDLER_SILENCE_S,
    MAX_DATAGRAM_BYTES,
    Buffer,
    Request,
    RequestRejected,
    Response,
    Transport,
    TransportError,
)
from tests.harness.environment.virtual_loop import Unhandled, run
from tests.harness.network.network import Network
from tests.harness.network.transport import MemoryTransport
from tests.harness.runner.stories import played_by, run_by


class Host:
    """A transport with handlers, on its own host."""

    def __init__(self, network: Network, number: int) -> None:
        self.transport: MemoryTransport = network.transport(f"10.0.0.{number}")
        self.heard: list[tuple[float, bytes, Address]] = []
        self.handled: list[str] = []
        self.ended: list[str] = []
        self.address = self.transport.address

    async def open(self) -> Host:
        transport: Transport = self.transport
        loop = asyncio.get_running_loop()
        await transport.open(lambda data, source: self.heard.append((loop.time(), data, source)), self.handle)
        return self

    async def handle(self, incoming: Request) -> Response:
        self.handled.append(incoming.name)
        try:
            return await self._handle(incoming)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        except TransportError as error:
            self.ended.append(error.kind)
            raise

    async def _handle(self, incoming: Request) -> Response:
        if incoming.name == "echo":
            return Response(incoming.head, [bytes(chunk) async for chunk in incoming.body])
        if incoming.name == "stream":
            return Response(incoming.head, incoming.body)
        if incoming.name == "count":
            return Response(str(sum([len(chunk) async for chunk in incoming.body])).encode())
        if incoming.name == "slow":
            await asyncio.sleep(float(incoming.head))
            return Response(b"at last")
        if incoming.name == "give":
            return Response(b"", flood(int(incoming.head)))
        if incoming.name == "refuse":
            raise RequestRejected("because")
        raise KeyError(incoming.name)

    async def ask(
        self, to: Address, name: str, head: bytes = b"", body: Any = (), timeout_s: float = 5.0
    ) -> tuple[bytes, bytes]:
        async with self.transport.request(to, name, head, body, timeout_s=timeout_s) as answer:
            return answer.head, b"".join([bytes(chunk) async for chunk in answer.body])


async def flood(chunks: int, size: int = 1000, every_s: float = 0.0) -> AsyncIterator[Buffer]:
    """Views of one buffer that is overwritten for each chunk."""
    buffer = bytearray(size)
    for number in range(chunks):
        buffer[:] = bytes([number % 256]) * size
        yield memoryview(buffer)
        if every_s:
            await asyncio.sleep(every_s)


def flooded(chunks: int, size: int = 1000) -> bytes:
    return b"".join(bytes([number % 256]) * size for number in range(chunks))


async def kind_of(awaitable: Any) -> str:
    with pytest.raises(TransportError) as caught:
        await awaitable
    return caught.value.kind


def simulate(main: Callable[[Network, Host, Host, Host], Any], **options: Any) -> Any:
    """Run `main` with a network and three open hosts; nothing may be left over."""

    async def world() -> Any:
        network = Network(asyncio.get_running_loop(), 11, **options)
        hosts = [await Host(network, number).open() for number in (1, 2, 3)]
        result = await main(network, *hosts)
        for host in hosts:
            await host.transport.close()
        return result

    return run(world(), strict=True)


# --- datagrams ----------------------------------------------------------------------------------------------------


@played_by(simulate)
async def test_datagrams_take_their_delay(network: Network, one: Host, two: Host, _three: Host) -> None:
    """Every datagram arrives once, within the range of delays, and they overtake each other."""
    began = network.loop.time()
    for number in range(200):
        one.transport.send(two.address, b"%d" % number)
    await asyncio.sleep(1)
    assert sorted(int(data) for _, data, _ in two.heard) == list(range(200))
    assert [int(data) for _, data, _ in two.heard] != list(range(200))
    assert all(0.01 <= at - began <= 0.05 for at, _, _ in two.heard)
    assert {source for _, _, source in two.heard} == {one.address}
    assert network.traffic.datagrams == 200


@played_by(simulate, loss=0.2, duplicate=0.1)
async def test_loss_and_duplication(network: Network, one: Host, two: Host, _three: Host) -> None:
    """About the asked share is lost and doubled."""
    for number in range(2000):
        one.transport.send(two.address, b"%d" % number)
    await asyncio.sleep(1)
    distinct = len({data for _, data, _ in two.heard})
    assert 0.17 < 1 - distinct / 2000 < 0.23
    assert 0.07 < len(two.heard) / distinct - 1 < 0.13
    assert network.traffic.datagrams_lost == 2000 - distinct


@played_by(simulate)
async def test_too_long_datagram_is_the_senders_mistake(_network: Network, one: Host, two: Host, _three: Host) -> None:
    """A datagram above the limit raises in the simulated world, so that tests find it."""
    with pytest.raises(ValueError, match="fit"):
        one.transport.send(two.address, bytes(MAX_DATAGRAM_BYTES + 1))


@played_by(simulate)
async def test_partition_and_cut(network: Network, one: Host, two: Host, three: Host) -> None:
    """A partition separates groups, a cut one direction, and `heal` ends both."""

    async def heard() -> list[str]:
        for host in (one, two, three):
            host.heard.clear()
        for a in (one, two, three):
            for b in (one, two, three):
                if a is not b:
                    a.transport.send(b.address, a.address.host[-1].encode() + b.address.host[-1].encode())
        await asyncio.sleep(1)
        return sorted(data.decode() for host in (one, two, three) for _, data, _ in host.heard)

    network.partition([one.address, "10.0.0.2"])
    assert await heard() == ["12", "21"]
    network.heal()
    network.cut(one.address, three.address)
    assert await heard() == ["12", "21", "23", "31", "32"]
    network.heal()
    assert len(await heard()) == 6


# --- requests -----------------------------------------------------------------------------------------------------


@played_by(simulate, bandwidth=100_000.0)
async def test_bandwidth(network: Network, one: Host, two: Host, _three: Host) -> None:
    """A stream is no faster than its bandwidth."""
    began = network.loop.time()
    await one.ask(two.address, "count", b"", flood(100, 10_000), timeout_s=60)
    assert 10 <= network.loop.time() - began < 11


@played_by(simulate)
async def test_backpressure(_network: Network, one: Host, two: Host, _three: Host) -> None:
    """A sender is not more than a few chunks ahead of a reader that does not read."""
    made: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield bytes(1000)

    assert await kind_of(one.ask(two.address, "slow", b"60", body(), timeout_s=5)) == "timeout"
    assert len(made) < 20


@played_by(simulate)
async def test_failures_of_requests(network: Network, one: Host, two: Host, three: Host) -> None:
    """No process listens: refused. The handler refuses: rejected, with its reason. A closed transport: closed."""
    assert await kind_of(one.ask(Address("10.0.0.9", 1), "echo")) == "refused"
    with pytest.raises(TransportError, match="because") as caught:
        await one.ask(two.address, "refuse", b"", flood(1000))
    assert caught.value.kind == "rejected"
    await three.transport.close()
    assert await kind_of(three.ask(two.address, "echo")) == "closed"
    assert await kind_of(two.ask(three.address, "echo")) == "refused"
    network.unreachable("10.0.0.2")
    assert await kind_of(one.ask(two.address, "echo", timeout_s=1)) == "timeout"
    network.unreachable("10.0.0.2", since_now=False)
    assert await one.ask(two.address, "echo", b"1") == (b"1", b"")


@played_by(simulate)
async def test_silence_is_a_timeout_and_progress_is_not(network: Network, one: Host, two: Host, _three: Host) -> None:
    """Patience bounds each silence, not the whole; the handler that was left is cancelled."""
    began = network.loop.time()
    assert await kind_of(one.ask(two.address, "slow", b"10", timeout_s=2)) == "timeout"
    assert network.loop.time() == pytest.approx(began + 2)
    await asyncio.sleep(0.1)
    assert two.ended == ["cancelled"]
    head, _ = await one.ask(two.address, "count", b"", flood(20, every_s=1.0), timeout_s=2)
    assert head == b"20000"
    _, back = await one.ask(two.address, "stream", b"", flood(20, every_s=1.0), timeout_s=2)
    assert len(back) == 20000


def test_handler_failure_fails_the_world() -> None:
    """A handler's mistake is a `reset` for its caller, and the run fails with it."""

    async def main(_network: Network, one: Host, two: Host, _three: Host) -> None:
        assert await kind_of(one.ask(two.address, "no such name")) == "reset"
        await asyncio.sleep(1)

    with pytest.raises(Unhandled, match="no such name"):
        simulate(main)


# --- faults of processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [True, False])
@played_by(simulate)
async def test_crash(network: Network, one: Host, two: Host, _three: Host, *, refused: bool) -> None:
    """A killed process resets its streams and refuses; a machine without power is silent. Either way its messages
    on the way vanish, and its address is free for a restart."""
    asked = asyncio.create_task(kind_of(one.ask(two.address, "slow", b"100", timeout_s=3)))
    asking = asyncio.create_task(kind_of(two.ask(one.address, "slow", b"100", timeout_s=3)))
    await asyncio.sleep(1)
    two.transport.send(one.address, b"on the way")
    network.crash(two.address, refused=refused)
    assert await asking == "closed"
    assert await asked == ("reset" if refused else "timeout")
    assert await kind_of(one.ask(two.address, "echo", timeout_s=1)) == ("refused" if refused else "timeout")
    assert await kind_of(two.ask(one.address, "echo")) == "closed"
    assert one.heard == []
    again = await Host(network, 2).open()
    assert await one.ask(again.address, "echo", b"back") == (b"back", b"")
    await again.transport.close()
    if refused:
        assert one.ended == ["cancelled"]
    else:  # the handler is not notified and completes its work
        assert one.ended == []
        await asyncio.sleep(100)
        assert one.transport.handlers == {}


@played_by(simulate)
async def test_crash_in_mid_body(network: Network, one: Host, two: Host, three: Host) -> None:
    """A body whose sender is killed ends in an error, never short; a handler whose sender lost power times out."""

    async def read() -> None:
        async with one.transport.request(two.address, "give", b"1000000", timeout_s=3) as answer:
            async for _ in answer.body:
                await asyncio.sleep(0.01)

    reading = asyncio.create_task(kind_of(read()))
    await asyncio.sleep(2)
    network.crash(two.address, refused=True)
    assert await reading == "reset"
    sending = asyncio.create_task(kind_of(three.ask(one.address, "count", b"", flood(1000, every_s=0.1))))
    await asyncio.sleep(2)
    network.crash(three.address)
    assert await sending == "closed"
    await asyncio.sleep(HANDLER_SILENCE_S + 1)
    assert one.ended == ["timeout"]


@played_by(simulate)
async def test_pause_and_resume(network: Network, one: Host, two: Host, _three: Host) -> None:
    """A stopped process answers no node; what waited in its socket arrives when it continues."""
    network.pause(two.address)
    one.transport.send(two.address, b"waits")
    two.transport.send(one.address, b"was never sent")
    patient = asyncio.create_task(one.ask(two.address, "echo", b"patient", timeout_s=60))
    assert await kind_of(one.ask(two.address, "echo", timeout_s=2)) == "timeout"
    assert (one.heard, two.heard) == ([], [])
    network.resume(two.address)
    assert await patient == (b"patient", b"")
    assert [data for _, data, _ in two.heard] == [b"waits"]
    assert one.heard == []


@played_by(simulate)
async def test_streams_wait_for_a_partition_to_heal(network: Network, one: Host, two: Host, _three: Host) -> None:
    """A stream that is cut for less than its time-out continues without an error."""
    transfer = asyncio.create_task(one.ask(two.address, "stream", b"", flood(100, every_s=0.05), timeout_s=5))
    await asyncio.sleep(1)
    network.cut(two.address, one.address)
    await asyncio.sleep(3)
    network.heal()
    _, back = await transfer
    assert back == flooded(100)
    network.partition([one.address])
    assert await kind_of(one.ask(two.address, "echo", timeout_s=2)) == "timeout"


@run_by(run)
async def test_a_hole_separates_two_hosts_and_no_other() -> None:
    """Datagrams vanish. Streams fail at once as it is said, or are silent; after `heal` all is as before."""
    got: list[str] = []

    async def answers(transport: MemoryTransport, to: Address) -> str:
        try:
            async with transport.request(to, "x", b"", timeout_s=1.0):
                return "ok"
        except TransportError as error:
            return f"{error.kind}: {error.detail}"

    network = Network(seed=1)
    a, b, c = (network.transport(host) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))

    async def serve(_request: Request) -> Response:
        return Response(b"")

    for transport in (a, b, c):
        await transport.open(lambda data, _source: got.append(data.decode()), serve)
    network.hole(a.address, b.address, ("refused", "no route"))
    network.hole(b.address, c.address)
    for one, other in ((a, b), (b, a), (a, c)):
        one.send(other.address, b"datagram")
    await asyncio.sleep(1.0)

    assert got == ["datagram"]
    assert await answers(a, b.address) == await answers(b, a.address) == "refused: no route"
    assert await answers(b, c.address) == "timeout: did not answer for 1 s"
    assert await answers(a, c.address) == "ok"
    network.heal()
    assert [await answers(b, a.address), await answers(b, c.address)] == ["ok", "ok"]
    for transport in (a, b, c):
        await transport.close()
