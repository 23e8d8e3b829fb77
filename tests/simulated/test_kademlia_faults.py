"""The numbered faults of `kademlia` 2.2.3 and `rpcudp` 5.0.1: each is shown on the stock classes, and absent from ours.

Faults 1 and 12 need real sockets: tests/process/test_overlay_sockets.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from kademlia.node import Node
from kademlia.routing import RoutingTable
from kademlia.utils import digest

from overlay.addresses import Address
from overlay.identity import identity_from_seed
from overlay.ids import distance, random_id
from overlay.kademlia import messages
from overlay.kademlia.identity_proofs import IdentityProofs
from overlay.kademlia.routing_table import ContactTable
from overlay.overlay import NotThisSwarm
from overlay.peers import Contact, Heartbeat
from overlay.transport import MAX_DATAGRAM_BYTES, RequestRejected
from tests.harness.environment.virtual_loop import Unhandled, VirtualLoop
from tests.harness.swarms.overlay_swarm import GENESIS, PORT, OverlayWorld, address_of, endpoint
from tests.harness.swarms.stock_kademlia import StockNetwork, ids_in, known

TAG = messages.swarm_tag("tests", GENESIS)
SOMEBODY = Address("10.7.7.7", 4000)


def play(story: Coroutine[Any, Any, Any]) -> Any:
    return VirtualLoop().run(story)


def request(heartbeat: Heartbeat, body: Any, message_id: bytes = b"q" * 20) -> bytes:
    """A datagram of any sender, `body` encoded as it is."""
    return b"\x00" + message_id + msgspec.msgpack.encode([TAG, heartbeat, body, []])


async def offered(seed: int, count: int) -> tuple[RoutingTable, ContactTable, list[bytes]]:
    """A stock table and ours with the same contacts offered. On a loop: the stock one makes a task when it is full."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    own, ids = random_id(rng), [random_id(rng) for _ in range(count)]
    stock, ours = RoutingTable(Silent(), 20, Node(own)), ContactTable(20, Node(own))
    for number, node_id in enumerate(ids):
        stock.add_contact(Node(node_id, "10.0.0.1", 1 + number))
        ours.add(Contact(node_id, Address("10.0.0.1", 1 + number)))
    await asyncio.sleep(1)
    return stock, ours, ids


def tables(seed: int, count: int) -> tuple[RoutingTable, ContactTable, list[bytes]]:
    """See `offered`."""
    return play(offered(seed, count))  # type: ignore[no-any-return]


class Silent:
    """In the place of a table's protocol: a full bucket pings its head through it."""

    async def call_ping(self, _node: Node) -> tuple[bool, None]:
        return (False, None)


class Member:
    """A member of the swarm with a real key, that answers `find_node` with whatever it is given."""

    def __init__(self, world: OverlayWorld, seed: bytes, shape: Any, host: str = "10.0.0.99", port: int = PORT) -> None:
        self.identity = identity_from_seed(seed * 32)
        self.contact = Contact(self.identity.node_id, Address(host, port))
        self._heartbeat = Heartbeat(self.identity.node_id, 1, 1, port)
        self._proofs = IdentityProofs(self.identity)
        self._transport = world.network.transport(host, port)
        self._shape = shape

    async def open(self, *, greet: Address) -> None:
        async def refuse(_: Any) -> Any:
            raise RequestRejected("no streams here")

        await self._transport.open(self._receive, refuse)
        self._transport.send(greet, request(self._heartbeat, ["ping"]))

    def _receive(self, datagram: bytes, source: Address) -> None:
        message_id, message = messages.decode(datagram)
        if isinstance(message, messages.RequestDatagram):
            head = messages.encode_head(TAG, self._heartbeat)
            proof = self._proofs.make(message.heartbeat.node_id, message_id, head, 0.0)
            body = self._shape if isinstance(message.body, messages.FindNode) else ["pong"]
            encoded = msgspec.msgpack.encode([TAG, self._heartbeat, body, [], proof])
            self._transport.send(source, b"\x01" + message_id + encoded)

    async def close(self) -> None:
        await self._transport.close()


