"""The closed swarm's real door on 127.0.0.1: what passes between members, and that strangers meet silence.

Each kind of stranger is let loose on datagrams and on streams; a member must not answer a byte, deliver nothing, keep
nothing, and count. Under asyncio and uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import time
from collections import Counter
from typing import Any

import pytest

from overlay.addresses import Address, NodeAddress, id_behind
from overlay.identity import Identity, identity_from_seed
from overlay.sealing.certificate_maker import make_bundle
from overlay.sealing.certificate_request import CertificateRequest
from overlay.sealing.sealed_transport import SealedTransport
from overlay.sealing.swarm_key import KeyRing, SwarmKey
from overlay.sealing.tickets import TicketVerdict, TicketVerifier
from overlay.sealing.tls import Credentials
from overlay.sockets.connection_pool import StreamSeal
from overlay.sockets.ticket_gate import TicketGate
from overlay.sockets.transport import SocketTransport
from overlay.system import SystemClock, SystemEntropy
from overlay.transport import MAX_DATAGRAM_BYTES, Request, Response, TransportError
from tests.process.test_sockets import LOCAL, MB, Recorder, Run, failure, pattern, run

__all__ = ["run"]

KEY, NEXT_KEY, OTHER_KEY = (SwarmKey(bytes([n]) * 32) for n in (1, 2, 3))
RING = KeyRing((KEY,))


def credentials(identity: Identity, keys: KeyRing, run_name: str = "tests") -> Credentials:
    return Credentials.of(
        make_bundle(CertificateRequest(identity.seed, run_name, [key.secret for key in keys], time.time()))
    )


class SkewedClock(SystemClock):
    """A machine whose clock is wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def wall(self) -> float:
        return super().wall() + self._ahead_s


class Member:
    """A sealed transport that records what it is delivered and answers every request with who asked."""

    def __init__(
        self, keys: KeyRing = RING, run_name: str = "tests", seed: bytes | None = None, *, ahead_s: float = 0.0
    ) -> None:
        self.identity = identity_from_seed(seed or os.urandom(32))
        self.keys = keys
        self.run_name = run_name
        self.log = Recorder()
        self.datagrams: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.requests: list[tuple[str, bytes]] = []
        clock, entropy = SkewedClock(ahead_s), SystemEntropy()
        self.tickets = TicketVerifier(keys, run_name, self.identity.node_id, entropy.token, started_wall=clock.wall())
        self.seal = StreamSeal(self.tickets, credentials(self.identity, keys, run_name))
        self.sockets = SocketTransport(LOCAL, 0, log=self.log, clock=clock, seal=self.seal)
        self.door = SealedTransport(
            self.sockets, self.identity, keys, run_name, clock=clock, entropy=entropy, log=self.log
        )

    async def __aenter__(self) -> Member:
        await self.door.open(lambda data, source: self.datagrams.put_nowait((data, source)), self.handle)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.door.close()

    async def handle(self, incoming: Request) -> Response:
        self.requests.append((incoming.name, id_behind(incoming.source)))
        if incoming.name == "echo":
            return Response(incoming.head, incoming.body)
        return Response(id_behind(incoming.source))

    @property
    def home(self) -> NodeAddress:
        return NodeAddress.of(self.sockets.address, self.identity.node_id)

    def use(self, keys: KeyRing) -> None:
        before, self.keys = self.keys, keys
        self.door.use(keys)
        self.tickets.use(keys)
        fresh = credentials(self.identity, keys, self.run_name)
        self.sockets.use(fresh, end_others=not set(before) <= set(keys))

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.door.counters)

    def dropped(self) -> dict[str, int]:
        """What was refused, by reason, datagrams and streams together."""
        found: Counter[str] = Counter()
        for name, count in self.counters.items():
            for prefix in ("seal_dropped_", "streams_dropped_"):
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] += count
        return dict(found)

    def untouched(self) -> bool:
        """Whether nothing was delivered, nobody got a pair, and not one datagram was sent."""
        return (
            self.datagrams.empty()
            and not self.requests
            and self.counters["seal_pairs"] == 0
            and self.counters.get("sent", 0) == 0
        )


async def ask(member: Member, to: Address, name: str = "who", body: Any = ()) -> tuple[bytes, bytes, bytes]:
    """Head and body of the answer, and who answered."""
    async with member.door.request(to, name, b"head", body, timeout_s=5) as answer:
        return answer.head, b"".join([bytes(chunk) async for chunk in answer.body]), answer.node_id


