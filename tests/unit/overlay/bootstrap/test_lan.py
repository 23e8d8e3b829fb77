"""The local network: which announcements count, which node a node joins, and when it founds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.lan import (
    LAN_JOIN_TIMEOUT_S,
    MAX_ADDRESSES,
    MAX_DISCOVERED,
    Announcement,
    LanDiscovery,
    read,
)
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.local_node import LocalNode
from tests.harness.environment.simulated import ListLog, Record
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

OWN, LOWER, LOWEST = (bytes([first]) * ID_BYTES for first in (0x50, 0x40, 0x30))
BOUND = Address("10.0.0.9", 9000)
GENESIS = b"genesis of tests"


class Network:
    """In the place of `ZeroconfLan`: records what is announced."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.announced: list[Announcement] = []
        self.hosts: list[str] = []
        self.stopped = 0

    async def start(
        self,
        own: Announcement,
        host: str,
        on_announcement: Callable[[str, Mapping[str, str], Iterable[str], int], None],
    ) -> None:
        if self.fails:
            raise OSError("no multicast")
        self.announced.append(own)
        self.hosts.append(host)
        self.on_announcement = on_announcement

    async def announce(self, own: Announcement) -> None:
        self.announced.append(own)

    async def stop(self) -> None:
        self.stopped += 1


class Joins:
    """In the place of `Joining`: answers after `needs_s`."""

    def __init__(self, needs_s: float) -> None:
        self.needs_s = needs_s
        self.calls: list[tuple[Sequence[str], bytes | None]] = []
        self.failures = {"10.0.0.1:8468": "timed out"}

    async def join(self, bootstraps: Sequence[str], genesis: bytes | None) -> None:
        self.calls.append((bootstraps, genesis))
        await asyncio.sleep(self.needs_s)


class World:
    def __init__(self, *, fails: bool = False, has_lan: bool = True, join_s: float = 0.0) -> None:
        self.records: list[Record] = []
        self.lan = Network(fails=fails)
        self.local = LocalNode(OWN, 1, 1, "tests", BOUND)
        self.joins: Any = Joins(join_s)
        lan: Any = self.lan if has_lan else None
        self.service = LanDiscovery(self.local, lan, ListLog(self.records))

    def receive(self, node_id: bytes, *, joined: bool = False) -> None:
        entry = Announcement("tests", node_id, 8468, joined=joined)
        self.lan.on_announcement(node_id.hex(), entry.properties(), [f"10.0.0.{node_id[0]}"], 8468)


@run_by(run)
async def test_the_bound_port_is_announced_and_later_that_the_node_has_joined() -> None:
    """Announcements of others reach the local network."""
    world = World()
    await world.service.start()
    assert world.lan.announced == [Announcement("tests", OWN, 9000, joined=False)]
    assert world.lan.hosts == ["10.0.0.9"]
    world.receive(LOWER, joined=True)
    assert world.service.is_any_joined()

    waits = asyncio.create_task(world.service.announce_when_joined(), name="announce")
    await asyncio.sleep(1.0)
    assert len(world.lan.announced) == 1
    world.local.enter(GENESIS)
    await waits
    assert world.lan.announced[1:] == [Announcement("tests", OWN, 9000, joined=True)]
    await world.service.stop()
    assert world.lan.stopped == 1


@run_by(run)
async def test_a_network_without_multicast_is_logged_and_otherwise_ignored() -> None:
    """The node then finds no peer, announces nothing and has nothing to withdraw; so does one without multicast DNS."""
    for world, events in ((World(fails=True), ["lan_discovery_failed"]), (World(has_lan=False), [])):
        await world.service.start()
        assert [record.event for record in world.records] == events
        assert not await world.service.join(world.joins.join, world.joins.failures)
        world.local.enter(GENESIS)
        await world.service.announce_when_joined()
        await world.service.stop()
        assert (world.lan.announced, world.lan.stopped, world.joins.calls) == ([], 0, [])


