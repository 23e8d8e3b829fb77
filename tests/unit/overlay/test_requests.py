"""The request service: what the envelope guards, and the limits of one peer."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from p2pnode.overlay import requests
from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.capacity import class_of
from p2pnode.overlay.envelope import REPEATED_S, Envelope
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, Heartbeat
from p2pnode.overlay.rate_limits import RateLimit
from p2pnode.overlay.requests import RATE_LIMIT_DELAY_S, RequestService
from p2pnode.overlay.transport import (
    Buffer,
    ReceivedResponse,
    Request,
    RequestRejected,
    RequestStream,
    Response,
    TransportError,
)
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.stream_stub import StreamStub

OWN_ID, THEIR_ID = b"o" * 20, b"t" * 20
SOURCE = Address("10.0.0.2", 50_000)


class Events:
    """Records the requests that count as signs of life."""

    def __init__(self) -> None:
        self.changes = 0
        self.requests: list[tuple[bytes, Address]] = []
        self.capacities: list[tuple[bytes, int]] = []
        self.versions: list[tuple[bytes, str]] = []
        self.streams: list[tuple[bytes, RequestStream]] = []
        self.responses: list[bytes] = []
        self.failures: list[str] = []
        #: Requests of this node.
        self.under_way: list[tuple[bytes, RequestStream]] = []

    def on_stream(self, node_id: bytes, stream: RequestStream) -> None:
        self.streams.append((node_id, stream))

    def on_sent(self, node_id: bytes, request: RequestStream) -> None:
        self.under_way.append((node_id, request))

    def on_done(self, node_id: bytes, request: RequestStream) -> None:
        self.under_way.remove((node_id, request))

    def on_capacity(self, node_id: bytes, capacity: int) -> None:
        self.capacities.append((node_id, capacity))

    def on_version(self, node_id: bytes, version: str) -> None:
        self.versions.append((node_id, version))

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        self.requests.append((heartbeat.node_id, source))

    def on_response(self, heartbeat: Heartbeat, address: Address) -> None:
        self.responses.append(heartbeat.node_id)

    def on_failure(self, to: Contact, reason: str) -> None:
        self.failures.append(reason)

    def takes_streams(self, node_id: bytes) -> bool:
        return True


async def no_body() -> AsyncIterator[Buffer]:
    return
    yield b""


async def echo(contact: Contact, payload: bytes, _body: AsyncIterator[Buffer]) -> Response:
    return Response(payload + str(contact.address).encode())


def service(version: str = "") -> tuple[RequestService, LocalNode, Events]:
    local = LocalNode(OWN_ID, 1, 1, "tests", Address("10.0.0.1", 8468), version=version)
    local.enter(b"genesis of tests")
    events = Events()
    made = RequestService(local, None, events, VirtualClock())  # type: ignore[arg-type]
    made.register("echo", echo)
    return made, local, events


def request(local: LocalNode, *, name: str = "echo", source: Address = SOURCE, **changes: Any) -> Request:
    assert local.tag is not None
    fields = {"tag": local.tag, "heartbeat": heartbeat(THEIR_ID), "to": OWN_ID, "payload": b"hi ", **changes}
    return Request(name, source, msgspec.msgpack.encode(Envelope(**fields)), no_body())


def play(story: Coroutine[Any, Any, Any]) -> Any:
    return run(story)


def test_a_request_reaches_its_handler_and_its_heartbeat_the_members() -> None:
    """The contact has the port that the peer listens on; the response carries the own tag and heartbeat."""

    async def story() -> None:
        made, local, events = service()
        answer = msgspec.msgpack.decode((await made.serve(request(local))).head, type=Envelope)

        assert answer == Envelope(local.tag or b"", local.heartbeat, b"", b"hi 10.0.0.2:8468")
        assert events.requests == [(THEIR_ID, Address("10.0.0.2", 8468))]

    play(story())


def test_the_stream_of_a_request_is_reported_with_its_peer() -> None:
    """As soon as the peer is known, so that its movement counts while the request is under way."""

    async def story() -> None:
        made, local, events = service()
        incoming = request(local)
        incoming.stream = StreamStub()
        await made.serve(incoming)
        assert events.streams == [(THEIR_ID, incoming.stream)]

    play(story())


def test_what_a_peer_said_last_keeps_no_stream_alive() -> None:
    """A connection that has ended takes no memory until its peer is heard again, which may be never."""

    async def story() -> None:
        made, local, events = service()
        incoming = request(local)
        incoming.stream = StreamStub()
        gone = weakref.ref(incoming.stream)
        await made.serve(incoming)
        incoming.stream = None
        events.streams.clear()
        assert gone() is None

    play(story())


@pytest.mark.parametrize(
    "change",
    ["time", "membership", "heartbeat", "host", "proof", "capacity", "version", "stream"],
)
def test_what_a_peer_repeats_at_once_is_told_once(change: str) -> None:
    """Ten requests within a moment are one sign of life. Anything else that they say, or that has changed since, is
    told: the time, what is known of peers, heartbeat, address, proof, capacity class, version, stream."""

    async def story() -> None:
        made, local, events = service()
        stream = StreamStub()

        async def serve(source: Address = SOURCE, stream: RequestStream = stream, **changes: Any) -> None:
            incoming = request(local, source=source, **changes)
            incoming.stream = stream
            await made.serve(incoming)

        for _ in range(10):
            await serve()
        assert (len(events.requests), len(events.streams)) == (1, 1)
        if change == "time":
            await asyncio.sleep(1.01 * REPEATED_S)
        if change == "membership":
            events.changes += 1
        await serve(
            NodeAddress.of(SOURCE, THEIR_ID)
            if change == "proof"
            else Address("10.0.0.3", 5)
            if change == "host"
            else SOURCE,
            StreamStub() if change == "stream" else stream,
            **{
                "heartbeat": {"heartbeat": heartbeat(THEIR_ID, step=3)},
                "capacity": {"capacity": 3},
                "version": {"version": "1"},
            }.get(change, {}),
        )
        assert len(events.requests) == (1 if change == "stream" else 2)
        assert len(events.streams) == 2
        assert events.capacities == [(THEIR_ID, 3)] * (change == "capacity")
        assert events.versions == [(THEIR_ID, "1")] * (change == "version")

    play(story())


class Outgoing(StreamStub):
    """A request of a transport, which is answered so, or fails."""

    def __init__(self, answer: bytes | Exception, events: Events) -> None:
        super().__init__()
        self.answer, self.events, self.has_ended = answer, events, False

    async def __aenter__(self) -> ReceivedResponse:
        assert self.events.under_way == [(THEIR_ID, self)]
        if isinstance(self.answer, Exception):
            raise self.answer
        return ReceivedResponse(self.answer, no_body())

    async def __aexit__(self, *_: object) -> None:
        self.has_ended = True


@pytest.mark.parametrize("ends", ["answered", "repeated", "foreign", "failed", "broken", "left"])
def test_a_request_counts_as_under_way_until_it_has_ended(ends: str) -> None:
    """Whether it is answered, by a node of this swarm or another, fails before or inside its body, or is left. Of what
    a peer repeats in its answers it is told once, as of what it repeats in its requests."""

    async def story() -> None:
        made, local, events = service()
        theirs = Envelope(local.tag or b"", heartbeat(THEIR_ID), b"", b"hi")
        encoded: bytes | Exception = msgspec.msgpack.encode(theirs)
        to = Contact(THEIR_ID, SOURCE)
        if ends == "foreign":
            encoded = b"nothing"
        if ends == "failed":
            encoded = TransportError("refused", to.address, "refused it")
        made._transport = SimpleNamespace(request=lambda *_, **__: Outgoing(encoded, events))  # type: ignore[assignment]
        for _ in range(3 if ends == "repeated" else 1):
            try:
                async with made.request(to, "echo", b"", timeout_s=1.0) as answer:
                    assert answer.head == b"hi"
                    assert len(events.under_way) == 1
                    if ends == "broken":
                        raise TransportError("reset", to.address, "broke off")
                    if ends == "left":
                        raise ZeroDivisionError
            except (TransportError, ZeroDivisionError):
                assert ends in ("foreign", "failed", "broken", "left")
        assert events.under_way == []
        assert events.responses == [THEIR_ID] * (ends not in ("foreign", "failed"))
        assert len(events.failures) == (ends in ("failed", "broken"))

    play(story())


class FormerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """The envelope of versions without capacity classes."""

    tag: bytes
    heartbeat: Heartbeat
    to: bytes
    payload: bytes


def test_a_capacity_class_travels_with_requests_and_answers_and_former_versions_do_not_notice() -> None:
    """An unknown class adds no byte; a known one is an element that a former version ignores, and may leave out."""

    async def story() -> None:
        made, local, events = service()
        unknown = (await made.serve(request(local))).head
        assert unknown == msgspec.msgpack.encode(
            FormerEnvelope(local.tag or b"", local.heartbeat, b"", b"hi 10.0.0.2:8468")
        )
        assert events.capacities == []

        for _ in range(100):
            local.line.sent(0.25, 250_000, is_busy=True, is_full=True)
        head = (await made.serve(request(local, capacity=7))).head
        assert events.capacities == [(THEIR_ID, 7)]
        assert msgspec.msgpack.decode(head, type=Envelope).capacity == class_of(1_000_000)
        assert msgspec.msgpack.decode(head, type=FormerEnvelope).payload == b"hi 10.0.0.2:8468"

        former = FormerEnvelope(local.tag or b"", heartbeat(THEIR_ID), OWN_ID, b"hi ")
        await made.serve(Request("echo", SOURCE, msgspec.msgpack.encode(former), no_body()))
        assert events.capacities == [(THEIR_ID, 7)]

    play(story())


class CapacityEnvelope(FormerEnvelope, frozen=True, array_like=True):
    """The envelope of versions without versions."""

    capacity: Annotated[int, Meta(ge=0, le=255)] = 0


def test_the_version_travels_with_requests_and_answers_and_former_versions_do_not_notice() -> None:
    """A node says its version in both directions, before and after its capacity class is known. Those that know no
    versions read the rest, and may leave it out."""

    async def story() -> None:
        made, local, events = service("0.2.1")
        for capacity in (0, class_of(1_000_000)):
            head = (await made.serve(request(local, version="0.3.0.dev1"))).head
            assert msgspec.msgpack.decode(head, type=Envelope).version == "0.2.1"
            assert msgspec.msgpack.decode(head, type=Envelope).capacity == capacity
            assert msgspec.msgpack.decode(head, type=CapacityEnvelope).capacity == capacity
            assert msgspec.msgpack.decode(head, type=FormerEnvelope).payload == b"hi 10.0.0.2:8468"
            for _ in range(100):
                local.line.sent(0.25, 250_000, is_busy=True, is_full=True)
            events.changes += 1
        assert events.versions == [(THEIR_ID, "0.3.0.dev1")] * 2

        for kind in (FormerEnvelope, CapacityEnvelope):
            former = kind(local.tag or b"", heartbeat(THEIR_ID), OWN_ID, b"hi ")
            await made.serve(Request("echo", SOURCE, msgspec.msgpack.encode(former), no_body()))
        assert len(events.versions) == 2

    play(story())


@pytest.mark.parametrize("version", ["v" * 65, 7, None, b"0.1"])
def test_a_version_without_bound_is_no_envelope(version: object) -> None:
    """What is longer than any version, or no text, is refused before anything is done with it."""

    async def story() -> None:
        made, local, events = service("0.2.1")
        fields = (local.tag, heartbeat(THEIR_ID), OWN_ID, b"hi ", 0, version)
        with pytest.raises(RequestRejected, match="not an envelope"):
            await made.serve(Request("echo", SOURCE, msgspec.msgpack.encode(fields), no_body()))
        assert (events.requests, events.versions) == ([], [])

    play(story())


@pytest.mark.parametrize(
    ("changes", "counter", "is_seen"),
    [
        ({"tag": b"swarmtag"}, "other_swarm", False),
        ({"to": b"x" * 20}, "other_node", False),
        ({"source": NodeAddress.of(SOURCE, b"x" * 20)}, "anothers_name", False),
        ({"heartbeat": heartbeat(OWN_ID)}, "own_id", True),
        ({"name": "whisper"}, "no_handler", True),
    ],
)
def test_a_misdirected_request_never_reaches_a_handler(changes: dict[str, Any], counter: str, is_seen: bool) -> None:
    """Each kind is counted; only a request of this swarm, to this node, and under the sender's own id refreshes a
    peer."""

    async def story() -> None:
        made, local, events = service()
        with pytest.raises(RequestRejected):
            await made.serve(request(local, **changes))

        assert made.counters[f"requests_refused_{counter}"] == 1
        assert bool(events.requests) is is_seen

    play(story())


def test_a_node_outside_any_swarm_serves_no_request() -> None:
    """Before `enter` there is no tag to compare with."""

    async def story() -> None:
        made, local, _ = service()
        incoming = request(local)
        local.tag = None
        with pytest.raises(RequestRejected, match="not joined a swarm"):
            await made.serve(incoming)

    play(story())


def test_a_stranger_beyond_the_rate_is_refused_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """To answer it costs a signature. Another address has its own rate."""
    monkeypatch.setattr(requests, "BARE_REQUEST_RATE", RateLimit(1.0, 2.0))

    async def answer(_incoming: Request) -> Response:
        return Response(b"hello")

    async def story() -> None:
        made, local, _ = service()
        made.register_bare("hello", answer)
        for _ in range(2):
            await made.serve(request(local, name="hello"))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(RequestRejected, match="than a stranger may"):
            await made.serve(request(local, name="hello"))

        assert asyncio.get_running_loop().time() - began_s == pytest.approx(RATE_LIMIT_DELAY_S)
        await made.serve(request(local, name="hello", source=Address("10.0.0.3", 50_000)))
        assert made.counters["refused_rate"] == 1

    play(story())