async def until(condition: Any, what: str) -> None:
    """Wait for a counter that a datagram of ours must move."""
    try:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 (a counter, moved by another's datagram)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within 5 s: {what}") from None


async def say(address: Address, data: bytes) -> bytes:
    """Connect, send these bytes, and return all that came back until the other side closed."""
    reader, writer = await asyncio.open_connection(*address)
    heard = b""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(8):
            heard = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return heard


class Stranger:
    """A bare UDP socket that counts what comes back."""

    def __init__(self, port: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((LOCAL, port))
        self.socket.setblocking(False)

    def send(self, to: Address, data: bytes) -> None:
        self.socket.sendto(data, tuple(to))

    def heard(self) -> list[bytes]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(4096))
        return found


def test_members_speak(run: Run) -> None:
    """Datagrams and requests arrive under their sender's proven id, the longest and 20 MB among them; a connection is
    opened once and used again."""

    async def main() -> None:
        async with Member() as one, Member() as two:
            for data in (b"hello", b"x" * MAX_DATAGRAM_BYTES):
                one.door.send(two.home, data)
                async with asyncio.timeout(5):
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
            assert (one.dropped(), two.dropped()) == ({}, {})

    run(main())


STRANGERS = [
    pytest.param(KeyRing((OTHER_KEY,)), "tests", id="a wrong key"),
    pytest.param(RING, "other", id="the key of another run"),
]


@pytest.mark.parametrize(("keys", "run_name"), STRANGERS)
def test_with_another_key(run: Run, keys: KeyRing, run_name: str) -> None:
    """Neither datagram nor stream gets an answer; the one who dials is told what silence may mean."""

    async def main() -> None:
        async with Member() as member, Member(keys, run_name) as stranger:
            stranger.door.send(member.home, b"hello")
            await until(lambda: member.dropped() == {"stranger": 1}, "the offer is counted")
            error = await failure(ask(stranger, member.home))
            assert error.kind == "reset"
            assert "same swarm key and run" in error.detail
            assert "clocks agree" in error.detail
            assert member.dropped() == {"stranger": 2}
            assert member.untouched()
            assert stranger.counters.get("received", 0) == 0

    run(main())


def test_without_a_key(run: Run) -> None:
    """An open node's datagrams and requests, HTTP, TLS without a ticket, and junk: not a byte comes back."""

    async def main() -> None:
        async with Member() as member:
            address = member.sockets.address
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            outgoing = ssl.MemoryBIO()
            with contextlib.suppress(ssl.SSLWantReadError):
                context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="example.org").do_handshake()
            streams = [
                b"POST /p2p/hello HTTP/1.1\r\nHost: x\r\nX-P2PNode: 1\r\nContent-Length: 0\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                outgoing.read(),
                b"\x16\x03\x01\xff\xff" + os.urandom(64),
                os.urandom(2000),
                b"\0",
            ]
            for data in streams:
                assert await say(address, data) == b""
            stranger = Stranger()
            datagrams = [b"", b"\0" * 21, os.urandom(201), b"\x10" + os.urandom(200), b"\x12" + os.urandom(60)]
            datagrams += [bytes([kind]) + os.urandom(size) for kind in range(256) for size in (0, 21, 180, 1400)]
            for data in datagrams:
                stranger.send(address, data)
            await until(lambda: member.counters.get("received", 0) >= len(datagrams) - 1, "all are read")
            refused = member.dropped()
            assert refused.pop("no_pair") >= 1
            assert refused.pop("stranger") >= len(datagrams)
            assert refused == {}
            assert stranger.heard() == []
            assert member.untouched()
            stranger.socket.close()
            open_door = SocketTransport(LOCAL, 0, log=Recorder(), clock=SystemClock())
            await open_door.open(lambda _data, _source: None, member.handle)
            with pytest.raises(TransportError) as caught:
                async with open_door.request(address, "hello", b"", timeout_s=5):
                    pass
            assert "key" in caught.value.detail
            await open_door.close()
            assert member.untouched()

    run(main())


