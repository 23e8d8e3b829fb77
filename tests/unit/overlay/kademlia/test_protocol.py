"""The datagram protocol: calls between two nodes, what is dropped and counted, errors of handlers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kademlia.node import Node

from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.messages import RETRANSMIT, FindNode, Gossip, Ping, Pong, Result
from p2pnode.overlay.kademlia.protocol import IdentityProofs, SwarmProtocol
from p2pnode.overlay.peers import Contact, Heartbeat, Peer, PeerTable
from tests.harness.environment.simulated import SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.stories import played_by

TAG = b"swarmtag"


class Events:
    """Records the events of a protocol, and holds the peers that it knows."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.table = PeerTable()
        self.doubtful: set[bytes] = set()

    def peer(self, node_id: bytes) -> Peer | None:
        return self.table.get(node_id)

    def stretch(self) -> float:
        return 1.0

    def is_doubtful(self, node_id: bytes) -> bool:
        return node_id in self.doubtful

    def on_response(
        self, heartbeat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        self.seen.append(("response", heartbeat.node_id, proven))

    def on_id_mismatch(self, heartbeat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        self.seen.append(("mismatch", heartbeat.node_id, asked.node_id))

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        self.seen.append(("request", heartbeat.node_id))

    def on_timeout(self, contact: Contact) -> None:
        self.seen.append(("timeout", contact.node_id))

    def on_own_id(self, heartbeat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        self.seen.append(("own id", heartbeat.boot_id, proven))

    def on_gossip(self, news: Gossip, sender: bytes) -> None:
        self.seen.append(("gossip", news.node_id, sender))


class Network:
    """Delivers datagrams between protocols in the next turn of the loop; `lose` drops them."""

    def __init__(self) -> None:
        self.nodes: dict[Address, SwarmProtocol] = {}
        self.lose = False

    def add(self, number: int, identity: Identity, boot_id: int = 1) -> SwarmProtocol:
        address = Address(f"10.0.0.{number}", 8468)
        made = SwarmProtocol(
            Node(identity.node_id),
            20,
            proofs=IdentityProofs(identity),
            environment=make_environment(entropy=SeededEntropy(number)),
            ceiling_s=0.5,
        )
        made.subscribe(Events())
        made.connection_made(Way(self, address))
        made.set_heartbeat(Heartbeat(identity.node_id, 1, boot_id, 8468), TAG)
        self.nodes[address] = made
        return made


class Way:
    """The transport of one node."""

    def __init__(self, network: Network, source: Address) -> None:
        self.counters: Counter[str] = Counter()
        self._network = network
        self._source = source

    def send(self, to: Address, datagram: bytes) -> None:
        receiver = self._network.nodes.get(Address(to.host, to.port))
        if receiver is not None and not self._network.lose:
            asyncio.get_running_loop().call_soon(receiver.datagram_received, datagram, self._source)


ONE, TWO, THREE = (identity_from_seed(bytes([number]) * 32) for number in (1, 2, 3))
HOME = Address("10.0.0.2", 8468)


def events(protocol: SwarmProtocol) -> list[tuple[Any, ...]]:
    return protocol._events.seen  # type: ignore[attr-defined,no-any-return]


def play(story: Callable[[Network, SwarmProtocol, SwarmProtocol], Awaitable[None]]) -> None:
    async def run() -> None:
        network = Network()
        one, two = network.add(1, ONE), network.add(2, TWO)
        two.register(Ping, lambda _body, _heartbeat, _source, _message_id: Pong())
        await story(network, one, two)

    VirtualLoop().run(run())


async def ask(protocol: SwarmProtocol, contact: Contact, **options: Any) -> Result | None:
    waiting: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
    protocol.call(contact, Ping(), waiting.set_result, **options)
    return await waiting


@played_by(play)
async def test_an_unknown_contact_proves_its_id_and_both_sides_report_events(
    _: Network, one: SwarmProtocol, two: SwarmProtocol
) -> None:
    """The callee reports a request, the caller a proven response; gossip of both datagrams is reported."""
    one.queue.put(Gossip(1, b"x" * 20, 1), 2)
    two.queue.put(Gossip(1, b"y" * 20, 1), 2)
    assert await ask(one, Contact(TWO.node_id, HOME)) == Pong()
    assert events(two) == [("request", ONE.node_id), ("gossip", b"x" * 20, ONE.node_id)]
    assert events(one) == [("response", TWO.node_id, True), ("gossip", b"y" * 20, TWO.node_id)]
    assert two.counters["proofs_made"] == 1


@played_by(play)
async def test_a_peer_at_its_known_address_needs_no_proof(_: Network, one: SwarmProtocol, two: SwarmProtocol) -> None:
    """No signature is made, unless the caller requires it."""
    one._events.table.observe(Heartbeat(TWO.node_id, 1, 1, 8468), HOME, 0.0)  # type: ignore[attr-defined]
    await ask(one, Contact(TWO.node_id, HOME))
    assert (events(one), two.counters["proofs_made"]) == ([("response", TWO.node_id, False)], 0)
    await ask(one, Contact(TWO.node_id, HOME), require_proof=True)
    assert two.counters["proofs_made"] == 1


@pytest.mark.parametrize("counts", [True, False])
@played_by(play)
async def test_a_time_out_is_an_event_where_it_counts_as_failure(
    network: Network, one: SwarmProtocol, _: SwarmProtocol, *, counts: bool
) -> None:
    """After the retry the result is None."""
    network.lose = True
    assert await ask(one, Contact(TWO.node_id, HOME), counts_as_failure=counts) is None
    assert events(one) == ([("timeout", TWO.node_id)] if counts else [])
    assert (one.counters["retries"], one.counters["timeouts"]) == (1, 1)


@played_by(play)
async def test_no_gossip_is_spent_on_a_node_that_probably_hears_nothing(
    network: Network, one: SwarmProtocol, two: SwarmProtocol
) -> None:
    """A piece goes out a bounded number of times: none of them to a suspect, or with a retry."""
    news = Gossip(1, b"x" * 20, 1)
    one.queue.put(news, 2)
    heard = ("gossip", news.node_id, ONE.node_id)
    one._events.doubtful.add(TWO.node_id)  # type: ignore[attr-defined]
    assert await ask(one, Contact(TWO.node_id, HOME)) == Pong()
    assert heard not in events(two)
    one._events.doubtful.clear()  # type: ignore[attr-defined]
    network.lose = True
    assert await ask(one, Contact(TWO.node_id, HOME)) is None
    assert one.counters["retries"] == 1
    network.lose = False
    given: list[Gossip] = []
    while pieces := one.queue.take():
        given += pieces
    assert given == [news] * (RETRANSMIT - 1), "the first try of the last call took one"
    one.queue.put(news, 2)
    assert await ask(one, Contact(TWO.node_id, HOME)) == Pong()
    assert heard in events(two)


@played_by(play)
async def test_datagrams_that_are_not_ours_are_counted_by_reason(
    _: Network, one: SwarmProtocol, _two: SwarmProtocol
) -> None:
    """Junk, another swarm, an id that is not the sealed one, an answer to nothing, an unknown procedure."""
    theirs = Heartbeat(TWO.node_id, 1, 1, 8468)

    def request(tag: bytes = TAG, body: messages.Call = Ping()) -> bytes:  # noqa: B008
        return messages.encode(messages.REQUEST, b"m" * 20, messages.encode_head(tag, theirs), body)

    answer = messages.encode(messages.RESPONSE, b"m" * 20, messages.encode_head(TAG, theirs), Pong())
    for datagram, source, reason in [
        (b"junk", HOME, "dropped_short"),
        (request(b"otherone"), HOME, "dropped_other_swarm"),
        (request(), NodeAddress.of(HOME, THREE.node_id), "dropped_in_anothers_name"),
        (answer, HOME, "dropped_unasked"),
        (request(body=FindNode(b"t" * 20)), HOME, "dropped_no_procedure"),
    ]:
        one.datagram_received(datagram, source)
        assert one.counters[reason] == 1, reason
    one.set_heartbeat(Heartbeat(ONE.node_id, 1, 1, 8468), None)
    one.datagram_received(request(), HOME)
    assert one.counters["dropped_no_swarm"] == 1


@played_by(play)
async def test_a_second_process_with_our_key_is_reported_and_an_echo_is_not(
    network: Network, one: SwarmProtocol, _: SwarmProtocol
) -> None:
    """A request under the own id and another start is an event; its proof is one too. The own datagram is dropped."""
    copy = network.add(9, ONE, boot_id=2)
    copy.register(Ping, lambda _body, _heartbeat, _source, _message_id: Pong())
    copy.call(Contact(ONE.node_id, Address("10.0.0.1", 8468)), Ping(), lambda _: None, require_proof=True)
    await asyncio.sleep(0.1)
    assert events(one) == [("own id", 2, False)]
    assert events(copy) == [("own id", 1, True)]
    one.datagram_received(
        messages.encode(messages.REQUEST, b"m" * 20, messages.encode_head(TAG, one._heartbeat), Ping()),  # type: ignore[arg-type]
        HOME,
    )
    assert one.counters["dropped_own_echo"] == 1


@played_by(play)
async def test_an_error_in_a_handler_is_counted_and_logged_once(
    _: Network, one: SwarmProtocol, two: SwarmProtocol
) -> None:
    """The protocol continues; a test can have the exception raised instead."""

    def broken(*_: object) -> Result | None:
        raise LookupError("a bug")

    two.register(Ping, broken)
    request = messages.encode(messages.REQUEST, b"m" * 20, one._head, Ping())
    two.datagram_received(request, Address("10.0.0.1", 8468))
    two.datagram_received(request, Address("10.0.0.1", 8468))
    assert two.counters["faults"] == 2
    two.raise_handler_errors = True
    with pytest.raises(LookupError, match="a bug"):
        two.datagram_received(request, Address("10.0.0.1", 8468))


@played_by(play)
async def test_close_ends_pending_calls_without_a_failure(
    network: Network, one: SwarmProtocol, _: SwarmProtocol
) -> None:
    """Each gets None at once; later calls get None too."""
    network.lose = True
    results: list[Result | None] = []
    one.call(Contact(TWO.node_id, HOME), Ping(), results.append)
    assert one.waiting == 1
    one.close()
    one.call(Contact(TWO.node_id, HOME), Ping(), results.append)
    assert results == [None, None]
    assert (one.waiting, events(one)) == (0, [])


ASKER, QUESTION, HEAD = b"a" * 20, b"m" * 20, b"head"
IDENTITY = identity_from_seed(b"r" * 32)
OTHER = identity_from_seed(b"t" * 32)


@pytest.mark.parametrize(
    ("node_id", "asker", "question", "head", "expected"),
    [
        (IDENTITY.node_id, ASKER, QUESTION, HEAD, True),
        (OTHER.node_id, ASKER, QUESTION, HEAD, False),
        (IDENTITY.node_id, b"b" * 20, QUESTION, HEAD, False),
        (IDENTITY.node_id, ASKER, b"n" * 20, HEAD, False),
        (IDENTITY.node_id, ASKER, QUESTION, b"another head", False),
    ],
)
def test_a_proof_holds_for_its_id_requester_request_and_heartbeat_alone(
    node_id: bytes, asker: bytes, question: bytes, head: bytes, expected: bool
) -> None:
    """Any other id, requester, message id or heartbeat makes it void."""
    proofs = IdentityProofs(IDENTITY)
    proof = proofs.make(ASKER, QUESTION, HEAD)

    assert proofs.holds(proof, node_id, asker, question, head) is expected


@pytest.mark.parametrize("proof", [b"", bytes(95), bytes(96), bytes(97)])
def test_bytes_of_any_length_are_no_proof(proof: bytes) -> None:
    """Empty, short, zero and long bytes are refused without an exception."""
    assert not IdentityProofs(IDENTITY).holds(proof, IDENTITY.node_id, ASKER, QUESTION, HEAD)
