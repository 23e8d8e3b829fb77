"""Unauthenticated traffic of every kind to a daemon: no answer, no change in /status, and a count in /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from p2pnode.client import find
from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.bootstrap.hello import HelloContext, say_hello
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.messages import Ping
from p2pnode.overlay.peers import Heartbeat
from p2pnode.overlay.requests import Envelope
from p2pnode.overlay.sealing.handshake import SEALED
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tickets import server_name
from p2pnode.overlay.sockets.framing import Kind, beginning
from p2pnode.overlay.system import SystemEntropy
from p2pnode.overlay.transport import TransportError
from tests.process.harness.members import BareSocket, Member, Relay, Tap, ask, flipped, send_bytes
from tests.process.harness.sockets import failure
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, TRAINER, ProcessNode, until

RUN = "guarded"
ABSENT = identity_from_seed(b"a" * 32)


def page(daemon: ProcessNode) -> str:
    """/metrics."""
    found = find(daemon.state_dir)
    assert found is not None
    connection = http.client.HTTPConnection(str(found.address), timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def refused(daemon: ProcessNode) -> dict[tuple[str, str], int]:
    """(channel, reason) → count, as /metrics has it."""
    samples = re.findall(r'p2pnode_strangers_refused_total\{channel="(\w+)",reason="(\w+)"\} (\d+)', page(daemon))
    return {(channel, reason): int(count) for channel, reason, count in samples}


def standing(daemon: ProcessNode) -> str:
    """What unauthenticated peers may not change: peers, pairs, owners, population, health."""
    status = daemon.status()
    kept = {key: status[key] for key in ("node", "run", "swarm", "population", "health")}
    kept["node"].pop("uptime_seconds")
    overlay = status["overlay"]
    kept["overlay"] = [overlay[key] for key in ("peers", "contacts", "suspects", "lost", "calls_waiting")]
    kept["pairs"] = overlay["socket"]["seal_pairs"]
    kept["sent"] = overlay["socket"].get("sent", 0)
    kept["shards"] = status["exchange"]["shards_owned"]
    return json.dumps(kept, sort_keys=True)


@pytest.mark.timeout(600)
def test_an_unauthenticated_peer_gets_no_answer_and_is_counted(tmp_path: Path) -> None:
    """No key, a wrong key, the key of another run, recordings, flipped bits, another's id and a wrong clock, by
    datagram and by TLS. Each changes its counter; none gets a byte or changes anything else."""
    key = SwarmKey(os.urandom(32))
    ring = KeyRing((key,))
    daemon = ProcessNode(
        tmp_path,
        "first",
        SHORT_STEPS | {"swarm.run": RUN, "training.checkpoint_s": 0},
        environment={"P2PNODE_SWARM_KEY": key.text},
        script=TRAINER,
        forks=True,
    )
    try:
        until(lambda: daemon.trains, START_S, "the founder trains")
        host, _, port = daemon.address.rpartition(":")
        node_id = bytes.fromhex(daemon.status()["node"]["id"])
        asyncio.run(_attacks(daemon, NodeAddress.of(Address(host, int(port)), node_id), ring))
        step = daemon.step
        until(lambda: daemon.step > step, 90, "it trains on")
        log = daemon.output()
        assert "Traceback" not in log
        assert key.text not in log
    finally:
        daemon.kill()
        print(f"--- its log's end:\n{daemon.output()[-1500:]}")


async def _attacks(daemon: ProcessNode, home: NodeAddress, ring: KeyRing) -> None:
    bare = BareSocket()

    async def expect(name: str, attack: Callable[[], Awaitable[None]], *counters: tuple[str, str]) -> None:
        """The attack changes these counters and nothing else, and the bare socket receives nothing."""
        before, stood = refused(daemon), standing(daemon)
        await attack()
        async with asyncio.timeout(60):
            while not all(refused(daemon).get(each, 0) > before.get(each, 0) for each in counters):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert standing(daemon) == stood, name
        assert bare.received() == [], name
        print(f"{name}: {[(each, refused(daemon)[each] - before.get(each, 0)) for each in counters]}")

    async def without_a_key() -> None:
        bare.send(home, b"\0" + os.urandom(299))  # a first byte of ours would be another reason
        assert await send_bytes(home, beginning(Kind.REQUEST, b"", 0, name=b"hello")) == b""

    def with_keys(keys: KeyRing, run: str) -> Callable[[], Awaitable[None]]:
        async def attack() -> None:
            async with Member(keys, run) as outsider:
                outsider.transport.send(home, b"hello")
                error = await failure(ask(outsider, home))
                assert error.kind == "reset"
                assert outsider.counters.get("received", 0) == 0

        return attack

    both = (("datagram", "stranger"), ("stream", "stranger"))
    await expect("without a key", without_a_key, *both)
    await expect("a wrong key", with_keys(KeyRing((SwarmKey(b"w" * 32),)), RUN), *both)
    await expect("the key of another run", with_keys(ring, "another"), *both)

    async def with_a_wrong_clock() -> None:
        async with Member(ring, RUN, ahead_s=200.0) as late:
            late.transport.send(home, b"hello")
            error = await failure(ask(late, home))
            assert "clocks agree to 60 s" in error.detail

    await expect("a wrong clock", with_a_wrong_clock, ("datagram", "clock"), ("stream", "clock"))
    async with asyncio.timeout(60):  # a thread writes the log
        while "clock_differs" not in daemon.output():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async with Member(ring, RUN) as member:
        relay = Relay(home)
        await relay.start()
        through = NodeAddress.of(relay.address, home.node_id)
        with contextlib.suppress(Exception):  # the daemon does not know what is asked; that it listened is enough
            await ask(member, through)
        tap = Tap(member)
        async with asyncio.timeout(60):
            while sum(datagram[0] == SEALED for datagram in tap.sent) < 3:  # until there is a session, offers are sent
                member.transport.send(home, b"no message of ours")
                await asyncio.sleep(0.2)
        datagrams, stream = tap.stop(), relay.sent
        await relay.stop()
        assert len(datagrams) >= 3
        assert len(stream) > 500

        async def again() -> None:
            for datagram in datagrams:
                bare.send(home, datagram)
            assert await send_bytes(home, stream) == b""

        await expect("recordings", again, ("datagram", "replayed"), ("stream", "replayed"))

        async def flip() -> None:
            for bit in range(0, 8 * len(datagrams[-1]), 5):
                bare.send(home, flipped(datagrams[-1], bit))
            ticket = server_name(stream)
            assert ticket is not None
            at = stream.index(ticket) + 20
            other = b"a" if stream[at : at + 1] != b"a" else b"b"
            assert await send_bytes(home, stream[:at] + other + stream[at + 1 :]) == b""

        await expect("flipped bits", flip, ("datagram", "forged"), ("stream", "stranger"))

        async def as_another() -> None:
            async with Member(ring, RUN) as liar:
                liar.transport.sealer._identity = Thief(liar.identity)
                liar.transport.send(home, b"hello")
                await asyncio.sleep(0.2)
                assert liar.counters.get("received", 0) == 0

        await expect("another's id", as_another, ("datagram", "unsigned"))
        await _in_anothers_name(daemon, member, home)
        await expect("what names another", _misdirected(member, home, bare), ("datagram", "misdirected"))
    bare.socket.close()


async def _in_anothers_name(daemon: ProcessNode, member: Member, home: NodeAddress) -> None:
    """What a member sends under its own seal or certificate in the name of another is refused, and counted."""
    context = HelloContext(member.identity, 1, RUN, SystemEntropy())
    greeted = await say_hello(member.transport, home, context=context, genesis=None, timeout_s=60.0)
    tag = messages.swarm_tag(RUN, greeted.genesis)
    heartbeat = Heartbeat(ABSENT.node_id, 1, 1, 8468, step=99)
    before, stood = page(daemon), standing(daemon)
    member.transport.send(
        home,
        messages.encode(
            messages.REQUEST, os.urandom(messages.MESSAGE_ID_BYTES), messages.encode_head(tag, heartbeat), Ping()
        ),
    )
    envelope = msgspec.msgpack.encode(Envelope(tag, heartbeat, home.node_id, b""))
    with pytest.raises(TransportError, match="uses the id of"):
        async with member.transport.request(home, "dialback", envelope, timeout_s=60.0):
            pass
    for sample in ('{reason="in_anothers_name"}', '{kind="refused_anothers_name"}'):
        async with asyncio.timeout(60):
            while count_of(page(daemon), sample) != count_of(before, sample) + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert standing(daemon) == stood


def count_of(text: str, labels: str) -> int:
    return sum(int(line.rpartition(" ")[2]) for line in text.splitlines() if labels in line)


class Thief:
    """Another's id and public key, without its private key."""

    def __init__(self, own: Identity) -> None:
        self.node_id, self.public_key = ABSENT.node_id, ABSENT.public_key
        self.sign = own.sign


def _misdirected(member: Member, home: NodeAddress, bare: BareSocket) -> Callable[[], Awaitable[None]]:
    """What a member sent to a third node, sent to this one."""

    async def attack() -> None:
        tap = Tap(member)
        member.transport.send(NodeAddress.of(Address("127.0.0.1", 9), ABSENT.node_id), b"for another")
        for datagram in tap.stop():
            bare.send(home, datagram)

    return attack
