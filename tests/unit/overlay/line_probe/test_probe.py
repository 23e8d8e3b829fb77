"""The probe of a joining node: overlays on lines with a rate, and what other members may do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from overlay.addresses import Address
from overlay.capacity import AT_LEAST, UNKNOWN, class_of, split
from overlay.line_probe.estimate import PROBE_BYTES
from overlay.line_probe.probe import MAX_ALL_S, MAX_PROBE_S, MAX_WAIT_S, PROBE, RATE, LineProbe, ProbeRequest
from overlay.local_node import LocalNode
from overlay.overlay import Overlay
from overlay.peer_table import PeerTable
from overlay.peers import Contact
from overlay.requests import RequestService
from overlay.sockets.transport import SocketTransport
from overlay.transport import Buffer, RequestRejected, Response, TransportError
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.simulated import NoLog, VirtualClock, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.overlay_swarm import OverlayWorld, address_of

MBIT = 125_000.0
SLOW, FAST = 5 * MBIT, 100 * MBIT
SEED = 18


def play(story: Callable[[OverlayWorld], Awaitable[None]], *mbit: float) -> OverlayWorld:
    """Run a story in a world whose hosts, by number, have lines of these rates; 0: no line of its own."""
    world: list[OverlayWorld] = []

    async def main() -> None:
        world.append(OverlayWorld(SEED, delay=(0.03, 0.031)))
        for number, rate in enumerate(mbit):
            if rate:
                world[0].network.line(address_of(number), rate * MBIT)
        await story(world[0])
        await world[0].stop()

    run(main())
    return world[0]


def probes(world: OverlayWorld) -> list[tuple[int, int]]:
    """Sender and receiver of each probe that a node begins to read, also of nodes made later. A second one at the same
    time fails the test."""
    seen: list[tuple[int, int]] = []
    make = world.make

    def watch(overlay: Overlay) -> Overlay:
        handler = overlay._requests._handlers[PROBE]
        reading: list[bytes] = []

        async def watched(peer: Contact, payload: bytes, body: AsyncIterator[Buffer]) -> Response:
            async def pieces() -> AsyncIterator[Buffer]:
                reading.append(peer.node_id)
                assert reading == [peer.node_id], "two probes at once"
                numbers = {each.node_id: number for number, each in world.nodes.items()}
                seen.append((numbers[peer.node_id], numbers[overlay.node_id]))
                async for piece in body:
                    yield piece

            try:
                return await handler(peer, payload, pieces())
            finally:
                if peer.node_id in reading:
                    reading.remove(peer.node_id)

        overlay._requests._handlers[PROBE] = watched
        return overlay

    world.make = lambda *args, **options: watch(make(*args, **options))  # type: ignore[method-assign]
    return seen


async def eligible(world: OverlayWorld, overlay: Overlay, within_s: float) -> float:
    return await world.until(lambda: overlay.heartbeat.eligible, within_s, "eligible")


def test_a_slow_line_is_known_to_the_others_before_its_node_is_eligible() -> None:
    """One of 5 and three of 100 Mbit/s: within two seconds the slow one has its class, and all that know it as
    eligible know that class."""

    async def story(world: OverlayWorld) -> None:
        others = [await world.found(0)]
        for number in (1, 2):
            others.append(await world.join(number))
            await eligible(world, others[-1], 1.5)
        slow = await world.join(3)
        unknowing: list[float] = []

        async def watch() -> None:
            while True:
                for other in others:
                    peer = other.peers.get(slow.node_id)
                    if peer is not None and peer.eligible and not peer.capacity:
                        unknowing.append(world.clock.monotonic())
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        waited_s = await eligible(world, slow, 2.5)
        await asyncio.sleep(1.0)
        watching.cancel()

        print(f"eligible after {waited_s:.2f} s")
        assert split(slow.local.line.capacity) == (class_of(SLOW), False)
        assert slow.local.line.capacity_source == "probe"
        assert unknowing == []
        for other in others:
            assert other.capacity(slow.node_id) == class_of(SLOW)
        for fast in others[1:]:
            value, is_bound = split(fast.local.line.capacity)
            assert is_bound
            assert class_of(FAST) - 1 <= value <= class_of(FAST)
        # The founder owned everything at once: it asked nobody.
        assert others[0].local.line.capacity_source in ("", "transfers")
        for key in (bytes([number]) * 20 for number in range(20)):
            assert slow.node_id not in [each.node_id for each in await others[0].candidates(key)]

    world = play(story, 100, 100, 100, 5)
    assert [record.node for record in world.records if record.event == "upload_probed"] == ["n1", "n2", "n3"]


def test_a_slow_receiver_makes_no_node_slow() -> None:
    """The founder's line is slow: a fast node that joins through it asks a second member."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        await world.join(1)
        fast = await world.join(2)
        await eligible(world, fast, MAX_ALL_S)

        value, is_bound = split(fast.local.line.capacity)
        assert is_bound
        assert value >= class_of(FAST) - 1

    play(story, 5, 0, 100)