# -- 2


@pytest.mark.parametrize(
    "shape", [5, [[1]], [None], [[b"i" * 20, "x", 1, 2]], {"x": 1}, "text", [["", "10.0.0.1", 1]]], ids=repr
)
def test_kademlia_fault_02_a_malformed_reply_raises_out_of_a_lookup(shape: Any) -> None:
    """Stock: whatever a peer answers to `find_node` comes out of `bootstrap` as an exception. Ours: no answer."""

    async def stock() -> None:
        network = StockNetwork()
        server = network.server(1)
        hostile = network.hostile_node(9, lambda name: b"l" * 20 if name == "ping" else shape)
        with pytest.raises((TypeError, AttributeError, KeyError, ValueError)):
            await server.bootstrap([hostile])

    async def ours() -> None:
        world = OverlayWorld(seed=2)
        node = await world.found(0)
        hostile = Member(world, b"l", shape)
        await hostile.open(greet=endpoint(0))
        await world.until(lambda: len(node.peers) == 1, 2.0, "it is in, its key is real")
        found = await node.lookup(b"t" * 20)
        assert node.node_id in [contact.node_id for contact in found]
        assert node.report().counters["dropped_content"] > 0
        await hostile.close()
        await world.stop()

    play(stock())
    play(ours())


# -- 3


def test_kademlia_fault_03_a_cancelled_call_leaves_its_entry_and_raises_later() -> None:
    """Stock: five seconds after a cancelled call `InvalidStateError` in the timer, and its entry is never removed.
    Ours: entry and timer are gone after the usual waits, and nothing is raised."""
    servers: list[Any] = []

    async def stock() -> None:
        server = StockNetwork().server(1)
        servers.append(server)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.protocol.ping(("10.1.0.9", 1), server.node.id), 1.0)
        await asyncio.sleep(10)

    async def ours() -> None:
        world = OverlayWorld(seed=3)
        node = await world.found(0)
        for number in range(10):
            silent = Contact(bytes([number]) * 20, Address("10.0.0.99", PORT))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(node.ping(silent), 0.01)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(node._lookups.find(b"t" * 20, [silent]), 0.01)
        assert node.report().calls_waiting > 0
        await asyncio.sleep(2)
        assert node.report().calls_waiting == 0
        await world.stop()

    with pytest.raises(Unhandled, match="InvalidStateError"):
        play(stock())
    assert len(servers[0].protocol._outstanding) == 1
    play(ours())


# -- 4, 10, 13, R1, R2: values


def test_kademlia_fault_04_set_fails_where_every_neighbour_is_dead() -> None:
    """Stock: `ValueError` from an empty `max`. Ours: no values are kept; a lookup among dead nodes finds the own
    one."""

    async def stock() -> None:
        network = StockNetwork()
        one, two = await network.swarm(2)
        network.kill(two)
        with pytest.raises(ValueError, match="max"):
            await one.set("key", "value")

    async def ours() -> None:
        world = OverlayWorld(seed=4)
        nodes = await world.raise_swarm(3)
        await world.until(lambda: len(nodes[0].peers) == 2, 5.0, "they know each other")
        await world.crash(1)
        await world.crash(2)
        assert [contact.node_id for contact in await nodes[0].lookup(b"t" * 20)] == [nodes[0].node_id]
        with pytest.raises(NotImplementedError):
            await nodes[0]._server.set("key", "value")
        await world.stop()

    play(stock())
    play(ours())


def test_kademlia_fault_05_an_id_does_not_resolve_to_its_address() -> None:
    """Stock: `find_neighbors` of an id in the table leaves that very node out. Ours: it comes first."""
    stock, ours, _ = tables(5, 60)
    held = [node.id for bucket in stock.buckets for node in bucket.nodes.values()]
    for node_id in held:
        assert node_id not in [node.id for node in stock.find_neighbors(Node(node_id))]
    for contact in list(ours):
        assert ours.find_neighbors(Node(contact.node_id))[0].id == contact.node_id


