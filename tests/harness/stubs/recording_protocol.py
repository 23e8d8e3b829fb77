"""A datagram protocol that records what it is asked to send, and a membership over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from kademlia.node import Node

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.calls import CallTimes
from p2pnode.overlay.kademlia.messages import BroadcastQueue, Call, Gossip, GossipOnly, Result
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Contact, Heartbeat
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.simulated import ListLog, Record, make_environment

OWN = b"o" * 20


class RecordedCall(NamedTuple):
    contact: Contact
    body: Call
    on_result: Callable[[Result | None], None]
    options: dict[str, Any]


class RecordingProtocol:
    """Stands in the place of `SwarmProtocol`; a test answers a call by its `on_result`."""

    def __init__(self) -> None:
        self.own_id = OWN
        self.counters: Counter[str] = Counter()
        self.queue = BroadcastQueue()
        self.round_trips = CallTimes(0.5)
        self.router = ContactTable(20, Node(OWN))
        self.calls: list[RecordedCall] = []
        self.proving: set[Contact] = set()
        self.sent: list[tuple[Contact, list[Gossip], object]] = []
        self.responses: list[tuple[bytes, Address, Result]] = []
        self.procedures: dict[type, Callable[..., Result | None]] = {}

    @property
    def protocol(self) -> SwarmProtocol:
        return cast(SwarmProtocol, self)

    def subscribe(self, events: object) -> None:
        self.events = events

    def register(self, call: type, procedure: Callable[..., Result | None]) -> None:
        self.procedures[call] = procedure

    def awaits_proof(self, contact: Contact) -> bool:
        return contact in self.proving

    def call(self, contact: Contact, body: Call, on_result: Callable[[Result | None], None], **options: Any) -> None:
        self.calls.append(RecordedCall(contact, body, on_result, options))

    def send_gossip(self, contact: Contact, news: Sequence[Gossip], body: object = GossipOnly()) -> None:
        self.sent.append((contact, list(news), body))

    def respond(self, message_id: bytes, to: Address, result: Result) -> None:
        self.responses.append((message_id, to, result))


class MembershipWorld:
    """A membership over a protocol that records, made on a virtual loop."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.recorder = RecordingProtocol()
        environment = make_environment(log=ListLog(self.records))
        self.clock = environment.clock
        self.membership = Membership(heartbeat(OWN), 20, self.recorder.protocol, environment)
        self.members = self.membership.members

    def answered(self, seen: Heartbeat, home: Contact) -> None:
        """A node has answered this one, and is a member."""
        self.members.on_response(seen, home.address, 0.01, home, proven=True)