def test_with_one_receiver_alone_a_full_line_is_not_announced() -> None:
    """The slow line may be the receiver's: after some seconds the node is eligible and counts as unknown."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        slow = await world.join(1)
        assert not slow.heartbeat.eligible
        waited_s = await eligible(world, slow, MAX_WAIT_S + 0.5)
        assert waited_s > 1.0
        assert slow.local.line.capacity == UNKNOWN

    world = play(story, 100, 5)
    assert [record.event for record in world.records].count("upload_not_known") == 1


def test_a_second_receiver_that_comes_later_is_asked() -> None:
    """Two nodes join at about the same time through the founder: the first one waits for the second."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        slow = await world.join(1)
        await asyncio.sleep(1.0)
        await world.join(2)
        await eligible(world, slow, MAX_ALL_S)
        assert split(slow.local.line.capacity) == (class_of(SLOW), False)

    play(story, 100, 5, 100)


def test_a_member_receives_one_probe_at_a_time() -> None:
    """Eight nodes join at once through one founder: most end with a class soon, and no two probes overlap."""

    async def story(world: OverlayWorld) -> None:
        seen = probes(world)
        await world.found(0)
        joined = await asyncio.gather(*(world.join(number) for number in range(1, 9)))
        for number in joined:
            await eligible(world, number, MAX_ALL_S)
        assert sum(overlay.local.line.capacity != UNKNOWN for overlay in joined) >= 6
        assert len(seen) == len(set(seen)) >= 10
        assert not [sender for sender, receiver in seen if sender in (0, receiver)]

    play(story, *[10.0] * 9)


@pytest.mark.parametrize("how", ["dies", "hangs", "old", "refuses"])
def test_members_that_take_no_probe_delay_a_node_for_seconds_at_most(how: str) -> None:
    """A receiver that dies or hangs during the probe, is of an older version, or refuses: another one is asked; where
    all are so, the node is eligible all the same, and its capacity unknown."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        await world.join(1)
        for overlay in world.nodes.values():
            if how == "old":
                del overlay._requests._handlers[PROBE]
            elif how == "refuses":
                overlay._line_probe._is_receiving = True
        joined = await world.join(2)
        if how in ("dies", "hangs"):
            await asyncio.sleep(0.3)
            for number in (0, 1):
                if how == "dies":
                    await world.crash(number)
                else:
                    world.network.pause(world.nodes[number].address)
        await world.until(lambda: not joined.local._measures, MAX_ALL_S + 2 * MAX_PROBE_S + 1.0, "no longer measuring")
        assert joined.local.line.capacity == UNKNOWN
        if how in ("old", "refuses"):
            await eligible(world, joined, 1.0)
        if how == "old":  # asked once by each of the others, and told once
            refused = [each._requests.counters["requests_refused_no_handler"] for each in world.nodes.values()]
            assert max(refused) <= 2

    play(story, 100, 100, 5)


def test_many_members_that_hang_do_not_add_up() -> None:
    """Eight members that answer nothing, one after the other: the node waits as long as for two."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        for number in range(1, 8):
            await world.join(number)
        joined = await world.join(8)
        await world.until(lambda: len(joined.peers) == 8, 5.0, "all known")
        world.network.line(address_of(8), SLOW)
        joined._line_probe._is_due = True
        for number in range(8):
            world.network.pause(world.nodes[number].address)
        assert joined._line_probe.begin()
        began = world.clock.monotonic()
        await joined._line_probe.run()
        assert world.clock.monotonic() - began <= MAX_ALL_S + 0.1
        assert not joined.local._measures

    play(story, *[0.0] * 9)