def test_kademlia_fault_06_neighbours_are_not_the_closest() -> None:
    """Stock: buckets are walked left and right until k are found. Ours: the k closest of the table, exactly."""
    stock, ours, _ = tables(6, 400)
    rng = random.Random(6)
    worst = 0
    for _ in range(100):
        target = random_id(rng)

        def near(held: list[bytes], target: bytes = target) -> list[bytes]:
            return sorted(held, key=lambda node_id: distance(node_id, target))[:20]

        held = [node.id for bucket in stock.buckets for node in bucket.nodes.values()]
        worst = max(worst, 20 - len(set(near(held)) & {node.id for node in stock.find_neighbors(Node(target))}))
        assert [entry.node_id for entry in ours.closest(target, 20)] == near([contact.node_id for contact in ours])
    assert worst > 0


def test_kademlia_fault_07_the_dead_are_returned_by_lookups() -> None:
    """Stock: a dead peer taken off the heap comes back by others' answers, already asked. Ours: only who answered."""

    async def stock() -> None:
        network = StockNetwork()
        servers = await network.swarm(30)
        for server in servers[3::5]:
            network.kill(server)
        dead = {server.node.id for server in servers[3::5]}
        found = [node.id for node in await servers[0].bootstrap([servers[1].place])]
        assert dead & set(found)

    async def ours() -> None:
        world = OverlayWorld(seed=7)
        nodes = await world.raise_swarm(30)
        await asyncio.sleep(3)
        dead = {nodes[number].node_id for number in range(3, 30, 5)}
        for number in range(3, 30, 5):
            await world.crash(number)
        rng = random.Random(7)
        for _ in range(10):
            assert not dead & {contact.node_id for contact in await nodes[0].lookup(random_id(rng))}
        await world.stop()

    play(stock())
    play(ours())


def test_kademlia_fault_08_a_new_id_at_an_old_address_keeps_its_ghost() -> None:
    """Stock: the old id's ping is answered by the new node and it stays in the table. Ours: removed, the new one in."""

    async def stock() -> None:
        network = StockNetwork()
        one, old = await network.swarm(2)
        await old.bootstrap([one.place])
        network.kill(old)
        network.server(2, node_id=b"another node's id 20")
        assert (await one.protocol.call_ping(Node(old.node.id, *old.place)))[0]
        assert old.node.id in ids_in(one)

    async def ours() -> None:
        world = OverlayWorld(seed=8)
        nodes = await world.raise_swarm(3)
        await world.until(lambda: all(len(node.peers) == 2 for node in nodes), 5.0, "they know each other")
        ghost = nodes[2].contact(nodes[1].node_id)
        assert ghost is not None
        await world.crash(1)
        new = world.make(77, host=address_of(1))
        await new.start()
        new.found(GENESIS)
        assert await nodes[0].ping(ghost) is None
        assert not nodes[0].is_alive(ghost.node_id)
        await world.until(lambda: nodes[0].is_alive(new.node_id), 2.0, "the new one is in")
        await world.stop()

    play(stock())
    play(ours())


def test_kademlia_fault_09_a_changed_address_is_never_learnt() -> None:
    """Stock: a known id that sends from another address stays where it was. Ours: asked there, it proves itself,
    moves."""

    async def stock() -> None:
        network = StockNetwork()
        one, two = await network.swarm(2)
        await two.bootstrap([one.place])
        network.kill(two)
        moved = network.server(3, node_id=two.node.id)
        await moved.bootstrap([one.place])
        node = known(one, two)
        assert node is not None
        assert (node.ip, node.port) == two.place

    async def ours() -> None:
        world = OverlayWorld(seed=9)
        nodes = await world.raise_swarm(3)
        await world.until(lambda: len(nodes[0].peers) == 2, 5.0, "they know each other")
        await world.crash(1)
        moved = world.make(1, host="10.9.9.9")
        await moved.start()
        await moved.join([f"{address_of(0)}:{PORT}"], genesis=None)

        def place() -> Address | None:
            contact = nodes[0].contact(moved.node_id)
            return contact.address if contact else None

        await world.until(lambda: place() == moved.address, 3.0, "the new address is known")
        await world.stop()

    play(stock())
    play(ours())


