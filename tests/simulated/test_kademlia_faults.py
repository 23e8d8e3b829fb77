"""Faults of `kademlia` 2.2.3 and `rpcudp` 5.0.1 that the overlay, which is built on their classes, has not."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from kademlia.node import Node
from kademlia.utils import digest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.ids import random_id
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.protocol import IdentityProofs
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.membership.service import MAX_PAUSED
from p2pnode.overlay.peers import Contact, Heartbeat
from p2pnode.overlay.transport import RequestRejected
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import GENESIS, PORT, OverlayWorld, endpoint

TAG = messages.swarm_tag("tests", GENESIS)
SOMEBODY = Address("10.7.7.7", 4000)


def request(heartbeat: Heartbeat, body: Any, message_id: bytes = b"q" * 20) -> bytes:
    """A datagram of any sender, `body` encoded as it is."""
    return b"\x00" + message_id + msgspec.msgpack.encode([TAG, heartbeat, body, []])


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
            proof = self._proofs.make(message.heartbeat.node_id, message_id, head)
            body = self._shape if isinstance(message.body, messages.FindNode) else ["pong"]
            encoded = msgspec.msgpack.encode([TAG, self._heartbeat, body, [], proof])
            self._transport.send(source, b"\x01" + message_id + encoded)

    async def close(self) -> None:
        await self._transport.close()


@pytest.mark.parametrize(
    "shape", [5, [[1]], [None], [[b"i" * 20, "x", 1, 2]], {"x": 1}, "text", [["", "10.0.0.1", 1]]], ids=repr
)
@run_by(run)
async def test_a_malformed_reply_ends_no_lookup(shape: Any) -> None:
    """Whatever a peer answers to `find_node` counts as no answer."""
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


@run_by(run)
async def test_junk_is_dropped_and_counted() -> None:
    """Random datagrams and deep nesting make no task and no log line."""
    rng = random.Random(14)
    junk = [bytes([rng.randrange(2)]) + rng.randbytes(rng.randrange(25, 600)) for _ in range(500)]
    junk += [b"\x00" + b"m" * 20 + b"\x91" * 8000, b"\x01" + b"m" * 20 + b"\x91" * 1300]
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


@run_by(run)
async def test_one_socket_does_not_fill_the_table() -> None:
    """No id enters without its key."""
    rng = random.Random(15)
    made_up = [random_id(rng) for _ in range(5000)]
    world = OverlayWorld(seed=15)
    node = await world.found(0)
    for number, node_id in enumerate(made_up):
        heartbeat = Heartbeat(node_id, 1, 1, 1 + number % 60000)
        node._protocol.datagram_received(request(heartbeat, ["ping"], node_id), SOMEBODY)
    assert node.report().calls_waiting <= MAX_PAUSED
    await asyncio.sleep(2)
    real = [Member(world, bytes([number]), ["nodes", b"", b""], "10.0.0.66", 9000 + number) for number in range(9)]
    for member in real:
        await asyncio.sleep(0.1)
        await member.open(greet=endpoint(0))
    await asyncio.sleep(5)
    assert {peer.address.host for peer in node.peers} == {"10.0.0.66"}
    assert len(node.peers) == len(real)
    for member in real:
        await member.close()
    await world.stop()


@run_by(run)
async def test_one_socket_surrounds_no_key() -> None:
    """Ids are hashes of keys. Made-up ones that a member names are asked, prove nothing, and no lookup returns them."""
    key = digest("the key")
    around = [key[:-1] + bytes([number]) for number in range(30)]
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


@run_by(run)
async def test_one_lost_datagram_evicts_no_peer() -> None:
    """It is asked again, and a contact that answers moves to the tail of its bucket."""
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
    assert list(bucket.nodes)[-1] == contacts[0].node_id
    await world.stop()
