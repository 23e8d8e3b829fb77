"""Identity: ids proved by their keys, one key in two processes, few ids behind one address. Virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address, group_of
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.protocol import IdentityProofs
from p2pnode.overlay.overlay import NotThisSwarm, Overlay
from p2pnode.overlay.peers import Contact, Heartbeat
from p2pnode.overlay.transport import RequestRejected
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import GENESIS, PORT, OverlayWorld, address_of, endpoint

TAG = messages.swarm_tag("tests", GENESIS)


def copied(world: OverlayWorld, number: int, to: int, *, incarnation: int | None = None, **node: Any) -> Overlay:
    """A node on a copy of another's disk; `incarnation` is the one it will start with."""
    world.disks[to] = copy = MemoryDisk()
    copy.files.update(world.disks[number].files)
    if incarnation is not None:
        copy.files["incarnation"] = str(incarnation - 1).encode()
    return world.make(to, **node)


def twins(world: OverlayWorld, *numbers: int) -> list[bool]:
    """Who of these has learnt that its identity runs elsewhere."""
    return [any(change.kind == "twin" for _, change in world.changes[number]) for number in numbers]


class Forger:
    """A host that sends whatever the test gives, and records what comes back."""

    def __init__(self, world: OverlayWorld, host: str, *, answer: Any = None) -> None:
        self.address = Address(host, PORT)
        self.heard: list[tuple[messages.RequestDatagram | messages.ResponseDatagram, bytes, Address]] = []
        self._transport = world.network.transport(host, PORT)
        self._answer = answer

    async def open(self) -> Forger:
        async def refuse(_: Any) -> Any:
            raise RequestRejected("no streams here")

        await self._transport.open(self._receive, refuse)
        return self

    def _receive(self, datagram: bytes, source: Address) -> None:
        message_id, message = messages.decode(datagram)
        self.heard.append((message, message_id, source))
        if self._answer is not None and isinstance(message, messages.RequestDatagram):
            self._answer(self, message, message_id, source)

    def ask(self, to: Address, heartbeat: Heartbeat, body: Any = None, *, prove: bool = False) -> None:
        head = messages.encode_head(TAG, heartbeat)
        self._transport.send(
            to, messages.encode(messages.REQUEST, b"forged message id 20", head, body or messages.Ping(), (), prove)
        )

    def respond(self, to: Address, message_id: bytes, heartbeat: Heartbeat, proof: bytes = b"") -> None:
        head = messages.encode_head(TAG, heartbeat)
        self._transport.send(to, messages.encode(messages.RESPONSE, message_id, head, messages.Pong(), (), proof))

    async def close(self) -> None:
        await self._transport.close()


def proof(identity: Identity, asker: bytes, message_id: bytes, heartbeat: Heartbeat) -> bytes:
    return IdentityProofs(identity).make(asker, message_id, messages.encode_head(TAG, heartbeat))


# -- one key, two processes


@pytest.mark.parametrize("incarnation", [1, 2, 7])
@run_by(run)
async def test_two_processes_with_one_key_both_learn_it_and_prove_it(incarnation: int) -> None:
    """A copy of a state directory, at the same, the next or a far count of starts. Both processes get a proof of the
    other and report where it is. A third node reports it once and is not misled about itself."""
    world = OverlayWorld(seed=40)
    await world.raise_swarm(4)
    await asyncio.sleep(2)
    clone = copied(world, 1, 100, incarnation=incarnation)
    assert clone.node_id == world.nodes[1].node_id
    await clone.start()
    await clone.join([f"{address_of(0)}:{PORT}"], genesis=None)
    await world.until(lambda: all(twins(world, 1, 100)), 10.0, "both know")
    reasons = {n: [c.reason for _, c in world.changes[n] if c.kind == "twin"] for n in (1, 100)}
    assert [len(found) for found in reasons.values()] == [1, 1]
    assert str(endpoint(100)) in reasons[1][0]
    assert str(endpoint(1)) in reasons[100][0]
    assert twins(world, 0, 2, 3) == [False] * 3
    said = [r for r in world.records if r.event == "identity_used_twice" and r.level == "error"]
    assert {r.node for r in said} == {"n1", "n100"}
    await world.stop()


@run_by(run)
async def test_a_copy_that_dials_its_own_original_is_told_so() -> None:
    """The founder's directory copied, and the founder as bootstrap: the signed hello shows the identity that
    answers."""
    world = OverlayWorld(seed=41)
    await world.found(0)
    clone = copied(world, 0, 100)
    await clone.start()
    with pytest.raises(NotThisSwarm, match="runs with this node's own identity"):
        await clone.join([f"{address_of(0)}:{PORT}"], genesis=None)
    assert twins(world, 100) == [True]
    await world.stop()