def test_kademlia_fault_10_the_wrong_keys_are_handed_to_a_joiner() -> None:
    """Stock: keys are hashed a second time, so a node whose id *is* the key does not get it. Ours: nothing is kept for
    others, a `store` request is dropped."""

    async def stock() -> int:
        network = StockNetwork()
        handed = 0
        for number in range(40):
            holder, other = network.server(1), network.server(2)
            await other.bootstrap([holder.place])
            key = digest(f"key {number}")
            holder.storage[key] = "value"
            joiner = network.server(3, node_id=key)
            holder.protocol.welcome_if_new(Node(joiner.node.id, *joiner.place))
            await asyncio.sleep(1)
            handed += joiner.storage.get(key) is not None
        return handed

    assert play(stock()) < 40
    play(no_values_are_kept(10))


async def no_values_are_kept(seed: int, value: Any = "value", key: Any = b"k" * 20) -> None:
    """`store` and `find_value` to a node of p2pnode: dropped, counted, unanswered; nothing is stored afterwards."""
    world = OverlayWorld(seed=seed)
    node = await world.found(0)
    heartbeat = Heartbeat(b"a stranger's node id", 1, 1, 4000)
    sent = world.network.traffic.datagrams
    for body in (["store", key, value], ["find_value", key], ["store", heartbeat.node_id, key, value], ["stun"]):
        for number in range(25):
            node._protocol.datagram_received(request(heartbeat, body, number.to_bytes(20, "big")), SOMEBODY)
    assert node.report().counters["dropped_content"] == 100
    assert world.network.traffic.datagrams == sent
    assert not node._server.storage
    assert node._protocol.storage is None
    assert len(node.peers) == 0
    await world.stop()


def test_kademlia_fault_11_a_node_bootstraps_to_itself() -> None:
    """Stock: the own id lands in the own table. Ours: refused by name, the table stays empty."""

    async def stock() -> None:
        server = StockNetwork().server(1)
        await server.bootstrap([server.place])
        assert server.node.id in ids_in(server)

    async def ours() -> None:
        world = OverlayWorld(seed=11)
        node = world.make(0)
        await node.start()
        with pytest.raises(NotThisSwarm, match="is this node itself"):
            await node.join([f"{address_of(0)}:{PORT}"], genesis=None)
        assert len(node.peers) == len(node._protocol.router) == 0
        assert not node._protocol.router.add(Contact(node.node_id, node.address))
        await world.stop()

    play(stock())
    play(ours())


def test_kademlia_fault_13_a_reply_may_be_larger_than_any_datagram() -> None:
    """Stock: the 8 KB limit is the caller's alone, an answer of 60 KB is sent. Ours: no answer exceeds one frame, the
    fullest table, news and proof included."""

    async def stock() -> int:
        network = StockNetwork()
        one, two = await network.swarm(2)
        one.storage[digest("key")] = b"x" * 60_000
        await two.protocol.call_find_value(Node(one.node.id, *one.place), Node(digest("key")))
        return max(len(data) for _, _, data in network.sent)

    async def ours() -> int:
        world = OverlayWorld(seed=13)
        node = await world.found(0)
        largest = 0
        transport: Any = node._transport
        send = transport.send

        def measured(to: Address, datagram: bytes) -> None:
            nonlocal largest
            largest = max(largest, len(datagram))
            send(to, datagram)

        transport.send = measured
        rng = random.Random(13)
        for number in range(300):
            node._protocol.router.add(Contact(random_id(rng), Address(f"2001:db8::{number + 1:x}", 65535)))
        node.announce(step=2**63 - 1, samples=2**63 - 1, step_seconds=0.1)
        for _ in range(30):
            node._protocol.queue.put(messages.Gossip(1, random_id(rng), 2**63 - 1, 2**63 - 1), 1000)
            ask = messages.encode(
                0, rng.randbytes(20), messages.encode_head(TAG, heartbeat), messages.FindNode(random_id(rng)), (), True
            )
            node._protocol.datagram_received(ask, SOMEBODY)
        await world.stop()
        return largest

    heartbeat = Heartbeat(b"a stranger's node id", 1, 1, 4000)
    assert play(stock()) > 60_000
    largest = play(ours())
    print(largest)
    assert 800 < largest <= MAX_DATAGRAM_BYTES


