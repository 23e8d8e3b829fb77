"""The rules of an owner and its backup as plain functions: claims, pushes, catch-up of a new backup, hand-over."""

from __future__ import annotations

from typing import Any

from tests.harness.ownership.states import (
    NO_NODE,
    RULES,
    ZERO,
    Backed,
    Counts,
    Message,
    Node,
    Owned,
    Receipt,
    Scenario,
    State,
    Term,
)


class PairRules:
    """The rules of a pair without a fault, as transitions between states."""

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
        nodes = state.nodes
        sent = state.messages.union([one for one in messages if nodes[one.to].alive])
        return State(nodes, sent, *state[2:])

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
        if back.owner != owner and term > max(back.term, back.promised or ZERO):
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
        return self.put(state, place, own=Owned(*own[:-1], pushes))

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
            if other != place and self.connected(state, place, other) and theirs is not None and theirs.term >= fence:
                return self.note_owner(state, place, theirs.term, other)
        mine = self.rank(state.nodes[place])
        for other in range(len(state.nodes)):
            better = self.connected(state, place, other) and self.rank(state.nodes[other]) > mine
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
        if back is not None and back.owner != message.source and message.term < (back.promised or ZERO):
            return state
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
        """A former backup that has asked hears that the owner has another one."""
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

    # -- how good a copy is ------------------------------------------------------------------------------------

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
