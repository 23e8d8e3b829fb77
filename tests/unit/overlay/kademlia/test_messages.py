"""The datagrams of the overlay: golden bytes, sizes, malformed input."""

from __future__ import annotations

import math

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.messages import GOSSIP_PER_DATAGRAM, MAX_QUEUED, BroadcastQueue
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES
from tests.harness.builders.peers import heartbeat, ids


def test_datagrams_are_what_the_specification_says() -> None:
    """Golden bytes: kind, message id, then [tag, heartbeat, body, gossip] in MessagePack."""
    head = messages.encode_head(b"swarmtag", heartbeat(step=3, eligible=True))
    datagram = messages.encode(messages.REQUEST, b"m" * 20, head, messages.Ping(), [messages.Gossip(1, b"s" * 20, 2)])

    assert datagram.hex() == (
        "00" + "6d" * 20 + "94" + "c408" + b"swarmtag".hex() + "9a" + "c414" + "6e" * 20 + "0107cd2114a00003"
        "cb000000000000000000c3" + "91a470696e67" + "9193" + "01c414" + "73" * 20 + "02"
    )
    message_id, message = messages.decode(datagram)
    assert message_id == b"m" * 20
    assert message.heartbeat == heartbeat(step=3, eligible=True)


def test_twenty_contacts_fit_one_datagram_and_come_back() -> None:
    """IPv4 and IPv6 mixed, largest heartbeat, most gossip: at most 1400 bytes; own id and bad entries are left out."""
    nodes = ids(40, seed=7)
    v4 = [Contact(node_id, Address("10.1.2.3", 9)) for node_id in nodes[:10]]
    v6 = [Contact(node_id, Address("2001:db8::1", 65535)) for node_id in nodes[10:20]]
    packed = messages.pack_nodes([*v4, *v6])
    largest = heartbeat(
        incarnation=2**48 - 1,
        boot_id=2**64 - 1,
        port=65535,
        host="f" * 0 + "2001:db8:1111:2222:3333:4444:5555:6666",
        step=2**48 - 1,
        step_seconds=math.pi,
        samples=2**48 - 1,
    )
    news = [messages.Gossip(3, node_id, 2**48 - 1) for node_id in nodes[: messages.MAX_GOSSIP]]
    datagram = messages.encode(messages.RESPONSE, b"m" * 20, messages.encode_head(b"swarmtag", largest), packed, news)
    contacts, malformed = messages.unpack_nodes(packed, nodes[0])

    assert len(datagram) <= MAX_DATAGRAM_BYTES
    assert malformed == 0
    assert contacts == [*v4[1:], *v6]
    only_v4, _ = messages.unpack_nodes(packed, b"o" * 20, ipv6=False)
    assert only_v4 == v4


@pytest.mark.parametrize(
    "entry",
    [
        b"i" * 20 + bytes([10, 0, 0, 1]) + b"\x00\x00",  # port 0
        b"i" * 20 + bytes([0, 0, 0, 0]) + b"\x00\x01",  # unspecified
        b"i" * 20 + bytes([224, 0, 0, 1]) + b"\x00\x01",  # multicast
        b"i" * 20 + bytes([255, 255, 255, 255]) + b"\x00\x01",  # broadcast
        b"i" * 25,  # cut off
    ],
)
def test_contacts_that_cannot_be_sent_to_are_counted_and_dropped(entry: bytes) -> None:
    """None of them becomes a contact."""
    assert messages.unpack_nodes(messages.Nodes(entry, b""), b"o" * 20) == ([], 1)


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", "short"),
        (b"\x00" * 21, "short"),
        (b"\x02" + b"\x00" * 40, "kind"),
        (b"\x00" + b"\x00" * 2000, "long"),
        (b"\x00" * 21 + b"\x94" * 1300, "content"),
        (b"\x00" * 21 + b"\x91" * 1300, "content"),
        (
            messages.encode(0, b"m" * 20, messages.encode_head(b"swarmtag", heartbeat(port=0)), messages.Ping()),
            "content",
        ),
    ],
)
def test_bytes_that_are_no_datagram_have_a_reason(datagram: bytes, reason: str) -> None:
    """`Malformed` with a constant reason, whatever the bytes, nested ones included."""
    with pytest.raises(messages.Malformed, match=reason):
        messages.decode(datagram)


def test_a_host_that_is_no_address_does_not_pass() -> None:
    """A name in a heartbeat could block on a resolver."""
    head = messages.encode_head(b"swarmtag", heartbeat(host="example.org"))

    with pytest.raises(messages.Malformed, match="host"):
        messages.decode(messages.encode(messages.REQUEST, b"m" * 20, head, messages.Ping()))


def test_an_update_is_sent_a_bounded_number_of_times() -> None:
    """4 · ceil(log10(n + 1)) datagrams each, four updates per datagram, only the newest about a node."""
    queue = BroadcastQueue()
    nodes = ids(6)
    for node_id in nodes:
        queue.put(messages.Gossip(1, node_id, 1), members=99)
    queue.put(messages.Gossip(2, nodes[0], 1), members=99)
    told: list[messages.Gossip] = []
    while taken := queue.take():
        assert len(taken) <= GOSSIP_PER_DATAGRAM
        told += taken

    assert len(told) == 6 * 8
    assert messages.Gossip(1, nodes[0], 1) not in told


def test_a_full_queue_drops_the_oldest() -> None:
    """In a mass failure the queue stays bounded."""
    queue = BroadcastQueue()
    nodes = ids(MAX_QUEUED + 1, seed=3)
    for node_id in nodes:
        queue.put(messages.Gossip(2, node_id, 1), members=9)

    assert len(queue) == MAX_QUEUED
    assert queue.take()[0].node_id == nodes[1]
