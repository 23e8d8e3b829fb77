"""Whom we know: the one place that inserts, moves and removes peers, in table, buckets and detector together.

The rules (reference/kademlia.md section 4 c, d, f): a contact is inserted only after it answered *us* at that very
address; whoever speaks to us first is asked back. A known id at a new address replaces the old one when its
incarnation is newer, or when the old address does not answer. Another id at a known address buries the old id. Who
says it is leaving is gone at once. Changes are told to whoever subscribed.

Implements the protocol's `Listener`. It sends through the protocol, never awaits, and owns no task.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from overlay.doors import Clock, Log
from overlay.ids import short
from overlay.kademlia_server import SwarmProtocol
from overlay.liveness import Action, Detector, Judged
from overlay.peers import Activity, Beat, Contact, Peer, PeerChange, PeerTable
from overlay.timeouts import NegativeCache
from overlay.transport import Address
from overlay.wire import News, Ping, Result, Twin, literal

#: One who speaks to us is asked back at most once in this time.
ASK_BACK_PAUSE_S = 1.0
ASK_BACK_ENTRIES = 1024
#: Not heard from for this long, and in no bucket, pool or watch: forgotten without judgement.
FORGET_S = 180.0
#: Up to this many peers everybody is welcome in the table: knowing all of a few hundred is cheaper than looking them
#: up for every shard. Nothing depends on it; beyond it only the buckets' contacts and those in use are kept.
FULL_VIEW = 256
#: Reason of an "up" of one who was held for dead: where it lives, others may be back as well.
BACK = "back from the dead"


class Membership:
    """The peers of one node."""

    def __init__(self, own_id: bytes, boot: int, detector: Detector, clock: Clock, log: Log, k: int) -> None:
        self.peers = PeerTable()
        self.detector = detector
        self.negative = NegativeCache()
        self.lost: dict[bytes, Contact] = {}  # where the dead lived
        self._own_id = own_id
        self._boot = boot
        self._clock = clock
        self._log = log
        self._k = k
        self._asked_back: dict[Contact, float] = {}
        self._clones: dict[bytes, int] = {}
        self._callbacks: list[Callable[[PeerChange], None]] = []
        self._protocol: SwarmProtocol
        self._perform: Callable[[Sequence[Action]], None]

    def connect(self, protocol: SwarmProtocol, perform: Callable[[Sequence[Action]], None]) -> None:
        """Give it its way out: the protocol, and whoever carries out the detector's actions."""
        self._protocol = protocol
        self._table = protocol.router
        self._perform = perform
        protocol.serve(Twin, self.told_of_twin)

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

    def answered(self, beat: Beat, source: Address, rtt_s: float | None, asked: Contact) -> None:
        """An answer: from the address it claims, from the one we know, or from another."""
        now = self._clock.monotonic()
        self.negative.answered(asked)
        if beat.activity == Activity.LEAVING:
            self._perform(self.detector.left(beat.node_id, now))
            return
        known = self.peers.get(beat.node_id)
        claimed = _claimed(beat, source)
        if asked.address == claimed:
            self._verified(beat, claimed, rtt_s, known, now)
        elif known is not None and known.address == asked.address:
            self._fold(beat, known.address, rtt_s, now)
        elif known is None:
            # It answered where we asked and says it lives elsewhere: prefer its word if that answers too.
            def settle(result: Result | None) -> None:
                if result is None and beat.node_id not in self.peers:
                    self._insert(beat, asked.address, rtt_s)

            self._protocol.call(Contact(beat.node_id, claimed), Ping(), settle, blame=False)

    def impostor(self, beat: Beat, source: Address, asked: Contact) -> None:
        """The address belongs to another node now: the one we asked lives there no more."""
        known = self.peers.get(asked.node_id)
        now = self._clock.monotonic()
        self.negative.silent(asked, now)
        if known is not None and known.address == asked.address:
            self._perform(
                self.detector.declare_dead(asked.node_id, now, f"{short(beat.node_id)} answers at its address")
            )
        self.answered(beat, source, None, Contact(beat.node_id, asked.address))

    def spoke(self, beat: Beat, source: Address) -> None:
        """A request: fold it if it comes from where the node is known to live, otherwise ask back."""
        known = self.peers.get(beat.node_id)
        claimed = _claimed(beat, source)
        if known is not None and known.address == claimed:
            if beat.activity == Activity.LEAVING:
                self._perform(self.detector.left(beat.node_id, self._clock.monotonic()))
            else:
                self._fold(beat, claimed, None, self._clock.monotonic())
        elif beat.activity != Activity.LEAVING and (known is not None or self._wants(beat.node_id)):
            self.ask_back(Contact(beat.node_id, claimed))

    def silent(self, contact: Contact) -> None:
        """Two questions and no answer."""
        now = self._clock.monotonic()
        self.negative.silent(contact, now)
        known = self.peers.get(contact.node_id)
        if known is not None and known.address == contact.address:
            others = [peer.node_id for peer in self.peers if peer.node_id != contact.node_id]
            self._perform(self.detector.silent(contact.node_id, now, others=others))

    def own_id_used(self, beat: Beat, source: Address) -> None:
        """Our own datagram come back, or another process with our identity."""
        if beat.boot != self._boot:
            self._clone(self._own_id, beat.boot, f"{source} speaks with our identity, incarnation {beat.incarnation}")

    def told_of_twin(self, body: Twin, _beat: Beat, source: Address, _message_id: bytes) -> None:
        """Two processes of one identity never list each other: a third, who meets both, tells them."""
        if body.boot != self._boot:
            reason = f"{source} met another process with our identity, incarnation {body.incarnation}"
            self._clone(self._own_id, body.boot, reason)

    def news(self, news: News, sender: bytes) -> None:
        actions = self.detector.learn(news, sender, self._clock.monotonic())
        if actions:
            self._perform(actions)

    # -- insertion and change ------------------------------------------------------------------------------------

    def met(self, beat: Beat, address: Address) -> None:
        """A request over a stream was answered by this node at this address, its id checked."""
        if beat.activity == Activity.LEAVING:
            self._perform(self.detector.left(beat.node_id, self._clock.monotonic()))
            return
        known = self.peers.get(beat.node_id)
        if known is not None:
            self._fold(beat, known.address, None, self._clock.monotonic())
        else:
            self.ask_back(Contact(beat.node_id, address))

    def ask_back(self, contact: Contact) -> None:
        """Ping one who has not answered us at this address yet; at most once a second."""
        now = self._clock.monotonic()
        if contact.node_id == self._own_id or now < self._asked_back.get(contact, 0.0):
            return
        self._asked_back.pop(contact, None)
        self._asked_back[contact] = now + ASK_BACK_PAUSE_S
        if len(self._asked_back) > ASK_BACK_ENTRIES:
            del self._asked_back[next(iter(self._asked_back))]
        self._protocol.call(contact, Ping(), _ignore)

    def _wants(self, node_id: bytes) -> bool:
        return len(self.peers) < FULL_VIEW or self._table.wants(node_id) or node_id in self.lost

    def _verified(self, beat: Beat, address: Address, rtt_s: float | None, known: Peer | None, now: float) -> None:
        if known is None:
            self._insert(beat, address, rtt_s)
        elif known.address == address or beat.incarnation > known.incarnation:
            self._evict_ghost(beat.node_id, address, now)
            self._fold(beat, address, rtt_s, now)
        elif beat.incarnation == known.incarnation and beat.boot == known.boot:
            # Two addresses answer as one node: the old one stays unless it has gone silent.
            def settle(result: Result | None) -> None:
                if result is None and beat.node_id in self.peers:
                    later = self._clock.monotonic()
                    self._evict_ghost(beat.node_id, address, later)
                    self._fold(beat, address, rtt_s, later)

            self._protocol.call(known.contact, Ping(), settle, blame=False)
        else:
            self._fold(beat, known.address, None, now, source=address)

    def _insert(self, beat: Beat, address: Address, rtt_s: float | None) -> None:
        now = self._clock.monotonic()
        self._evict_ghost(beat.node_id, address, now)
        self._fold(beat, address, rtt_s, now)

    def _evict_ghost(self, node_id: bytes, address: Address, now: float) -> None:
        ghost = self.peers.at(address)
        if ghost is not None and ghost != node_id:
            self._perform(self.detector.declare_dead(ghost, now, f"{short(node_id)} answers at its address"))

    def _fold(
        self, beat: Beat, address: Address, rtt_s: float | None, now: float, *, source: Address | None = None
    ) -> None:
        node_id = beat.node_id
        change = self.peers.observe(beat, address.host, now, rtt_s, address=address)
        if change is not None:
            if change.kind == "clone":
                self._met_twins(beat, source or address, change.reason)
                return
            if change.kind in ("up", "restarted", "moved"):
                self._table.add(Contact(node_id, address))
            if change.kind == "up" and self.lost.pop(node_id, None) is not None:
                change = PeerChange(node_id, "up", BACK)
        actions = (
            self.detector.answered(node_id, beat.incarnation, now)
            if change is not None and change.kind == "up"
            else self.detector.heard(node_id, beat.incarnation, now)
        )
        if change is not None:
            self._changed(change)
        if actions:
            self._perform(actions)

    def _clone(self, node_id: bytes, boot: int, reason: str) -> None:
        """Say it once per boot number."""
        if self._clones.get(node_id) == boot:
            return
        self._clones[node_id] = boot
        self._log.warning("identity_used_twice", peer=short(node_id), reason=reason)
        for callback in list(self._callbacks):
            callback(PeerChange(node_id, "clone", reason))

    def _met_twins(self, beat: Beat, source: Address, reason: str) -> None:
        known = self.peers.get(beat.node_id)
        if known is not None and self._clones.get(beat.node_id) != beat.boot:
            second = Contact(beat.node_id, _claimed(beat, source))
            self._protocol.tell(known.contact, [], Twin(beat.incarnation, beat.boot))
            self._protocol.tell(second, [], Twin(known.incarnation, known.boot))
        self._clone(beat.node_id, beat.boot, reason)

    def judged(self, action: Judged) -> None:
        """The detector changed its mind about a member."""
        node_id = action.node_id
        match action.kind:
            case "suspect" | "refuted":
                self._table.list_to_others(node_id, action.kind == "refuted")
            case "dead" | "left":
                peer = self.peers.remove(node_id)
                self._table.remove(node_id)
                if peer is not None and action.kind == "dead":
                    self.lost[node_id] = peer.contact
        self._changed(PeerChange(node_id, action.kind, action.reason))

    def _changed(self, change: PeerChange) -> None:
        level = self._log.info if change.kind in ("dead", "left", "restarted", "moved") else self._log.debug
        level(f"peer_{change.kind}", peer=short(change.node_id), reason=change.reason)
        for callback in list(self._callbacks):
            callback(change)

    def forget_strangers(self, keep: Container[bytes]) -> None:
        """Drop peers that are of no use and were not heard from for long: a table is not a list of everybody."""
        now = self._clock.monotonic()
        for peer in self.peers if len(self.peers) > FULL_VIEW else ():
            if now - peer.last_heard > FORGET_S and peer.node_id not in self._table and peer.node_id not in keep:
                self.detector.forget(peer.node_id)
                self.peers.remove(peer.node_id)
                self._table.remove(peer.node_id)
        remembered = dict.fromkeys(self.detector.dead())
        for node_id in list(self.lost):
            if node_id not in remembered:
                del self.lost[node_id]


def _claimed(beat: Beat, source: Address) -> Address:
    host = literal(beat.host) if beat.host else None
    return Address(host or source.host, beat.port)


def _ignore(_: Result | None) -> None:
    """The answer itself is what was wanted; the listener has seen it."""
