"""The verified peers of one node: merges heartbeats into one `Peer` per node.

Steps only increase within an incarnation, so an old heartbeat never undoes a newer one. A `Peer` changes while its node
is known, and keeps what was known last when it is removed. Pure. `now` (monotonic seconds) is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Activity, ChangeKind, Contact, Heartbeat, Peer, PeerChange, shown_version
from p2pnode.overlay.waits import smoothed


class PeerTable:
    """The verified peers by id. The failure detector decides which are dead, the member list which are inserted."""

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
        self,
        heartbeat: Heartbeat,
        source_host: str,
        now: float,
        rtt: float | None = None,
        *,
        address: Address | None = None,
    ) -> PeerChange | None:
        """Merge a heartbeat that came from its own node; returns what changed, if anything did.

        `address` overrides the claimed one (`heartbeat.host` or `source_host`, with `heartbeat.port`). The member list
        passes the known address until another one is verified.
        """
        address = address or Address(heartbeat.host or source_host, heartbeat.port)
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
        if rtt is not None:
            peer.round_trip_s, peer.round_trip_deviation_s = smoothed(
                peer.round_trip_s, peer.round_trip_deviation_s, rtt
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
    if heartbeat.step < peer.step or peer.activity is Activity.LEAVING:
        return None  # overtaken by a newer one; and only a new incarnation ends LEAVING
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
