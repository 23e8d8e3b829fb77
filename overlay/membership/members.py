"""Whom we know: the one place that inserts, moves and removes peers, in table, buckets and detector together.

The rules (reference/kademlia.md section 4 c, d, f): a contact is inserted only after it answered *us* at that very
address and proved its id; whoever speaks to us first is asked back. A known id at a new address replaces the old one
when its incarnation is newer, or when the old address does not answer; either with proof. Who does not answer where it
says it lives, but where it spoke from, lives there: a NAT gave it that address, and may give it another at any moment.
Another id at a known address buries the old id. Who says it is leaving is gone at once. Few ids share an address
(`overlay.kademlia.address_limit`). Changes are told to whoever subscribed.

Implements the protocol's `Listener`. It sends through the protocol, never awaits, and owns no task.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from overlay.addresses import Address, group_of, literal
from overlay.environment import Clock, Log
from overlay.ids import short
from overlay.kademlia.messages import DuplicateIdentity, Gossip, Ping, Result, pack_contact, unpack_contact
from overlay.kademlia.protocol import SwarmProtocol
from overlay.membership.failure_detector import Action, FailureDetector, StateChanged
from overlay.membership.negative_cache import NegativeCache
from overlay.peers import Activity, Contact, Heartbeat, Peer, PeerChange, PeerTable

#: One who speaks to us is asked back at most once in this time.
ASK_BACK_PAUSE_S = 1.0
ASK_BACK_ENTRIES = 1024
#: Strangers asked back that may wait at one time: what a flood of made-up senders costs us, and those it names.
MOST_ASKED_BACK = 512
#: More peers than this are not taken in: a table is not a list of everybody, and a liar may invent as many as it likes.
MOST_PEERS = 4096
#: A node is told of its twin at most once in this time.
TWIN_PAUSE_S = 1.0
#: Not heard from for this long, and in no bucket, pool or watch: forgotten without judgement.
FORGET_S = 180.0
#: Up to this many peers everybody is welcome in the table: knowing all of a few hundred is cheaper than looking them
#: up for every shard. Nothing depends on it; beyond it only the buckets' contacts and those in use are kept.
FULL_VIEW = 256


class MemberList:
    """The peers of one node."""

    def __init__(
        self,
        own_id: bytes,
        boot: int,
        detector: FailureDetector,
        clock: Clock,
        log: Log,
        k: int,
        *,
        ids_per_address: int = 0,
    ) -> None:
        self.peers = PeerTable()
        self.ids_per_address = ids_per_address  # 0: any number
        self.detector = detector
        self.negative = NegativeCache()
        self.lost: dict[bytes, Contact] = {}  # where the dead lived
        self._own_id = own_id
        self._boot = boot
        self._clock = clock
        self._log = log
        self._k = k
        self._asked_back: dict[Contact, float] = {}
        self._asking_back = 0
        self._told_of_twin: dict[bytes, float] = {}
        self._crowded: dict[str, None] = {}
        self._translated: set[bytes] = set()
        self._claims: dict[bytes, Address] = {}  # where they say they live, where that is elsewhere; asked once each
        self.twin = ""  # who else uses our identity, once that is proven
        self._callbacks: list[Callable[[PeerChange], None]] = []
        self._protocol: SwarmProtocol
        self._perform: Callable[[Sequence[Action]], None]

    def connect(self, protocol: SwarmProtocol, perform: Callable[[Sequence[Action]], None]) -> None:
        """Give it its way out: the protocol, and whoever carries out the detector's actions."""
        self._protocol = protocol
        self._table = protocol.router
        self._perform = perform
        protocol.serve(DuplicateIdentity, self.told_of_twin)

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        self._callbacks.append(callback)

    # -- what is known -------------------------------------------------------------------------------------------

    def peer(self, node_id: bytes) -> Peer | None:
        return self.peers.get(node_id)

    def contact(self, node_id: bytes) -> Contact | None:
        peer = self.peers.get(node_id)
        return peer.contact if peer is not None else None

    def stretch(self) -> float:
        return self.detector.stretch

    def everybody_known(self) -> bool:
        """No more nodes than one lookup returns: table and swarm are the same."""
        return len(self.peers) + 1 <= self._k

    # -- the protocol's facts ------------------------------------------------------------------------------------

    def answered(
        self, beat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        """An answer: from the address it claims, from the one we know, or from another."""
        now = self._clock.monotonic()
        self.negative.answered(asked)
        known = self.peers.get(beat.node_id)
        if known is not None and known.address == asked.address and _same_start(beat, known):
            self._hear_again(beat, known.address, rtt_s, now)
        elif not proven:
            # A node we know, started again or moved: it may be, but it has to say so itself.
            self.ask_back(asked)
        elif beat.activity == Activity.LEAVING:
            self._perform(self.detector.left(beat.node_id, now))
        elif asked.address == (claimed := _claimed(beat, source)):
            self._verified(beat, claimed, rtt_s, known)
        elif known is not None and asked.address in (known.address, source):
            self._verified(beat, asked.address, rtt_s, known)
        elif known is None:
            # It answered where we asked and says it lives elsewhere: prefer its word if that answers too.
            def settle(result: Result | None) -> None:
                if result is None and beat.node_id not in self.peers:
                    self._insert(beat, asked.address, rtt_s)

            self._protocol.call(Contact(beat.node_id, claimed), Ping(), settle, blame=False)

    def impostor(self, beat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        """The address belongs to another node now: the one we asked lives there no more."""
        known = self.peers.get(asked.node_id)
        now = self._clock.monotonic()
        self.negative.silent(asked, now)
        if known is not None and known.address == asked.address:
            self._perform(
                self.detector.declare_dead(asked.node_id, now, f"{short(beat.node_id)} answers at its address")
            )
        self.answered(beat, source, None, Contact(beat.node_id, asked.address), proven=proven)

    def spoke(self, beat: Heartbeat, source: Address) -> None:
        """A request: fold it if it comes from where the node is known to live, otherwise ask back."""
        if beat.node_id == self._own_id:
            self.own_id_used(beat, source)
            return
        known = self.peers.get(beat.node_id)
        claimed = _claimed(beat, source)
        if known is not None and known.address in (claimed, source) and _same_start(beat, known):
            self._hear_again(beat, known.address, None, self._clock.monotonic())
            if known.address != claimed and self._claims.get(beat.node_id) != claimed:
                self._claims[beat.node_id] = claimed  # its router may have opened a port for it since
                self.ask_back(Contact(beat.node_id, claimed))
        elif known is not None and known.address != claimed and _is_twin(beat, known):
            self._tell_of_twin(beat, source, known)
        elif beat.activity != Activity.LEAVING and (known is not None or self._wants(beat.node_id)):
            self.ask_back(Contact(beat.node_id, claimed))
            if source != claimed:
                self.ask_back(Contact(beat.node_id, source))

    def requested(self, beat: Heartbeat, source: Address) -> None:
        """A request over a stream, which has a port of its own: the host alone says whether it is the node we know."""
        known = self.peers.get(beat.node_id)
        if known is not None and known.address.host == source.host and _same_start(beat, known):
            self._hear_again(beat, known.address, None, self._clock.monotonic())
        else:
            self.spoke(beat, source)

    def takes_streams(self, node_id: bytes) -> bool:
        """False for a peer at a port that a NAT chose for its datagrams, unless others have reached it there."""
        peer = self.peers.get(node_id)
        return peer is None or peer.eligible or node_id not in self._translated

    def _hear_again(self, beat: Heartbeat, address: Address, rtt_s: float | None, now: float) -> None:
        """One we know, where we know it, since the same start."""
        if beat.activity == Activity.LEAVING:
            self._perform(self.detector.left(beat.node_id, now))
        else:
            self._fold(beat, address, rtt_s, now)

    def silent(self, contact: Contact) -> None:
        """Two questions and no answer."""
        now = self._clock.monotonic()
        self.negative.silent(contact, now)
        known = self.peers.get(contact.node_id)
        if known is not None and known.address == contact.address:
            self._perform(self.detector.silent(contact.node_id, now, others=self.peers.ids()))

    # -- one identity, two processes -----------------------------------------------------------------------------

    def own_id_used(self, beat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        """Another process claims to be us: ask it for the proof; with it, say so once, and whoever listens stops us."""
        if beat.boot == self._boot:
            return
        if not proven:
            self._ask_twin(Contact(self._own_id, _claimed(beat, source)))
            self._ask_twin(Contact(self._own_id, source))
            return
        self.proven_twin(beat.incarnation, beat.boot, source)

    def proven_twin(self, incarnation: int, boot: int, source: Address) -> None:
        """A process at this address has signed with our key, under another start, what we asked it just now."""
        if boot == self._boot or self.twin:
            return
        self.twin = str(source)
        reason = f"{source} runs with the same key, as incarnation {incarnation} of this node"
        self._log.error("identity_used_twice", address=str(source), reason=reason)
        self._changed(PeerChange(self._own_id, "twin", reason))

    def _ask_twin(self, contact: Contact) -> None:
        self._ask_back(contact, blame=False)

    def told_of_twin(self, body: DuplicateIdentity, _beat: Heartbeat, _source: Address, _message_id: bytes) -> None:
        """Two processes of one identity never list each other: a third, who meets both, tells them. Only a hint."""
        contact = unpack_contact(body.contact)
        if body.boot != self._boot and contact is not None and contact.node_id == self._own_id:
            self._ask_twin(contact)

    def _tell_of_twin(self, beat: Heartbeat, source: Address, known: Peer) -> None:
        """One id speaks as two starts at a time; each is told where the other is, and asks it."""
        now = self._clock.monotonic()
        if now < self._told_of_twin.get(beat.node_id, 0.0):
            return
        first = self._told_of_twin.pop(beat.node_id, None) is None
        self._told_of_twin[beat.node_id] = now + TWIN_PAUSE_S
        if len(self._told_of_twin) > ASK_BACK_ENTRIES:
            del self._told_of_twin[next(iter(self._told_of_twin))]
        if first:
            reason = f"{source} and {known.address} both speak as this node"
            self._log.warning("identity_used_twice", peer=short(beat.node_id), reason=reason)
            self._changed(PeerChange(beat.node_id, "clone", reason))
        second = Contact(beat.node_id, _claimed(beat, source))
        self._protocol.tell(known.contact, [], DuplicateIdentity(beat.boot, pack_contact(second)))
        self._protocol.tell(second, [], DuplicateIdentity(known.boot, pack_contact(known.contact)))
        self._protocol.counters["twins_told"] += 1

    def news(self, news: Gossip, sender: bytes) -> None:
        actions = self.detector.learn(news, sender, self._clock.monotonic())
        if actions:
            self._perform(actions)

    # -- insertion and change ------------------------------------------------------------------------------------

    def met(self, beat: Heartbeat, address: Address) -> None:
        """A request over a stream was answered by this node at this address, its id checked."""
        known = self.peers.get(beat.node_id)
        if known is not None and _same_start(beat, known):
            self._hear_again(beat, known.address, None, self._clock.monotonic())
        else:
            self.ask_back(Contact(beat.node_id, address))

    def ask_back(self, contact: Contact) -> None:
        """Ping one who has not answered us at this address yet; at most once a second. It has to prove its id."""
        if contact.node_id != self._own_id:
            self._ask_back(contact, blame=True)

    def _ask_back(self, contact: Contact, *, blame: bool) -> None:
        now = self._clock.monotonic()
        if now < self._asked_back.get(contact, 0.0):
            return
        if self._asking_back >= MOST_ASKED_BACK:
            self._protocol.counters["strangers_not_asked"] += 1
            return
        self._asked_back.pop(contact, None)
        self._asked_back[contact] = now + ASK_BACK_PAUSE_S
        if len(self._asked_back) > ASK_BACK_ENTRIES:
            del self._asked_back[next(iter(self._asked_back))]
        self._asking_back += 1
        self._protocol.call(contact, Ping(), self._asked, blame=blame, prove=True)

    def _asked(self, _: Result | None) -> None:
        """The answer itself is what was wanted; the protocol has told of it."""
        self._asking_back -= 1

    def _wants(self, node_id: bytes) -> bool:
        return len(self.peers) < FULL_VIEW or self._table.wants(node_id) or node_id in self.lost

    def _verified(self, beat: Heartbeat, address: Address, rtt_s: float | None, known: Peer | None) -> None:
        if known is None:
            self._insert(beat, address, rtt_s)
        elif known.address == address and _is_twin(beat, known):
            # Two processes cannot share an address: the start we knew is over, its directory was put back.
            now = self._clock.monotonic()
            self._perform(self.detector.declare_dead(beat.node_id, now, "started again from an older state directory"))
            self._insert(beat, address, rtt_s)
        elif known.address == address or beat.incarnation > known.incarnation:
            self._settle_at(beat, address, rtt_s)
        elif _same_start(beat, known) and beat.node_id in self._translated and address.port == beat.port:
            self._settle_at(beat, address, rtt_s)  # where it says it lives, at last: streams reach it there
        elif _same_start(beat, known):
            # Two addresses answer as one node: the old one stays unless it has gone silent.
            def settle(result: Result | None) -> None:
                if result is None and beat.node_id in self.peers:
                    self._settle_at(beat, address, rtt_s)

            self._protocol.call(known.contact, Ping(), settle, blame=False)
        else:
            self._tell_of_twin(beat, address, known)

    def _insert(self, beat: Heartbeat, address: Address, rtt_s: float | None) -> None:
        if len(self.peers) >= MOST_PEERS:
            self._protocol.counters["peers_refused_full"] += 1
        else:
            self._settle_at(beat, address, rtt_s)

    def _settle_at(self, beat: Heartbeat, address: Address, rtt_s: float | None) -> None:
        """It lives there now, if there is room at that address."""
        if self._is_crowded(beat.node_id, address):
            return
        now = self._clock.monotonic()
        self._evict_ghost(beat.node_id, address, now)
        self._fold(beat, address, rtt_s, now)

    def _is_crowded(self, node_id: bytes, address: Address) -> bool:
        """Eclipse costs addresses: in an open swarm only so many ids share one (reference/kademlia.md fault 16)."""
        group = group_of(address.host)
        if not self.ids_per_address or not group:
            return False
        known = self.peers.get(node_id)
        if known is not None and group_of(known.address.host) == group:
            return False
        ghost = self.peers.at(address)
        if self.peers.sharing(group) - (ghost is not None and ghost != node_id) < self.ids_per_address:
            return False
        self._protocol.counters["peers_refused_crowded"] += 1
        if group not in self._crowded and len(self._crowded) < ASK_BACK_ENTRIES:
            self._crowded[group] = None
            self._log.warning(
                "address_crowded", address=group, ids=self.ids_per_address, setting="swarm.ids_per_address"
            )
        return True

    def _evict_ghost(self, node_id: bytes, address: Address, now: float) -> None:
        ghost = self.peers.at(address)
        if ghost is not None and ghost != node_id:
            self._perform(self.detector.declare_dead(ghost, now, f"{short(node_id)} answers at its address"))

    def _fold(self, beat: Heartbeat, address: Address, rtt_s: float | None, now: float) -> None:
        node_id = beat.node_id
        change = self.peers.observe(beat, address.host, now, rtt_s, address=address)
        if change is not None:
            if change.kind in ("up", "restarted", "moved"):
                self._note_translation(beat, address)
            if change.kind in ("up", "restarted", "moved"):
                self._table.add(Contact(node_id, address))
            if change.kind == "up" and self.lost.pop(node_id, None) is not None:
                change = PeerChange(node_id, "returned", "back from the dead")
        actions = (
            self.detector.answered(node_id, beat.incarnation, now)
            if change is not None and change.kind in ("up", "returned")
            else self.detector.heard(node_id, beat.incarnation, now)
        )
        if change is not None:
            self._changed(change)
        if actions:
            self._perform(actions)

    def _note_translation(self, beat: Heartbeat, address: Address) -> None:
        """The port that a node names belongs to its streams as well; one that a NAT chose does not."""
        if address.port == beat.port:
            self._translated.discard(beat.node_id)
        else:
            self._translated.add(beat.node_id)

    def judged(self, action: StateChanged) -> None:
        """The detector changed its mind about a member."""
        node_id = action.node_id
        match action.kind:
            case "suspect" | "refuted":
                self._table.list_to_others(node_id, action.kind == "refuted")
            case "dead" | "left":
                peer = self.peers.remove(node_id)
                self._translated.discard(node_id)
                self._claims.pop(node_id, None)
                self._table.remove(node_id)
                if peer is not None and action.kind == "dead":
                    self.lost[node_id] = peer.contact
        self._changed(PeerChange(node_id, action.kind, action.reason))

    def _changed(self, change: PeerChange) -> None:
        level = self._log.info if change.kind in ("dead", "left", "restarted", "moved") else self._log.debug
        event = "up" if change.kind == "returned" else change.kind
        level(f"peer_{event}", peer=short(change.node_id), reason=change.reason)
        for callback in list(self._callbacks):
            callback(change)

    def forget_strangers(self, keep: Container[bytes]) -> None:
        """Drop peers that are of no use and were not heard from for long: a table is not a list of everybody."""
        now = self._clock.monotonic()
        for peer in self.peers if len(self.peers) > FULL_VIEW else ():
            if now - peer.last_heard > FORGET_S and peer.node_id not in self._table and peer.node_id not in keep:
                self.detector.forget(peer.node_id)
                self.peers.remove(peer.node_id)
                self._translated.discard(peer.node_id)
                self._claims.pop(peer.node_id, None)
                self._table.remove(peer.node_id)
        remembered = dict.fromkeys(self.detector.dead())
        for node_id in list(self.lost):
            if node_id not in remembered:
                del self.lost[node_id]


def _claimed(beat: Heartbeat, source: Address) -> Address:
    host = literal(beat.host) if beat.host else None
    return Address(host or source.host, beat.port)


def _same_start(beat: Heartbeat, known: Peer) -> bool:
    return beat.incarnation == known.incarnation and beat.boot == known.boot


def _is_twin(beat: Heartbeat, known: Peer) -> bool:
    """A start that cannot have been followed by the one we know: an older one that still speaks, or its equal."""
    return beat.incarnation < known.incarnation or (beat.incarnation == known.incarnation and beat.boot != known.boot)