def test_a_member_that_refuses_is_asked_again() -> None:
    """It was free when it was asked, and began to receive the probe of another node before this one's came."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        await world.join(1)
        for overlay in world.nodes.values():
            handler = overlay._line_probe._receive_body
            refused: list[bytes] = []

            async def refusing(
                peer: Contact,
                size_bytes: int,
                body: AsyncIterator[Buffer],
                handler: Any = handler,
                refused: list[bytes] = refused,
            ) -> None:
                if not refused:
                    refused.append(peer.node_id)
                    raise RequestRejected("another node sends a probe here")
                await handler(peer, size_bytes, body)

            overlay._line_probe._receive_body = refusing  # type: ignore[method-assign]
        slow = await world.join(2)
        await eligible(world, slow, MAX_ALL_S)
        assert split(slow.local.line.capacity) == (class_of(SLOW), False)

    play(story, 0, 0, 5)


def test_one_bad_receiver_does_not_spoil_the_probe() -> None:
    """Of three receivers one does not serve probes: the two others show the line."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        for number in (1, 2):
            await world.join(number)
        del world.nodes[0]._requests._handlers[PROBE]
        slow = await world.join(3)
        await eligible(world, slow, MAX_ALL_S)
        assert split(slow.local.line.capacity) == (class_of(SLOW), False)

    play(story, 100, 100, 100, 5)


def test_without_a_line_nothing_is_probed_and_nothing_waits() -> None:
    """On one machine, and for a founder, a node that may not own, or one that arrives again, there is no probe."""

    async def story(world: OverlayWorld) -> None:
        seen = probes(world)
        founder = await world.found(0)
        assert founder.heartbeat.eligible
        near = await world.join(1)
        client = await world.join(2, client_only=True)
        master = await world.join(3, role="master")
        await eligible(world, near, 1.0)
        await asyncio.sleep(3.0)
        assert not near._line_probe.begin()
        assert not founder._line_probe.begin()
        assert not client._line_probe.begin()
        assert not master._line_probe.begin()
        assert seen == []

    play(story, 20, 0, 20, 20)


def test_members_on_the_same_machine_are_not_asked() -> None:
    """Not at this node's own address, whatever its transport is bound to, and not on the loopback."""

    async def story() -> None:
        local = LocalNode(b"o" * 20, 1, 1, "tests", Address("10.0.0.1", 8468))
        transport = SocketTransport("0.0.0.0", 0, log=NoLog(), clock=VirtualClock())
        peers = PeerTable()
        for number, host in enumerate(("10.0.0.1", "10.0.0.2", "127.0.0.1", "::1")):
            peers.observe(heartbeat(bytes([number]) * 20), host, 0.0)
        requests = RequestService(local, transport, None, VirtualClock())  # type: ignore[arg-type]
        probe = LineProbe(local, transport, requests, peers, make_environment(), may_own=True)

        assert [str(peer.address.host) for peer in probe._receivers([])] == ["10.0.0.2"]
        bound = SocketTransport("10.0.0.2", 0, log=NoLog(), clock=VirtualClock())
        assert [bound.has_line_to(Address(host, 1)) for host in ("10.0.0.2", "10.0.0.3")] == [False, True]

    run(story())


