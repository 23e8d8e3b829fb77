"""A model of the ownership of one shard, small enough to search completely: every order of events, up to a bound.

It repeats the decisions of `training.exchange.store`, `owner`, `backup` and `recovery` as plain functions on immutable
states: owner, backup, learner, terms, promises, promotion, release, hand-over, take-over, crash, restart with its
fence, split, repair. A search visits every state that a few events can reach, with letters that arrive in any order or
never, and checks the invariants. Each rule can be left out (`without`). Then the search must find a history that breaks
an invariant, which shows that the rule is needed and that the search can fail.

`python -m tests.harness.ownership_model --depth 12` searches further than the tests do. The rules are described in
docs/protocol.md, "Operations".
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Term = tuple[int, int]
NOBODY = -1
ZERO: Term = (0, NOBODY)
Counts = tuple[int, ...]

#: The rules that can be left out.
RULES = {
    "backup_first": "an owner adds only when backup and learner have the delta",
    "look_again": "a backup's acknowledgement counts only for the pair, term and promise under which it was asked",
    "identities": "a delta that is known is not added again",
    "fence": "a forward under a lower term than the highest seen is refused",
    "office": "a learner outranks no backup before its owner has used the promised term",
    "late_learn": "a request for a catch-up that is older than the present attempt is ignored",
    "new_term": "a new backup comes with a new term",
    "drop_raises": "continuing without the backup raises the term",
    "drain": "a hand-over begins when nothing is in flight, and nothing begins during it",
    "heir_heard": "an owner that learns of its successor before the answer to its hand-over is its backup all the same",
    "known_count": "a former owner is the new one's backup only if it lacks nothing",
    "fences_survive": "the highest term seen survives a restart",
    "ask_before_yielding": "an owner below a fence asks for that term's owner, and rises above it if there is none",
    "better_copy": "an owner below a fence yields to the better copy of a dead owner's backup",
    "rise": "an owner raises its term above the fence of a node that asks",
    "above_promises": "a take-over is above the term promised to its node as a learner",
    "best_state": "a take-over continues from the best copy",
    "ask_when_moving": "an owner whose backup died during the hand-over surveys the copies before it continues",
    "old_copy": "its copy then ranks by the term under which it last owned",
    "repair": "the lower of two owners offers what it has to the higher one",
    "by_identity": "offered deltas are added by identity, not as a difference",
    "restart_is_death": "an owner that has restarted owns nothing: its backup takes over although it answers",
    "keep_remnant": "a superseded copy is kept until the owner has confirmed its deltas",
    "repair_replicated": "a repaired delta is confirmed only when the backup has it",
}


class Receipt(NamedTuple):
    """A backup's acknowledgement, under the owner's term and last promise then."""

    node: int
    term: Term
    promised: int


class Own(NamedTuple):
    term: Term
    counts: Counts
    backup: int = NOBODY
    learner: int = NOBODY
    promised: int = 0
    moving: Term | None = None
    #: Per delta: None, or the receipts of the forwards on their way.
    flights: tuple[frozenset[Receipt] | None, ...] = ()

    @property
    def targets(self) -> list[int]:
        return [node for node in (self.backup, self.learner) if node != NOBODY]


class Back(NamedTuple):
    owner: int
    term: Term
    counts: Counts | None = None
    promised: Term | None = None
    attempt: int = 0
    waiting: frozenset[int] = frozenset()
    #: The owner's incarnation when it last acted as the owner.
    life: int = 0

    @property
    def is_active(self) -> bool:
        return self.counts is not None and self.promised is None


class Node(NamedTuple):
    alive: bool = True
    fence: Term = ZERO
    life: int = 0
    own: Own | None = None
    back: Back | None = None
    #: Deltas to be offered to the owner that this node lost the shard to.
    remnant: frozenset[int] = frozenset()
    #: Standings gathered for a take-over that has not happened yet.
    survey: tuple[tuple[int, tuple[Any, ...], Term], ...] | None = None
    #: The highest term this node has ever known. No rule may look at it: it is there to be compared with.
    ever: Term = ZERO


class Letter(NamedTuple):
    kind: str
    source: int
    to: int
    term: Term = ZERO
    number: int = 0
    delta: int = 0
    counts: Counts = ()
    taken: bool = True


class State(NamedTuple):
    nodes: tuple[Node, ...]
    letters: frozenset[Letter] = frozenset()
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


class Model:
    """The rules of one shard as transitions between states."""

    def __init__(self, scenario: Scenario, without: str = "") -> None:
        assert without == "" or without in RULES, without
        self.scenario = scenario
        self.without = without
        self.deltas = range(scenario.deltas)

    def has(self, rule: str) -> bool:
        return rule != self.without

    # -- small changes of a state ---------------------------------------------------------------------------------

    @staticmethod
    def put(state: State, place: int, **changes: Any) -> State:
        node = state.nodes[place]._replace(**changes)
        if node.fence > node.ever:
            node = node._replace(ever=node.fence)
        return state._replace(nodes=(*state.nodes[:place], node, *state.nodes[place + 1 :]))

    @staticmethod
    def send(state: State, *letters: Letter) -> State:
        # The dead read no letters.
        return state._replace(letters=state.letters.union(one for one in letters if state.nodes[one.to].alive))

    @staticmethod
    def spend(state: State, what: str) -> State | None:
        left = dict(state.budget)
        if not left.get(what):
            return None
        left[what] -= 1
        return state._replace(budget=tuple(left.items()))

    def added(self, counts: Counts, delta: int) -> Counts:
        if counts[delta] and self.has("identities"):
            return counts
        return tuple(count + (place == delta) for place, count in enumerate(counts))

    @staticmethod
    def met(state: State, one: int, other: int) -> bool:
        return state.nodes[one].alive and state.nodes[other].alive and state.sides[one] == state.sides[other]

    def next_term(self, node: Node, me: int, *above: Term) -> Term:
        own = (node.own.term, (node.own.promised, me)) if node.own is not None else ()
        promised = () if node.back is None or node.back.promised is None else (node.back.promised,)
        if not self.has("above_promises"):
            promised = ()
        return max((node.fence, *own, *promised, *above))[0] + 1, me

    # -- losing and gaining --------------------------------------------------------------------------------------

    def lost(self, state: State, place: int, counts: Counts | None) -> State:
        """A state ends without an heir of its own pair: what it holds is kept to be offered."""
        if counts is None or not self.scenario.repairs or not self.has("repair"):
            return state
        node = state.nodes[place]
        return self.put(state, place, remnant=node.remnant.union(d for d in self.deltas if counts[d]))

    def note_owner(self, state: State, place: int, term: Term, owner: int) -> State:
        """News of an owner."""
        node = state.nodes[place]
        if term < node.fence:
            return state
        state = self.put(state, place, fence=term)
        own = node.own
        if own is not None and own.moving and own.backup == owner and term[1] == place and self.has("heir_heard"):
            return self.become_backup(state, place, term, owner)
        if node.own is not None and term > node.own.term and owner != place:
            state = self.lost(self.put(state, place, own=None), place, node.own.counts)
        back = node.back
        if back is None:
            return state
        if term > back.term and back.owner != owner:
            state = self.lost(self.put(state, place, back=None), place, back.counts)
        elif back.counts is not None and term == back.promised:
            back = back._replace(term=term, promised=None, waiting=frozenset())
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
        own = node.own._replace(term=term, backup=NOBODY, learner=NOBODY, moving=None, promised=term[0])
        return self.advance(self.put(state, place, own=own, fence=max(node.fence, term)), place)

    # -- pushes --------------------------------------------------------------------------------------------------

    def push(self, state: State, place: int, delta: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.flights[delta] is not None:
            return None
        if own.counts[delta]:
            return None if self.unsafe(state, place) else self.acknowledge(state, delta)
        if own.moving is not None and self.has("drain"):
            return None
        return self.advance(self.fly(state, place, delta, frozenset()), place)

    def fly(self, state: State, place: int, delta: int, receipts: frozenset[Receipt] | None) -> State:
        own = state.nodes[place].own
        assert own is not None
        flights = tuple(receipts if one == delta else flight for one, flight in enumerate(own.flights))
        return self.put(state, place, own=own._replace(flights=flights))

    @staticmethod
    def acknowledge(state: State, delta: int) -> State:
        return state._replace(acknowledged=state.acknowledged | {delta})

    def unsafe(self, state: State, place: int) -> bool:
        own = state.nodes[place].own
        assert own is not None
        others = any(self.met(state, place, other) for other in range(len(state.nodes)) if other != place)
        return not own.targets and others

    def advance(self, state: State, place: int) -> State:
        """Look again at every flight of an owner: forward to whom it is missing, add what everybody has."""
        for delta in self.deltas:
            own = state.nodes[place].own
            if own is None or own.flights[delta] is None:
                continue
            receipts = own.flights[delta]
            assert receipts is not None
            if self.has("look_again"):
                missing = [to for to in own.targets if Receipt(to, own.term, own.promised) not in receipts]
            else:
                asked = {receipt.node for receipt in receipts}
                missing = [] if asked else own.targets
            if missing and self.has("backup_first"):
                for to in missing:
                    state = self.send(state, Letter("forward", place, to, own.term, own.promised, delta))
            elif self.has("backup_first") and self.unsafe(state, place):
                continue
            else:
                for to in missing:
                    state = self.send(state, Letter("forward", place, to, own.term, own.promised, delta))
                state = self.fly(state, place, delta, None)
                own = state.nodes[place].own
                assert own is not None
                state = self.put(state, place, own=own._replace(counts=self.added(own.counts, delta)))
                state = self.acknowledge(state, delta)
        return state

    def on_forward(self, state: State, letter: Letter) -> State:
        node = state.nodes[letter.to]
        answer = Letter("forwarded", letter.to, letter.source, letter.term, letter.number, letter.delta)
        back = node.back
        if letter.term < node.fence and self.has("fence"):
            return self.send(state, answer._replace(kind="fenced", counts=node.fence))
        if back is None or back.owner != letter.source:
            return self.send(state, answer._replace(kind="unknown"))
        if back.promised is not None and letter.term >= back.promised:
            back = back._replace(term=letter.term, promised=None, waiting=frozenset())
        elif back.is_active and letter.term > back.term:
            back = back._replace(term=letter.term)
        state = self.put(state, letter.to, fence=max(node.fence, back.term))
        if not back.is_active:
            back = back._replace(waiting=back.waiting | {letter.delta})
        if back.counts is not None:
            back = back._replace(counts=self.added(back.counts, letter.delta))
        return self.send(self.put(state, letter.to, back=back), answer)

    def on_forwarded(self, state: State, letter: Letter) -> State:
        own = state.nodes[letter.to].own
        if own is None or own.flights[letter.delta] is None:
            return state
        receipts = own.flights[letter.delta]
        assert receipts is not None
        receipt = Receipt(letter.source, letter.term, letter.number)
        return self.advance(self.fly(state, letter.to, letter.delta, receipts | {receipt}), letter.to)

    def on_unknown(self, state: State, letter: Letter) -> State:
        own = state.nodes[letter.to].own
        if own is None:
            return state
        if own.backup == letter.source:
            return self.drop_backup(state, letter.to)
        if own.learner == letter.source:
            return self.advance(self.put(state, letter.to, own=own._replace(learner=NOBODY)), letter.to)
        return state

    def on_fenced(self, state: State, letter: Letter) -> State:
        own = state.nodes[letter.to].own
        fence = (letter.counts[0], letter.counts[1])
        if own is None or fence <= own.term or fence[1] == letter.to:
            return state
        return self.challenged(state, letter.to, fence)

    def challenged(self, state: State, place: int, fence: Term) -> State:
        """An owner hears of a higher term: it asks whose it is, and yields, or rises above it."""
        own = state.nodes[place].own
        if own is None or fence <= own.term:
            return state
        if not self.has("ask_before_yielding"):
            state = self.put(state, place, own=None, fence=max(state.nodes[place].fence, fence))
            return self.lost(state, place, own.counts)
        for other in range(len(state.nodes)):
            theirs = state.nodes[other].own
            if other != place and self.met(state, place, other) and theirs is not None and theirs.term >= fence:
                return self.note_owner(state, place, theirs.term, other)
        mine = self.standing(state.nodes[place])
        for other in range(len(state.nodes)):
            better = self.met(state, place, other) and self.standing(state.nodes[other]) > mine
            if other != place and better and self.has("better_copy"):
                # Not an owner's word but an heir's: it takes over, and this copy is only offered to it.
                return self.lost(self.put(state, place, own=None), place, own.counts)
        return self.drop_backup(state, place, fence)

    def abandon(self, state: State, place: int, delta: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.flights[delta] is None:
            return None
        spent = self.spend(state, "timeout")
        return None if spent is None else self.fly(spent, place, delta, None)

    # -- a new backup --------------------------------------------------------------------------------------------

    def teach(self, state: State, place: int, to: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.learner != NOBODY or own.moving is not None or to in (place, own.backup):
            return None
        promised = self.next_term(state.nodes[place], place)[0]
        state = self.put(state, place, own=own._replace(promised=promised))
        return self.send(self.advance(state, place), Letter("learn", place, to, own.term, promised))

    def on_learn(self, state: State, letter: Letter) -> State:
        node = state.nodes[letter.to]
        if (letter.term < node.fence and self.has("fence")) or node.own is not None:
            return state
        back = node.back
        if (
            back is not None
            and back.owner == letter.source
            and letter.number <= back.attempt
            and self.has("late_learn")
        ):
            return state
        state = self.note_owner(state, letter.to, letter.term, letter.source)
        life = state.nodes[letter.source].life
        back = Back(letter.source, letter.term, attempt=letter.number, life=life)
        answer = Letter("learning", letter.to, letter.source, letter.term, letter.number)
        return self.send(self.put(state, letter.to, back=back), answer)

    def on_learning(self, state: State, letter: Letter) -> State:
        own = state.nodes[letter.to].own
        if own is None or own.learner != NOBODY or own.moving is not None or own.promised != letter.number:
            return state
        state = self.put(state, letter.to, own=own._replace(learner=letter.source))
        body = Letter("state", letter.to, letter.source, own.term, letter.number, counts=own.counts)
        return self.send(self.advance(state, letter.to), body)

    def on_state(self, state: State, letter: Letter) -> State:
        node, back = state.nodes[letter.to], state.nodes[letter.to].back
        promised = (letter.number, letter.source)
        if back is None or back.owner != letter.source or promised < node.fence or back.is_active:
            return state
        if back.promised is not None and promised < back.promised:
            return state
        counts = letter.counts
        for delta in sorted(back.waiting):
            counts = self.added(counts, delta)
        if self.has("office"):
            back = back._replace(counts=counts, promised=promised)
        else:
            back = back._replace(counts=counts, term=promised, waiting=frozenset())
            state = self.put(state, letter.to, fence=max(node.fence, promised))
        answer = Letter("learnt", letter.to, letter.source, letter.term, letter.number)
        return self.send(self.put(state, letter.to, back=back), answer)

    def on_learnt(self, state: State, letter: Letter) -> State:
        node, own = state.nodes[letter.to], state.nodes[letter.to].own
        if own is None or own.learner != letter.source or own.promised != letter.number:
            return state
        former = own.backup
        term = (letter.number, letter.to) if self.has("new_term") else own.term
        own = own._replace(term=term, backup=letter.source, learner=NOBODY)
        state = self.put(state, letter.to, own=own, fence=max(node.fence, term))
        if former != NOBODY:
            state = self.send(state, Letter("release", letter.to, former, term))
        return self.advance(state, letter.to)

    def on_release(self, state: State, letter: Letter) -> State:
        back = state.nodes[letter.to].back
        if back is None or back.owner != letter.source or not letter.term > back.term:
            return state
        if back.promised is not None and back.promised >= letter.term:
            return state
        return self.note_owner(self.put(state, letter.to, back=None), letter.to, letter.term, letter.source)

    def give_up(self, state: State, place: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.learner == NOBODY:
            return None
        spent = self.spend(state, "timeout")
        if spent is None:
            return None
        return self.advance(self.put(spent, place, own=own._replace(learner=NOBODY)), place)

    # -- hand-over -----------------------------------------------------------------------------------------------

    def hand_over(self, state: State, place: int) -> State | None:
        own = state.nodes[place].own
        if own is None or own.backup == NOBODY or own.learner != NOBODY:
            return None
        if self.has("drain") and any(flight is not None for flight in own.flights):
            return None
        spent = self.spend(state, "move")
        if spent is None:
            return None
        term = self.next_term(state.nodes[place], place)
        state = self.put(spent, place, own=own._replace(promised=term[0], moving=term))
        return self.send(state, Letter("hand_over", place, own.backup, term, sum(own.counts)))

    def on_hand_over(self, state: State, letter: Letter) -> State:
        node, back = state.nodes[letter.to], state.nodes[letter.to].back
        answer = Letter("handed", letter.to, letter.source, letter.term)
        if node.own is not None and node.own.term == letter.term:
            return self.send(state, answer)
        appointed = back is not None and back.promised is not None and letter.term[0] == back.promised[0] + 1
        if (
            back is None
            or back.counts is None
            or back.owner != letter.source
            or not (back.is_active or appointed)
            or (letter.term < node.fence and self.has("fence"))
        ):
            claim = () if node.own is None else (*node.own.term, letter.to)
            return self.send(state, answer._replace(taken=False, counts=claim))
        own = Own(letter.term, back.counts, backup=letter.source, flights=(None,) * len(self.deltas))
        state = self.put(state, letter.to, own=own, back=None, fence=letter.term)
        if sum(back.counts) != letter.number and self.has("known_count"):
            state = self.drop_backup(state, letter.to)
        return self.send(state, answer)

    def on_handed(self, state: State, letter: Letter) -> State:
        own = state.nodes[letter.to].own
        if own is None or own.moving is None:
            return state
        if letter.taken:
            if own.moving != letter.term:
                return state
            return self.become_backup(state, letter.to, letter.term, letter.source)
        if letter.counts:
            state = self.note_owner(state, letter.to, (letter.counts[0], letter.counts[1]), letter.source)
        own = state.nodes[letter.to].own
        if own is None or own.moving != letter.term:
            return state
        return self.drop_backup(state, letter.to)

    def become_backup(self, state: State, place: int, term: Term, heir: int) -> State:
        node = state.nodes[place]
        assert node.own is not None
        back = Back(heir, term, node.own.counts, attempt=node.own.promised, life=state.nodes[heir].life)
        return self.put(state, place, own=None, back=back, fence=max(node.fence, term))

    # -- death ---------------------------------------------------------------------------------------------------

    def crash(self, state: State, place: int) -> State | None:
        """A node crashes for good. Beyond the promise, and so left out: a death while the pair is not complete, and
        that of a node that has something left to offer."""
        node = state.nodes[place]
        idle = node.own is None and node.back is None
        if not node.alive or node.remnant or not (idle or self.complete(state)):
            return None
        spent = self.spend(state, "crash")
        if spent is None:
            return None
        fence = state.nodes[place].fence if self.has("fences_survive") else ZERO
        letters = frozenset(one for one in spent.letters if place not in (one.to, one.source))
        state = spent._replace(letters=letters)
        dead = Node(alive=False, fence=fence, life=node.life + 1, ever=node.ever)
        return state._replace(nodes=(*state.nodes[:place], dead, *state.nodes[place + 1 :]))

    def complete(self, state: State) -> bool:
        """The acting owner and a backup that has everything both live."""
        acting = self.acting(state)
        if acting == NOBODY:
            return False
        own = state.nodes[acting].own
        assert own is not None
        if own.backup == NOBODY or own.moving is not None or not state.nodes[own.backup].alive:
            return False
        partner = state.nodes[own.backup]
        # One that was started anew and has not been missed yet is a death that the owner has not noticed.
        return partner.life == 0 or (partner.back is not None and partner.back.owner == acting)

    def restart(self, state: State, place: int) -> State | None:
        if state.nodes[place].alive:
            return None
        spent = self.spend(state, "restart")
        return None if spent is None else self.put(spent, place, alive=True)

    def bury(self, state: State, place: int) -> State | None:
        """An owner holds its partner for dead: rightly, or (as a suspicion) not."""
        own = state.nodes[place].own
        if own is None:
            return None
        for partner in (own.backup, own.learner):
            if partner == NOBODY:
                continue
            spent = state if not self.met(state, place, partner) else self.spend(state, "suspicion")
            if spent is None:
                continue
            if partner == own.learner:
                return self.advance(self.put(spent, place, own=own._replace(learner=NOBODY)), place)
            if own.moving is not None and self.has("ask_when_moving"):
                # Under its own old term: the heir may have taken the shard, and have left a newer copy elsewhere.
                term = own.term if self.has("old_copy") else self.next_term(state.nodes[place], place)
                life = state.nodes[partner].life - (not state.nodes[partner].alive)
                back = Back(partner, term, own.counts, attempt=own.promised, life=life)
                return self.put(spent, place, own=None, back=back, fence=max(state.nodes[place].fence, term))
            return self.drop_backup(spent, place)
        return None

    def standing(self, node: Node) -> tuple[Any, ...]:
        """How much a node's copy is worth: term, role, promise, number of deltas."""
        if node.own is not None:
            return (node.own.term, 4, ZERO, sum(node.own.counts))
        back = node.back
        if back is None or back.counts is None:
            return (ZERO, 0, ZERO, 0)
        if back.is_active:
            return (back.term, 3, ZERO, sum(back.counts))
        return (back.term, 2, back.promised, sum(back.counts))

    def survey(self, state: State, place: int) -> State | None:
        """A backup or learner whose owner is gone asks everybody it can reach what they have."""
        node, back = state.nodes[place], state.nodes[place].back
        if not node.alive or node.own is not None or back is None or back.counts is None or node.survey is not None:
            return None
        restarted = state.nodes[back.owner].life > back.life and self.has("restart_is_death")
        gone = restarted or not self.met(state, place, back.owner)
        spent = state if gone else self.spend(state, "suspicion")
        if spent is None:
            return None
        others = [other for other in range(len(state.nodes)) if other != place and (restarted or other != back.owner)]
        found = tuple(
            (other, self.standing(state.nodes[other]), self.seen(state.nodes[other]))
            for other in others
            if self.met(state, place, other)
        )
        return self.put(spent, place, survey=found)

    def seen(self, node: Node) -> Term:
        promised = node.back.promised if node.back is not None else None
        return max(node.fence, promised) if promised is not None and self.has("above_promises") else node.fence

    def take_over(self, state: State, place: int) -> State | None:
        """What the survey said is acted upon, perhaps much later."""
        node, back, survey = state.nodes[place], state.nodes[place].back, state.nodes[place].survey
        if survey is None:
            return None
        state = self.put(state, place, survey=None)
        if back is None or back.counts is None or node.own is not None:
            return state
        mine = self.standing(node)
        for other, standing, _ in survey:
            if standing[1] == 4 and standing[0] >= max(mine[0], self.seen(node)):
                return self.note_owner(state, place, standing[0], other)
        if self.has("best_state") and any(standing > mine for _, standing, _ in survey if standing[1] >= 2):
            return state
        term = self.next_term(node, place, *(one for _, standing, fence in survey for one in (standing[0], fence)))
        own = Own(term, back.counts, flights=(None,) * len(self.deltas))
        state = self.put(state, place, own=own, back=None, fence=term)
        return self.send(state, *(Letter("news", place, other, term) for other, _, _ in survey))

    def tell(self, state: State, place: int, to: int) -> State | None:
        """A digest: an owner tells another node of its claim."""
        own = state.nodes[place].own
        if own is None or state.nodes[to].fence >= own.term:
            return None
        return self.send(state, Letter("news", place, to, own.term))

    def read_fence(self, state: State, place: int, asker: int) -> State | None:
        """A pull carries the fence of a node that remembers a higher term than the owner's."""
        own, fence = state.nodes[place].own, state.nodes[asker].fence
        if own is None or fence <= own.term or not self.met(state, place, asker) or not self.has("rise"):
            return None
        return self.challenged(state, place, fence)

    # -- splits --------------------------------------------------------------------------------------------------

    def split(self, state: State, sides: tuple[int, ...]) -> State | None:
        spent = self.spend(state, "split")
        if spent is None or len(dict.fromkeys(state.sides)) > 1:
            return None
        letters = frozenset(one for one in spent.letters if sides[one.to] == sides[one.source])
        return spent._replace(sides=sides, letters=letters)

    def heal(self, state: State) -> State | None:
        if len(dict.fromkeys(state.sides)) == 1:
            return None
        return state._replace(sides=(0,) * len(state.sides))

    def offer(self, state: State, place: int, to: int) -> State | None:
        """The loser offers what it has to the node that claims to own; only what the winner knows is settled."""
        remnant, own = state.nodes[place].remnant, state.nodes[to].own
        if not remnant or own is None or not self.met(state, place, to):
            return None
        if not self.has("by_identity"):
            counts = tuple(count + (delta in remnant) for delta, count in enumerate(own.counts))
            state = self.put(state, to, own=own._replace(counts=counts))
            return self.put(state, place, remnant=frozenset())
        if not self.has("repair_replicated"):
            counts = own.counts
            for delta in remnant:
                counts = self.added(counts, delta)
            state = self.put(state, to, own=own._replace(counts=counts))
        before = state
        for delta in sorted(remnant):
            own = state.nodes[to].own
            if own is not None and not own.counts[delta]:
                state = self.push(state, to, delta) or state
        own = state.nodes[to].own
        settled = own is not None and all(own.counts[delta] for delta in remnant)
        safe = not self.unsafe(state, to) or not self.has("repair_replicated")
        if (settled and safe) or not self.has("keep_remnant"):
            state = self.put(state, place, remnant=frozenset())
        return None if state == before else state

    # -- the search ----------------------------------------------------------------------------------------------

    def deliver(self, state: State, letter: Letter) -> State | None:
        if state.sides[letter.source] != state.sides[letter.to]:
            return None
        state = state._replace(letters=state.letters - {letter})
        if letter.kind == "news":
            return self.note_owner(state, letter.to, letter.term, letter.source)
        handler: Any = getattr(self, f"on_{letter.kind}")
        after: State = handler(state, letter)
        return after

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Every event that may come next, in words, and what it leads to."""
        size = len(state.nodes)
        for letter in sorted(state.letters):
            if (after := self.deliver(state, letter)) is not None:
                yield f"{letter.kind} {letter.source}→{letter.to} {letter.term}", after
        for place in range(size):
            for delta in self.deltas:
                # Deltas are alike: the second is pushed after the first has been.
                if delta == 0 or delta - 1 in state.acknowledged:
                    yield from named(f"push {delta} to {place}", self.push(state, place, delta))
                yield from named(f"{place} abandons {delta}", self.abandon(state, place, delta))
            for action in (self.give_up, self.hand_over, self.crash, self.restart, self.bury, self.survey):
                yield from named(f"{action.__name__} {place}", action(state, place))
            yield from named(f"take_over {place}", self.take_over(state, place))
            for other in range(size):
                if other == place or not state.nodes[other].alive or not state.nodes[place].alive:
                    continue
                if (spent := self.spend(state, "teach")) is not None:
                    yield from named(f"{place} teaches {other}", self.teach(spent, place, other))
                if (spent := self.spend(state, "news")) is not None:
                    yield from named(f"{place} tells {other}", self.tell(spent, place, other))
                yield from named(f"{other} shows its fence to {place}", self.read_fence(state, place, other))
                if self.scenario.repairs:
                    yield from named(f"{place} offers to {other}", self.offer(state, place, other))
        if dict(state.budget).get("split"):
            for alone in range(1, 2 ** (size - 1)):
                sides = tuple(int(place > 0 and bool(alone >> (place - 1) & 1)) for place in range(size))
                yield from named(f"split {sides}", self.split(state, sides))
        yield from named("heal", self.heal(state))

    # -- what must hold ------------------------------------------------------------------------------------------

    def acting(self, state: State) -> int:
        owners = [place for place, node in enumerate(state.nodes) if node.alive and node.own is not None]
        return max(owners, key=lambda place: self.standing(state.nodes[place]), default=NOBODY)

    def check(self, state: State) -> None:
        """In every state."""
        terms: dict[Term, int] = {}
        for place, node in enumerate(state.nodes):
            copies = [held.counts for held in (node.own, node.back) if held is not None and held.counts is not None]
            if any(max(counts) > 1 for counts in copies):
                raise Broken("a delta was added twice")
            if node.own is not None and terms.setdefault(node.own.term, place) != place:
                raise Broken(f"two owners under {node.own.term}")
            if node.own is not None and node.own.term > node.fence:
                raise Broken("an owner above its own fence")
            for other, partner in enumerate(state.nodes):
                back = partner.back if partner.alive else None
                if node.own is None or back is None or not back.is_active or other == node.own.backup:
                    continue
                if (back.owner, back.term) == (place, node.own.term):
                    raise Broken(f"two pairs under {back.term}")
            for reader in state.nodes:
                if reader.alive and node.own is not None and reader.fence <= node.own.term < reader.ever:
                    raise Broken("a node reads under a lower term than it has read before")
        if self.scenario.repairs:
            held = {d for node in state.nodes if node.alive for d in (*self.of(node), *node.remnant)}
        else:
            heir = max((node for node in state.nodes if node.alive), key=self.standing)
            held = set(self.of(heir))
        if missing := state.acknowledged - held:
            raise Broken(f"acknowledged and lost: {sorted(missing)}")

    def of(self, node: Node) -> list[int]:
        copies = [held.counts for held in (node.own, node.back) if held is not None and held.counts is not None]
        return [delta for counts in copies for delta in self.deltas if counts[delta]]

    def settle(self, state: State) -> State:
        """No more faults, and everything that is due happens: the end must be one owner with every delta once."""
        state = state._replace(sides=(0,) * len(state.nodes), budget=(("teach", 99), ("timeout", 99)))
        size = range(len(state.nodes))
        for _ in range(12):
            state = self.quiet(state)
            for place in size:
                for delta in self.deltas:
                    state = self.abandon(state, place, delta) or state
                for action in (self.bury, self.give_up, self.survey, self.take_over):
                    state = self.quiet(action(state, place) or state)
                for other in size:
                    if other != place and state.nodes[other].alive:
                        state = self.quiet(self.tell(state, place, other) or state)
                        state = self.quiet(self.read_fence(state, place, other) or state)
            acting = self.acting(state)
            if acting == NOBODY:
                continue
            own = state.nodes[acting].own
            assert own is not None
            if own.moving is not None:  # the next look asks again: here, that it was not taken
                state = self.drop_backup(state, acting)
            pupil = next((other for other in size if other != acting and state.nodes[other].alive), NOBODY)
            if own.backup == NOBODY and pupil != NOBODY:
                state = self.quiet(self.teach(state, acting, pupil) or state)
            for place in size:
                if self.scenario.repairs and self.has("repair"):
                    state = self.quiet(self.offer(state, place, acting) or state)
            for delta in self.deltas:
                state = self.quiet(self.push(state, acting, delta) or state)
        return state

    def quiet(self, state: State) -> State:
        """All letters arrive, in order."""
        for _ in range(200):
            if not state.letters:
                return state
            state = self.deliver(state, min(state.letters)) or state
        raise Broken("letters without end")

    def check_settled(self, state: State) -> None:
        before = state.acknowledged
        state = self.settle(state)
        owners = [node.own for node in state.nodes if node.alive and node.own is not None]
        if len(owners) != 1:
            raise Broken(f"{len(owners)} owners at rest")
        (own,) = owners
        if any(node.alive and node.fence > own.term for node in state.nodes):
            raise Broken("a node whose fence is above the owner's term starves")
        if any(node.remnant for node in state.nodes):
            raise Broken("a repair that never ends")
        if lost := [delta for delta in before if own.counts[delta] == 0]:
            raise Broken(f"acknowledged and lost at rest: {lost}")
        if own.counts != (1,) * len(self.deltas):
            raise Broken(f"deltas at rest: {own.counts}")


def named(name: str, state: State | None) -> Iterator[tuple[str, State]]:
    if state is not None:
        yield name, state


@dataclass
class Result:
    """How far a search went; `trace` is the shortest history to a broken promise."""

    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def search(scenario: Scenario, *, without: str = "", depth: int | None = None, settle_every: int = 1) -> Result:
    """Breadth first to `depth` events; every `settle_every`-th state is also brought to rest."""
    model = Model(scenario, without)
    limit = scenario.depth if depth is None else depth
    seen: dict[State, tuple[State, str] | None] = {scenario.start: None}
    queue = deque([(scenario.start, 0)])
    checked = 0
    while queue:
        state, deep = queue.popleft()
        checked += 1
        try:
            model.check(state)
            if checked % settle_every == 0:
                model.check_settled(state)
            found = list(model.successors(state)) if deep < limit else []
        except Broken as broken:
            return Result(checked, str(broken), _trace(seen, state))
        for name, after in found:
            if after not in seen:
                seen[after] = (state, name)
                queue.append((after, deep + 1))
    return Result(checked)


def _trace(seen: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (step := seen[state]) is not None:
        state, name = step
        names.append(name)
    return tuple(reversed(names))


# -- from where the searches start ---------------------------------------------------------------------------------


def start(nodes: list[Node], order: tuple[int, ...], *, letters: tuple[Letter, ...] = (), **budget: int) -> State:
    """`order` renames the nodes: terms are compared by their raiser too, so it matters who has the higher number."""
    name = {NOBODY: NOBODY, **dict(enumerate(order))}

    def renamed(value: Any) -> Any:
        if isinstance(value, Node):
            return value._replace(
                fence=renamed(value.fence), ever=renamed(value.fence), own=renamed(value.own), back=renamed(value.back)
            )
        if isinstance(value, Own):
            return value._replace(
                term=renamed(value.term),
                backup=name[value.backup],
                learner=name[value.learner],
                moving=renamed(value.moving),
            )
        if isinstance(value, Back):
            return value._replace(owner=name[value.owner], term=renamed(value.term), promised=renamed(value.promised))
        if isinstance(value, Letter):
            return value._replace(source=name[value.source], to=name[value.to], term=renamed(value.term))
        return None if value is None else (value[0], name[value[1]])

    placed = sorted(zip(order, nodes, strict=True), key=lambda pair: pair[0])
    return State(
        tuple(renamed(node) for _, node in placed),
        letters=frozenset(renamed(letter) for letter in letters),
        sides=(0,) * len(nodes),
        budget=tuple(budget.items()),
    )


def owner(term: Term, deltas: int = 1, **more: Any) -> Node:
    own = Own(term, (0,) * deltas, **{"promised": term[0], "flights": (None,) * deltas, **more})
    return Node(fence=term, own=own)


def backup(of: int, term: Term, deltas: int = 1, **more: Any) -> Node:
    return Node(fence=term, back=Back(of, term, (0,) * deltas, **{"attempt": term[0], **more}))


def pair(size: int = 3, deltas: int = 1) -> list[Node]:
    """The first owns under (2, 0), the second is its active backup, the others are candidates."""
    term = (2, 0)
    others = [Node(fence=term)] * (size - 2)
    return [owner(term, deltas, backup=1), backup(0, term, deltas), *others]


def alone(size: int) -> list[Node]:
    """The first owns under (1, 0) without a backup."""
    return [owner((1, 0)), *[Node(fence=(1, 0))] * (size - 1)]


def switched() -> list[Node]:
    """The third has just become the backup in the place of the second, and neither has heard of it yet."""
    learner = backup(0, (2, 0), promised=(3, 0), attempt=3)
    return [owner((3, 0), backup=2), backup(0, (2, 0)), learner]


def moved() -> list[Node]:
    """The first handed over to the second, which has the third as its backup by now; the answer got lost."""
    return [owner((2, 0), backup=1, promised=3, moving=(3, 0)), owner((4, 1), backup=2), backup(1, (4, 1))]


def handing() -> list[Node]:
    """The first has just asked the second to take the shard."""
    return [owner((2, 0), backup=1, promised=3, moving=(3, 0)), backup(0, (2, 0)), Node(fence=(2, 0))]


def superseded() -> list[Node]:
    """The first was wrongly suspected, has not heard of it, and tries to make a learner of the third, which backs the
    new owner."""
    return [owner((2, 0), backup=1, promised=3), owner((4, 1), backup=2), backup(1, (4, 1))]


def parted() -> State:
    """After a split: the pair of the first won, and the third still has an acknowledged delta that the pair lacks."""
    state = start(pair(), (0, 1, 2), crash=1, timeout=1)
    return Model.put(state._replace(acknowledged=frozenset({0})), 2, remnant=frozenset({0}))


IN_ORDER, TURNED = (0, 1, 2), (2, 0, 1)
RELEASE = Letter("release", 0, 1, (3, 0))
HAND_OVER = Letter("hand_over", 0, 1, (3, 0))
LEARN = Letter("learn", 0, 2, (2, 0), 3)

SCENARIOS = {
    one.name: one
    for one in (
        Scenario("pair", start(pair(), IN_ORDER, crash=1, suspicion=2, timeout=2), depth=12),
        Scenario("first backup", start(alone(2), (0, 1), teach=2, crash=1, timeout=1), depth=12),
        Scenario("new backup", start(pair(), IN_ORDER, teach=2, crash=1, timeout=1), depth=9),
        Scenario("switched", start(switched(), IN_ORDER, letters=(RELEASE,), crash=1), depth=10),
        Scenario("switched, turned", start(switched(), TURNED, letters=(RELEASE,), crash=1), depth=10),
        Scenario(
            "switched, suspected",
            start(switched(), TURNED, letters=(RELEASE,), crash=1, suspicion=1),
            depth=9,
            repairs=True,
        ),
        Scenario("hand-over", start(pair(), IN_ORDER, move=1, crash=1, timeout=1, suspicion=1), depth=10),
        Scenario("handing", start(handing(), IN_ORDER, letters=(HAND_OVER,), teach=1, suspicion=1), depth=10),
        Scenario("superseded", start(superseded(), IN_ORDER, letters=(LEARN,), crash=1), depth=8),
        Scenario("moved", start(moved(), TURNED, crash=1, teach=1), depth=9),
        Scenario("suspicion", start(pair(), IN_ORDER, teach=1, suspicion=1, crash=1), depth=9),
        Scenario("suspected by both", start(pair(), IN_ORDER, teach=1, suspicion=2), depth=10, repairs=True),
        Scenario("restart", start(pair(), IN_ORDER, crash=1, restart=1, suspicion=1, teach=1), depth=8),
        Scenario(
            "remembered fence", start([pair()[0], Node(fence=(7, 2)), Node(fence=(2, 0))], IN_ORDER, teach=1), depth=8
        ),
        Scenario("parted", parted(), depth=8, repairs=True),
        Scenario("split", start(pair(), IN_ORDER, split=1, news=1, crash=1), depth=8, deltas=1, repairs=True),
        Scenario("two deltas", start(pair(3, 2), IN_ORDER, split=1, news=1, crash=1), depth=8, deltas=2, repairs=True),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=list(SCENARIOS), default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--without", choices=list(RULES), default="")
    arguments = parser.parse_args()
    for name in [arguments.scenario] if arguments.scenario else SCENARIOS:
        began = time.perf_counter()
        result = search(SCENARIOS[name], without=arguments.without, depth=arguments.depth)
        print(f"{name}: {result.states} states in {time.perf_counter() - began:.1f} s; {result.broken or 'all holds'}")
        for line in result.trace:
            print(f"    {line}")


if __name__ == "__main__":
    main()
