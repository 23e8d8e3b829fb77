"""Joining: what follows the first answer, when a node dials again, and which address heals a partition."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.dialer import NotThisSwarm
from p2pnode.overlay.bootstrap.hello import HelloResult
from p2pnode.overlay.bootstrap.joining import HEAL_INTERVAL_S, JOIN_LOOKUP_TIMEOUT_S, RECONNECT_INTERVAL_S, Joining
from p2pnode.overlay.bootstrap.lan import Announcement, LanDiscovery
from p2pnode.overlay.bootstrap.peer_store import PeerStore
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, PeerTable
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import ListLog, Record, make_environment
from tests.harness.runner.stories import in_world, played_by

OWN, A, B, C = ids(4)
HERE = Address("10.0.0.9", 8468)
GENESIS = b"genesis of tests"


def at(number: int) -> Address:
    return Address(f"10.0.0.{number}", 8468)


class Scripted:
    """In the place of dialer, lookups and membership; what they are asked is recorded."""

    def __init__(self, peers: PeerTable) -> None:
        self.failures: dict[str, str] = {}
        self.dialled: list[tuple[list[str], list[Address], bytes | None]] = []
        self.tried: list[str] = []
        self.noted: list[bool] = []
        self.found: list[tuple[bytes, list[Contact]]] = []
        self.verified: list[Contact] = []
        self.result = HelloResult(Contact(A, at(1)), GENESIS, "10.0.0.9", [Contact(B, at(2))])
        self.error: NotThisSwarm | None = None
        self.lookup_s = 0.0
        self.members = SimpleNamespace(
            peers=peers, detector=SimpleNamespace(leaving=False), takes_streams=lambda _node: True
        )

    async def dial(
        self, bootstraps: Sequence[str], remembered: Callable[[], Sequence[Address]], genesis: bytes | None
    ) -> HelloResult:
        self.dialled.append((list(bootstraps), list(remembered()), genesis))
        if self.error is not None:
            raise self.error
        return self.result

    async def try_once(
        self, label: str | Address, genesis: bytes | None, *, is_noted: bool = False
    ) -> HelloResult | None:
        assert genesis == GENESIS
        self.tried.append(str(label))
        self.noted.append(is_noted)
        return self.result

    async def find(self, target: bytes, seeds: Sequence[Contact]) -> list[Contact]:
        self.found.append((target, list(seeds)))
        await asyncio.sleep(self.lookup_s)
        return []

    def verify(self, contact: Contact) -> None:
        self.verified.append(contact)


class World:
    """One node that joins, over scripted services."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        environment = make_environment(log=ListLog(self.records))
        self.peers = PeerTable()
        self.scripted: Any = Scripted(self.peers)
        self.local = LocalNode(OWN, 1, 1, "tests", HERE)
        self.store = PeerStore(environment)
        self.network = LanDiscovery(self.local, None, environment.log)
        self.joining = Joining(
            self.local, self.scripted, self.store, self.network, self.scripted, self.scripted, environment
        )

    def meet(self, node_id: bytes, address: Address) -> None:
        self.peers.observe(heartbeat(node_id, port=address.port), address, 0.0)

    def events(self) -> list[str]:
        return [record.event for record in self.records]