def test_a_stored_capacity_is_used_for_a_day_and_then_probed_again() -> None:
    """A restart on the same disk begins with it; after more than a day it is measured anew."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        for number in (1, 2):
            await world.join(number)
        slow = await world.join(3)
        await eligible(world, slow, 3.0)
        await world.crash(3, refused=True)

        again = await world.join(3)
        assert again.local.line.capacity_source == "stored"
        assert split(again.local.line.capacity) == (class_of(SLOW), False)
        await world.crash(3, refused=True)

        world.clocks[3] = world.clock  # the wall clock is that of the disk
        stored = msgspec.json.decode(world.disks[3].files["capacity.json"])
        world.disks[3].files["capacity.json"] = msgspec.json.encode({**stored, "at": stored["at"] - 25 * 3600.0})
        again = await world.join(3)
        assert again.local.line.capacity == UNKNOWN
        await eligible(world, again, 3.0)
        assert again.local.line.capacity_source == "probe"

    play(story, 100, 100, 100, 5)


def test_a_member_cannot_flood_another_with_probes() -> None:
    """More bytes than allowed, more than said, other payloads, and more probes than allowed are refused."""

    async def story(world: OverlayWorld) -> None:
        founder = await world.found(0)
        hostile = await world.join(1)

        async def send(payload: bytes, body: list[bytes]) -> str:
            try:
                async with hostile.request(founder.local.contact, PROBE, payload, body, timeout_s=5.0):
                    return ""
            except TransportError as error:
                return error.detail

        def request(size_bytes: int) -> bytes:
            return msgspec.msgpack.encode(ProbeRequest(size_bytes))

        assert "at most" in await send(request(PROBE_BYTES + 1), [b"x"])
        assert "at most" in await send(request(-1), [b"x"])
        assert "not a probe" in await send(b"\xff", [])
        found = [await send(request(10), [b"x" * 10]) for _ in range(int(RATE.burst))]
        assert found == [""] * len(found)
        assert "a moment ago" in await send(request(10), [b"x" * 10])
        await asyncio.sleep(1 / RATE.rate_per_s)
        assert "longer than it says" in await send(request(10), [b"x" * 11])
        assert not founder._line_probe._is_receiving

    play(story, 100, 0)


def test_a_receiver_gives_up_a_probe_that_does_not_end() -> None:
    """It is free again for others after some seconds."""

    async def story(world: OverlayWorld) -> None:
        founder = await world.found(0)
        hostile = await world.join(1)

        async def trickle() -> Any:
            while True:
                yield b"x"
                await asyncio.sleep(0.5)

        async def send() -> None:
            head = msgspec.msgpack.encode(ProbeRequest(PROBE_BYTES))
            async with hostile.request(founder.local.contact, PROBE, head, trickle(), timeout_s=30.0):
                pass

        began = world.clock.monotonic()
        with pytest.raises(TransportError, match="taken longer"):
            await send()
        assert world.clock.monotonic() - began < 2 * MAX_PROBE_S + 1.0
        assert not founder._line_probe._is_receiving

    play(story, 100, 0)


def test_a_probe_that_is_cancelled_leaves_nothing() -> None:
    """A node that stops while it probes stops at once."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        slow = await world.join(1)
        await asyncio.sleep(0.3)
        assert slow.local._measures
        began = world.clock.monotonic()
        await slow.stop()
        assert world.clock.monotonic() - began < 0.5

    play(story, 100, 5)


def test_bounds_are_marked() -> None:
    """A probe of a fast line announces a bound, which later transfers may raise."""

    async def story(world: OverlayWorld) -> None:
        await world.found(0)
        fast = await world.join(1)
        await eligible(world, fast, 1.5)
        assert fast.local.line.capacity > AT_LEAST

    play(story, 100, 100)
