"""What a node knows of its peers: addresses, times of contact, and steps that every message carries.

A `Heartbeat` is the small record in every message, both ways; `PeerTable` merges heartbeats into one `Peer` per node,
which changes while its node is known, and keeps what was known last when it is removed. `Peer` also decides which peers
count as workers, and which are skipped as stalled (docs/architecture.md). Pure. `now` (monotonic seconds) is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.waits import smoothed

Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
#: More than any node counts: a step of a microsecond takes nine years to get there. A larger number is malformed.
Counter = Annotated[int, Meta(ge=0, lt=1 << 48)]


class Activity(IntEnum):
    """What a node announces that it does. `TRAINING` peers are workers; a barrier waits for them and for `READY`
    ones."""

    JOINING = 0
    READY = 1  # has the manifest and the vector; waits for `min_nodes`
    TRAINING = 2  # working on a step or waiting at its barrier
    PAUSED = 3
    STALLED = 4  # its trainer hangs or keeps crashing; the daemon works and continues to own shards
    FINISHED = 5
    LEAVING = 6


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The state of a node that every datagram, request and response of it carries.

    `incarnation` counts the starts on one state directory; `boot_id` is random per start and distinguishes copies of
    one directory. `port` is where the node listens; its host is the source of the datagram, or `host` if it advertises
    one. `step` counts completed steps. `step_seconds` is the median step time, 0 when unknown. `samples` is the number
    of samples in the last delta. Decoding checks the ranges.
    """

    node_id: Id
    incarnation: Counter
    boot_id: Annotated[int, Meta(ge=0)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    host: Annotated[str, Meta(max_length=45)] = ""
    activity: Annotated[int, Meta(ge=0, le=6)] = 0
    step: Counter = 0
    step_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    samples: Counter = 0
    eligible: bool = False


class Contact(msgspec.Struct, frozen=True, gc=False):
    """Enough to reach a node: its id and its address.

    A record of msgspec, because every lookup makes dozens: a frozen dataclass takes three times as long to make and to
    hash, and half as much memory again.
    """

    node_id: bytes
    address: Address


#: The longest version that is shown, and what one may consist of (a subset of PEP 440 and of semantic versions).
VERSION_CHARACTERS = 40
_VERSION = re.compile(rf"[0-9A-Za-z][0-9A-Za-z.+!_-]{{0,{VERSION_CHARACTERS - 1}}}")


def shown_version(text: str) -> str:
    """What a node says that its version is, if it looks like one; otherwise nothing, as it may be shown anywhere."""
    return text if _VERSION.fullmatch(text) else ""


#: A peer without progress for this long, or for four of its own step times, is skipped until it progresses.
STALL_FLOOR_S = 10.0
STALL_STEPS = 4.0


@dataclass(slots=True)
class Peer:
    """One peer as of its last heartbeat. Times are monotonic seconds of the local clock."""

    contact: Contact
    incarnation: int
    boot_id: int
    activity: Activity
    step: int
    step_seconds: float
    samples: int
    eligible: bool
    last_heard: float
    last_progress: float
    round_trip_s: float | None = None
    round_trip_deviation_s: float = 0.0
    #: The capacity class that it announced last (`overlay.line.capacity`); 0: none.
    capacity: int = 0
    #: The version of p2pnode that it says it runs; empty until it has. For display: nothing is decided by it.
    version: str = ""

    @property
    def node_id(self) -> bytes:
        return self.contact.node_id

    @property
    def address(self) -> Address:
        return self.contact.address

    def is_worker(self, now: float) -> bool:
        """Whether it trains and made progress within max(10 s, four of its own step times) before its last heartbeat.

        Time since the last heartbeat does not count: a peer that was not asked lately may have made progress. Failure
        detection finds a dead peer, and the next heartbeat shows a stalled one.
        """
        if self.activity is not Activity.TRAINING:
            return False
        # Called for every peer at every step: without min() and max() it takes half the time.
        silent_since = self.last_heard if self.last_heard < now else now
        idle_s = silent_since - self.last_progress
        return idle_s <= STALL_FLOOR_S or idle_s <= STALL_STEPS * self.step_seconds

    @property
    def is_in_first_step(self) -> bool:
        """Whether it has begun to train and completed no step since its start: its step time is not known yet."""
        return self.activity is Activity.TRAINING and self.step_seconds == 0.0

    def counts_for_barrier(self, now: float, since: float = 0.0) -> bool:
        """Whether a barrier waits for this peer: a worker, or a peer in its first step that began together with the
        asking node.

        So nodes that start together take their first step together. A ready peer counts for as long as a stall is
        allowed, from its last progress or from `since`, when the asking node itself began. The last node that gets
        ready is seen by others at times up to a fifth of a second apart.
        A first step may compile for minutes. Such a peer counts while it lives and is not announced as stalled.
        One that began later than the asking node, a joiner, counts only as long as any worker without progress.
        """
        if self.activity is Activity.READY:
            return now - max(self.last_progress, since) <= STALL_FLOOR_S
        if self.is_in_first_step and self.last_progress <= since + STALL_FLOOR_S:
            return True
        return self.is_worker(now)


def heartbeat_of(peer: Peer) -> Heartbeat:
    """What a peer said last, with the address at which it is known."""
    return Heartbeat(
        peer.node_id,
        peer.incarnation,
        peer.boot_id,
        peer.address.port,
        peer.address.host,
        int(peer.activity),
        peer.step,
        peer.step_seconds,
        peer.samples,
        peer.eligible,
    )


ChangeKind = Literal[
    "up", "returned", "suspect", "refuted", "dead", "left", "restarted", "moved", "eligible", "clone", "twin"
]


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A change in what is known of a peer.

    `returned`: a peer that had been declared dead is up again. `clone`: two processes send as one incarnation of this
    node. `twin`: another process proved to hold this node's key; `node_id` is its own. `last`: what was known of a peer
    that is dead or has left, and is in no table any more; None where it never answered.
    """

    node_id: bytes
    kind: ChangeKind
    reason: str = ""
    last: Peer | None = field(default=None, compare=False)


class PeerTable:
    """The verified peers by id. The failure detector decides which are dead, the member list which are inserted.

    Steps only increase within an incarnation, so an old heartbeat never undoes a newer one.
    """

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer] = {}
        self.get = self._peers.get

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __contains__(self, node_id: bytes) -> bool:
        return node_id in self._peers

    def ids(self) -> list[bytes]:
        """The ids of all known peers, in the order in which they were inserted."""
        return list(self._peers)

    def at(self, address: Address) -> bytes | None:
        """The id known at an address."""
        return next((node_id for node_id, peer in self._peers.items() if peer.address == address), None)

    def note_capacity(self, node_id: bytes, capacity: int) -> None:
        """A known peer announced its capacity class. A restarted peer keeps its class until it announces another."""
        if (peer := self._peers.get(node_id)) is not None:
            peer.capacity = capacity

    def note_version(self, node_id: bytes, version: str) -> None:
        """A known peer said which version it runs: any text."""
        peer = self._peers.get(node_id)
        if peer is not None and peer.version != version:
            peer.version = shown_version(version)

    def remove(self, node_id: bytes) -> Peer | None:
        """Remove a peer and return what was known, if it was."""
        return self._peers.pop(node_id, None)

    def observe(
        self, heartbeat: Heartbeat, address: Address, now: float, rtt_s: float | None = None
    ) -> PeerChange | None:
        """Merge a heartbeat that came from its own node; returns what changed, if anything did.

        `address` is the known one until another one is verified.
        """
        peer = self._peers.get(heartbeat.node_id)
        kind: ChangeKind | None
        if peer is None:
            contact = Contact(heartbeat.node_id, address)
            self._peers[heartbeat.node_id] = peer = _peer_of(contact, heartbeat, now)
            kind = "up"
        elif heartbeat.incarnation < peer.incarnation:
            return None
        elif heartbeat.incarnation > peer.incarnation:
            _restart(peer, heartbeat, now)
            kind = "restarted"
        elif heartbeat.boot_id != peer.boot_id:
            return PeerChange(heartbeat.node_id, "clone", f"incarnation {heartbeat.incarnation} was started twice")
        else:
            kind = _merge(peer, heartbeat, now)
        if rtt_s is not None:
            peer.round_trip_s, peer.round_trip_deviation_s = smoothed(
                peer.round_trip_s, peer.round_trip_deviation_s, rtt_s
            )
        if address != peer.address:
            peer.contact = Contact(peer.node_id, address)
            kind = kind if kind == "restarted" else "moved"
        return None if kind is None else PeerChange(heartbeat.node_id, kind)


def _peer_of(contact: Contact, heartbeat: Heartbeat, now: float) -> Peer:
    return Peer(
        contact,
        heartbeat.incarnation,
        heartbeat.boot_id,
        Activity(heartbeat.activity),
        heartbeat.step,
        heartbeat.step_seconds,
        heartbeat.samples,
        heartbeat.eligible,
        last_heard=now,
        last_progress=now,
    )


def _restart(peer: Peer, heartbeat: Heartbeat, now: float) -> None:
    peer.incarnation, peer.boot_id = heartbeat.incarnation, heartbeat.boot_id
    peer.activity = Activity(heartbeat.activity)
    peer.step, peer.samples = heartbeat.step, heartbeat.samples
    peer.step_seconds, peer.eligible = heartbeat.step_seconds, heartbeat.eligible
    peer.version = ""  # a restart is how a node is upgraded
    peer.last_heard = peer.last_progress = now


def _merge(peer: Peer, heartbeat: Heartbeat, now: float) -> ChangeKind | None:
    """A heartbeat of the start that is known."""
    peer.last_heard = now
    if heartbeat.step < peer.step:
        return None  # overtaken by a newer one
    if heartbeat.step > peer.step:
        peer.step = heartbeat.step
        peer.last_progress = now
    if heartbeat.activity != peer.activity:
        peer.activity = Activity(heartbeat.activity)
        if peer.activity in (Activity.READY, Activity.TRAINING):
            peer.last_progress = now
    peer.step_seconds, peer.samples = heartbeat.step_seconds, heartbeat.samples
    if heartbeat.eligible != peer.eligible:
        peer.eligible = heartbeat.eligible
        return "eligible"
    return None