@run_by(run)
async def test_lower_ids_that_do_not_answer_are_dropped_until_this_node_founds() -> None:
    """Each attempt is bounded and logged with its failures."""
    world, loop = World(join_s=3600.0), asyncio.get_running_loop()
    await world.service.start()
    world.receive(LOWER)
    world.receive(LOWEST)
    began = loop.time()
    assert not await world.service.join(world.joins.join, world.joins.failures)
    assert loop.time() - began >= 2 * LAN_JOIN_TIMEOUT_S
    assert [record.event for record in world.records] == ["neighbours_do_not_answer"] * 2
    assert world.records[0].fields["attempts"] == {"10.0.0.1:8468": "timed out"}


@run_by(run)
async def test_a_node_never_founds_beside_one_that_announces_a_swarm() -> None:
    """One that has joined is not dropped, so the attempts continue."""
    world = World(join_s=3600.0)
    await world.service.start()
    world.receive(LOWER, joined=True)
    task = asyncio.create_task(world.service.join(world.joins.join, world.joins.failures), name="join")
    await asyncio.sleep(10 * LAN_JOIN_TIMEOUT_S)
    assert not task.done()
    assert len(world.joins.calls) >= 9
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


OURS = Announcement("tests", OWN, 8468, joined=False)
OTHER = Announcement("tests", b"\x60" * ID_BYTES, 8468, joined=True)


def network() -> LanDiscovery:
    log: Any = None
    return LanDiscovery(LocalNode(OWN, 1, 1, "tests", BOUND), None, log)


def test_an_announcement_of_our_run_is_read() -> None:
    """The result has its id, whether it has joined, and at most a few of its local addresses."""
    hosts = ["192.168.1.5", "fe80::5", *(f"10.0.0.{n}" for n in range(1, 9))]

    sighting = read(OTHER.properties(), hosts, 9000, OURS)

    assert sighting is not None
    assert (sighting.node_id, sighting.joined, len(sighting.addresses)) == (OTHER.node_id, True, MAX_ADDRESSES)
    assert sighting.addresses[:2] == (Address("192.168.1.5", 9000), Address("fe80::5", 9000))


def test_what_is_announced_names_run_id_and_state_and_nothing_else() -> None:
    """It contains no key, and no address but that of the service."""
    assert OTHER.properties() == {"v": OTHER.properties()["v"], "run": "tests", "id": "60" * ID_BYTES, "in": "1"}


GOOD = OTHER.properties()


@pytest.mark.parametrize(
    ("properties", "hosts", "port"),
    [
        ({}, ["10.0.0.1"], 8468),
        (GOOD | {"run": "another"}, ["10.0.0.1"], 8468),
        (GOOD | {"v": "999"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "zz"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "60"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "6" * 100000}, ["10.0.0.1"], 8468),
        (GOOD | {"id": OURS.node_id.hex()}, ["10.0.0.1"], 8468),
        (GOOD, [], 8468),
        (GOOD, ["no address"], 8468),
        (GOOD, ["10.0.0.1"], 0),
        (GOOD, ["10.0.0.1"], 70000),
        (GOOD, ["8.8.8.8"], 8468),
        (GOOD, ["0.0.0.0", "::", "224.0.0.251", "ff02::fb"], 8468),
    ],
)
def test_junk_is_ignored(properties: dict[str, str], hosts: list[str], port: int) -> None:
    """Other runs and versions, the own announcement, invalid ids and addresses, and addresses of other networks."""
    place = network()
    place.on_announcement("x", properties, hosts, port)

    assert place.addresses() == []
    assert place.should_found()


def test_a_flood_of_announcements_is_bounded() -> None:
    """Beyond the limit new names are ignored, and known ones may still change."""
    place = network()
    for number in range(1000):
        place.on_announcement(str(number), OTHER.properties(), [f"10.0.{number // 250}.{number % 250 + 1}"], 1)
    assert len(place.addresses()) == MAX_DISCOVERED
    place.on_announcement("0", OTHER.properties(), ["10.9.9.9"], 2)
    assert place.addresses()[0] == Address("10.9.9.9", 2)