def test_recorded_traffic(run: Run) -> None:
    """All that passed between two members, sent again to both and to a third, datagrams and the bytes of a whole TLS
    connection: silence, nothing delivered twice."""

    async def main() -> None:
        async with Member() as one, Member() as two, Member() as third:
            recorder = Relay(two.sockets.address)
            await recorder.start()
            through = NodeAddress.of(recorder.address, two.identity.node_id)
            assert (await ask(one, through))[2] == two.identity.node_id
            recorded = Tap(one)
            for number in range(3):
                one.door.send(two.home, b"%d" % number)
                async with asyncio.timeout(5):
                    await two.datagrams.get()
            stream, datagrams = recorder.sent, recorded.stop()
            await recorder.stop()
            assert len(stream) > 1000
            assert len(datagrams) == 4  # an offer, and three words
            before = (two.counters["seal_pairs"], two.counters["sent"], list(two.requests))
            stranger = Stranger()
            for data in datagrams:
                stranger.send(two.sockets.address, data)
                stranger.send(third.sockets.address, data)
            for member in (two, third):
                assert await say(member.sockets.address, stream) == b""
                await until(lambda at=member: at.counters.get("received", 0) >= 4, "all are read")
            await until(lambda: two.dropped() == {"replayed": 5}, "all are refused")
            await until(lambda: third.dropped() == {"stranger": 1, "misdirected": 1, "no_pair": 3}, "there too")
            assert (two.counters["seal_pairs"], two.counters["sent"], list(two.requests)) == before
            assert two.datagrams.empty()
            assert third.untouched()
            assert stranger.heard() == []
            stranger.socket.close()

    run(main())


def test_flipped_bits(run: Run) -> None:
    """One bit changed on the way: a datagram is dropped, a stream breaks off; nothing of either is delivered."""

    async def main() -> None:
        rng = random.Random(5)
        print("seed 5")
        async with Member() as one, Member() as two:
            tap = Tap(one)
            one.door.send(two.home, b"first")
            async with asyncio.timeout(5):
                await two.datagrams.get()
            one.door.send(two.home, b"second")
            async with asyncio.timeout(5):
                await two.datagrams.get()
            sealed = tap.stop()[-1]
            sent = two.counters["sent"]
            stranger = Stranger()
            for bit in range(0, 8 * len(sealed), 3):
                stranger.send(two.sockets.address, flipped(sealed, bit))
            sent_bits = len(range(0, 8 * len(sealed), 3))
            await until(lambda: sum(two.dropped().values()) == sent_bits, "all are refused")
            assert two.datagrams.empty()
            assert (two.counters["sent"], stranger.heard()) == (sent, [])
            stranger.socket.close()
            for _ in range(6):
                relay = Relay(two.sockets.address, flip=rng.randrange(100, 2000))
                await relay.start()
                error = await failure(
                    ask(one, NodeAddress.of(relay.address, two.identity.node_id), "who", [bytes(3000)])
                )
                assert error.kind in ("reset", "foreign", "timeout")
                await relay.stop()
            assert two.requests == []

    run(main())


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_member_that_presents_anothers_id(run: Run) -> None:
    """A member cannot be taken for another: not at the other's address, by datagram or stream, and not as the source of
    what it sends."""

    async def main() -> None:
        async with Member() as one, Member() as liar:
            absent = identity_from_seed(b"a" * 32)
            there = NodeAddress.of(liar.sockets.address, absent.node_id)
            one.door.send(there, b"for the absent one")
            await until(lambda: liar.dropped() == {"misdirected": 1}, "the liar cannot accept what names another")
            error = await failure(ask(one, there))
            assert error.kind == "reset"  # its ticket names another: the liar's own door does not admit it
            # The liar changes its door so that it admits everybody: it still has no certificate of the absent one.
            liar.tickets._own_id = absent.node_id
            liar.door.sealer._identity = Claimed(liar.identity, absent)  # type: ignore[assignment]
            error = await failure(ask(one, there, "who", [b"payload"]))
            assert error.kind == "rejected"
            assert "we asked for" in error.detail
            assert liar.requests == [], "not a byte of the request has passed"
            one.door.send(there, b"again")
            await asyncio.sleep(0.25)
            one.door.send(there, b"again")
            await until(lambda: one.dropped().get("impostor", 0) + one.dropped().get("unsigned", 0) > 0, "refused")
            assert liar.datagrams.empty()
            # And what it sends by its own door carries its own id, whatever it says.
            liar.door.sealer._identity = liar.identity
            liar.door.send(one.home, b"I am somebody else")
            async with asyncio.timeout(5):
                assert id_behind((await one.datagrams.get())[1]) == liar.identity.node_id

    run(main())


class Claimed:
    """An identity that answers to another's id, but has its own key."""

    def __init__(self, own: Identity, other: Identity) -> None:
        self.node_id = other.node_id
        self.public_key = own.public_key
        self.sign = own.sign


