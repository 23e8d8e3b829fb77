"""What streams to peers, and their failures, mean for membership.

Requests and responses over streams refresh the peers they come from. Each failure to connect asks the failure detector
for a probe. A peer whose streams fail twice within half a minute, although it answers probes, is notified, and is
no candidate for shards for as long. A peer at a port that a NAT chose accepts no streams at all.
"""

from __future__ import annotations

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.kademlia.messages import StreamsFailing
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Contact, Heartbeat, PeerChange
from p2pnode.overlay.transport import RequestStream

#: This many failed streams within the time make a peer unreachable for as long.
STREAM_FAILURES = 2
STREAM_FAILURE_S = 30.0
#: Peers whose failures are counted; beyond it the longest untouched are forgotten.
MAX_COUNTED = 1024


class StreamHealth:
    """Counts the failed streams to each peer. Implements `overlay.requests.StreamEvents`."""

    def __init__(self, protocol: SwarmProtocol, membership: Membership, clock: Clock) -> None:
        self._protocol = protocol
        self._membership = membership
        self._clock = clock
        #: See `StreamEvents.changes`.
        self.changes = 0
        #: See `StreamEvents`. Not methods of this class: each request calls them.
        self.takes_streams = membership.members.takes_streams
        self.on_sent, self.on_done = membership.movement.begin, membership.movement.end
        self._failures: dict[bytes, tuple[int, float]] = {}
        membership.on_change(self._on_change)

    def is_reachable(self, node_id: bytes) -> bool:
        """False for a while after its streams failed repeatedly, for a peer behind a NAT, and for an unverified one."""
        if not self.takes_streams(node_id) or not self._membership.members.is_verified(node_id):
            return False
        count, last = self._failures.get(node_id, (0, 0.0))
        return count < STREAM_FAILURES or self._clock.monotonic() - last > STREAM_FAILURE_S

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        """See `StreamEvents.on_request`."""
        self._membership.on_stream_request(heartbeat, source)

    def on_response(self, heartbeat: Heartbeat, address: Address) -> None:
        """See `StreamEvents.on_response`."""
        self._failures.pop(heartbeat.node_id, None)
        self._membership.on_stream_response(heartbeat, address)

    def on_capacity(self, node_id: bytes, capacity: int) -> None:
        """See `StreamEvents.on_capacity`."""
        self._membership.members.peers.note_capacity(node_id, capacity)

    def on_version(self, node_id: bytes, version: str) -> None:
        """See `StreamEvents.on_version`."""
        self._membership.members.peers.note_version(node_id, version)

    def on_stream(self, node_id: bytes, stream: RequestStream) -> None:
        """See `StreamEvents.on_stream`."""
        if node_id in self._membership.members.peers:
            self._membership.movement.add(node_id, stream)

    def on_failure(self, to: Contact, reason: str) -> None:
        """See `StreamEvents.on_failure`."""
        self.changes += 1
        now = self._clock.monotonic()
        count, last = self._failures.pop(to.node_id, (0, now))
        count = count + 1 if now - last <= STREAM_FAILURE_S else 1
        self._failures[to.node_id] = (count, now)
        if len(self._failures) > MAX_COUNTED:
            del self._failures[next(iter(self._failures))]
        if count == STREAM_FAILURES and to.node_id in self._membership.members.peers:
            self._protocol.send_gossip(to, [], StreamsFailing())
        self._membership.request_probe(to.node_id, reason)

    def _on_change(self, change: PeerChange) -> None:
        """A peer that came back or moved: failures from before do not count against its streams now."""
        self.changes += 1
        if change.kind in ("up", "returned", "restarted", "moved"):
            self._failures.pop(change.node_id, None)
