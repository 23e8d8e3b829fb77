"""The shards that this node owns or backs up, as a state machine: calls in, values out, no message sent. Pure.

An *owner* adds deltas and its *backup* adds the same ones; a *learner* is a backup that still receives the state. A
*promised* term becomes the owner's term when a learner is promoted. A *superseded* copy lost to a higher term; a
*stored* one was read from disk.

These rules keep an acknowledged delta from being lost or added twice:

* A term is a pair (number, node) and only rises. Messages with a lower term than the highest seen are rejected
  (fenced).
* Every change of owner or backup raises the term, which distinguishes the old pair from the new one.
* Whether a delta was added is decided by its identity, never by a count. Owner and backup may add in any order.
* An owner adds a delta only after its backup has acknowledged it, and only if it is still the owner then.
* The owner alone decides clipping; its backup receives the factor with a delta.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.messages import ForwardStatus
from p2pnode.training.exchange.store.records import Backed, BufferedDelta, Owned, RepairLog, StoredState, SupersededCopy
from p2pnode.training.exchange.terms import GENERATION, ZERO_TERM, KnownOwner, OwnerInfo, Ownership, Term, generation_of
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_table import ValueTable

#: Buffered deltas for states still to come. Above it a forward is answered `unknown`, and the catch-up restarts.
MAX_BUFFERED_BYTES = 256 * 1024 * 1024


class ShardStore:
    """All shards of one node. `bounds[i]` is the slice of the vector that shard *i* covers. `synchronous`: the barrier
    family is bsp, and a delta is pending until the barrier of its step has passed."""

    def __init__(
        self,
        node_id: bytes,
        bounds: list[tuple[int, int]],
        parameter_total: int,
        rule: Rule,
        log: RepairLog | None = None,
        *,
        synchronous: bool = False,
    ) -> None:
        self.node_id = node_id
        self.bounds = bounds
        self.rule = rule
        self.synchronous = synchronous
        self.holds_values = bounds[-1][1] == 0  # without a model: tables, and batches in place of deltas
        self._parameter_total = parameter_total
        self.owned: dict[int, Owned] = {}
        self.backed: dict[int, Backed] = {}
        self.ownership = Ownership(len(bounds))
        self.log = log if log is not None else RepairLog(0, 0.0)
        #: Copies that lost to a higher term, until its owner has all of their deltas.
        self.superseded: dict[int, SupersededCopy] = {}
        #: The states that this node had on disk when it started, until the owners of those shards are known.
        self.stored: dict[int, StoredState] = {}

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def size_bytes(self) -> int:
        """Memory of all states, each counted once: one from disk that this node goes on from is that of its shard."""
        held = [owned.state for owned in self.owned.values()]
        held += [backed.state for backed in self.backed.values() if backed.state is not None]
        held += [stored.state for stored in self.stored.values()]
        held += [copy.state for copy in self.superseded.values()]
        return sum(state.size_bytes for state in {id(state): state for state in held}.values())

    def size(self, shard: int) -> int:
        """Number of values of a shard."""
        start, stop = self.bounds[shard]
        return stop - start

    def parameters(self, shard: int) -> int:
        """How many values of a shard are parameters; the rest are buffers of the model."""
        start, stop = self.bounds[shard]
        return min(max(self._parameter_total - start, 0), stop - start)

    def fresh_state(
        self, shard: int, value: Vector, *, version: int = 0, era_step: int = 0, era_term: Term = ZERO_TERM
    ) -> ShardState:
        """A state of a value, without momentum or history; `value` is copied."""
        value, table = np.array(value, dtype=np.float32), ValueTable() if self.holds_values else None
        parameters = self.parameters(shard)
        return ShardState(value, parameters, version=version, era_step=era_step, era_term=era_term, table=table)

    # -- known owners -------------------------------------------------------------------------------------------

    def note_owner(self, shard: int, term: Term, owner: Contact) -> bool:
        """Record a claim of ownership; True when it changed the known owner.

        A claim under a higher term ends this node's own claim at once.
        """
        if not self.ownership.accept(shard, term, owner):
            return False
        mine = self.owned.get(shard)
        if mine is not None and term > mine.term and owner.node_id != self.node_id:
            is_backup = mine.backup is not None and mine.backup.node_id == owner.node_id
            if mine.moving and is_backup and term.node == self.node_id:
                # This node's own hand-over, reported by others before its answer arrived: the new owner relies on
                # this node as its backup.
                self.become_backup(shard, owner, term)
                return True
            self.step_down(shard)
        backed = self.backed.get(shard)
        is_others = backed is not None and backed.owner.node_id != owner.node_id
        if backed is not None and is_others and term > max(backed.term, self.promised_here(shard)):
            # Another pair took over without this node. Promise 1: below the term promised to this learner its owner may
            # have used that term, and count on this copy. A newer term of its own owner does not end the backup role:
            # only the owner knows whether it has another backup, and it is asked (`ShardMoves.ask`).
            del self.backed[shard]
            self._keep_superseded(shard, backed.term, backed.state)
        elif backed is not None and backed.state is not None and term == backed.promised:
            # No term is promised twice: an owner under this one must have promoted this learner.
            backed.activate(term)
        elif backed is not None and backed.promised is not None and term > backed.promised:
            # The owner promoted a later learner. This copy may lack what that one has, and never becomes the backup.
            del self.backed[shard]
        return True

    def note_owners(self, infos: Iterable[OwnerInfo]) -> None:
        """`note_owner` for a list from the wire; entries with a malformed address are skipped."""
        for info in infos:
            try:
                contact = info.contact()
            except ValueError:
                continue
            self.note_owner(info.shard, info.term, contact)

    def correct_owner(self, shard: int, term: Term, owner: Contact) -> None:
        """Replace the known owner under the same term: a term has one owner, and the known one denied it."""
        known = self.ownership.known_owners.get(shard)
        if shard not in self.owned and known is not None and known.term == term:
            self.ownership.assign(shard, term, owner)

    def believed_owner(self, shard: int) -> KnownOwner | None:
        """The known owner of a shard, unless that is this node and it does not own the shard."""
        known = self.ownership.known_owners.get(shard)
        is_wrong = known is not None and known.owner.node_id == self.node_id and shard not in self.owned
        return None if is_wrong else known

    def redirect(self, shard: int) -> OwnerInfo | None:
        """The believed owner, to redirect a sender to."""
        known = self.believed_owner(shard)
        return None if known is None else OwnerInfo.of(shard, known.term, known.owner)

    def redirects(self, shards: Iterable[int]) -> list[OwnerInfo]:
        """The believed owners of those of the shards that have one."""
        return [info for shard in shards if (info := self.redirect(shard)) is not None]

    def on_restart(self, node_id: bytes, me: Contact) -> None:
        """A node has restarted: it owns nothing and backs up nothing until it is asked again."""
        for shard, owned in list(self.owned.items()):
            owned.remove_learner(node_id)
            if owned.backup is not None and owned.backup.node_id == node_id and not owned.moving:
                self.drop_backup(shard, me)
        for shard, backed in list(self.backed.items()):
            if backed.owner.node_id == node_id:
                backed.owner_restarted = True
                if backed.state is None:
                    del self.backed[shard]
        self.ownership.forget_node(node_id)

    # -- owning -------------------------------------------------------------------------------------------------

    def own(
        self,
        shard: int,
        state: ShardState,
        term: Term,
        me: Contact,
        now: float,
        *,
        by_handover: bool,
        backup: Contact | None = None,
    ) -> Owned:
        """Become the owner. Raises `ValueError` for a term below the fence."""
        fence = self.ownership.fence(shard)
        if term < fence:
            raise ValueError(f"shard {shard}: term {term.number} is below the fence {fence.number}")
        backed = self.backed.pop(shard, None)
        if backed is not None and backed.state is not state:
            self._keep_superseded(shard, backed.term, backed.state)
        owned = Owned(state, term, since=now, by_handover=by_handover, backup=backup)
        self.owned[shard] = owned
        self.ownership.assign(shard, term, me)
        return owned

    def outranked(self) -> dict[int, Term]:
        """The shards owned here of which a higher term was seen than this owner's, with that term. While a hand-over is
        unanswered it is unknown which node owns the shard: that is resolved first."""
        fence = self.ownership.fence
        mine = {shard: owned.term for shard, owned in self.owned.items() if not owned.moving}
        return {shard: fence(shard) for shard, term in mine.items() if fence(shard) > term}

    def step_down(self, shard: int) -> None:
        """Stop owning the shard and keep its copy as superseded, for `SplitReconciler` to offer its deltas."""
        self._keep_superseded(shard, (owned := self.owned.pop(shard)).term, owned.state)

    def resign(self, shard: int) -> None:
        """Stop owning the shard and drop its state, which is broken. The fence rises: this node had the shard."""
        term = self.next_term(shard)
        del self.owned[shard]
        self.ownership.raise_fence(shard, term)

    def drop_copy(self, shard: int) -> None:
        """Drop the copy of a shard that this node does not own: its values are broken."""
        if self.backed.pop(shard, None) is None:
            self.superseded.pop(shard, None)

    def _keep_superseded(self, shard: int, term: Term, state: ShardState | None, *, is_stored: bool = False) -> None:
        if state is not None:
            copy = SupersededCopy(term, state, is_stored=is_stored)
            former = self.superseded.get(shard)
            self.superseded[shard] = copy if former is None else copy.merged_with(former)

    def next_term(self, shard: int, *above: Term, begins_generation: bool = False) -> Term:
        """A term of this node above every one that it has seen, has had, was promised or is given; the first one of a
        new generation when a whole swarm starts again."""
        owned = self.owned.get(shard)
        own = (owned.term, Term(owned.promised, self.node_id)) if owned is not None else ()
        highest = max((self.ownership.fence(shard), self.promised_here(shard), *own, *above))
        following = (generation_of(highest) + 1) * GENERATION if begins_generation else highest.number + 1
        return Term(following, self.node_id)

    def promised_here(self, shard: int) -> Term:
        """The term promised to this learner. Its owner may use it already, so a take-over must be above it."""
        backed = self.backed.get(shard)
        return ZERO_TERM if backed is None or backed.promised is None else backed.promised

    def promise(self, shard: int) -> Term:
        """The term under which a learner will become the backup; never the same one twice."""
        term = self.next_term(shard)
        self.owned[shard].promised = term.number
        return term

    def promote_learner(self, shard: int, backup: Contact, term: Term, me: Contact, now: float) -> None:
        """Make a learner that has caught up the backup, under its promised term."""
        owned = self.owned[shard]
        owned.backup, owned.learner = backup, None
        owned.term, owned.since = term, now
        self.ownership.assign(shard, term, me)

    def drop_backup(self, shard: int, me: Contact, *above: Term) -> None:
        """Continue alone under a new term, so that a state that the backup may still have ranks below later ones. The
        learner goes too: the term promised to it is below the new one."""
        term, owned = self.next_term(shard, *above), self.owned[shard]
        owned.backup, owned.learner, owned.moving = None, None, False
        owned.term, owned.promised = term, term.number
        self.ownership.assign(shard, term, me)

    def become_backup(self, shard: int, owner: Contact, term: Term) -> None:
        """After a hand-over: back up the new owner, with the state that this node had as owner."""
        owned = self.owned.pop(shard)
        self.backed[shard] = Backed(owner=owner, term=term, state=owned.state, attempt=owned.promised)
        self.ownership.assign(shard, term, owner)

    # -- backing up ---------------------------------------------------------------------------------------------

    def begin_catch_up(self, shard: int, term: Term, owner: Contact, attempt: int | None = None) -> bool:
        """Begin to buffer live deltas of a shard whose state will follow.

        False if a higher term is known, or promised by another owner, or if this node owns the shard. False too if a
        later `attempt` of the same owner arrived first: its buffered deltas would be lost.
        """
        if not (0 <= shard < len(self) and self.ownership.admits(shard, term)):
            return False
        former = self.backed.get(shard)
        if former is not None and former.owner.node_id != owner.node_id and term < self.promised_here(shard):
            return False
        same = former is not None and former.owner.node_id == owner.node_id and not former.owner_restarted
        if former is not None and same and attempt is not None and attempt <= former.attempt:
            return False
        self.note_owner(shard, term, owner)
        if shard in self.owned:
            return False
        # A new attempt of the same owner starts from nothing: its snapshot will be newer than this copy.
        self.backed[shard] = Backed(owner=owner, term=term, attempt=attempt or 0)
        return True

    def note_base(self, shard: int, owner: bytes, publication: bytes, value: Vector) -> bool:
        """This node holds the first published value of a publication: the owner need not send it.
        False if it waits for no state from this owner."""
        backed = self.backed.get(shard)
        if backed is None or backed.state is not None or backed.owner.node_id != owner:
            return False
        backed.base = publication, value.copy()
        return True

    def base(self, shard: int, publication: bytes) -> Vector | None:
        """The first published value of a publication, as this learner held it when its catch-up began."""
        backed = self.backed.get(shard)
        found = None if backed is None else backed.base
        return None if found is None or found[0] != publication else found[1]

    def take_state(self, shard: int, promised: Term, owner: Contact, state: ShardState) -> bool:
        """Add the buffered deltas to the state that has arrived; False if this node is no learner of the shard, or
        has a newer snapshot."""
        backed = self.backed.get(shard)
        if backed is None or backed.owner.node_id != owner.node_id or not self.ownership.admits(shard, promised):
            return False
        if backed.is_active or (backed.promised is not None and promised < backed.promised):
            return False
        for item in backed.buffered:
            self.add(shard, item, state)
        backed.state, backed.promised, backed.base = state, promised, None
        return True

    def drop_unconfirmed(self, info: OwnerInfo, owner: Contact, attempt: int) -> None:
        """The owner does not rely on this copy, which was of this catch-up when it was asked. Either it has another
        backup, or another node owns the shard: the copy is offered to that one."""
        backed = self.backed.get(info.shard)
        if backed is None or backed.owner.node_id != owner.node_id:
            return
        if info.owner != owner.node_id:
            del self.backed[info.shard]
            self._keep_superseded(info.shard, backed.term, backed.state)
            self.note_owners([info])
            return
        promised = ZERO_TERM if backed.promised is None else backed.promised
        # A learner that the owner has given up may be under its present term. The owner promotes it no more. A backup
        # that is a learner again since it asked, or was promoted since, stays.
        is_given_up = not backed.is_active and backed.attempt == attempt and info.term >= backed.term
        if is_given_up or info.term > max(backed.term, promised):
            del self.backed[info.shard]
            self.note_owner(info.shard, info.term, owner)

    def accept_forward(
        self, shard: int, term: Term, item: BufferedDelta, folded_step: int, sender: bytes
    ) -> tuple[ForwardStatus, Term]:
        """Add a delta of the owner. `fenced` comes with the higher term. `unknown`: it does not back up the shard, or
        its buffers are full; the owner then continues without it until a new catch-up."""
        fence = self.ownership.fence(shard)
        backed = self.backed.get(shard)
        if term < fence:
            return "fenced", fence
        if backed is None or backed.owner.node_id != sender or not self.ownership.is_plausible(term):
            return "unknown", fence
        if backed.follow_term(term):
            self.ownership.assign(shard, term, backed.owner)
        state = backed.state
        if not backed.is_active:
            learners = [one for one in self.backed.values() if not one.is_active]
            if sum(item.size_bytes for one in learners for item in one.buffered) > MAX_BUFFERED_BYTES:
                return "unknown", fence
            backed.buffered.append(item)  # a newer snapshot may still replace the state
        if state is not None:
            if not self.holds_values:
                state.fold(folded_step, self.rule)
            self.add(shard, item, state)
        return "ok", term

    def backed_as(self, shard: int, term: Term, owner: Contact, folded_step: int) -> ShardState | None:
        """The copy of a shard that this node backs up for `owner`, with the same deltas visible as there; None if it
        is no such copy."""
        backed = self.backed.get(shard)
        if backed is None or backed.owner.node_id != owner.node_id or not self.ownership.admits(shard, term):
            return None
        if backed.follow_term(term):
            self.ownership.assign(shard, term, backed.owner)
        state = backed.state
        if state is None or not backed.is_active:
            return None
        state.fold(folded_step, self.rule)
        return state

    def add(self, shard: int, item: BufferedDelta, state: ShardState | None = None) -> None:
        """Add a delta once to an owned shard, or to another `state` of the shard."""
        if state is None:
            state = self.owned[shard].state
        if not state.knows(item.identity):
            item.add_to(state, self.rule, synchronous=self.synchronous)
            if self.log.seconds:
                self.log.add(shard, item.identity, item.weight, item.payload, item.codec)

    def add_alone(self, shard: int, identity: DeltaId, weight: float, delta: Vector, *, plain: bool) -> None:
        """Add a delta of this node that no other will request: not logged or measured, and `delta` is not kept."""
        state = self.owned[shard].state
        if self.synchronous:
            state.add_pending(identity, weight, delta.copy(), plain=plain)
        else:
            state.apply(identity, weight, delta, self.rule, plain=plain)

    def fold(self, shard: int, step: int) -> None:
        """The barrier of a step has passed: make its deltas visible, if this node owns the shard."""
        if self.synchronous and (owned := self.owned.get(shard)) is not None:
            owned.state.fold(step, self.rule)

    # -- copies -------------------------------------------------------------------------------------------------

    def offer_stored(self, states: dict[int, StoredState]) -> None:
        """Keep the states read from disk until the owners are known."""
        self.stored = states
        for shard, stored in states.items():
            self.ownership.raise_fence(shard, stored.term)

    def supersede_stored(self) -> None:
        """For shards whose owner is known now, offer it the deltas of the state from disk."""
        for shard, stored in list(self.stored.items()):
            owned = self.owned.get(shard)
            if owned is not None or shard in self.ownership.known_owners:
                del self.stored[shard]
                if owned is None or owned.state.value is not stored.state.value:
                    self._keep_superseded(shard, stored.term, stored.state, is_stored=True)

    def unowned_copy(self, shard: int) -> tuple[Term, ShardState] | None:
        """The state of a shard that this node does not own but could continue from, and its term."""
        backed, superseded = self.backed.get(shard), self.superseded.get(shard)
        if backed is not None and backed.state is not None:
            return backed.term, backed.state
        return None if superseded is None or not superseded.is_usable else (superseded.term, superseded.state)

    def states_to_save(self) -> list[tuple[int, Term, ShardState]]:
        """Every state that other nodes may need after a restart, with the term by which it ranks; not copied."""
        found: list[tuple[int, Term, ShardState]] = []
        for shard in range(len(self)):
            if (owned := self.owned.get(shard)) is not None:
                found.append((shard, owned.rank_term, owned.state))
            elif (copy := self.unowned_copy(shard)) is not None:
                found.append((shard, *copy))
            elif (stored := self.stored.get(shard)) is not None:
                # A node that leaves before it knows the owners must keep the states it loaded.
                found.append((shard, stored.term, stored.state))
        return found
