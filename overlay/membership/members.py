"""The peers of one node: inserts, moves and removes them in peer table, routing table and failure detector together.

A contact is inserted only after it answered this node at that address and proved its id; an unknown sender is verified
first. A known id moves to a new address when its incarnation is newer, or when the old address does not answer; both
need the proof. A peer that answers at the source address of its datagram, but not at the address it claims, is behind a
NAT. The source address is used, which the NAT may change at any time. Another id that answers at a known address
replaces the old id. A peer that announces its leave is removed at once.

Two nodes behind routers, or on both sides of a hole, do not hear each other, and may both hear a third. Each is in the
other's list through that one, which pings it and passes its heartbeat on (`on_relayed`): what a node counts and waits
for must not depend on whom it can reach. Until such a member has answered this node itself it is *unverified*: it is in
no routing table, no candidate for shards, and not named to others.

Each event changes the tables, and what follows for others goes through the `Network` that the list is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import partial

from p2pnode.overlay.addresses import Address, usable_host
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.calls import NegativeCache
from p2pnode.overlay.kademlia.messages import Gossip
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.membership.failure_detector import FailureDetector, StateChange
from p2pnode.overlay.membership.identity_conflict import IdentityConflicts, is_conflict, is_same_start
from p2pnode.overlay.membership.network import Network
from p2pnode.overlay.membership.stream_movement import StreamMovement
from p2pnode.overlay.peers import Activity, Contact, Heartbeat, Peer, PeerChange, PeerTable
from p2pnode.overlay.transport import RequestStream

#: More peers than this are not inserted: a table need not hold every node, and an attacker can invent any number.
MAX_PEERS = 4096
#: A peer without a message for this long, in no bucket, pool or watch list, is dropped.
FORGET_S = 180.0
#: Up to this many peers none is dropped: to keep a few hundred costs less than a lookup for every shard. Beyond it only
#: the contacts of the buckets and those in use are kept.
FULL_VIEW = 256
#: Up to this many peers every node that asks is verified. Beyond it only what the buckets take: the others are met in
#: lookups, one side at a time. Otherwise each of N nodes that start together makes N proofs in its first seconds.
EAGER_VIEW = 64


class MemberList:
    """The peers of one node. Implements `overlay.kademlia.protocol.ProtocolEvents`."""

    def __init__(
        self,
        own: Heartbeat,
        table: ContactTable,
        k: int,
        environment: Environment,
        network: Network,
    ) -> None:
        """`own`: id and start of this node."""
        self.peers = PeerTable()
        self.detector = FailureDetector(
            own.node_id,
            own.incarnation,
            environment.entropy.random,
            environment.clock.monotonic(),
            network,
            self._follow,
        )
        self.conflicts = IdentityConflicts(own.node_id, own.boot_id, network, environment.log)
        self.negative = NegativeCache()
        self.movement = StreamMovement()
        self.counters: Counter[str] = Counter()
        self.dead_contacts: dict[bytes, Contact] = {}
        self._own_id = own.node_id
        self._table = table
        self._k = k
        self._now = environment.clock.monotonic
        self._network = network
        self._behind_nat: dict[bytes, None] = {}  # an empty set takes four times as much
        #: Members that did not answer this node last, and who has reached each for it.
        self._helpers: dict[bytes, bytes] = {}
        self._unverified: dict[bytes, None] = {}
        #: Addresses that peers claim but do not answer at, each verified once.
        self._claimed_addresses: dict[bytes, Address] = {}

    # -- what is known -------------------------------------------------------------------------------------------

    def peer(self, node_id: bytes) -> Peer | None:
        return self.peers.get(node_id)

    def contact(self, node_id: bytes) -> Contact | None:
        peer = self.peers.get(node_id)
        return peer.contact if peer is not None else None

    def stretch(self) -> float:
        """See `ProtocolEvents`."""
        return self.detector.health.stretch

    def is_doubtful(self, node_id: bytes) -> bool:
        """See `ProtocolEvents`."""
        return self.detector.is_suspect(node_id) or self.detector.is_gone(node_id)

    def all_known(self) -> bool:
        """No more nodes than one lookup returns: table and swarm are the same."""
        return len(self.peers) + 1 <= self._k

    def takes_streams(self, node_id: bytes) -> bool:
        """False for a peer at a port that a NAT chose for its datagrams, unless others have reached it there."""
        peer = self.peers.get(node_id)
        return peer is None or peer.eligible or node_id not in self._behind_nat

    def helper(self, node_id: bytes) -> Contact | None:
        """Who is to be asked for a member that does not answer this node."""
        helper = self._helpers.get(node_id)
        return None if helper is None else self.contact(helper)

    def is_verified(self, node_id: bytes) -> bool:
        """False for a member that only others have reached."""
        return node_id not in self._unverified

    def heard_directly(self, node_id: bytes, since: float) -> Peer | None:
        """The member, if a message of its own has come since then."""
        peer = None if node_id in self._helpers else self.peers.get(node_id)
        return peer if peer is not None and peer.last_heard >= since else None

    # -- datagrams -----------------------------------------------------------------------------------------------

    def on_response(
        self, heartbeat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        """See `ProtocolEvents`."""
        self.negative.discard(asked)
        if heartbeat.node_id in self._helpers and (proven or heartbeat.node_id not in self._unverified):
            self._reached(heartbeat, asked)
        known = self.peers.get(heartbeat.node_id)
        if known is not None and known.address == asked.address and is_same_start(heartbeat, known):
            self._refresh(heartbeat, asked.address, rtt_s)
            return
        if not proven:
            # A known node, restarted or moved: possible, but it has to prove its id.
            self._network.verify(asked)
            return
        if heartbeat.activity == Activity.LEAVING:
            self.detector.on_leave(heartbeat.node_id, self._now())
            return
        claimed = claimed_address(heartbeat, source)
        if asked.address == claimed:
            self._verified(heartbeat, claimed, rtt_s, known)
        elif known is None:
            # It answered at the address asked and claims another one, which is used if it answers there too.
            otherwise = partial(self._on_unanswered_check, heartbeat, asked.address, rtt_s, known=False)
            self._network.check_address(Contact(heartbeat.node_id, claimed), otherwise)
        elif asked.address in (known.address, source):
            self._verified(heartbeat, asked.address, rtt_s, known)

    def on_id_mismatch(self, heartbeat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        """See `ProtocolEvents`: the address is the other node's now."""
        known = self.peers.get(asked.node_id)
        self.negative.add(asked, self._now())
        if known is not None and known.address == asked.address:
            self._declare_dead(asked.node_id, f"{short(heartbeat.node_id)} answers at its address")
        self.on_response(heartbeat, source, None, Contact(heartbeat.node_id, asked.address), proven=proven)

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        """See `ProtocolEvents`: refresh the node if it is at its known address, otherwise verify it."""
        node_id = heartbeat.node_id
        if node_id == self._own_id:
            self.on_own_id(heartbeat, source)
            return
        claimed = claimed_address(heartbeat, source)
        known = self.peers.get(node_id)
        if known is not None and known.address == claimed and is_same_start(heartbeat, known):
            self._refresh(heartbeat, claimed, None)
        elif known is not None and known.address == source and is_same_start(heartbeat, known):
            self._refresh(heartbeat, known.address, None)
            if self._claimed_addresses.get(node_id) != claimed:
                self._claimed_addresses[node_id] = claimed  # its router may have opened a port for it since
                self._network.verify(Contact(node_id, claimed))
        elif known is not None and known.address != claimed and is_conflict(heartbeat, known):
            self._report_conflict(heartbeat, source, known)
        elif heartbeat.activity != Activity.LEAVING and (known is not None or self._would_insert(node_id)):
            self._network.verify(Contact(node_id, claimed))
            if source != claimed:
                self._network.verify(Contact(node_id, source))

    def on_timeout(self, contact: Contact) -> None:
        """See `ProtocolEvents`. A peer whose streams move is slow: its pongs wait behind them."""
        now, node_id = self._now(), contact.node_id
        if self.movement.has_moved(node_id):
            self.movement.mark(node_id)
            self.detector.on_movement(node_id, now)
            return
        self.negative.add(contact, now)
        known = self.peers.get(node_id)
        if known is not None and known.address == contact.address:
            others = [other for other in self.peers.ids() if other not in self._helpers]
            self.detector.on_timeout(node_id, now, others=others)

    def on_gossip(self, news: Gossip, sender: bytes) -> None:
        """See `ProtocolEvents`."""
        self.detector.on_gossip(news, sender, self._now())

    def on_own_id(self, heartbeat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        """See `ProtocolEvents`."""
        self.conflicts.on_own_id(heartbeat, claimed_address(heartbeat, source), source, proven=proven)

    def _on_unanswered_check(self, heartbeat: Heartbeat, address: Address, rtt_s: float | None, *, known: bool) -> None:
        """The preferred address did not answer: the peer is at the other one. `known`: whether it was a peer then."""
        if (heartbeat.node_id in self.peers) == known:
            self._place(heartbeat, address, rtt_s)

    def on_unreachable(self, node_id: bytes) -> None:
        """Neither this node nor the peers it asked reach this member."""
        self.detector.on_unreachable(node_id, self._now(), "neither this node nor others reach it")

    def on_relayed(self, heartbeat: Heartbeat, contact: Contact, helper: bytes) -> None:
        """`helper` has reached a node that does not answer this one, and passes its heartbeat on."""
        node_id, known = contact.node_id, self.peers.get(contact.node_id)
        if heartbeat.node_id != node_id or node_id == self._own_id:
            return
        if known is not None:
            if heartbeat.incarnation >= known.incarnation and not is_conflict(heartbeat, known):
                self._helpers[node_id] = helper
                self._refresh(heartbeat, known.address, None)
            return
        if (
            len(self.peers) < FULL_VIEW
            and heartbeat.activity != Activity.LEAVING
            and self.peers.at(contact.address) is None
        ):
            self._helpers[node_id], self._unverified[node_id] = helper, None
            self._observe(heartbeat, contact.address, None)

    def _reached(self, heartbeat: Heartbeat, asked: Contact) -> None:
        """A member whose heartbeats came through others has answered this node."""
        if heartbeat.node_id in self._unverified:
            self._note_nat(heartbeat, asked.address)
            self._table.add(Contact(heartbeat.node_id, asked.address))
        self._forget_helper(heartbeat.node_id)

    def _forget_helper(self, node_id: bytes) -> None:
        self._helpers.pop(node_id, None)
        self._unverified.pop(node_id, None)

    # -- streams -------------------------------------------------------------------------------------------------

    def on_stream_request(self, heartbeat: Heartbeat, source: Address, stream: RequestStream | None = None) -> None:
        """A peer sent a request over a stream. `source` has the port that the peer listens on: that of the stream is no
        address, so the host alone identifies a known peer."""
        known = self.peers.get(heartbeat.node_id)
        if known is not None and known.address.host == source.host and is_same_start(heartbeat, known):
            self._refresh(heartbeat, known.address, None)
        else:
            self.on_request(heartbeat, source)
        if stream is not None and heartbeat.node_id in self.peers:
            self.movement.add(heartbeat.node_id, stream)

    def on_stream_response(self, heartbeat: Heartbeat, address: Address) -> None:
        """The node at this address, its id checked, answered a request over a stream."""
        known = self.peers.get(heartbeat.node_id)
        if known is not None and is_same_start(heartbeat, known):
            self._refresh(heartbeat, known.address, None)
        else:
            self._network.verify(Contact(heartbeat.node_id, address))

    # -- insertion and change ------------------------------------------------------------------------------------

    def _refresh(self, heartbeat: Heartbeat, address: Address, rtt_s: float | None) -> None:
        """A known peer, at its known address, since the same start."""
        if heartbeat.activity == Activity.LEAVING:
            self.detector.on_leave(heartbeat.node_id, self._now())
        else:
            self._observe(heartbeat, address, rtt_s)

    def _would_insert(self, node_id: bytes) -> bool:
        return len(self.peers) < EAGER_VIEW or self._table.would_insert(node_id) or node_id in self.dead_contacts

    def _verified(self, heartbeat: Heartbeat, address: Address, rtt_s: float | None, known: Peer | None) -> None:
        if known is None:
            self._place(heartbeat, address, rtt_s)
        elif known.address == address and is_conflict(heartbeat, known):
            # Two processes cannot share an address: the known start has ended, and its directory was restored from a
            # copy.
            self._declare_dead(heartbeat.node_id, "started again from an older state directory")
            self._place(heartbeat, address, rtt_s)
        elif known.address == address or heartbeat.incarnation > known.incarnation:
            self._place(heartbeat, address, rtt_s)
        elif not is_same_start(heartbeat, known):
            self._report_conflict(heartbeat, address, known)
        elif heartbeat.node_id in self._behind_nat and address.port == heartbeat.port:
            self._place(heartbeat, address, rtt_s)  # the address it claims: streams reach it there
        else:
            # Two addresses answer as one node: the old one stays unless it has gone silent.
            otherwise = partial(self._on_unanswered_check, heartbeat, address, rtt_s, known=True)
            self._network.check_address(known.contact, otherwise)

    def _report_conflict(self, heartbeat: Heartbeat, source: Address, known: Peer) -> None:
        claimed = claimed_address(heartbeat, source)
        if self.conflicts.on_conflict(heartbeat, claimed, source, known, self._now()):
            self.counters["twins_told"] += 1

    def _place(self, heartbeat: Heartbeat, address: Address, rtt_s: float | None) -> None:
        """It is at this address from now on; the peer that was there before is gone."""
        node_id = heartbeat.node_id
        if node_id not in self.peers and len(self.peers) >= MAX_PEERS:
            self.counters["peers_refused_full"] += 1
            return
        occupant = self.peers.at(address)
        if occupant is not None and occupant != node_id:
            self._declare_dead(occupant, f"{short(node_id)} answers at its address")
        self._observe(heartbeat, address, rtt_s)

    def _observe(self, heartbeat: Heartbeat, address: Address, rtt_s: float | None) -> None:
        """Merge a heartbeat into tables and detector, and notify of what it changed."""
        now, node_id = self._now(), heartbeat.node_id
        change = self.peers.observe(heartbeat, address, now, rtt_s)
        if change is None:
            self.detector.on_heartbeat(node_id, heartbeat.incarnation, now)
            return
        if node_id in self._unverified:
            self._behind_nat[node_id] = None
        elif change.kind in ("up", "restarted", "moved"):
            self._note_nat(heartbeat, address)
            self._table.add(Contact(node_id, address))
        if change.kind == "up" and self.dead_contacts.pop(node_id, None) is not None:
            change = PeerChange(node_id, "returned", "answers again after it was declared dead")
        self.detector.on_response(node_id, heartbeat.incarnation, now)
        self._network.notify(change)

    def _note_nat(self, heartbeat: Heartbeat, address: Address) -> None:
        """The port that a node names takes its streams as well; one that a NAT chose does not."""
        if address.port == heartbeat.port:
            self._behind_nat.pop(heartbeat.node_id, None)
        else:
            self._behind_nat[heartbeat.node_id] = None

    def _follow(self, node_id: bytes, kind: StateChange, reason: str) -> None:
        """The detector changed the state of a member: follow in the tables."""
        peer = None
        if kind in ("suspect", "refuted"):
            self._table.list_to_others(node_id, kind == "refuted")
        else:
            peer = self._remove(node_id)
            if peer is not None and kind == "dead":
                self.dead_contacts[node_id] = peer.contact
        self._network.notify(PeerChange(node_id, kind, reason, peer))

    def _declare_dead(self, node_id: bytes, reason: str) -> None:
        self.detector.declare_dead(node_id, self._now(), reason)

    def _remove(self, node_id: bytes) -> Peer | None:
        self._behind_nat.pop(node_id, None)
        self._claimed_addresses.pop(node_id, None)
        self._forget_helper(node_id)
        self.movement.forget(node_id)
        self._table.remove(node_id)
        return self.peers.remove(node_id)

    def forget_unused(self, keep: Container[bytes]) -> None:
        """Drop peers without a message for long that are in no bucket and not in `keep`."""
        now = self._now()
        for peer in self.peers if len(self.peers) > FULL_VIEW else ():
            if now - peer.last_heard > FORGET_S and peer.node_id not in self._table and peer.node_id not in keep:
                self.detector.forget(peer.node_id)
                self._remove(peer.node_id)
        self.negative.expire(now)
        remembered = dict.fromkeys(self.detector.dead())
        for node_id in list(self.dead_contacts):
            if node_id not in remembered:
                del self.dead_contacts[node_id]


def claimed_address(heartbeat: Heartbeat, source: Address) -> Address:
    """Where a node claims to be: the host it advertises or else the source of its datagram, and the port it names."""
    if not heartbeat.host and heartbeat.port == source.port and type(source) is Address:
        return source  # nearly always
    host = usable_host(heartbeat.host) if heartbeat.host else None
    return Address(host or source.host, heartbeat.port)
