"""The states of one shard's ownership, and the rules of every event, as plain functions: see `ownership_model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Term = tuple[int, int]
NO_NODE = -1
ZERO: Term = (0, NO_NODE)
Counts = tuple[int, ...]

#: The rules that can be left out.
RULES = {
    "backup_first": "an owner adds only when backup and learner have the delta",
    "recheck": "a backup's acknowledgement counts only for the pair, term and promise under which it was asked",
    "identities": "a delta that is known is not added again",
    "fence": "a forward under a lower term than the highest seen is refused",
    "activation": "a learner outranks no backup before its owner has used the promised term",
    "late_catch_up": "a request for a catch-up that is older than the present attempt is ignored",
    "new_term": "a new backup comes with a new term",
    "drop_raises": "continuing without the backup raises the term",
    "drain": "a hand-over begins when nothing is in flight, and nothing begins during it",
    "successor_first": "an owner that receives its successor's claim before the hand-over's answer becomes its backup",
    "known_count": "a former owner is the new one's backup only if it lacks nothing",
    "fences_survive": "the highest term seen survives a restart",
    "ask_before_yielding": "an owner below a fence asks for that term's owner, and rises above it if there is none",
    "better_copy": "an owner below a fence steps down for the better copy of a dead owner's backup",
    "rise": "an owner raises its term above the fence of a node that asks",
    "above_promises": "a take-over is above the term promised to its node as a learner",
    "best_state": "a take-over continues from the best copy",
    "ask_when_moving": "an owner whose backup crashed during the hand-over surveys the copies before it continues",
    "old_copy": "its copy then ranks by the term under which it last owned",
    "repair": "of two owners the one with the lower term offers its deltas to the other",
    "by_identity": "offered deltas are added by identity, not as a difference",
    "restart_ends_ownership": "an owner that has restarted owns nothing: its backup takes over although it answers",
    "keep_superseded": "a superseded copy is kept until the owner has confirmed its deltas",
    "repair_replicated": "a repaired delta is confirmed only when the backup has it",
    "move_survives": "an owner that divides its shard during a hand-over adds nothing before it knows who owns it",
    "copy_survives": "a learner that divides its copy keeps it: its owner may count it as the backup already",
}


class Receipt(NamedTuple):
    """A backup's acknowledgement, under the owner's term and last promise then."""

    node: int
    term: Term
    promised: int


class Owned(NamedTuple):
    term: Term
    counts: Counts
    backup: int = NO_NODE
    learner: int = NO_NODE
    promised: int = 0
    moving: Term | None = None
    #: Per delta: None, or the receipts so far of a push in progress.
    pushes: tuple[frozenset[Receipt] | None, ...] = ()

    @property
    def targets(self) -> list[int]:
        return [node for node in (self.backup, self.learner) if node != NO_NODE]


class Backed(NamedTuple):
    owner: int
    term: Term
    counts: Counts | None = None
    promised: Term | None = None
    attempt: int = 0
    buffered: frozenset[int] = frozenset()
    #: The owner's incarnation when it last acted as the owner.
    incarnation: int = 0

    @property
    def is_active(self) -> bool:
        return self.counts is not None and self.promised is None


class Node(NamedTuple):
    alive: bool = True
    fence: Term = ZERO
    incarnation: int = 0
    own: Owned | None = None
    back: Backed | None = None
    #: Deltas to be offered to the owner that this node lost the shard to.
    superseded: frozenset[int] = frozenset()
    #: Ranks of copies gathered for a take-over that has not happened yet.
    survey: tuple[tuple[int, tuple[Any, ...], Term], ...] | None = None
    #: The highest term that this node ever accepted. No rule may read it; the invariants compare with it.
    highest_seen: Term = ZERO
    #: How often this node has divided its shards; this one is a part of one of them.
    division: int = 0


class Message(NamedTuple):
    kind: str
    source: int
    to: int
    term: Term = ZERO
    number: int = 0
    delta: int = 0
    counts: Counts = ()
    taken: bool = True
    #: That of its sender, who will hear no answer if it differs.
    division: int = 0


class State(NamedTuple):
    nodes: tuple[Node, ...]
    messages: frozenset[Message] = frozenset()
    acknowledged: frozenset[int] = frozenset()
    sides: tuple[int, ...] = ()
    #: Events of each kind that may still happen.
    budget: tuple[tuple[str, int], ...] = ()


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """The start of a search, and the events that may happen. Without `repairs` only the protocol itself helps."""

    name: str
    start: State
    repairs: bool = False
    deltas: int = 1
    depth: int = 9


class Rules:
    """The rules of one shard as transitions between states; `ownership_model.Model` searches them."""

    def __init__(self, scenario: Scenario, without: str = "") -> None:
        assert without == "" or without in RULES, without
        self.scenario = scenario
        self.without = without
        self.deltas = range(scenario.deltas)
        #: To what a state comes to rest: many are on the way of others.
        self._at_rest: dict[State, State] = {}

    def has(self, rule: str) -> bool:
        return rule != self.without

    # -- small changes of a state ---------------------------------------------------------------------------------

    @staticmethod
    def put(state: State, place: int, **changes: Any) -> State:
        nodes = state.nodes
        node = nodes[place]._replace(**changes)
        if node.fence > node.highest_seen:
            node = node._replace(highest_seen=node.fence)
        # Not `_replace`, which takes three times as long: this is most of a search.
        return State((*nodes[:place], node, *nodes[place + 1 :]), *state[1:])

    @staticmethod
    def send(state: State, *messages: Message) -> State:
        # A crashed node receives nothing.
        sent = state.messages.union(
            [one._replace(division=state.nodes[one.source].division) for one in messages if state.nodes[one.to].alive]
        )
        return State(state.nodes, sent, *state[2:])

    @staticmethod
    def spend(state: State, what: str) -> State | None:
        for place, (name, left) in enumerate(state.budget):
            if name == what and left:
                budget = (*state.budget[:place], (name, left - 1), *state.budget[place + 1 :])
                return State(*state[:-1], budget)
        return None

    def added(self, counts: Counts, delta: int) -> Counts:
        if counts[delta] and self.has("identities"):
            return counts
        return tuple(count + (place == delta) for place, count in enumerate(counts))

    @staticmethod
    def connected(state: State, one: int, other: int) -> bool:
        return state.nodes[one].alive and state.nodes[other].alive and state.sides[one] == state.sides[other]

    @classmethod
    def hears(cls, state: State, one: int, other: int) -> bool:
        """Whether one node's question has an answer of the other: they have divided their shards as often."""
        return cls.connected(state, one, other) and state.nodes[one].division == state.nodes[other].division

    def next_term(self, node: Node, me: int, *above: Term) -> Term:
        own = (node.own.term, (node.own.promised, me)) if node.own is not None else ()
        promised = () if node.back is None or node.back.promised is None else (node.back.promised,)
        if not self.has("above_promises"):
            promised = ()
        return max((node.fence, *own, *promised, *above))[0] + 1, me

    # -- known owners --------------------------------------------------------------------------------------------

    def keep_superseded(self, state: State, place: int, counts: Counts | None) -> State:
        """A copy lost to another pair: its deltas are kept to be offered."""
        if counts is None or not self.scenario.repairs or not self.has("repair"):
            return state
        node = state.nodes[place]
        return self.put(state, place, superseded=node.superseded.union(d for d in self.deltas if counts[d]))

    def note_owner(self, state: State, place: int, term: Term, owner: int) -> State:
        """Process a claim of ownership."""
        node = state.nodes[place]
        if term < node.fence:
            return state
        state = self.put(state, place, fence=term)
        own = node.own
        if own is not None and own.moving and own.backup == owner and term[1] == place and self.has("successor_first"):
            return self.become_backup(state, place, term, owner)
        if node.own is not None and term > node.own.term and owner != place:
            state = self.keep_superseded(self.put(state, place, own=None), place, node.own.counts)
        back = node.back
        if back is None:
            return state
        if term > back.term and back.owner != owner:
            state = self.keep_superseded(self.put(state, place, back=None), place, back.counts)
        elif back.counts is not None and term == back.promised:
            back = back._replace(term=term, promised=None, buffered=frozenset())
            state = self.put(state, place, back=back)
        elif back.promised is not None and term > back.promised:
            state = self.put(state, place, back=None)
        return state

    def drop_backup(self, state: State, place: int, *above: Term) -> State:
        node = state.nodes[place]
        assert node.own is not None
        term = self.next_term(node, place, *above)
        if not self.has("drop_raises") and not above:
            term = node.own.term
        # A catch-up under way was promised a term below the new one, so it is void.
        own = node.own._replace(term=term, backup=NO_NODE, learner=NO_NODE, moving=None, promised=term[0])
        return self.advance(self.put(state, place, own=own, fence=max(node.fence, term)), place)

    # -- pushes --------------------------------------------------------------------------------------------------

    def push(self, state: State, place: int, delta: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.pushes[delta] is not None:
            return None
        if own.counts[delta]:
            return None if self.lacks_backup(state, place) else self.acknowledge(state, delta)
        if own.moving is not None and self.has("drain"):
            return None
        return self.advance(self.set_receipts(state, place, delta, frozenset()), place)

    def set_receipts(self, state: State, place: int, delta: int, receipts: frozenset[Receipt] | None) -> State:
        own = state.nodes[place].own
        assert own is not None
        pushes = tuple(receipts if one == delta else push for one, push in enumerate(own.pushes))
        return self.put(state, place, own=own._replace(pushes=pushes))

    @staticmethod
    def acknowledge(state: State, delta: int) -> State:
        return state._replace(acknowledged=state.acknowledged | {delta})

    def lacks_backup(self, state: State, place: int) -> bool:
        own = state.nodes[place].own
        assert own is not None
        others = any(self.connected(state, place, other) for other in range(len(state.nodes)) if other != place)
        return not own.targets and others

    def advance(self, state: State, place: int) -> State:
        """Check every push of an owner again: forward it to targets that lack it, add it if all have it."""
        for delta in self.deltas:
            own = state.nodes[place].own
            if own is None or own.pushes[delta] is None:
                continue
            receipts = own.pushes[delta]
            assert receipts is not None
            if self.has("recheck"):
                missing = [to for to in own.targets if Receipt(to, own.term, own.promised) not in receipts]
            else:
                asked = {receipt.node for receipt in receipts}
                missing = [] if asked else own.targets
            if missing and self.has("backup_first"):
                for to in missing:
                    state = self.send(state, Message("forward", place, to, own.term, own.promised, delta))
            elif self.has("backup_first") and self.lacks_backup(state, place):
                continue
            else:
                for to in missing:
                    state = self.send(state, Message("forward", place, to, own.term, own.promised, delta))
                state = self.set_receipts(state, place, delta, None)
                own = state.nodes[place].own
                assert own is not None
                state = self.put(state, place, own=own._replace(counts=self.added(own.counts, delta)))
                state = self.acknowledge(state, delta)
        return state

    def on_forward(self, state: State, message: Message) -> State:
        node = state.nodes[message.to]
        answer = Message("forwarded", message.to, message.source, message.term, message.number, message.delta)
        back = node.back
        if message.term < node.fence and self.has("fence"):
            return self.send(state, answer._replace(kind="fenced", counts=node.fence))
        if back is None or back.owner != message.source:
            return self.send(state, answer._replace(kind="unknown"))
        if back.promised is not None and message.term >= back.promised:
            back = back._replace(term=message.term, promised=None, buffered=frozenset())
        elif back.is_active and message.term > back.term:
            back = back._replace(term=message.term)
        state = self.put(state, message.to, fence=max(node.fence, back.term))
        if not back.is_active:
            back = back._replace(buffered=back.buffered | {message.delta})
        if back.counts is not None:
            back = back._replace(counts=self.added(back.counts, message.delta))
        return self.send(self.put(state, message.to, back=back), answer)

    def on_forwarded(self, state: State, message: Message) -> State:
        own = state.nodes[message.to].own
        if own is None or own.pushes[message.delta] is None:
            return state
        receipts = own.pushes[message.delta]
        assert receipts is not None
        receipt = Receipt(message.source, message.term, message.number)
        return self.advance(self.set_receipts(state, message.to, message.delta, receipts | {receipt}), message.to)

    def on_unknown(self, state: State, message: Message) -> State:
        own = state.nodes[message.to].own
        if own is None:
            return state
        if own.backup == message.source:
            return self.drop_backup(state, message.to)
        if own.learner == message.source:
            return self.advance(self.put(state, message.to, own=own._replace(learner=NO_NODE)), message.to)
        return state

    def on_fenced(self, state: State, message: Message) -> State:
        own = state.nodes[message.to].own
        fence = (message.counts[0], message.counts[1])
        if own is None or fence <= own.term or fence[1] == message.to:
            return state
        return self.on_higher_term(state, message.to, fence)

    def on_higher_term(self, state: State, place: int, fence: Term) -> State:
        """An owner receives a higher term. It asks for that term's owner, and steps down or raises its own term."""
        own = state.nodes[place].own
        if own is None or fence <= own.term:
            return state
        if not self.has("ask_before_yielding"):
            state = self.put(state, place, own=None, fence=max(state.nodes[place].fence, fence))
            return self.keep_superseded(state, place, own.counts)
        for other in range(len(state.nodes)):
            theirs = state.nodes[other].own
            if other != place and self.hears(state, place, other) and theirs is not None and theirs.term >= fence:
                return self.note_owner(state, place, theirs.term, other)
        mine = self.rank(state.nodes[place])
        for other in range(len(state.nodes)):
            better = self.hears(state, place, other) and self.rank(state.nodes[other]) > mine
            if other != place and better and self.has("better_copy"):
                # Not an owner but the successor: it takes over, and this copy is only offered to it.
                return self.keep_superseded(self.put(state, place, own=None), place, own.counts)
        return self.drop_backup(state, place, fence)

    def abandon(self, state: State, place: int, delta: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.pushes[delta] is None:
            return None
        spent = self.spend(state, "timeout")
        return None if spent is None else self.set_receipts(spent, place, delta, None)

    # -- a new backup --------------------------------------------------------------------------------------------

    def add_learner(self, state: State, place: int, to: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.learner != NO_NODE or own.moving is not None or to in (place, own.backup):
            return None
        promised = self.next_term(state.nodes[place], place)[0]
        state = self.put(state, place, own=own._replace(promised=promised))
        return self.send(self.advance(state, place), Message("learn", place, to, own.term, promised))

    def on_learn(self, state: State, message: Message) -> State:
        node = state.nodes[message.to]
        if (message.term < node.fence and self.has("fence")) or node.own is not None:
            return state
        back = node.back
        if (
            back is not None
            and back.owner == message.source
            and message.number <= back.attempt
            and self.has("late_catch_up")
        ):
            return state
        state = self.note_owner(state, message.to, message.term, message.source)
        incarnation = state.nodes[message.source].incarnation
        back = Backed(message.source, message.term, attempt=message.number, incarnation=incarnation)
        answer = Message("learning", message.to, message.source, message.term, message.number)
        return self.send(self.put(state, message.to, back=back), answer)

    def on_learning(self, state: State, message: Message) -> State:
        own = state.nodes[message.to].own
        if own is None or own.learner != NO_NODE or own.moving is not None or own.promised != message.number:
            return state
        state = self.put(state, message.to, own=own._replace(learner=message.source))
        body = Message("state", message.to, message.source, own.term, message.number, counts=own.counts)
        return self.send(self.advance(state, message.to), body)

    def on_state(self, state: State, message: Message) -> State:
        node, back = state.nodes[message.to], state.nodes[message.to].back
        promised = (message.number, message.source)
        if back is None or back.owner != message.source or promised < node.fence or back.is_active:
            return state
        if back.promised is not None and promised < back.promised:
            return state
        counts = message.counts
        for delta in sorted(back.buffered):
            counts = self.added(counts, delta)
        if self.has("activation"):
            back = back._replace(counts=counts, promised=promised)
        else:
            back = back._replace(counts=counts, term=promised, buffered=frozenset())
            state = self.put(state, message.to, fence=max(node.fence, promised))
        answer = Message("learnt", message.to, message.source, message.term, message.number)
        return self.send(self.put(state, message.to, back=back), answer)

    def on_learnt(self, state: State, message: Message) -> State:
        node, own = state.nodes[message.to], state.nodes[message.to].own
        if own is None or own.learner != message.source or own.promised != message.number:
            return state
        former = own.backup
        term = (message.number, message.to) if self.has("new_term") else own.term
        own = own._replace(term=term, backup=message.source, learner=NO_NODE)
        state = self.put(state, message.to, own=own, fence=max(node.fence, term))
        if former != NO_NODE:
            state = self.send(state, Message("release", message.to, former, term))
        return self.advance(state, message.to)

    def on_release(self, state: State, message: Message) -> State:
        back = state.nodes[message.to].back
        if back is None or back.owner != message.source or not message.term > back.term:
            return state
        if back.promised is not None and back.promised >= message.term:
            return state
        return self.note_owner(self.put(state, message.to, back=None), message.to, message.term, message.source)

    def cancel_catch_up(self, state: State, place: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.learner == NO_NODE:
            return None
        spent = self.spend(state, "timeout")
        if spent is None:
            return None
        return self.advance(self.put(spent, place, own=own._replace(learner=NO_NODE)), place)

    # -- hand-over -----------------------------------------------------------------------------------------------

    def hand_over(self, state: State, place: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.backup == NO_NODE or own.learner != NO_NODE:
            return None
        if self.has("drain") and any(push is not None for push in own.pushes):
            return None
        spent = self.spend(state, "move")
        if spent is None:
            return None
        term = self.next_term(state.nodes[place], place)
        state = self.put(spent, place, own=own._replace(promised=term[0], moving=term))
        return self.send(state, Message("hand_over", place, own.backup, term, sum(own.counts)))

    def on_hand_over(self, state: State, message: Message) -> State:
        node, back = state.nodes[message.to], state.nodes[message.to].back
        answer = Message("handed", message.to, message.source, message.term)
        if node.own is not None and node.own.term == message.term:
            return self.send(state, answer)
        promoted = back is not None and back.promised is not None and message.term[0] == back.promised[0] + 1
        if (
            back is None
            or back.counts is None
            or back.owner != message.source
            or not (back.is_active or promoted)
            or (message.term < node.fence and self.has("fence"))
        ):
            claim = () if node.own is None else (*node.own.term, message.to)
            return self.send(state, answer._replace(taken=False, counts=claim))
        own = Owned(message.term, back.counts, backup=message.source, pushes=(None,) * len(self.deltas))
        state = self.put(state, message.to, own=own, back=None, fence=message.term)
        if sum(back.counts) != message.number and self.has("known_count"):
            state = self.drop_backup(state, message.to)
        return self.send(state, answer)

    def on_handed(self, state: State, message: Message) -> State:
        own = state.nodes[message.to].own
        if own is None or own.moving is None:
            return state
        if message.taken:
            if own.moving != message.term:
                return state
            return self.become_backup(state, message.to, message.term, message.source)
        if message.counts:
            state = self.note_owner(state, message.to, (message.counts[0], message.counts[1]), message.source)
        own = state.nodes[message.to].own
        if own is None or own.moving != message.term:
            return state
        return self.drop_backup(state, message.to)

    def become_backup(self, state: State, place: int, term: Term, successor: int) -> State:
        node = state.nodes[place]
        assert node.own is not None
        back = Backed(
            successor, term, node.own.counts, attempt=node.own.promised, incarnation=state.nodes[successor].incarnation
        )
        return self.put(state, place, own=None, back=back, fence=max(node.fence, term))

    # -- crash and take-over -------------------------------------------------------------------------------------

    def crash(self, state: State, place: int) -> State | None:
        """A node crashes. Two crashes are left out, because the guarantee does not cover them: while the pair is not
        complete, and of a node that still has deltas to offer."""
        node = state.nodes[place]
        idle = node.own is None and node.back is None
        if not node.alive or node.superseded or not (idle or self.complete(state)):
            return None
        spent = self.spend(state, "crash")
        if spent is None:
            return None
        fence = state.nodes[place].fence if self.has("fences_survive") else ZERO
        messages = frozenset(one for one in spent.messages if place not in (one.to, one.source))
        state = spent._replace(messages=messages)
        dead = Node(alive=False, fence=fence, incarnation=node.incarnation + 1, highest_seen=node.highest_seen)
        dead = dead._replace(division=node.division)
        return state._replace(nodes=(*state.nodes[:place], dead, *state.nodes[place + 1 :]))

    def complete(self, state: State) -> bool:
        """Whether the acting owner and a backup with the whole state are both running."""
        acting_owner = self.acting_owner(state)
        if acting_owner == NO_NODE:
            return False
        own = state.nodes[acting_owner].own
        assert own is not None
        if own.backup == NO_NODE or own.moving is not None or not state.nodes[own.backup].alive:
            return False
        partner = state.nodes[own.backup]
        # A backup that has restarted since is a crash that the owner has not detected yet.
        return partner.incarnation == 0 or (partner.back is not None and partner.back.owner == acting_owner)

    def restart(self, state: State, place: int) -> State | None:
        if state.nodes[place].alive:
            return None
        spent = self.spend(state, "restart")
        return None if spent is None else self.put(spent, place, alive=True)

    def declare_dead(self, state: State, place: int) -> State | None:
        """An owner declares its partner dead: rightly or, as a suspicion, wrongly."""
        own = state.nodes[place].own
        if own is None:
            return None
        for partner in (own.backup, own.learner):
            if partner == NO_NODE:
                continue
            spent = state if not self.connected(state, place, partner) else self.spend(state, "suspicion")
            if spent is None:
                continue
            if partner == own.learner:
                return self.advance(self.put(spent, place, own=own._replace(learner=NO_NODE)), place)
            if own.moving is not None and self.has("ask_when_moving"):
                # Under its own old term: the successor may own the shard, and may have left a newer copy elsewhere.
                term = own.term if self.has("old_copy") else self.next_term(state.nodes[place], place)
                incarnation = state.nodes[partner].incarnation - (not state.nodes[partner].alive)
                back = Backed(partner, term, own.counts, attempt=own.promised, incarnation=incarnation)
                return self.put(spent, place, own=None, back=back, fence=max(state.nodes[place].fence, term))
            return self.drop_backup(spent, place)
        return None

    def rank(self, node: Node) -> tuple[Any, ...]:
        """The rank of a node's copy: term, role, promise, number of deltas."""
        if node.own is not None:
            return (node.own.term, 4, ZERO, sum(node.own.counts))
        back = node.back
        if back is None or back.counts is None:
            return (ZERO, 0, ZERO, 0)
        if back.is_active:
            return (back.term, 3, ZERO, sum(back.counts))
        return (back.term, 2, back.promised, sum(back.counts))

    def survey(self, state: State, place: int) -> State | None:
        """A backup or learner whose owner is gone asks all nodes it can reach for their copies."""
        node, back = state.nodes[place], state.nodes[place].back
        if not node.alive or node.own is not None or back is None or back.counts is None or node.survey is not None:
            return None
        restarted = state.nodes[back.owner].incarnation > back.incarnation and self.has("restart_ends_ownership")
        gone = restarted or not self.connected(state, place, back.owner)
        spent = state if gone else self.spend(state, "suspicion")
        if spent is None:
            return None
        others = [other for other in range(len(state.nodes)) if other != place and (restarted or other != back.owner)]
        found = tuple(
            (other, self.rank(state.nodes[other]), self.seen(state.nodes[other]))
            for other in others
            if self.hears(state, place, other)
        )
        return self.put(spent, place, survey=found)

    def seen(self, node: Node) -> Term:
        promised = node.back.promised if node.back is not None else None
        return max(node.fence, promised) if promised is not None and self.has("above_promises") else node.fence

    def take_over(self, state: State, place: int) -> State | None:
        """Use the result of the survey, perhaps much later."""
        node, back, survey = state.nodes[place], state.nodes[place].back, state.nodes[place].survey
        if survey is None:
            return None
        state = self.put(state, place, survey=None)
        if back is None or back.counts is None or node.own is not None:
            return state
        mine = self.rank(node)
        for other, rank, _ in survey:
            if rank[1] == 4 and rank[0] >= max(mine[0], self.seen(node)):
                return self.note_owner(state, place, rank[0], other)
        if self.has("best_state") and any(rank > mine for _, rank, _ in survey if rank[1] >= 2):
            return state
        term = self.next_term(node, place, *(one for _, rank, fence in survey for one in (rank[0], fence)))
        own = Owned(term, back.counts, pushes=(None,) * len(self.deltas))
        state = self.put(state, place, own=own, back=None, fence=term)
        return self.send(state, *(Message("claim", place, other, term) for other, _, _ in survey))

    def appeal(self, state: State) -> State:
        """Nobody owns the shard, as every node says that is asked: the best copy takes over."""
        copies = [place for place, node in enumerate(state.nodes) if node.alive and node.back is not None]
        best = max(copies, key=lambda place: self.rank(state.nodes[place]), default=NO_NODE)
        if best == NO_NODE or self.rank(state.nodes[best])[1] < 2:
            return state
        others = [other for other in range(len(state.nodes)) if other != best and self.hears(state, best, other)]
        found = tuple((other, self.rank(state.nodes[other]), self.seen(state.nodes[other])) for other in others)
        return self.take_over(self.put(state, best, survey=found), best) or state

    def send_claim(self, state: State, place: int, to: int) -> State | None:
        """An owner sends its claim to another node."""
        own = state.nodes[place].own
        if own is None or state.nodes[to].fence >= own.term:
            return None
        return self.send(state, Message("claim", place, to, own.term))

    def read_fence(self, state: State, place: int, puller: int) -> State | None:
        """A pull carries the fence of a node that has seen a higher term than the owner's."""
        own, fence = state.nodes[place].own, state.nodes[puller].fence
        if own is None or fence <= own.term or not self.hears(state, place, puller) or not self.has("rise"):
            return None
        return self.on_higher_term(state, place, fence)

    # -- division ------------------------------------------------------------------------------------------------

    def divide(self, state: State, place: int) -> State | None:
        """A node divides its shards, by itself."""
        if not state.nodes[place].alive or state.nodes[place].division:
            return None
        spent = self.spend(state, "divide")
        return None if spent is None else self.divided(spent, place)

    def follow(self, state: State, place: int) -> State | None:
        """A node hears that another one has divided."""
        others = range(len(state.nodes))
        ahead = [other for other in others if state.nodes[other].division > state.nodes[place].division]
        if not any(self.connected(state, place, other) for other in ahead):
            return None
        return self.divided(state, place)

    def divided(self, state: State, place: int) -> State:
        """What a part has of the whole: all but what was under way."""
        node = state.nodes[place]
        own, back = node.own, node.back
        if own is not None:
            own = own._replace(learner=NO_NODE, pushes=(None,) * len(self.deltas))
            if not self.has("move_survives"):
                own = own._replace(moving=None)
        if back is not None and (back.counts is None or not (back.is_active or self.has("copy_survives"))):
            back = None
        elif back is not None:
            back = back._replace(buffered=frozenset())
        return self.put(state, place, own=own, back=back, survey=None, division=node.division + 1)

    # -- splits --------------------------------------------------------------------------------------------------

    def split(self, state: State, sides: tuple[int, ...]) -> State | None:
        spent = self.spend(state, "split")
        if spent is None or len(dict.fromkeys(state.sides)) > 1:
            return None
        messages = frozenset(one for one in spent.messages if sides[one.to] == sides[one.source])
        return spent._replace(sides=sides, messages=messages)

    def heal(self, state: State) -> State | None:
        if len(dict.fromkeys(state.sides)) == 1:
            return None
        return state._replace(sides=(0,) * len(state.sides))

    def offer(self, state: State, place: int, to: int) -> State | None:
        """The loser offers its deltas to the node that claims to own; only those that the winner has are settled."""
        superseded, own = state.nodes[place].superseded, state.nodes[to].own
        if not superseded or own is None or not self.hears(state, place, to):
            return None
        if not self.has("by_identity"):
            counts = tuple(count + (delta in superseded) for delta, count in enumerate(own.counts))
            state = self.put(state, to, own=own._replace(counts=counts))
            return self.put(state, place, superseded=frozenset())
        if not self.has("repair_replicated"):
            counts = own.counts
            for delta in superseded:
                counts = self.added(counts, delta)
            state = self.put(state, to, own=own._replace(counts=counts))
        before = state
        for delta in sorted(superseded):
            own = state.nodes[to].own
            if own is not None and not own.counts[delta]:
                state = self.push(state, to, delta) or state
        own = state.nodes[to].own
        settled = own is not None and all(own.counts[delta] for delta in superseded)
        safe = not self.lacks_backup(state, to) or not self.has("repair_replicated")
        if (settled and safe) or not self.has("keep_superseded"):
            state = self.put(state, place, superseded=frozenset())
        return None if state == before else state