@run_by(run)
async def test_a_node_that_hears_itself_knows_that_it_is_itself() -> None:
    """Its own datagrams, requests and answers come back from another address, as through a hairpin NAT or a second
    interface. One bootstrap is the node itself. No duplicate identity is reported."""
    world = OverlayWorld(seed=42)
    nodes = await world.raise_swarm(3)
    mirror = world.network.transport("10.0.0.77", PORT)

    async def refuse(_: Any) -> Any:
        raise RequestRejected("a mirror")

    # Whatever it is sent it sends to node 1, under its own address.
    await mirror.open(lambda datagram, _source: mirror.send(endpoint(1), datagram), refuse)
    node = nodes[1]
    for _ in range(20):
        await node.ping(Contact(b"whoever lives there!", Address("10.0.0.77", PORT)))
        await node.ping(Contact(node.node_id, Address("10.0.0.77", PORT)))
        await node.ping(Contact(node.node_id, endpoint(1)))
    node._joining._peer_store._met.clear()  # or it would come in through one of those
    with pytest.raises(NotThisSwarm, match="is this node itself"):
        await node.join([f"{address_of(1)}:{PORT}"], genesis=GENESIS)
    await asyncio.sleep(5)
    assert node.report().counters["dropped_own_echo"] > 20
    assert twins(world, 0, 1, 2) == [False] * 3
    assert len(node.peers) == 2
    await mirror.close()
    await world.stop()


@run_by(run)
async def test_no_forged_datagram_makes_a_node_report_a_duplicate_identity() -> None:
    """Nothing follows from claims of the own id under another start, reports of duplicates, and answers without proof.
    Nor from answers with another key's proof, with the own proof of another request, or with a replayed proof."""
    world = OverlayWorld(seed=43)
    nodes = await world.raise_swarm(3)
    await asyncio.sleep(2)
    victim = nodes[1]
    other_key = identity_from_seed(b"k" * 32)
    lie = msgspec.structs.replace(victim.heartbeat, boot_id=victim.heartbeat.boot_id + 1, incarnation=99)
    stolen: list[bytes] = []

    def answer(forger: Forger, request: messages.RequestDatagram, message_id: bytes, source: Address) -> None:
        forger.respond(source, message_id, lie)
        forger.respond(source, message_id, lie, proof(other_key, victim.node_id, message_id, lie))
        for old in stolen:
            forger.respond(source, message_id, lie, old)
            forger.respond(source, message_id, victim.heartbeat, old)

    forger = await Forger(world, "10.0.0.66", answer=answer).open()
    # The victim signs what any of its peers may ask; none of it is about another start or another question.
    forger.ask(endpoint(1), Heartbeat(other_key.node_id, 1, 1, PORT), prove=True)
    forger.ask(endpoint(1), lie, prove=True)
    await asyncio.sleep(1)
    stolen += [m.proof for m, _, _ in forger.heard if isinstance(m, messages.ResponseDatagram) and m.proof]
    assert len(stolen) == 2
    for body in (
        messages.Ping(),
        messages.FindNode(b"t" * 20),
        messages.DuplicateIdentity(5, messages.pack_contact(Contact(victim.node_id, forger.address))),
    ):
        for _ in range(5):
            forger.ask(endpoint(1), lie, body)
            forger.ask(endpoint(1), Heartbeat(other_key.node_id, 1, 1, PORT), body)
            await asyncio.sleep(1.1)
    asked = [m for m, _, _ in forger.heard if isinstance(m, messages.RequestDatagram) and m.prove]
    assert len(asked) >= 5, "it was asked for a proof"
    assert len(asked) <= 70, "and each of the two ids not more often than once a second, with a retry"
    assert twins(world, 0, 1, 2) == [False] * 3
    assert len(victim.peers) == 2
    await forger.close()
    await world.stop()


@pytest.mark.parametrize("incarnation", [1, 2])
@run_by(run)
async def test_a_directory_restored_from_a_copy_is_no_duplicate_identity(incarnation: int) -> None:
    """Killed at its second start, it is started at its address from an older copy, as its first or second. The others
    accept it within seconds, and no duplicate identity is reported."""
    world = OverlayWorld(seed=47)
    await world.raise_swarm(3)
    await asyncio.sleep(2)
    await world.kill(1, refused=True)
    second = world.make(1)
    await second.start()
    await second.join([f"{address_of(0)}:{PORT}"], genesis=None)
    rest = [world.nodes[0], world.nodes[2]]
    await world.until(
        lambda: all(starts(n, second) == (2, second.heartbeat.boot_id) for n in rest), 5.0, "the second start"
    )
    await world.kill(1, refused=True)
    world.disks[1].files["incarnation"] = str(incarnation - 1).encode()
    third = world.make(1)
    await third.start()
    await third.join([f"{address_of(0)}:{PORT}"], genesis=None)
    expected = (incarnation, third.heartbeat.boot_id)
    await world.until(lambda: all(starts(n, third) == expected for n in rest), 10.0, "the third start")
    await asyncio.sleep(20)
    assert all(starts(n, third) == expected for n in rest)
    assert twins(world, 0, 1, 2) == [False] * 3
    assert not [r for r in world.records if r.event == "identity_used_twice"]
    await world.stop()


