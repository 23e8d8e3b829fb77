"""Joining and rejoining: names with several addresses, failing resolvers, hours alone, partitions. Virtual time."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Coroutine
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.dialer import MAX_RETRY_DELAY_S, REMIND_S
from p2pnode.overlay.overlay import Overlay
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import PORT, OverlayWorld, address_of, endpoint

HOUR_S = 3600.0
#: Of a node without the others: the pause between two dials is at its longest after two minutes.
ALONE_S = 0.75 * HOUR_S


def play(story: Coroutine[Any, Any, Any], hours: float = 1.0) -> Any:
    return VirtualLoop().run(story, limit_s=hours * HOUR_S)


class Names:
    """A resolver: addresses by name, which may change; it may fail, or never answer."""

    def __init__(self, **names: list[Address]) -> None:
        self.names = names
        self.asked = 0
        self.failure: Exception | None = None
        self.hangs = False

    async def __call__(self, label: str) -> list[Address]:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(1e6)
        if self.failure is not None:
            raise self.failure
        host, _, port = label.rpartition(":")
        if host in self.names:
            return self.names[host]
        return [Address(host, int(port))]

    def serve(self, node: Overlay) -> None:
        node._joining._dialer.resolver = self


@run_by(play)
async def test_one_reachable_address_of_a_name_is_enough() -> None:
    """A name of five: two silent machines, a refusing one, one of a family that cannot be sent to, and a running
    node."""
    world = OverlayWorld(seed=51)
    await world.found(0)
    for number in (7, 8):
        other = world.make(number)
        await other.start()
        await world.kill(number)
    addresses = [endpoint(7), endpoint(8), endpoint(9), Address("2001:db8::1", PORT), endpoint(0)]
    node = world.make(1)
    Names(swarm=addresses).serve(node)
    await node.start()
    began = world.clock.monotonic()
    await node.join(["swarm:8468"], genesis=None)
    assert world.clock.monotonic() - began < 1.0, "the dead ones hold nobody up"
    await world.until(lambda: len(node.peers) == 1, 2.0, "it is in")
    await world.stop()


@run_by(play)
async def test_why_each_address_of_a_name_failed_is_said() -> None:
    """Alone: every address has its own reason, and the family that cannot be sent to names the setting."""
    world = OverlayWorld(seed=52)
    node = world.make(1)
    Names(swarm=[endpoint(9), Address("2001:db8::1", PORT)]).serve(node)
    await node.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await node.join(["swarm:8468"], genesis=None)
    assert set(node.failures) == {str(endpoint(9)), f"[2001:db8::1]:{PORT}"}
    assert 'node.host = "::"' in node.failures[f"[2001:db8::1]:{PORT}"]
    await world.stop()


@pytest.mark.parametrize("fault", ["fails", "hangs"])
@run_by(play)
async def test_a_dead_resolver_holds_up_neither_remembered_peers_nor_known_addresses(fault: str) -> None:
    """Restarted while names cannot be resolved, it joins through a remembered peer at once. Alone later, it dials the
    address that the name had last. When the resolver is back, it dials the new address."""
    world = OverlayWorld(seed=53)
    await world.found(0)
    names = Names(swarm=[endpoint(0)])
    node = world.make(1)
    names.serve(node)
    await node.start()
    await node.join(["swarm:8468"], genesis=None)
    await world.until(lambda: len(node.peers) == 1, 2.0, "it is in")
    await asyncio.sleep(35)
    await world.kill(1, refused=True)
    names.failure = OSError("no name servers") if fault == "fails" else None
    names.hangs = fault == "hangs"
    again = world.make(1)
    names.serve(again)
    again._joining._dialer._resolved["swarm:8468"] = [endpoint(0)]
    await again.start()
    began = world.clock.monotonic()
    await again.join(["swarm:8468"], genesis=None)
    assert world.clock.monotonic() - began < 1.0

    await world.kill(0)
    await world.until(lambda: len(again.peers) == 0, 30.0, "it is alone")
    again._joining._peer_store._met.clear()
    await asyncio.sleep(20)
    back = world.make(0)
    await back.start()
    back.found(again.genesis or b"")
    await world.until(lambda: len(again.peers) == 1, 30.0, "in through the name's last address")
    assert "cannot be resolved" in str([r.fields for r in world.records if r.event == "bootstrap_failed"])

    await world.kill(0)
    moved = world.make(0, host="10.9.9.9")
    await moved.start()
    moved.found(again.genesis or b"")
    again._joining._peer_store._met.clear()
    names.names["swarm"] = [moved.address]
    names.failure, names.hangs = None, False
    await world.until(lambda: any(p.address == moved.address for p in again.peers), 60.0, "at its new address")
    await world.stop()


@run_by(play, hours=8)
async def test_an_isolated_node_dials_for_ever_with_backoff_and_jitter() -> None:
    """Three quarters of a virtual hour alone: bootstraps and remembered peers are all dialled, at least every 15 s and
    at random intervals. The log has each reason once, and a reminder a minute; nothing accumulates. When the swarm is
    back the node joins within 20 s."""
    world = OverlayWorld(seed=54)
    await world.raise_swarm(4)
    names = Names(swarm=[endpoint(0), endpoint(1)])
    node = world.nodes[3]
    names.serve(node)
    node._joining._bootstraps = ["swarm:8468", f"{address_of(2)}:{PORT}"]
    await asyncio.sleep(40)
    genesis = node.genesis
    for number in (0, 1, 2):
        await world.kill(number)
    await world.until(lambda: len(node.peers) == 0, 30.0, "it is alone")
    dialled: list[tuple[float, Address]] = []
    transport: Any = node._transport
    request = transport.request

    def counted(to: Address, *arguments: Any, **options: Any) -> Any:
        dialled.append((world.clock.monotonic(), to))
        return request(to, *arguments, **options)

    transport.request = counted
    await asyncio.sleep(60)
    seen, tasks = len(world.records), len(asyncio.all_tasks())
    calls = len(dialled)
    await asyncio.sleep(ALONE_S)
    rounds = [at for at, to in dialled[calls:] if to == endpoint(0)]
    pauses = [later - at for at, later in itertools.pairwise(rounds) if later - at > 0.5]
    print(f"{len(rounds)} dials of one, pauses {min(pauses):.1f} to {max(pauses):.1f} s")
    assert {to for _, to in dialled[calls:]} == {endpoint(0), endpoint(1), endpoint(2)}
    assert max(pauses) < 1.5 * MAX_RETRY_DELAY_S + 2.5, "the last pause, with jitter, and one hello's time-out"
    assert ALONE_S / len(rounds) > MAX_RETRY_DELAY_S / 4, "and not as fast as it can"
    assert statistics.stdev(pauses) > 1.0, "never in step with others"
    logged = [record.event for record in world.records[seen:]]
    reminders = logged.count("still_not_joined")
    assert ALONE_S / (REMIND_S + 1.5 * MAX_RETRY_DELAY_S + 2.5) - 1 <= reminders <= ALONE_S / REMIND_S
    assert len(logged) - reminders <= 4
    assert len(asyncio.all_tasks()) <= tasks + 8
    assert node.report().calls_waiting <= 1

    back = world.make(1)
    await back.start()
    back.found(genesis or b"")
    took = await world.until(lambda: len(node.peers) == 1, 20.0, "it is in again")
    print(f"in after {took:.1f} s")
    await world.stop()


@pytest.mark.parametrize("side", [2, *more(3)], ids=["a pair without a bootstrap", "half"])
@run_by(play, hours=4)
async def test_the_sides_of_a_partition_longer_than_any_memory_of_the_dead_become_one(side: int) -> None:
    """A partition of three and three, or four and two, lasts an hour and a quarter, and each side forgets the other.
    They are one swarm within five minutes after it. The pair's only bootstrap is dead by then: stored peers alone lead
    back."""
    world = OverlayWorld(seed=55)
    nodes = await world.raise_swarm(6)
    await asyncio.sleep(60)
    left, right = nodes[:-side], nodes[-side:]
    world.network.partition([n.address.host for n in left], [n.address.host for n in right])
    if side == 2:
        await world.kill(0)
        left, nodes = left[1:], nodes[1:]
    await asyncio.sleep(1.25 * HOUR_S)  # dead members are kept for an hour
    assert all(len(node.peers) == len(left) - 1 for node in left)
    assert all(len(node.peers) == len(right) - 1 for node in right)
    assert all(node.report().lost == 0 for node in nodes), "no node keeps the dead any more"
    world.network.heal()
    whole = len(nodes) - 1
    took = await world.until(lambda: all(len(node.peers) == whole for node in nodes), 300.0, "one swarm again")
    print(f"whole after {took:.0f} s")
    assert [r.event for r in world.records].count("island_met") >= 1
    await world.stop()