# -- 14


def test_kademlia_fault_14_junk_ends_as_exceptions_of_tasks() -> None:
    """Stock: each random datagram is a task, and most end with an unhandled exception; so does deep nesting. Ours:
    dropped and counted, no task, no log line."""
    rng = random.Random(14)
    junk = [bytes([rng.randrange(2)]) + rng.randbytes(rng.randrange(25, 600)) for _ in range(500)]
    junk += [b"\x00" + b"m" * 20 + b"\x91" * 8000, b"\x01" + b"m" * 20 + b"\x91" * 1300]

    async def stock() -> None:
        server = StockNetwork().server(1)
        for datagram in junk:
            server.protocol.datagram_received(datagram, SOMEBODY)
        await asyncio.sleep(1)

    async def ours() -> None:
        world = OverlayWorld(seed=14)
        node = await world.found(0)
        tasks, lines = len(asyncio.all_tasks()), len(world.records)
        for datagram in junk:
            node._protocol.datagram_received(datagram, SOMEBODY)
        dropped = sum(count for key, count in node.report().counters.items() if key.startswith("dropped_"))
        assert dropped == len(junk)
        assert len(asyncio.all_tasks()) == tasks
        await asyncio.sleep(1)
        assert len(world.records) == lines
        await world.stop()

    with pytest.raises(Unhandled) as caught:
        play(stock())
    assert len(caught.value.contexts) > 100
    play(ours())


# -- 15, 16


def test_kademlia_fault_15_one_socket_fills_the_table() -> None:
    """Stock: five thousand invented ids of one address are inserted, and as many stores. Ours: none without its key, no
    more than the quota with, and no store."""
    rng = random.Random(15)
    made_up = [random_id(rng) for _ in range(5000)]

    async def stock() -> None:
        server = StockNetwork().server(1)
        for node_id in made_up:
            server.protocol.rpc_ping(("10.7.7.7", 4000), node_id)
        for node_id in made_up[:500]:
            server.protocol.rpc_store(("10.7.7.7", 4000), node_id, node_id, b"x" * 4000)
        assert len(ids_in(server)) > 200
        assert len(list(iter(server.storage))) == 500

    async def ours() -> None:
        world = OverlayWorld(seed=15)
        node = await world.found(0)
        for number, node_id in enumerate(made_up):
            heartbeat = Heartbeat(node_id, 1, 1, 1 + number % 60000)
            node._protocol.datagram_received(request(heartbeat, ["ping"], node_id), SOMEBODY)
        assert node.report().calls_waiting <= 512
        await asyncio.sleep(2)
        real = [Member(world, bytes([number]), ["nodes", b"", b""], "10.0.0.66", 9000 + number) for number in range(40)]
        for member in real:
            await asyncio.sleep(0.1)
            await member.open(greet=endpoint(0))
        await asyncio.sleep(5)
        assert {peer.address.host for peer in node.peers} == {"10.0.0.66"}
        assert len(node.peers) == len(node._protocol.router) == 8
        assert node.report().counters["peers_refused_crowded"] >= 32
        for member in real:
            await member.close()
        await world.stop()

    play(stock())
    play(ours())
    play(no_values_are_kept(15, value=b"x" * 1000))


