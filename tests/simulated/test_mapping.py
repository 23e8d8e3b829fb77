"""A port that the router opens for a node: announced, renewed, lost, found again, given back; and its failures."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.nat.port_mapping import LEASE_S, REMOVE_TIMEOUT_S, GatewayFailed, Mapped
from p2pnode.overlay.report import PortMappingReport
from tests.harness.environment.virtual_loop import run
from tests.harness.network.nat import Nat
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import PORT, OverlayWorld, address_of

PUBLIC = "93.184.216.34"
#: What the router grants, less than it is asked for.
GRANTED_S = 120.0


class Router:
    """Opens a port in a simulated NAT; `fails` is the reason why it does not."""

    def __init__(self, nat: Nat, outside: str = PUBLIC) -> None:
        self.nat = nat
        self.outside = outside
        self.fails = ""
        self.hangs = False
        self.opened: list[float] = []
        self.closed = 0

    async def open(self, internal: Address, lease_s: float) -> Mapped:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise GatewayFailed(self.fails)
        self.opened.append(asyncio.get_running_loop().time())
        self.nat.forward(9000, internal)
        assert lease_s == LEASE_S
        return Mapped(Address(self.outside, 9000), GRANTED_S)

    async def close(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self.closed += 1
        self.nat.forward(9000, None)


async def behind(seed: int) -> tuple[OverlayWorld, Nat, Router]:
    world = OverlayWorld(seed=seed)
    nat = Nat(PUBLIC)
    world.network.behind(nat, address_of(9))
    await world.raise_swarm(3)
    return world, nat, Router(nat)


@run_by(run, limit_s=36000)
async def test_a_mapped_node_is_reached_and_owns() -> None:
    """It announces the router's address, is dialled back there and becomes eligible. All know it there, and streams
    reach it. The lease is renewed at its half; leaving frees the port."""
    world, _, router = await behind(81)
    node = await world.join(9, gateway=router)
    await world.until(lambda: node.heartbeat.eligible, 30.0, "it is eligible")
    home = Address(PUBLIC, 9000)
    assert node.address == home
    others = [world.nodes[number] for number in range(3)]
    await world.until(
        lambda: all((c := other.contact(node.node_id)) and c.address == home for other in others),
        20.0,
        "known there",
    )
    contact = others[0].contact(node.node_id)
    assert contact is not None
    async with others[0].request(contact, "dialback", b"", timeout_s=5.0):
        pass
    await asyncio.sleep(GRANTED_S)
    pauses = [round(later - earlier, 3) for earlier, later in pairwise(router.opened)]
    assert len(pauses) >= 2
    assert set(pauses) == {GRANTED_S / 2}
    await node.leave()
    await node.stop()
    assert router.closed == 1
    assert [record.event for record in world.records if "port_mapping" in record.event] == ["port_mapping_removed"]
    del world.nodes[9]
    await world.stop()


@run_by(run, limit_s=36000)
async def test_a_router_that_opens_a_port_late() -> None:
    """Refused at first, and known as one behind a NAT: when the router gives in, all move to the address it opened."""
    world, _, router = await behind(82)
    router.fails = "refused AddPortMapping: 606"
    node = await world.join(9, gateway=router)
    others = [world.nodes[number] for number in range(3)]
    await world.until(lambda: all(node.node_id in other.peers for other in others), 20.0, "it is known")
    await asyncio.sleep(60)
    assert not node.heartbeat.eligible
    assert node.report().mapping == PortMappingReport(address="", reason=router.fails)
    said = [record for record in world.records if record.event == "port_not_mapped"]
    assert len(said) == 1, "said once, not at every try"
    router.fails = ""
    await world.until(lambda: node.heartbeat.eligible, 700.0, "it is eligible")
    await world.until(
        lambda: all((c := other.contact(node.node_id)) and c.address == Address(PUBLIC, 9000) for other in others),
        30.0,
        "all know it at its new address",
    )
    assert not [record for record in world.records if record.event == "peer_dead"]
    await world.stop()


@run_by(run, limit_s=36000)
async def test_a_mapping_that_is_lost_is_an_event_and_not_the_end() -> None:
    """The router loses the mapping and refuses: the node is no longer eligible, continues, and is eligible again with
    the mapping."""
    world, nat, router = await behind(83)
    node = await world.join(9, gateway=router)
    await world.until(lambda: node.heartbeat.eligible, 30.0, "it is eligible")
    router.fails = "no router in the local network answers to UPnP"
    nat.forward(9000, None)
    nat.rebind()
    await world.until(lambda: not node.heartbeat.eligible, GRANTED_S, "it finds out")
    assert [record for record in world.records if record.event == "port_mapping_lost"]
    others = [world.nodes[number] for number in range(3)]
    await asyncio.sleep(30)
    assert all(node.node_id in other.peers for other in others)
    router.fails = ""
    await world.until(lambda: node.heartbeat.eligible, 1500.0, "it is back")
    await world.stop()


@run_by(run, limit_s=36000)
async def test_a_router_behind_another_nat_is_not_believed() -> None:
    """An outside address that no peer can dial is not announced, and is reported."""
    world, _, router = await behind(84)
    router.outside = "100.64.3.1"
    node = await world.join(9, gateway=router)
    await asyncio.sleep(30)
    assert node.address == Address(address_of(9), PORT)
    assert "behind another NAT" in node.report().mapping.reason
    await world.stop()


@run_by(run, limit_s=36000)
async def test_a_router_that_hangs_blocks_nothing() -> None:
    """Neither the join nor the leave waits for it longer than its second."""
    world, _, router = await behind(85)
    router.hangs = True
    began = world.clock.monotonic()
    node = await world.join(9, gateway=router)
    assert world.clock.monotonic() - began < 5.0
    await asyncio.sleep(10)
    began = world.clock.monotonic()
    await node.leave()
    await node.stop()
    assert world.clock.monotonic() - began < REMOVE_TIMEOUT_S + 0.5
    del world.nodes[9]
    await world.stop()