def test_keys_are_rotated_under_traffic(run: Run) -> None:
    """While two members change their keys one step after the other, every request and datagram between them arrives;
    afterwards the old key opens nothing."""

    async def main() -> None:
        async with Member() as one, Member() as two:
            steps = [KeyRing((KEY, NEXT_KEY)), KeyRing((NEXT_KEY, KEY)), KeyRing((NEXT_KEY,))]
            for ring in steps:
                for changing, other in ((one, two), (two, one)):
                    changing.use(ring)
                    for asker, asked in ((one, two), (two, one)):
                        assert (await ask(asker, asked.home))[2] == asked.identity.node_id
                        asker.door.send(asked.home, b"hello")
                        async with asyncio.timeout(5):
                            assert (await asked.datagrams.get())[0] == b"hello"
                    assert other.dropped() == {}
            former = Member(RING)
            async with former:
                assert (await failure(ask(former, one.home))).kind == "reset"
                former.door.send(one.home, b"hello")
                await until(lambda: one.dropped() == {"stranger": 2}, "both are refused")

    run(main())


def test_half_open_connections_do_not_keep_members_out(run: Run) -> None:
    """Hundreds of connections that say nothing, or half a ClientHello, are bounded; a member gets through beside them,
    and they are gone a few seconds later."""

    async def main() -> None:
        async with Member() as one, Member() as two:
            sockets = []
            for number in range(700):
                stalled = socket.socket()
                stalled.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    stalled.connect(tuple(two.sockets.address))
                sockets.append(stalled)
                if number % 100 == 99:
                    assert (await ask(one, two.home))[2] == two.identity.node_id
                    one.sockets._client.pool._idle.clear()
            for stalled in sockets[::2]:
                with contextlib.suppress(OSError):
                    stalled.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            assert len(two.sockets._gate._pending) <= 512  # type: ignore[union-attr]
            await until(lambda: not two.sockets._gate._pending, "all are let go")  # type: ignore[union-attr]
            refused = two.dropped()
            assert refused.get("silent", 0) + refused.get("crowded", 0) + refused.get("left", 0) == 700
            assert (await ask(one, two.home))[2] == two.identity.node_id
            for stalled in sockets:
                stalled.close()

    run(main())


def test_half_a_greeting_is_looked_at_a_few_times_and_its_rest_is_taken(run: Run) -> None:
    """Who sends half a ClientHello is looked at again at growing intervals, not every 30 ms until it is let go; once
    the rest has come it is admitted."""
    whole = b"\x16\x03\x01\x02\x00"

    async def main() -> None:
        looks: list[bytes] = []
        admitted: list[socket.socket] = []
        counters: Counter[str] = Counter()

        def verify(beginning: bytes) -> TicketVerdict:
            looks.append(beginning)
            return TicketVerdict.ADMITTED if beginning == whole else TicketVerdict.INCOMPLETE

        listening = socket.create_server((LOCAL, 0))
        listening.setblocking(False)
        gate = TicketGate(listening, verify, admitted.append, counters)
        try:
            with socket.create_connection(listening.getsockname()) as half:
                half.send(whole[:3])
                await until(lambda: counters["streams_dropped_silent"] == 1, "its patience ends")
                assert 3 <= len(looks) <= 10
            with socket.create_connection(listening.getsockname()) as late:
                late.send(whole[:3])
                before = len(looks)
                await until(lambda: len(looks) > before + 1, "it is looked at again")
                late.send(whole[3:])
                await until(lambda: bool(admitted), "it is admitted")
                admitted[0].close()
        finally:
            gate.close()

    run(main())


class Tap:
    """Records what a member puts on the wire."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._send = member.sockets.send
        self._sent: list[bytes] = []
        member.sockets.send = self._tapped  # type: ignore[method-assign]

    def _tapped(self, to: Address, datagram: bytes) -> None:
        self._sent.append(datagram)
        self._send(to, datagram)

    def stop(self) -> list[bytes]:
        self._member.sockets.send = self._send  # type: ignore[method-assign]
        return self._sent


class Relay:
    """A TCP relay that records what the client sends; `flip`: the offset of a byte, client's, that loses a bit."""

    def __init__(self, to: Address, flip: int = -1) -> None:
        self.sent = b""
        self._to = to
        self._flip = flip
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOCAL, 0)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(*self._to)
        self._tasks.append(asyncio.create_task(self._pump(onward_reader, writer, record=False)))
        self._tasks.append(asyncio.create_task(self._pump(reader, onward_writer, record=True)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, record: bool) -> None:
        try:
            while data := await reader.read(65536):
                if record:
                    at = self._flip - len(self.sent)
                    self.sent += data
                    if 0 <= at < len(data):
                        data = flipped(data, 8 * at)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)