def test_kademlia_fault_16_one_socket_surrounds_a_key() -> None:
    """Stock: thirty ids made up around a key are all its neighbours. Ours: an id cannot be chosen, because it is the
    hash of a key. Named by a member, they are asked, prove nothing, and no lookup returns them."""
    key = digest("the key")
    around = [key[:-1] + bytes([number]) for number in range(30)]

    async def stock() -> None:
        network = StockNetwork()
        servers = await network.swarm(12)
        for node_id in around:
            servers[5].protocol.rpc_ping(("10.7.7.7", 4000), node_id)
        neighbours = servers[5].protocol.router.find_neighbors(Node(key))
        assert {node.id for node in neighbours} <= set(around)
        assert len(neighbours) == 20

    async def ours() -> None:
        world = OverlayWorld(seed=16)
        nodes = await world.raise_swarm(12)
        await asyncio.sleep(2)
        named = [messages.pack_contact(Contact(node_id, Address("10.0.0.99", PORT))) for node_id in around]
        hostile = Member(world, b"l", ["nodes", b"".join(named[:20]), b""])
        await hostile.open(greet=endpoint(0))
        await world.until(lambda: nodes[0].is_alive(hostile.contact.node_id), 2.0, "the hostile is a member")
        for node_id in around:
            heartbeat = Heartbeat(node_id, 1, 1, PORT)
            nodes[0]._protocol.datagram_received(request(heartbeat, ["ping"], node_id), Address("10.0.0.99", PORT))
        await asyncio.sleep(2)
        found = {contact.node_id for contact in await nodes[0].lookup(key)}
        assert found == {node.node_id for node in nodes} | {hostile.contact.node_id}
        await hostile.close()
        await world.stop()

    play(stock())
    play(ours())


# -- 17


def test_kademlia_fault_17_one_lost_datagram_evicts_a_peer() -> None:
    """Stock: no retry, and a contact that answers stays at the head of its bucket. Ours: asked again, and it moves to
    the tail."""

    async def stock() -> None:
        network = StockNetwork()
        servers = await network.swarm(4)
        one, two = servers[:2]
        [bucket] = one.protocol.router.buckets
        head = bucket.head().id
        lost = []
        network.lost = lambda source, to, data: not lost and not lost.append(data)  # type: ignore[func-returns-value]
        assert not (await one.protocol.call_ping(Node(two.node.id, *two.place)))[0]
        assert two.node.id not in ids_in(one)
        await one.protocol.call_ping(Node(servers[2].node.id, *servers[2].place))
        assert bucket.head().id in (head, servers[2].node.id)

    async def ours() -> None:
        world = OverlayWorld(seed=17)
        nodes = await world.raise_swarm(4)
        await world.until(lambda: len(nodes[0].peers) == 3, 5.0, "they know each other")
        contact = nodes[0].contact(nodes[1].node_id)
        assert contact is not None
        retries = nodes[0].report().counters.get("retries", 0)
        world.network.cut(endpoint(0), endpoint(1))
        asyncio.get_running_loop().call_later(0.05, world.network.heal)
        assert await nodes[0].ping(contact) is not None
        assert nodes[0].report().counters["retries"] == retries + 1
        assert contact.node_id in nodes[0]._protocol.router
        table = ContactTable(20, Node(b"o" * 20))
        contacts = [Contact(bytes([number]) * 20, SOMEBODY) for number in range(1, 6)]
        for each in [*contacts, contacts[0]]:
            table.add(each)
        [bucket] = table.buckets
        assert bucket.nodes[-1].startswith(contacts[0].node_id)
        await world.stop()

    play(stock())
    play(ours())


# -- 18


