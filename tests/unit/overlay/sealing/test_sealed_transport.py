"""The sealed transport over another one: proven sources, counters, and clock warnings."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

from p2pnode.overlay.addresses import Address, NodeAddress, id_behind
from p2pnode.overlay.environment import Log
from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.sealed_transport import SealedTransport
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.transport import DatagramHandler, Request, RequestHandler, Response

KEYS, OTHER_KEYS = KeyRing((SwarmKey(b"\1" * 32),)), KeyRing((SwarmKey(b"\2" * 32),))


class Below:
    """The transport below: keeps what is sent, and delivers it to the other end on demand."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.sent: deque[tuple[Address, bytes]] = deque()
        self.counters = {"received": 3}
        self.requests: list[tuple[Any, ...]] = []
        self.on_datagram: DatagramHandler | None = None
        self.is_open = False

    async def open(self, on_datagram: DatagramHandler, _on_request: RequestHandler, _waits: object) -> Address:
        self.on_datagram, self.is_open = on_datagram, True
        return self.address

    def send(self, to: Address, datagram: bytes) -> None:
        self.sent.append((to, datagram))

    def request(self, *arguments: Any, **options: Any) -> Any:
        self.requests.append((*arguments, options))

    async def close(self) -> None:
        self.is_open = False


class Machine:
    """Clock, entropy and log of one end."""

    def __init__(self, name: str, wall: float) -> None:
        self.random = random.Random(name)
        self._wall = wall
        self.warnings: list[dict[str, Any]] = []

    def monotonic(self) -> float:
        return 10.0

    def wall(self) -> float:
        self._wall += 0.001
        return self._wall

    def token(self, size_bytes: int) -> bytes:
        return self.random.randbytes(size_bytes)

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append({"event": event, **fields})

    debug = info = error = warning


class End:
    """A sealed transport and what it delivers."""

    def __init__(self, name: str, keys: KeyRing = KEYS, ahead_s: float = 0.0) -> None:
        self.identity = identity_from_seed(name.encode() * 32)
        self.below = Below(Address("10.0.0.1", ord(name)))
        self.machine = Machine(name, 1_767_225_600.0 + ahead_s)
        log: Log = self.machine
        self.transport = SealedTransport(
            self.below, self.identity, keys, "tests", clock=self.machine, entropy=self.machine, log=log
        )
        self.delivered: list[tuple[bytes, Address]] = []

    async def open(self) -> None:
        await self.transport.open(lambda data, source: self.delivered.append((data, source)), refuse)

    @property
    def home(self) -> NodeAddress:
        return NodeAddress.of(self.below.address, self.identity.node_id)


async def refuse(_request: Request) -> Response:
    raise AssertionError("no request is expected")


def carry(one: End, two: End) -> None:
    """Deliver everything both have sent, until nothing is left."""
    while one.below.sent or two.below.sent:
        for source, target in ((one, two), (two, one)):
            while source.below.sent:
                _, datagram = source.below.sent.popleft()
                assert target.below.on_datagram is not None
                target.below.on_datagram(datagram, source.below.address)


async def opened(*ends: End) -> tuple[End, ...]:
    for end in ends:
        await end.open()
    return ends


def test_datagrams_arrive_with_a_proven_source() -> None:
    """What one member sends the other gets, with the sender's id in the source; the counters show the session."""
    one, two = asyncio.run(opened(End("a"), End("b")))
    one.transport.send(two.home, b"datagram")
    carry(one, two)

    ((datagram, source),) = two.delivered
    assert (datagram, id_behind(source), source) == (b"datagram", one.identity.node_id, one.below.address)
    assert two.transport.counters == {"received": 3, "seal_offers_accepted": 1, "seal_opened": 1, "seal_pairs": 1}


def test_nothing_is_delivered_or_answered_without_the_key() -> None:
    """A node with another key, and plain bytes, get no answer."""
    one, two = asyncio.run(opened(End("a", OTHER_KEYS), End("b")))
    one.transport.send(two.home, b"datagram")
    carry(one, two)
    assert two.below.on_datagram is not None
    two.below.on_datagram(b"plain", one.below.address)

    assert (two.delivered, list(two.below.sent)) == ([], [])
    assert two.transport.counters["seal_dropped_stranger"] == 2


def test_new_keys_are_used_at_once() -> None:
    """After both ends have replaced their keys, datagrams pass again."""
    one, two = asyncio.run(opened(End("a", OTHER_KEYS), End("b")))
    one.transport.use(KEYS)
    one.transport.send(two.home, b"datagram")
    carry(one, two)

    assert [datagram for datagram, _ in two.delivered] == [b"datagram"]


def test_a_wrong_clock_is_logged() -> None:
    """An init whose sender's clock differs too much is dropped, and the difference is logged."""
    one, two = asyncio.run(opened(End("a", ahead_s=CLOCK_BOUND_S + 30), End("b")))
    one.transport.send(two.home, b"datagram")
    carry(one, two)

    assert two.delivered == []
    (warning,) = two.machine.warnings
    assert (warning["event"], warning["ahead_s"], warning["bound_s"]) == ("clock_differs", 90.0, CLOCK_BOUND_S)


def test_requests_and_closing_pass_through() -> None:
    """Requests go to the transport below as they are, and `close` closes it."""
    (one,) = asyncio.run(opened(End("a")))
    one.transport.request(one.home, "name", b"head", [b"body"], timeout_s=2.0, keep=False)
    asyncio.run(one.transport.close())

    assert one.below.requests == [(one.home, "name", b"head", [b"body"], {"timeout_s": 2.0, "keep": False})]
    assert not one.below.is_open
