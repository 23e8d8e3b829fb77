"""Members of a closed swarm on real sockets, and the means of an attacker: bare sockets, a tap, a relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from typing import Any

from p2pnode.overlay.addresses import Address, NodeAddress, id_behind
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.sealing.certificate_maker import make_bundle
from p2pnode.overlay.sealing.sealed_transport import SealedTransport
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tickets import TicketVerifier
from p2pnode.overlay.sealing.tls import CertificateRequest, Credentials
from p2pnode.overlay.sockets.connection_pool import StreamSeal
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock, SystemEntropy
from p2pnode.overlay.transport import Request, Response
from tests.process.harness.sockets import LOCAL, Recorder

KEY, NEXT_KEY, OTHER_KEY = (SwarmKey(bytes([n]) * 32) for n in (1, 2, 3))

RING = KeyRing((KEY,))
#: How long an event may take that has to come: a loaded machine is late.
LIMIT_S = 60.0


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
    """A sealed transport that records what it receives and answers every request with the caller's id."""

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
        self.transport = SealedTransport(
            self.sockets, self.identity, keys, run_name, clock=clock, entropy=entropy, log=self.log
        )

    async def __aenter__(self) -> Member:
        await self.transport.open(lambda data, source: self.datagrams.put_nowait((data, source)), self.handle)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()

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
        self.transport.use(keys)
        self.tickets.use(keys)
        fresh = credentials(self.identity, keys, self.run_name)
        self.sockets.use(fresh, end_others=not set(before) <= set(keys))

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.transport.counters)

    def dropped(self) -> dict[str, int]:
        """What was refused, by reason, datagrams and streams together."""
        found: Counter[str] = Counter()
        for name, count in self.counters.items():
            for prefix in ("seal_dropped_", "streams_dropped_"):
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] += count
        return dict(found)

    def untouched(self) -> bool:
        """Whether nothing was delivered, there is no session, and no datagram was sent."""
        return (
            self.datagrams.empty()
            and not self.requests
            and self.counters["seal_pairs"] == 0
            and self.counters.get("sent", 0) == 0
        )


async def ask(
    member: Member, to: Address, name: str = "who", body: Any = (), *, timeout_s: float = LIMIT_S
) -> tuple[bytes, bytes, bytes]:
    """Head and body of the response, and the id of the responder."""
    async with member.transport.request(to, name, b"head", body, timeout_s=timeout_s) as answer:
        return answer.head, b"".join([bytes(chunk) async for chunk in answer.body]), answer.node_id


async def until(condition: Any, what: str) -> None:
    """Wait until a condition holds."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 (a counter has no event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S:.0f} s: {what}") from None


async def send_bytes(address: Address, data: bytes) -> bytes:
    """Connect, send these bytes, and return everything received until the other side closes."""
    reader, writer = await asyncio.open_connection(*address)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(60):
            answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


class BareSocket:
    """A UDP socket that keeps what comes back."""

    def __init__(self, port: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((LOCAL, port))
        self.socket.setblocking(False)

    def send(self, to: Address, data: bytes) -> None:
        self.socket.sendto(data, tuple(to))

    def received(self) -> list[bytes]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(4096))
        return found


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Tap:
    """Records the datagrams that a member sends."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._send = member.sockets.send
        self.sent: list[bytes] = []
        member.sockets.send = self._tapped

    def _tapped(self, to: Address, datagram: bytes) -> None:
        self.sent.append(datagram)
        self._send(to, datagram)

    def stop(self) -> list[bytes]:
        self._member.sockets.send = self._send
        return self.sent


class Relay:
    """A TCP relay that records what the client sends; `flip` is the offset of a byte to change in it."""

    def __init__(self, to: Address, flip: int = -1) -> None:
        self.sent = b""
        self._to = to
        self._flip = flip
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOCAL, 0)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        connecting = asyncio.create_task(asyncio.open_connection(*self._to))
        self._tasks.append(connecting)
        onward_reader, onward_writer = await connecting
        self._writers.append(onward_writer)
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
        # Here too: a task that is cancelled before it runs closes nothing.
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)
