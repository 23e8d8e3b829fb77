"""The request service: what the envelope guards, and the limits of one peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode.overlay import requests
from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.line.capacity import class_of
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, Heartbeat, Peer
from p2pnode.overlay.rate_limits import RateLimit
from p2pnode.overlay.requests import RATE_LIMIT_DELAY_S, Envelope, RequestService
from p2pnode.overlay.transport import (
    PART_BYTES,
    Buffer,
    ReceivedResponse,
    Request,
    RequestRejected,
    RequestStream,
    Response,
    TransportError,
    gathered,
    in_parts,
)
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.recording_protocol import MembershipWorld
from tests.harness.stubs.stream_stub import StreamStub

OWN_ID, THEIR_ID = b"o" * 20, b"t" * 20
SOURCE = Address("10.0.0.2", 50_000)
THEM = Contact(THEIR_ID, Address("10.0.0.2", 8468))


async def no_body() -> AsyncIterator[Buffer]:
    return
    yield b""


async def echo(contact: Contact, payload: bytes, _body: AsyncIterator[Buffer]) -> Response:
    return Response(payload + str(contact.address).encode())


class World(MembershipWorld):
    """The requests of one node, and its members."""

    def __init__(self, version: str = "") -> None:
        super().__init__()
        self.local = LocalNode(OWN_ID, 1, 1, "tests", Address("10.0.0.1", 8468), version=version)
        self.local.enter(b"genesis of tests")
        self.made = RequestService(self.local, None, self.membership, self.clock)  # type: ignore[arg-type]
        self.made.register("echo", echo)

    def verified(self) -> list[Contact]:
        """Who has been asked for a proof: a request came from an unknown node there."""
        return [call.contact for call in self.recorder.calls]

    def met(self) -> Peer:
        """The other node, which is a member from now on."""
        self.answered(heartbeat(THEIR_ID), THEM)
        peer = self.members.peer(THEIR_ID)
        assert peer is not None
        return peer

    def moving(self) -> list[RequestStream]:
        """The streams with the other node that count."""
        return list(self.members.movement.sample(THEIR_ID))


def request(local: LocalNode, *, name: str = "echo", source: Address = SOURCE, **changes: Any) -> Request:
    assert local.tag is not None
    fields = {"tag": local.tag, "heartbeat": heartbeat(THEIR_ID), "to": OWN_ID, "payload": b"hi ", **changes}
    return Request(name, source, msgspec.msgpack.encode(Envelope(**fields)), no_body())


def play(story: Coroutine[Any, Any, Any]) -> Any:
    return run(story)


@run_by(play)
async def test_a_request_reaches_its_handler_and_its_heartbeat_the_members() -> None:
    """The contact has the port that the peer listens on; the response carries the own tag and heartbeat."""
    world = World()
    local = world.local
    answer = msgspec.msgpack.decode((await world.made.serve(request(local))).head, type=Envelope)

    assert answer == Envelope(local.tag or b"", local.heartbeat, b"", b"hi 10.0.0.2:8468")
    assert world.verified() == [THEM]
    peer = world.met()
    await world.made.serve(request(local, heartbeat=heartbeat(THEIR_ID, step=3)))
    assert peer.step == 3


@run_by(play)
async def test_the_stream_of_a_request_is_reported_with_its_peer() -> None:
    """As soon as the peer is known, so that its movement counts while the request is under way."""
    world = World()
    world.met()
    incoming = request(world.local)
    incoming.stream = StreamStub()
    await world.made.serve(incoming)
    assert world.moving() == [incoming.stream]


class Outgoing(StreamStub):
    """A request of a transport, which is answered so, or fails."""

    def __init__(self, answer: bytes | Exception, world: World) -> None:
        super().__init__()
        self.answer, self.world = answer, world

    async def __aenter__(self) -> ReceivedResponse:
        assert self.world.moving() == [self]
        if isinstance(self.answer, Exception):
            raise self.answer
        return ReceivedResponse(self.answer, no_body())

    async def __aexit__(self, *_: object) -> None:
        """Nothing is left to close."""


@pytest.mark.parametrize("ends", ["answered", "foreign", "failed", "broken", "left"])
@run_by(play)
async def test_a_request_counts_as_under_way_until_it_has_ended(ends: str) -> None:
    """Whether it is answered, by a node of this swarm or another, fails before or inside its body, or is left."""
    world = World()
    peer = world.met()
    theirs = Envelope(world.local.tag or b"", heartbeat(THEIR_ID, step=5), b"", b"hi")
    encoded: bytes | Exception = msgspec.msgpack.encode(theirs)
    if ends == "foreign":
        encoded = b"nothing"
    if ends == "failed":
        encoded = TransportError("refused", THEM.address, "refused it")
    world.made._transport = SimpleNamespace(request=lambda *_, **__: Outgoing(encoded, world))  # type: ignore[assignment]
    try:
        async with world.made.request(THEM, "echo", b"", timeout_s=1.0) as answer:
            assert answer.head == b"hi"
            assert len(world.moving()) == 1
            if ends == "broken":
                raise TransportError("reset", THEM.address, "broke off")
            if ends == "left":
                raise ZeroDivisionError
    except (TransportError, ZeroDivisionError):
        assert ends in ("foreign", "failed", "broken", "left")
    assert world.moving() == []
    assert peer.step == 5 * (ends not in ("foreign", "failed"))
    assert len(world.recorder.calls) == (ends in ("failed", "broken")), "a probe"


class ShortEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """An envelope without capacity class and version."""

    tag: bytes
    heartbeat: Heartbeat
    to: bytes
    payload: bytes


@run_by(play)
async def test_capacity_class_and_version_travel_with_requests_and_answers() -> None:
    """A peer may leave them out, and then it has announced none; what a later version appends is ignored."""
    world = World("0.2.1")
    made, local, peer = world.made, world.local, world.met()
    head = (await made.serve(request(local, capacity=7, version="0.3.0.dev1"))).head
    assert msgspec.msgpack.decode(head, type=Envelope).version == "0.2.1"
    assert (peer.capacity, peer.version) == (7, "0.3.0.dev1")

    for _ in range(100):
        local.line.sent(0.25, 250_000, is_busy=True, is_full=True)
    short = ShortEnvelope(local.tag or b"", heartbeat(THEIR_ID), OWN_ID, b"hi ")
    head = (await made.serve(Request("echo", SOURCE, msgspec.msgpack.encode(short), no_body()))).head
    assert msgspec.msgpack.decode(head, type=Envelope).capacity == class_of(1_000_000)
    assert (peer.capacity, peer.version) == (7, "0.3.0.dev1"), "as it was"

    later = [*msgspec.msgpack.decode(request(local).head), "more"]
    await made.serve(Request("echo", SOURCE, msgspec.msgpack.encode(later), no_body()))


HEAD = [b"t" * 8, heartbeat(THEIR_ID), OWN_ID, b"hi ", 0]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode(HEAD)[:-1],
        msgspec.msgpack.encode([b"t" * 9, *HEAD[1:]]),
        msgspec.msgpack.encode([*HEAD[:2], OWN_ID + b"o", *HEAD[3:]]),
        msgspec.msgpack.encode([*HEAD[:4], 256]),
        *(msgspec.msgpack.encode([*HEAD, version]) for version in ("v" * 65, 7, None, b"0.1")),
    ],
)
@run_by(play)
async def test_anything_else_is_no_envelope(head: bytes) -> None:
    """It is refused before anything is done with it: strangers send it."""
    world = World("0.2.1")
    with pytest.raises(RequestRejected, match="not an envelope"):
        await world.made.serve(Request("echo", SOURCE, head, no_body()))
    assert world.verified() == []


@pytest.mark.parametrize(("host", "reached"), [("192.0.2.5", "192.0.2.5"), ("nonsense", "10.0.0.2")])
@run_by(play)
async def test_a_peer_is_reached_at_the_host_that_it_announces(host: str, reached: str) -> None:
    """If that is an address; otherwise where its request came from, at the port that it listens on."""
    world = World()
    head = (await world.made.serve(request(world.local, heartbeat=heartbeat(THEIR_ID, host=host)))).head
    assert msgspec.msgpack.decode(head, type=Envelope).payload == f"hi {reached}:8468".encode()


@pytest.mark.parametrize(
    ("changes", "counter", "is_seen"),
    [
        ({"tag": b"swarmtag"}, "other_swarm", False),
        ({"to": b"x" * 20}, "other_node", False),
        ({"source": NodeAddress.of(SOURCE, b"x" * 20)}, "anothers_name", False),
        ({"heartbeat": heartbeat(OWN_ID, boot_id=8)}, "own_id", True),
        ({"name": "whisper"}, "no_handler", True),
    ],
)
@run_by(play)
async def test_a_misdirected_request_never_reaches_a_handler(
    changes: dict[str, Any], counter: str, is_seen: bool
) -> None:
    """Each kind is counted; only a request of this swarm, to this node, and under the sender's own id refreshes a
    peer."""
    world = World()
    with pytest.raises(RequestRejected):
        await world.made.serve(request(world.local, **changes))

    assert world.made.counters[f"requests_refused_{counter}"] == 1
    assert bool(world.verified()) is is_seen


@run_by(play)
async def test_a_node_outside_any_swarm_serves_no_request() -> None:
    """Before `enter` there is no tag to compare with."""
    world = World()
    made, local = world.made, world.local
    incoming = request(local)
    local.tag = None
    with pytest.raises(RequestRejected, match="not joined a swarm"):
        await made.serve(incoming)


@run_by(play)
async def test_a_stranger_beyond_the_rate_is_refused_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """To answer it costs a signature. Another address has its own rate."""
    monkeypatch.setattr(requests, "BARE_REQUEST_RATE", RateLimit(1.0, 2.0))

    async def answer(_incoming: Request) -> Response:
        return Response(b"hello")

    world = World()
    made, local = world.made, world.local
    made.register_bare("hello", answer)
    for _ in range(2):
        await made.serve(request(local, name="hello"))
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(RequestRejected, match="than a stranger may"):
        await made.serve(request(local, name="hello"))

    assert asyncio.get_running_loop().time() - began_s == pytest.approx(RATE_LIMIT_DELAY_S)
    await made.serve(request(local, name="hello", source=Address("10.0.0.3", 50_000)))
    assert made.counters["refused_rate"] == 1


async def body_of(parts: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES + 1])
def test_a_message_arrives_whole(size: int) -> None:
    """In parts that are not copied."""
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = in_parts(message)
    assert all(len(part) <= PART_BYTES for part in parts)
    assert asyncio.run(gathered(body_of(parts), size)) == message


def test_a_longer_one_than_is_allowed_is_refused_before_it_is_in_memory() -> None:
    """The rest of the body is not read."""
    read: list[int] = []

    async def endless() -> AsyncIterator[Buffer]:
        while True:
            read.append(1)
            yield bytes(100)

    with pytest.raises(ValueError, match="more than 250 bytes"):
        asyncio.run(gathered(endless(), 250))
    assert len(read) == 3
