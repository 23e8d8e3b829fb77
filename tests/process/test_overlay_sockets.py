"""The overlay on real sockets, under asyncio and uvloop: both address families, names, and two faults of `kademlia`
that only real sockets show. Others are in tests/simulated/test_kademlia_faults.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import socket
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.dialer import resolve
from p2pnode.overlay.identity import load_identity, next_incarnation
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.membership.service import MAX_PAUSED
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Heartbeat
from p2pnode.overlay.settings import NodeSettings, OverlaySettings, SwarmSettings
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock, SystemEntropy
from tests.harness.environment.simulated import ListLog, MemoryDisk, Record, make_environment
from tests.harness.runner.stories import run_by
from tests.process.harness.members import until
from tests.process.harness.sockets import has_ipv6, run

__all__ = ["run"]

V4, V6 = "127.0.0.1", "::1"
GENESIS = b"genesis of tests"
TAG = messages.swarm_tag("tests", GENESIS)


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback (::1)")


class Real:
    """An overlay on real sockets, closed at the end of its block."""

    def __init__(self, host: str = V4) -> None:
        self.records: list[Record] = []
        disk, log = MemoryDisk(), ListLog(self.records)
        entropy = SystemEntropy()
        self.overlay = Overlay(
            identity=load_identity(disk, entropy),
            incarnation=next_incarnation(disk, SystemClock().wall()),
            boot_id=int.from_bytes(os.urandom(4), "big"),
            settings=OverlaySettings(NodeSettings(host=host, port=0), SwarmSettings(run="tests")),
            transport=SocketTransport(host, 0, log=log, clock=SystemClock()),
            environment=make_environment(clock=SystemClock(), entropy=entropy, disk=disk, log=log),
        )
        self.overlay._protocol.raise_handler_errors = True

    async def __aenter__(self) -> Overlay:
        await self.overlay.start()
        return self.overlay

    async def __aexit__(self, *_: object) -> None:
        await self.overlay.stop()


def port_of(node: Overlay) -> int:
    return node.address.port


# -- both families


@needs_ipv6
@run_by("run")
async def test_nodes_of_both_families_join_one_swarm_through_a_dual_stack_node() -> None:
    """A founder on "::", one joiner over 127.0.0.1 and one over ::1. The founder knows each under its own family, and
    no address is mapped. A node on "::" joins through either."""
    async with Real("::") as founder, Real(V4) as four, Real(V6) as six, Real("::") as both:
        founder.found(GENESIS)
        await four.join([f"{V4}:{port_of(founder)}"], genesis=None)
        await six.join([f"[{V6}]:{port_of(founder)}"], genesis=None)
        await both.join([f"{V4}:{port_of(four)}", f"[{V6}]:{port_of(six)}"], genesis=None)
        nodes = (founder, four, six, both)
        await until(lambda: len(founder.peers) == 3, "the founder knows all")
        await until(lambda: len(both.peers) == 3, "the second dual-stack node knows all")
        hosts = {peer.node_id: peer.address.host for peer in founder.peers}
        assert hosts[four.node_id] == V4
        assert hosts[six.node_id] == V6
        for node in nodes:
            for peer in node.peers:
                assert ipaddress.ip_address(peer.address.host).is_loopback
                assert "ffff" not in peer.address.host
        found = [contact.node_id for contact in await both.lookup(six.node_id)]
        assert found[0] == six.node_id
        # A node that listens on one family knows only nodes that it can send to, as soon as it has heard from them.
        for node, host in ((four, V4), (six, V6)):
            await until(lambda node=node, host=host: {peer.address.host for peer in node.peers} == {host}, "its family")


@needs_ipv6
@pytest.mark.parametrize("host", [V4, V6, "::"])
@run_by("run")
async def test_a_name_of_both_families_leads_in_over_the_one_that_works(host: str) -> None:
    """A name with a dead address, one of each family, a founder on one: in over what works."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
        reserved.bind((V4, 0))
        dead = Address(V4, reserved.getsockname()[1])  # bound, and no process listens: refused
        for founder_host in (V4, V6):
            if host not in (founder_host, "::"):
                continue
            async with Real(founder_host) as founder, Real(host) as joiner:
                founder.found(GENESIS)
                port = port_of(founder)
                addresses = [dead, Address(V6, port), Address(V4, port)]
                dialler = joiner._joining._dialer

                async def resolver(label: str, addresses: list[Address] = addresses) -> list[Address]:
                    assert label == "swarm.example:8468"
                    return addresses

                dialler.resolver = resolver
                await joiner.join(["swarm.example:8468"], genesis=None)
                await until(lambda: founder.is_alive(joiner.node_id), "the founder knows it")
                await until(lambda: joiner.is_alive(founder.node_id), "it knows the founder")


@run_by("run")
async def test_a_real_name_is_resolved_off_the_loop_to_all_its_addresses() -> None:
    """`localhost` gives literal addresses, each once; a joiner gets in by it."""
    async with Real(V4) as founder, Real(V4) as joiner:
        founder.found(GENESIS)
        addresses = await resolve(f"localhost:{port_of(founder)}")
        assert Address(V4, port_of(founder)) in addresses
        assert len(set(addresses)) == len(addresses)
        assert all(ipaddress.ip_address(address.host).is_loopback for address in addresses)
        await joiner.join([f"localhost:{port_of(founder)}"], genesis=None)
        await until(lambda: joiner.is_alive(founder.node_id), "it is in")


