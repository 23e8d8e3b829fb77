"""A closed swarm on real sockets: members reach each other, and unauthenticated peers get no answer.

Each kind of attacker sends datagrams and opens streams. A member must not answer a byte, deliver nothing, keep no state
and count the refusal. Under asyncio and uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl

import pytest

from p2pnode.overlay.addresses import NodeAddress, id_behind
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.sockets.framing import Kind, beginning
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES, TransportError
from tests.harness.runner.stories import run_by
from tests.process.harness.members import (
    KEY,
    NEXT_KEY,
    OTHER_KEY,
    RING,
    BareSocket,
    Member,
    Relay,
    Tap,
    ask,
    flipped,
    send_bytes,
    until,
)
from tests.process.harness.sockets import LOCAL, MB, Recorder, failure, pattern, run

__all__ = ["run"]


@run_by("run")
async def test_members_reach_each_other() -> None:
    """Datagrams and requests of any size arrive with their sender's proven id, and a connection is reused."""
    async with Member() as one, Member() as two:
        for data in (b"hello", b"x" * MAX_DATAGRAM_BYTES):
            one.transport.send(two.home, data)
            async with asyncio.timeout(60):
                got, source = await two.datagrams.get()
            assert (got, id_behind(source)) == (data, one.identity.node_id)
            assert source == one.sockets.address
        for _ in range(5):
            assert await ask(one, two.home) == (one.identity.node_id, b"", two.identity.node_id)
        assert await ask(one, two.sockets.address) == (one.identity.node_id, b"", two.identity.node_id)
        total = 20 * MB + 12345
        _, back, _ = await ask(one, two.home, "echo", pattern(total))
        assert back == b"".join(map(bytes, pattern(total)))
        assert two.counters["streams_sealed"] == 1
        assert {*one.dropped(), *two.dropped()} <= {"unasked"}  # a busy machine repeats a first message


OTHER_KEYS = [
    pytest.param(KeyRing((OTHER_KEY,)), "tests", id="a wrong key"),
    pytest.param(RING, "other", id="the key of another run"),
]


@pytest.mark.parametrize(("keys", "run_name"), OTHER_KEYS)
@run_by("run")
async def test_with_another_key(keys: KeyRing, run_name: str) -> None:
    """Neither datagram nor stream gets an answer; the error at the caller names the likely causes."""
    async with Member() as member, Member(keys, run_name) as outsider:
        outsider.transport.send(member.home, b"hello")
        await until(lambda: member.dropped() == {"stranger": 1}, "the init is counted")
        error = await failure(ask(outsider, member.home))
        assert error.kind == "reset"
        assert "same swarm key and run" in error.detail
        assert "clocks agree" in error.detail
        assert member.dropped() == {"stranger": 2}
        assert member.untouched()
        assert outsider.counters.get("received", 0) == 0


@run_by("run")
async def test_without_a_key() -> None:
    """Datagrams and requests of an open swarm, HTTP, TLS without a ticket and random bytes get no byte back."""
    async with Member() as member:
        address = member.sockets.address
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        outgoing = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="example.org").do_handshake()
        streams = [
            beginning(Kind.REQUEST, b"", 0, name=b"hello"),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            outgoing.read(),
            b"\x16\x03\x01\xff\xff" + os.urandom(64),
            os.urandom(2000),
            b"\0",
        ]
        for data in streams:
            assert await send_bytes(address, data) == b""
        bare = BareSocket()
        datagrams = [b"", b"\0" * 21, os.urandom(201), b"\x10" + os.urandom(200), b"\x12" + os.urandom(60)]
        datagrams += [bytes([kind]) + os.urandom(size) for kind in range(256) for size in (0, 21, 180, 1400)]
        for data in datagrams:
            bare.send(address, data)
        await until(lambda: member.counters.get("received", 0) >= len(datagrams) - 1, "all are read")
        refused = member.dropped()
        assert refused.pop("no_pair") >= 1
        assert refused.pop("stranger") >= len(datagrams)
        assert refused == {}
        assert bare.received() == []
        assert member.untouched()
        bare.socket.close()
        open_transport = SocketTransport(LOCAL, 0, log=Recorder(), clock=SystemClock())
        await open_transport.open(lambda _data, _source: None, member.handle)
        with pytest.raises(TransportError) as caught:
            async with open_transport.request(address, "hello", b"", timeout_s=60):
                pass
        assert "key" in caught.value.detail
        await open_transport.close()
        assert member.untouched()


