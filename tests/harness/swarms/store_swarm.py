"""Four stores that own one shard, and the messages between them, which arrive late, are lost, or time out.

The stores are the real ones. The services around them are reduced to a few lines that keep their order: forward, check
again, add; catch-up, snapshot, promotion; drain, hand-over. Each delta adds 1 at its own place of the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.store.records import BufferedDelta, Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, OwnerInfo, Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState

NAMES = "abcd"
IDS = {name: name.encode() * 20 for name in NAMES}
CONTACTS = {name: Contact(IDS[name], Address("10.0.0.1", ord(name))) for name in NAMES}
BY_ID = {node: name for name, node in IDS.items()}

#: Deltas of a history; each is 1 at its own place. They have two origins, so that the steps of each have gaps.
DELTAS = 24
IDENTITIES = [DeltaId(bytes([65 + number % 2]) * 20, 1, 1 + number // 2) for number in range(DELTAS)]
PLAIN = Rule(outer_lr=1.0, outer_momentum=0.0)
FORWARD_ROUNDS = 3


def unit(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.zeros(DELTAS, dtype=np.float32)
    values[number] = 1.0
    return values


@dataclass
class PendingPush:
    """A delta that its owner is forwarding to backup and learner."""

    acknowledged: dict[tuple[bytes, Term, int], None] = field(default_factory=dict)
    outstanding: int = 0
    rounds: int = 0


@dataclass
class Node:
    """One store, and the pending work of its services."""

    name: str
    store: ShardStore
    alive: bool = True
    catching_up: bool = False
    handing_over: bool = False
    pushes: dict[int, PendingPush] = field(default_factory=dict)

    @property
    def owned(self) -> Owned | None:
        return self.store.owned.get(0) if self.alive else None

    @property
    def states(self) -> list[ShardState]:
        backed = self.store.backed.get(0)
        found = [] if backed is None or backed.state is None else [backed.state]
        return found if (owned := self.store.owned.get(0)) is None else [*found, owned.state]


@dataclass
class Message:
    """A request on its way to a node, or (`to` empty) an answer on its way back."""

    ticket: int
    to: str
    run: Callable[[], Any]
    is_state: bool = False


class StoreSwarm:
    """Four nodes, the messages between them, and the deltas acknowledged to their origins."""

    def __init__(self, *, synchronous: bool) -> None:
        self.synchronous = synchronous
        self.nodes = {name: Node(name, ShardStore(IDS[name], [(0, DELTAS)], DELTAS, PLAIN)) for name in NAMES}
        self.in_transit: list[Message] = []
        self.waiting: dict[int, Callable[[Any], None]] = {}
        self.tickets = 0
        self.pushed: dict[int, None] = {}
        self.acknowledged: dict[int, None] = {}
        self.crashed = False
        self.last_add = ZERO_TERM
        self.adders: dict[Term, str] = {}
        self.seen: dict[str, Term] = dict.fromkeys(NAMES, ZERO_TERM)
        self.counts = dict.fromkeys(("acknowledged", "switched", "handed", "taken", "fenced", "dismissed"), 0)
        first = self.nodes["a"].store
        state = first.fresh_state(0, np.zeros(DELTAS, dtype=np.float32))
        first.own(0, state, first.next_term(0), CONTACTS["a"], 0.0, by_handover=False)
        for node in self.nodes.values():
            node.store.note_owner(0, first.owned[0].term, CONTACTS["a"])

    # -- messages -----------------------------------------------------------------------------------------------

    def call(self, to: str, run: Callable[[], Any], then: Callable[[Any], None], *, is_state: bool = False) -> None:
        self.tickets += 1
        self.in_transit.append(Message(self.tickets, to, run, is_state))
        self.waiting[self.tickets] = then

    def deliver(self, place: int) -> None:
        """Any message arrives; an answer after its time-out is dropped."""
        if not self.in_transit:
            return
        message = self.in_transit.pop(place % len(self.in_transit))
        if not message.to:
            if (then := self.waiting.pop(message.ticket, None)) is not None:
                then(message.run())
        elif self.nodes[message.to].alive:
            result = message.run()
            self.in_transit.append(Message(message.ticket, "", lambda: result))

    def lose(self, place: int) -> None:
        if self.in_transit:
            self.in_transit.pop(place % len(self.in_transit))

    def time_out(self, place: int) -> None:
        """A caller stops waiting for an answer; the message may still arrive."""
        if self.waiting:
            self.waiting.pop(list(self.waiting)[place % len(self.waiting)])(None)

    def drain(self) -> None:
        """All messages arrive, in order, until there are none."""
        while self.in_transit:
            self.deliver(0)

    # -- pushes -------------------------------------------------------------------------------------------------

    def push(self, number: int, name: str) -> None:
        """An origin sends a delta, for the first time or again, to the owner it knows."""
        self.pushed[number] = None
        node = self.nodes[name]
        owned = node.owned
        if owned is None or number in node.pushes:
            return
        if owned.state.knows(IDENTITIES[number]):
            if owned.targets():
                self.acknowledged[number] = None
        elif not owned.moving:
            node.pushes[number] = PendingPush()
            self._forward(node, number)

    def _forward(self, node: Node, number: int) -> None:
        push, owned = node.pushes[number], node.owned
        if owned is None:
            del node.pushes[number]
            return
        # The promise counts too: a learner that begins again has dropped the deltas of its former attempt.
        missing = [to for to in owned.targets() if (to.node_id, owned.term, owned.promised) not in push.acknowledged]
        if not missing:
            del node.pushes[number]
            if owned.targets():
                self._add(node, number, owned)
            return
        push.rounds += 1
        if push.rounds > FORWARD_ROUNDS:
            del node.pushes[number]
            return
        push.outstanding = len(missing)
        term, folded, promised = owned.term, owned.state.folded_step, owned.promised
        for to in missing:
            backup = self.nodes[BY_ID[to.node_id]].store
            item = BufferedDelta(IDENTITIES[number], 1.0, unit(number), self.synchronous)

            def arrive(backup: ShardStore = backup, item: BufferedDelta = item) -> tuple[str, Term]:
                return backup.accept_forward(0, term, item, folded, IDS[node.name])

            def answered(result: tuple[str, Term] | None, to: Contact = to) -> None:
                self._forwarded(node, number, push, owned, (to, term, promised), result)

            self.call(BY_ID[to.node_id], arrive, answered)

    def _forwarded(
        self,
        node: Node,
        number: int,
        push: PendingPush,
        owned: Owned,
        sent: tuple[Contact, Term, int],
        result: tuple[str, Term] | None,
    ) -> None:
        if not node.alive:
            return
        to, term, promised = sent
        status, known = result or ("silent", ZERO_TERM)
        if status == "ok":
            push.acknowledged[to.node_id, term, promised] = None
        elif status == "fenced" and known.node != IDS[node.name] and known > owned.term:
            if node.owned is owned:
                del node.store.owned[0]
                node.store.ownership.raise_fence(0, known)
                self.counts["fenced"] += 1
        elif status == "unknown" and owned.backup == to:
            # A former owner answers so until it learns that its hand-over was accepted.
            if node.owned is owned:
                node.store.drop_backup(0, CONTACTS[node.name])
            owned.backup = None
        if status in ("unknown", "silent") and owned.learner == to:
            owned.learner = None
        push.outstanding -= 1
        if not push.outstanding:
            self._forward(node, number)

    def _add(self, node: Node, number: int, owned: Owned) -> None:
        """The owner adds and acknowledges, never under a term below the last one used, nor under another node's."""
        assert owned.term >= self.last_add, f"{node.name} adds under {owned.term}, after {self.last_add}"
        assert self.adders.setdefault(owned.term, node.name) == node.name
        self.last_add = owned.term
        node.store.add(0, BufferedDelta(IDENTITIES[number], 1.0, unit(number), self.synchronous))
        self.acknowledged[number] = None
        self.counts["acknowledged"] += 1

    def fold(self, name: str, step: int) -> None:
        """A pull names a step whose barrier has passed."""
        if self.synchronous and (owned := self.nodes[name].owned) is not None:
            owned.state.fold(step, PLAIN)

    # -- learners -----------------------------------------------------------------------------------------------

    def add_learner(self, name: str, to: str) -> None:
        node, learner = self.nodes[name], self.nodes[to]
        owned = node.owned
        if owned is None or to == name or node.catching_up or owned.learner is not None or owned.moving:
            return
        if owned.backup == CONTACTS[to]:
            return
        node.catching_up = True
        term, me = owned.term, CONTACTS[name]
        promised = node.store.promise(0)

        def accepted(taken: bool | None) -> None:
            owned = node.owned
            if taken is False:
                node.store.note_owners(known for known in [learner.store.ownership.owner_info(0)] if known is not None)
            stale = owned is None or owned.promised != promised.number
            if not taken or stale or owned.learner is not None or owned.moving:
                node.catching_up = False
                return
            owned.learner = CONTACTS[to]
            snapshot = owned.state.copy()
            self.call(
                to,
                lambda: learner.store.take_state(0, promised, me, snapshot),
                lambda taken: self._caught_up(node, to, promised, taken),
                is_state=True,
            )

        self.call(to, lambda: learner.store.begin_catch_up(0, term, me, promised.number), accepted)

    def _caught_up(self, node: Node, to: str, promised: Term, taken: bool | None) -> None:
        node.catching_up = False
        owned = node.owned
        if owned is None or owned.learner != CONTACTS[to] or owned.promised != promised.number:
            return
        if not taken:
            owned.learner = None
            return
        me = CONTACTS[node.name]
        node.store.promote_learner(0, CONTACTS[to], promised, me, 0.0)
        self.counts["switched"] += 1

    def gossip(self, source: str, to: str) -> None:
        """The owner that one node knows now is reported to another at any later time."""
        info = self.nodes[source].store.ownership.owner_info(0)
        if info is not None and self.nodes[source].alive and source != to:
            self.call(to, lambda: self.nodes[to].store.note_owners([info]), lambda _: None)

    def ask_owner(self, name: str) -> None:
        """A backup asks whether its owner relies on it, here at any time, not only after an interval without deltas."""
        node = self.nodes[name]
        backed = node.store.backed.get(0)
        if not node.alive or backed is None or backed.owner_restarted:
            return
        owner, attempt = self.nodes[BY_ID[backed.owner.node_id]], backed.attempt

        def answer() -> OwnerInfo | None:
            owned = owner.owned
            is_needed = owned is not None and (IDS[name] in owned.target_ids() or not owned.has_targets)
            return None if is_needed else owner.store.redirect(0)

        def answered(info: OwnerInfo | None) -> None:
            if info is not None:
                self.counts["dismissed"] += node.store.backed.get(0) is not None
                node.store.drop_unconfirmed(info, CONTACTS[owner.name], attempt)
                self.counts["dismissed"] -= node.store.backed.get(0) is not None

        self.call(owner.name, answer, answered)

    # -- hand-over ----------------------------------------------------------------------------------------------

    def hand_over(self, name: str) -> None:
        """Once nothing is in flight; again, until an answer arrives."""
        node = self.nodes[name]
        owned = node.owned
        if owned is None or owned.backup is None or node.handing_over or node.pushes or owned.learner is not None:
            return
        to = BY_ID[owned.backup.node_id]
        term, known = node.store.promise(0), known_to(owned.state)
        owned.moving = node.handing_over = True
        self.call(
            to,
            lambda: (self._become_owner(to, name, term, known), self.nodes[to].store.ownership.owner_info(0)),
            lambda answer: self._handed_over(node, to, term, answer),
        )

    def _become_owner(self, name: str, former: str, term: Term, known: int) -> bool:
        node = self.nodes[name]
        if (mine := node.owned) is not None and mine.term == term:
            return True
        backed = node.store.backed.get(0)
        if backed is None or backed.state is None or backed.owner.node_id != IDS[former]:
            return False
        # Right after the promotion, before any delta, a hand-over proves it as a forward does.
        if backed.promised is not None and backed.promised.number + 1 != term.number:
            return False
        if term < node.store.ownership.fence(0):
            return False
        owned = node.store.own(0, backed.state, term, CONTACTS[name], 0.0, by_handover=True)
        owned.backup = CONTACTS[former]
        if known != known_to(owned.state):
            node.store.drop_backup(0, CONTACTS[name])  # the former owner becomes the backup under `term`
        self.counts["handed"] += 1
        return True

    def _handed_over(self, node: Node, to: str, term: Term, answer: tuple[bool, OwnerInfo | None] | None) -> None:
        node.handing_over = False
        if answer is None or node.owned is None:
            return
        taken, known = answer
        if not taken:
            node.store.note_owners(info for info in [known] if info is not None)
        owned = node.owned
        if owned is not None and taken:
            node.store.become_backup(0, CONTACTS[to], term)
        elif owned is not None and owned.moving:
            node.store.drop_backup(0, CONTACTS[node.name])


def known_to(state: ShardState) -> int:
    """How many deltas are in a state, visible or pending; equal to `known_count`."""
    known = sum(state.knows(identity) for identity in IDENTITIES)
    assert state.known_count == known
    return known