async def for_a_while(work: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.create_task(work, name="under test")
    await asyncio.sleep(seconds)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@played_by(in_world, World)
async def test_a_join_enters_the_swarm_verifies_the_responder_and_looks_up_the_own_id(world: World) -> None:
    """The lookup starts from the responder and its contacts; the subscribers are called last."""
    arrived: list[bytes | None] = []
    world.joining.on_arrival(lambda: arrived.append(world.scripted.found[0][0]))
    await world.joining.join(["seed:8468"], None)

    assert world.local.genesis == GENESIS
    assert world.scripted.dialled == [(["seed:8468"], [], None)]
    assert world.scripted.verified == [Contact(A, at(1))]
    assert world.scripted.found == [(OWN, [Contact(A, at(1)), Contact(B, at(2))])]
    assert arrived == [OWN]


@played_by(in_world, World)
async def test_a_slow_lookup_does_not_delay_the_join(world: World) -> None:
    """It is cut off, logged, and the subscribers are called all the same."""
    arrived: list[float] = []
    loop = asyncio.get_running_loop()
    world.joining.on_arrival(lambda: arrived.append(loop.time()))
    world.scripted.lookup_s = 60.0
    began = loop.time()
    await world.joining.join(["seed:8468"], None)

    assert arrived == [began + JOIN_LOOKUP_TIMEOUT_S]
    assert world.events() == ["join_lookup_slow", "swarm_joined"]


@played_by(in_world, World)
async def test_known_addresses_are_those_remembered_and_announced_without_the_own_one(world: World) -> None:
    """Remembered peers come first, and no address twice."""
    world.meet(A, at(1))
    world.meet(B, HERE)
    world.store.add_live(world.peers)
    announced = Announcement("tests", C, 8468, joined=True)
    world.network.on_announcement("c", announced.properties(), ["10.0.0.1", "10.0.0.3", "10.0.0.9"], 8468)

    assert world.joining.remembered() == [at(1)]
    assert world.joining.known_addresses()[0] == at(1)
    assert sorted(world.joining.known_addresses()) == [at(1), at(3)]


@played_by(in_world, World)
async def test_a_node_dials_again_only_when_all_its_peers_are_gone(world: World) -> None:
    """Not before it has entered a swarm, not while it leaves, and not without an address to dial."""
    await for_a_while(world.joining.keep_connected(), 3 * RECONNECT_INTERVAL_S)
    world.local.enter(GENESIS)
    await for_a_while(world.joining.keep_connected(), 3 * RECONNECT_INTERVAL_S)
    world.meet(A, at(1))
    world.store.add_live(world.peers)
    await for_a_while(world.joining.keep_connected(), 3 * RECONNECT_INTERVAL_S)
    world.peers.remove(A)
    world.scripted.members.detector.leaving = True
    await for_a_while(world.joining.keep_connected(), 3 * RECONNECT_INTERVAL_S)
    assert world.scripted.dialled == []

    world.scripted.members.detector.leaving = False
    await for_a_while(world.joining.keep_connected(), 1.5 * RECONNECT_INTERVAL_S)
    assert world.scripted.dialled == [([], [at(1)], GENESIS)]
    assert world.scripted.verified == [Contact(A, at(1))]


@played_by(in_world, World)
async def test_a_bootstrap_of_another_swarm_does_not_end_the_reconnecting(world: World) -> None:
    """The refusal is logged once, and the node dials again at every interval."""
    await world.joining.join(["seed:8468"], None)
    world.scripted.error = NotThisSwarm([("seed:8468", "belongs to run 'other'")])
    await for_a_while(world.joining.keep_connected(), 2.5 * RECONNECT_INTERVAL_S)

    assert len(world.scripted.dialled) == 3
    assert world.events() == ["swarm_joined", "table_empty", "not_this_swarm"]


@played_by(in_world, World)
async def test_a_bootstrap_is_dialled_as_often_as_all_remembered_peers_together(world: World) -> None:
    """One bootstrap beside sixty remembered peers gets half of the attempts."""
    await world.joining.join(["10.0.0.200:8468"], None)
    gone = ids(60, seed=5)
    for number, node_id in enumerate(gone):
        world.meet(node_id, Address(f"10.0.1.{number}", 8468))
    world.store.add_live(world.peers)
    for node_id in gone:
        world.peers.remove(node_id)
    world.meet(A, at(1))
    await for_a_while(world.joining.heal_partitions(), 55 * HEAL_INTERVAL_S)

    tried = Counter(label == "10.0.0.200:8468" for label in world.scripted.tried)
    assert 15 <= tried[True] <= 40
    assert tried[True] + tried[False] >= 50


@played_by(in_world, World)
async def test_a_node_whose_peers_can_own_nothing_looks_for_one_that_can(world: World) -> None:
    """Every few seconds, and what it finds is noted; not while a peer could own."""
    await world.joining.join(["10.0.0.200:8468"], None)
    world.meet(B, at(2))
    await for_a_while(world.joining.keep_connected(), 3.5 * RECONNECT_INTERVAL_S)
    assert world.scripted.tried == ["10.0.0.200:8468"] * 3
    assert world.scripted.noted == [True] * 3
    world.peers.observe(heartbeat(C, eligible=True), at(3), 0.0)
    await for_a_while(world.joining.keep_connected(), 3.5 * RECONNECT_INTERVAL_S)
    assert len(world.scripted.tried) == 3
    assert len(world.scripted.dialled) == 1


@played_by(in_world, World)
async def test_an_address_that_a_nat_chose_is_not_remembered(world: World) -> None:
    """Nobody can dial it, and a swarm that is started again would wait for who was there."""
    world.meet(A, at(1))
    world.meet(B, at(2))
    world.scripted.members.takes_streams = lambda node_id: node_id != B
    world.scripted.members.is_verified = lambda _node_id: True
    world.joining.note_peers()
    assert world.joining.remembered() == [at(1)]