@run_by("run")
async def test_recorded_traffic() -> None:
    """Recorded datagrams and the bytes of a TLS connection are replayed to the recipient and to a third member. They
    get no answer and are not delivered again."""
    async with Member() as one, Member() as two, Member() as third:
        recorder = Relay(two.sockets.address)
        await recorder.start()
        through = NodeAddress.of(recorder.address, two.identity.node_id)
        assert (await ask(one, through))[2] == two.identity.node_id
        recorded = Tap(one)
        for number in range(3):
            one.transport.send(two.home, b"%d" % number)
            async with asyncio.timeout(60):
                await two.datagrams.get()
        stream, datagrams = recorder.sent, recorded.stop()
        await recorder.stop()
        assert len(stream) > 1000
        assert len(datagrams) == 4  # an init, and three datagrams
        before = (two.counters["seal_pairs"], two.counters["sent"], list(two.requests))
        bare = BareSocket()
        for data in datagrams:
            bare.send(two.sockets.address, data)
            bare.send(third.sockets.address, data)
        for member in (two, third):
            assert await send_bytes(member.sockets.address, stream) == b""
            await until(lambda at=member: at.counters.get("received", 0) >= 4, "all are read")
        await until(lambda: two.dropped() == {"replayed": 5}, "all are refused")
        await until(lambda: third.dropped() == {"stranger": 1, "misdirected": 1, "no_pair": 3}, "there too")
        assert (two.counters["seal_pairs"], two.counters["sent"], list(two.requests)) == before
        assert two.datagrams.empty()
        assert third.untouched()
        assert bare.received() == []
        bare.socket.close()


@run_by("run")
async def test_flipped_bits() -> None:
    """With one bit changed on the way a datagram is dropped and a stream breaks; nothing is delivered."""
    rng = random.Random(5)
    print("seed 5")
    async with Member() as one, Member() as two:
        tap = Tap(one)
        one.transport.send(two.home, b"first")
        async with asyncio.timeout(60):
            await two.datagrams.get()
        one.transport.send(two.home, b"second")
        async with asyncio.timeout(60):
            await two.datagrams.get()
        sealed = tap.stop()[-1]
        sent = two.counters["sent"]
        bare = BareSocket()
        for bit in range(0, 8 * len(sealed), 3):
            bare.send(two.sockets.address, flipped(sealed, bit))
        sent_bits = len(range(0, 8 * len(sealed), 3))
        await until(lambda: sum(two.dropped().values()) == sent_bits, "all are refused")
        assert two.datagrams.empty()
        assert (two.counters["sent"], bare.received()) == (sent, [])
        bare.socket.close()
        for _ in range(6):
            relay = Relay(two.sockets.address, flip=rng.randrange(100, 2000))
            await relay.start()
            error = await failure(
                ask(one, NodeAddress.of(relay.address, two.identity.node_id), "who", [bytes(3000)], timeout_s=5.0)
            )
            assert error.kind in ("reset", "foreign", "timeout")
            await relay.stop()
        assert two.requests == []


@run_by("run")
async def test_a_member_cannot_use_anothers_id() -> None:
    """A member at another's address gets neither its datagrams nor its requests, and sends only under its own id."""
    async with Member() as one, Member() as impostor:
        absent = identity_from_seed(b"a" * 32)
        there = NodeAddress.of(impostor.sockets.address, absent.node_id)
        one.transport.send(there, b"for the absent one")
        await until(lambda: impostor.dropped() == {"misdirected": 1}, "its id is not the recipient")
        error = await failure(ask(one, there))
        assert error.kind == "reset"  # its ticket names another node, so the unmodified gate refuses it
        # With a modified gate the connection is admitted, but there is no certificate of the absent node.
        impostor.tickets._own_id = absent.node_id
        impostor.transport.sealer._identity = Claimed(impostor.identity, absent)
        error = await failure(ask(one, there, "who", [b"payload"]))
        assert error.kind == "rejected"
        assert "this node asked for" in error.detail
        assert impostor.requests == [], "not a byte of the request has passed"
        one.transport.send(there, b"again")
        await asyncio.sleep(0.25)
        one.transport.send(there, b"again")
        await until(lambda: one.dropped().get("impostor", 0) + one.dropped().get("unsigned", 0) > 0, "refused")
        assert impostor.datagrams.empty()
        # What it sends carries its own id, whatever the contents claim.
        impostor.transport.sealer._identity = impostor.identity
        impostor.transport.send(one.home, b"I am somebody else")
        async with asyncio.timeout(60):
            assert id_behind((await one.datagrams.get())[1]) == impostor.identity.node_id


class Claimed:
    """An identity with another node's id and its own key."""

    def __init__(self, own: Identity, other: Identity) -> None:
        self.node_id = other.node_id
        self.public_key = own.public_key
        self.sign = own.sign


@run_by("run")
async def test_a_rotation_under_traffic() -> None:
    """Requests and datagrams arrive during all steps of a rotation; afterwards the old key is refused."""
    async with Member() as one, Member() as two:
        steps = [KeyRing((KEY, NEXT_KEY)), KeyRing((NEXT_KEY, KEY)), KeyRing((NEXT_KEY,))]
        for ring in steps:
            for changing, other in ((one, two), (two, one)):
                changing.use(ring)
                for asker, asked in ((one, two), (two, one)):
                    assert (await ask(asker, asked.home))[2] == asked.identity.node_id
                    asker.transport.send(asked.home, b"hello")
                    async with asyncio.timeout(60):
                        assert (await asked.datagrams.get())[0] == b"hello"
                # A busy machine answers a first message twice, which was repeated.
                assert other.dropped().keys() <= {"unasked"}
        former = Member(RING)
        async with former:
            assert (await failure(ask(former, one.home))).kind == "reset"
            former.transport.send(one.home, b"hello")
            await until(lambda: one.dropped().get("stranger") == 2, "both are refused")