# -- faults that need a real socket


@run_by("run")
async def test_no_reply_kills_the_socket() -> None:
    """A real socket sends contacts without a port, without an address, multicast, of the other family, and
    heartbeats with invalid hosts. The node counts them and continues to answer."""
    async with Real() as node, Real() as other:
        node.found(GENESIS)
        await other.join([str(node.address)], genesis=None)
        await until(lambda: node.is_alive(other.node_id), "they know each other")
        entries = [b"\x7f\x00\x00\x01\x00\x00", b"\x00" * 6, b"\xe0\x00\x00\x01\x00\x09", b"\xff" * 6]
        lies = messages.Nodes(
            b"".join(b"x" * 20 + entry for entry in entries), b"y" * 20 + b"\x00" * 15 + b"\x01\x00\x07"
        )
        asked = asyncio.Event()

        def lying(_body: Any, _heartbeat: Any, _source: Any, _message_id: Any) -> messages.Nodes:
            asked.set()
            return lies

        other._protocol.register(messages.FindNode, lying)
        for _ in range(3):
            await node.lookup(b"t" * 20)
        assert asked.is_set()
        assert node.report().counters["malformed_contacts"] >= 4
        heartbeats = [
            Heartbeat(b"z" * 20, 1, 1, 1, host) for host in ("nowhere.invalid", "255.255.255.255", "fe80::1%lo")
        ]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            for heartbeat in heartbeats:
                head = messages.encode_head(TAG, heartbeat)
                raw.sendto(messages.encode(0, os.urandom(20), head, messages.Ping()), node.address)
                forged = msgspec.msgpack.encode([TAG, [*msgspec.to_builtins(heartbeat)[:3], 99999], ["ping"], []])
                raw.sendto(b"\x00" + os.urandom(20) + forged, node.address)
        await until(lambda: node.report().counters.get("dropped_host", 0) == 3, "hosts that are none are dropped")
        await until(lambda: node.report().counters.get("dropped_content", 0) >= 3, "and ports that are none")
        for address in (Address(V4, 99999), Address("", 1), Address("nowhere.invalid", 1)):
            node._transport.send(address, b"x")
        assert node.report().socket["not_sent_bad_address"] >= 1
        contact = other.contact(node.node_id)
        assert contact is not None
        assert await other.ping(contact) is not None


@run_by("run")
async def test_sending_resolves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending never resolves a name, whatever it is given; names are resolved off the loop, before. (Mapped
    addresses: the dual-stack test above.)"""

    def never(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"resolved {arguments}")

    async with Real() as node:
        node.found(GENESIS)
        monkeypatch.setattr(socket, "gethostbyname", never)
        for host in ("nowhere.invalid", "::1"):
            began = asyncio.get_running_loop().time()
            node._transport.send(Address(host, 9), b"x")
            assert asyncio.get_running_loop().time() - began < 4.0
        counters = node.report().socket
        assert counters.get("not_sent_bad_address", 0) + counters.get("not_sent_no_way", 0) == 2


# -- junk


@run_by("run")
async def test_mutated_datagrams_through_a_real_socket() -> None:
    """Twenty thousand random and mutated datagrams in bursts: what was read is dropped or answered, and no invented
    node is in the table. The other node is served meanwhile (a full socket may lose a ping)."""
    seed = 71
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with Real() as node, Real() as other:
        node.found(GENESIS)
        await other.join([str(node.address)], genesis=None)
        await until(lambda: node.is_alive(other.node_id), "they know each other")
        contact = other.contact(node.node_id)
        assert contact is not None
        heads = [messages.encode_head(TAG, Heartbeat(rng.randbytes(20), 1, 1, 4000)) for _ in range(20)]
        bodies = [
            messages.Ping(),
            messages.FindNode(b"t" * 20),
            messages.StreamsFailing(),
            messages.Pong(),
        ]  # nothing that names another address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            for burst in range(100):
                for _ in range(200):
                    body = rng.choice(bodies)
                    kind = isinstance(body, messages.Pong)
                    datagram = bytearray(messages.encode(kind, rng.randbytes(20), rng.choice(heads), body))
                    for _ in range(rng.randrange(3)):
                        datagram[rng.randrange(len(datagram))] = rng.randrange(256)
                    if rng.random() < 0.1:
                        datagram = bytearray(rng.randbytes(rng.randrange(1, 3000)))
                    raw.sendto(datagram, node.address)
                await asyncio.sleep(0)
                if burst % 10 == 0:
                    answers = [await other.ping(contact) for _ in range(3)]
                    assert any(answer is not None for answer in answers)
        assert {peer.node_id for peer in node.peers} == {other.node_id}
        report = node.report()
        assert report.counters["dropped_content"] > 1000
        assert report.socket["dropped_long"] > 100
        assert report.counters.get("faults", 0) == 0
        # Of two pauses: a call may last as long as the pause between two verifications.
        assert report.calls_waiting <= 2 * MAX_PAUSED
