"""The rules of faults as plain functions: crash, survey, take-over, split, and the offer of lost deltas."""

from __future__ import annotations

from tests.harness.ownership.pair_rules import PairRules
from tests.harness.ownership.states import NO_NODE, ZERO, Backed, Message, Node, Owned, State, Term


class Rules(PairRules):
    """All rules of one shard as transitions between states; `tests.harness.ownership.model.Model` searches them."""

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
            if self.connected(state, place, other)
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

    def send_claim(self, state: State, place: int, to: int) -> State | None:
        """An owner sends its claim to another node."""
        own = state.nodes[place].own
        if own is None or state.nodes[to].fence >= own.term:
            return None
        return self.send(state, Message("claim", place, to, own.term))

    def read_fence(self, state: State, place: int, puller: int) -> State | None:
        """A pull carries the fence of a node that has seen a higher term than the owner's."""
        own, fence = state.nodes[place].own, state.nodes[puller].fence
        if own is None or fence <= own.term or not self.connected(state, place, puller) or not self.has("rise"):
            return None
        return self.on_higher_term(state, place, fence)

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
        if not superseded or own is None or not self.connected(state, place, to):
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