def test_kademlia_fault_18_every_unknown_attribute_is_a_remote_call() -> None:
    """Stock: a misspelling is a call, and an attribute hides the call of its name. Ours: `AttributeError`."""

    async def stock() -> None:
        server = StockNetwork().server(1)
        assert callable(server.protocol.find_nod)
        server.protocol.step = 3
        assert not callable(server.protocol.step)

    async def ours() -> None:
        world = OverlayWorld(seed=18)
        node = await world.found(0)
        for name in ("find_nod", "find_value", "stun", "rpc_find_nod"):
            with pytest.raises(AttributeError, match=name):
                getattr(node._protocol, name)
        await world.stop()

    play(stock())
    play(ours())


# -- 19


def test_kademlia_fault_19_an_isolated_node_stays_isolated() -> None:
    """Stock: joined through a peer that was not there yet, a node stays alone. Ours: it dials until it is in."""

    async def stock() -> None:
        network = StockNetwork()
        lonely = network.server(1)
        lonely.refresh_table()
        await lonely.bootstrap([("10.1.0.2", 8468)])
        await network.server(2).bootstrap([network.server(3).place])
        await asyncio.sleep(3000)
        assert ids_in(lonely) == []
        lonely.stop()

    async def ours() -> None:
        world = OverlayWorld(seed=19)
        lonely = world.make(1)
        await lonely.start()
        joining = asyncio.create_task(lonely.join([f"{address_of(0)}:{PORT}"], genesis=None))
        await asyncio.sleep(3000)
        assert not joining.done()
        await world.found(0)
        await asyncio.wait_for(joining, 20)
        await world.until(lambda: len(lonely.peers) == 1, 2.0, "it is in")
        await world.stop()

    play(stock())
    play(ours())


# -- R1, R2, R3


def test_kademlia_fault_r1_set_is_true_although_every_store_failed() -> None:
    """Stock: `any` of `(False, None)` is true. Ours: there is no `set`; what a call returns is the answer or None."""

    async def stock() -> None:
        network = StockNetwork()
        one, _ = await network.swarm(2)
        network.lost = lambda _source, _to, data: b"store" in data
        assert await one.set("key", "value") is True

    async def ours() -> None:
        world = OverlayWorld(seed=101)
        node = await world.found(0)
        with pytest.raises(NotImplementedError):
            await node._server.set("key", "value")
        assert await node._queries.ask(Contact(b"nobody lives there!!", SOMEBODY), messages.Ping()) is None
        await world.stop()

    play(stock())
    play(ours())


@pytest.mark.parametrize(("key", "value"), [(b"", None), (b"k" * 3, {"a": [1]}), ("text", [1, 2]), (7, 2.5)], ids=repr)
def test_kademlia_fault_r2_a_store_takes_anything_under_anything(key: Any, value: Any) -> None:
    """Stock: any type under any key of bytes. Ours: dropped and counted, whatever it is."""
    if isinstance(key, bytes):
        server = play(stock_server())
        assert server.protocol.rpc_store(("10.7.7.7", 4000), b"i" * 20, key, value) is True
        assert server.storage.get(key) == value
    play(no_values_are_kept(102, value, key))


async def stock_server() -> Any:
    return StockNetwork().server(1)


def test_kademlia_fault_r3_every_time_out_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Stock: an ERROR for each silence, however often. Ours: a count; a line only when the state of a peer changes."""

    async def stock() -> None:
        server = StockNetwork().server(1)
        for _ in range(5):
            await server.protocol.call_ping(Node(b"n" * 20, "10.1.0.9", 1))

    async def ours() -> None:
        world = OverlayWorld(seed=103)
        node = await world.found(0)
        for _ in range(5):
            await node.ping(Contact(b"n" * 20, SOMEBODY))
        assert node.report().counters["timeouts"] == 5
        assert [record.event for record in world.records if record.level in ("warning", "error")] == []
        await world.stop()

    with caplog.at_level(logging.ERROR, "rpcudp.protocol"):
        play(stock())
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 5
    caplog.clear()
    play(ours())
    assert not caplog.records