def starts(at: Overlay, node: Overlay) -> tuple[int, int] | None:
    """The start under which one node lists another."""
    peer = at.peers.get(node.node_id)
    return None if peer is None else (peer.incarnation, peer.boot_id)


# -- ids bound to keys


@pytest.mark.parametrize("shape", ["none", "empty key", "another key", "another question", "another heartbeat"])
@run_by(run)
async def test_an_id_without_its_key_enters_no_table(shape: str) -> None:
    """A node that answers every request but cannot prove its id is not inserted; with the right proof it is."""
    world = OverlayWorld(seed=44)
    node = await world.found(0)
    real, thief = identity_from_seed(b"r" * 32), identity_from_seed(b"t" * 32)
    heartbeat = Heartbeat(real.node_id, 1, 1, PORT)

    def answer(forger: Forger, request: messages.RequestDatagram, message_id: bytes, source: Address) -> None:
        asker = request.heartbeat.node_id
        forged = {
            "none": b"",
            "empty key": bytes(messages.PROOF_BYTES),
            "another key": proof(thief, asker, message_id, heartbeat),
            "another question": proof(real, asker, b"x" * 20, heartbeat),
            "another heartbeat": proof(real, asker, message_id, msgspec.structs.replace(heartbeat, incarnation=2)),
            "right": proof(real, asker, message_id, heartbeat),
        }
        forger.respond(source, message_id, heartbeat, forged[kind])

    kind = shape
    forger = await Forger(world, "10.0.0.66", answer=answer).open()
    for _ in range(3):
        forger.ask(endpoint(0), heartbeat)
        await asyncio.sleep(2)
    assert len(node.peers) == 0
    assert node.report().counters["dropped_unproven"] >= 3
    assert real.node_id not in [contact.node_id for contact in await node.lookup(real.node_id)]

    kind = "right"
    forger.ask(endpoint(0), heartbeat)
    await world.until(lambda: real.node_id in node.peers, 5.0, "it is in")
    await forger.close()
    await world.stop()


@run_by(run)
async def test_a_forged_start_does_not_replace_a_peer() -> None:
    """Datagrams that claim a restart or another address under a peer's id change nothing about it."""
    world = OverlayWorld(seed=45)
    nodes = await world.raise_swarm(3)
    await world.until(lambda: all(len(node.peers) == 2 for node in nodes), 5.0, "they know each other")
    real = nodes[2]
    forger = await Forger(world, "10.0.0.66").open()
    claims = [
        msgspec.structs.replace(real.heartbeat, incarnation=2**62),
        msgspec.structs.replace(real.heartbeat, incarnation=2**62, host=real.address.host),
        msgspec.structs.replace(real.heartbeat, host="10.0.0.66"),
    ]
    for claim in claims:
        for body in (messages.Ping(), messages.FindNode(b"t" * 20)):
            forger.ask(endpoint(0), claim, body)
            await asyncio.sleep(2)
    peer = nodes[0].peers.get(real.node_id)
    assert peer is not None
    assert (peer.address, peer.incarnation) == (real.address, real.heartbeat.incarnation)
    kinds = [change.kind for _, change in world.changes[0] if change.node_id == real.node_id]
    assert not set(kinds) & {"restarted", "moved", "dead", "clone"}
    await forger.close()
    await world.stop()


# -- few ids behind one address


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::5", "::6", True),
    ],
)
def test_addresses_count_by_what_they_cost(one: str, other: str, same: bool) -> None:
    """An IPv4 address by itself, an IPv6 address by its /64; the loopback never."""
    assert (group_of(one) == group_of(other)) is same
    assert group_of(one)
    assert group_of("127.0.0.1") == group_of("127.9.9.9") == group_of("::1") == ""


async def sybil(world: OverlayWorld, identity: Identity, port: int, others: list[Identity]) -> Any:
    """One of many nodes on one host: it proves its id, and names all the others as the closest to anything."""
    transport = world.network.transport("10.0.0.66", port)
    heartbeat = Heartbeat(identity.node_id, 1, port, port)
    head = messages.encode_head(TAG, heartbeat)
    named = [Contact(o.node_id, Address("10.0.0.66", 9000 + n)) for n, o in enumerate(others)]

    def receive(datagram: bytes, source: Address) -> None:
        message_id, message = messages.decode(datagram)
        if isinstance(message, messages.RequestDatagram):
            asker = message.heartbeat.node_id
            body = messages.pack_nodes(named) if isinstance(message.body, messages.FindNode) else messages.Pong()
            signed = proof(identity, asker, message_id, heartbeat) if message.prove else b""
            transport.send(source, messages.encode(messages.RESPONSE, message_id, head, body, (), signed))

    async def refuse(_: Any) -> Any:
        raise RequestRejected("no streams here")

    await transport.open(receive, refuse)
    transport.send(endpoint(0), messages.encode(messages.REQUEST, b"i" * 20, head, messages.Ping()))
    return transport
