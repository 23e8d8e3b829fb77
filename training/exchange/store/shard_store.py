"""Which shards this node owns or backs up, under which terms, and what it believes of the others.

Pure. Requests and discoveries come in as calls, answers go out as values; no message is sent from here. The rules that
keep an acknowledged delta from being lost or doubled:

* a term is a pair (number, raiser) and only rises; what has a lower term than the highest seen is fenced off,
* a new term for every change of the pair owner–backup, so that an old pair can always be told from a new one,
* identities, not counters, decide whether a delta is in; owner and backup may take them in any order,
* an owner adds a delta only after its backup has it, and looks again before it adds,
* what may not depend on the order in which deltas come – how much one is clipped by, which ones make a window of the
  trimmed mean – the owner decides and its backup is told: with the delta, or with the next one (`closings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from overlay.peers import Contact
from training.encoding import codecs
from training.encoding.codecs import Vector
from training.exchange.messages import Closing, CopyStatus
from training.exchange.store.records import Backed, BufferedDelta, KnownOwner, Owned, StoredState
from training.exchange.store.repair_log import RepairLog, SupersededCopy, everything
from training.exchange.terms import ZERO_TERM, Fence, OwnerInfo, Role, Term
from training.shards.applied import Applied, DeltaId
from training.shards.outer_rule import Rule
from training.shards.robust import is_complete
from training.shards.state import ShardState

#: Live deltas kept for states that are still to come, over all shards: a slow lesson is given up and begun anew.
MOST_WAITING_BYTES = 256 * 1024 * 1024


class ShardStore:
    """All shards as one node sees them. `bounds[i]` is the slice of the vector that shard *i* is."""

    def __init__(
        self,
        node_id: bytes,
        bounds: list[tuple[int, int]],
        parameter_total: int,
        rule: Rule,
        log: RepairLog | None = None,
    ) -> None:
        self.node_id = node_id
        self.bounds = bounds
        self.rule = rule
        self._parameter_total = parameter_total
        self.owned: dict[int, Owned] = {}
        self.backed: dict[int, Backed] = {}
        self.beliefs: dict[int, KnownOwner] = {}
        #: The highest term seen per shard; persisted, so that the fence survives a restart.
        self.fences: dict[int, Term] = {}
        self.fences_changed = False
        self.log = log if log is not None else RepairLog(0, 0.0)
        #: Copies that lost to a higher term, until its owner has everything that is in them.
        self.remnants: dict[int, SupersededCopy] = {}
        #: What this node had on disk when it started, until it knows who owns those shards now.
        self.stored: dict[int, StoredState] = {}

    def __len__(self) -> int:
        return len(self.bounds)

    def size(self, shard: int) -> int:
        """Number of values of a shard."""
        start, stop = self.bounds[shard]
        return stop - start

    def fresh_state(self, shard: int, value: Vector) -> ShardState:
        """A state around a value, without momentum or history; `value` is copied."""
        start, stop = self.bounds[shard]
        parameters = min(max(self._parameter_total - start, 0), stop - start)
        return ShardState(value=np.array(value, dtype=np.float32), parameters=parameters)

    # -- beliefs ------------------------------------------------------------------------------------------------

    def fence(self, shard: int) -> Term:
        return self.fences.get(shard, ZERO_TERM)

    def raise_fence(self, shard: int, term: Term) -> None:
        """Remember a term; lower ones are refused from now on."""
        if term > self.fence(shard):
            self.fences[shard] = term
            self.fences_changed = True

    def note_owner(self, shard: int, term: Term, owner: Contact) -> bool:
        """Fold in news of an owner; True when it changed what is believed.

        An own claim under a lower term ends here: whoever has the higher term is the owner, without discussion.
        """
        if not 0 <= shard < len(self.bounds):
            return False
        known = self.beliefs.get(shard)
        if term < self.fence(shard) or (known is not None and term < known.term):
            return False
        if known is not None and term == known.term and known.owner == owner:
            return False
        if known is not None and term == known.term and known.owner.node_id != owner.node_id:
            return False
        self.beliefs[shard] = KnownOwner(term, owner)
        self.raise_fence(shard, term)
        mine = self.owned.get(shard)
        if mine is not None and term > mine.term and owner.node_id != self.node_id:
            heir = mine.backup is not None and mine.backup.node_id == owner.node_id
            if mine.moving and heir and term.node == self.node_id:
                # Our own hand-over, heard of before its answer: the new owner counts on us as its backup.
                self.demote(shard, owner, term)
                return True
            self.depose(shard)
        backed = self.backed.get(shard)
        if backed is not None and term > backed.term and backed.owner.node_id != owner.node_id:
            # Another pair took over without us. News of our own owner's next term do not end our office: only the
            # owner knows whether that switch took place, and it says so by `release`.
            del self.backed[shard]
            self._keep_remnant(shard, backed.term, backed.state)
        elif backed is not None and backed.state is not None and term == backed.promised:
            # No term is promised twice: that there is an owner under this one proves that it appointed us.
            backed.take_office(term)
        elif backed is not None and backed.promised is not None and term > backed.promised:
            # Our owner went on with a later learner: what we have may lack what that one has, and never takes office.
            del self.backed[shard]
        return True

    def correct_owner(self, shard: int, term: Term, owner: Contact) -> None:
        """Believe in this owner instead of another under the same term: a term has one owner, and that was not it."""
        known = self.beliefs.get(shard)
        if known is not None and known.term == term and shard not in self.owned:
            self.beliefs[shard] = KnownOwner(term, owner)

    def depose(self, shard: int) -> None:
        """Own it no more; what only this copy has is offered to whoever does."""
        owned = self.owned.pop(shard)
        self._keep_remnant(shard, owned.term, owned.state)

    def _keep_remnant(self, shard: int, term: Term, state: ShardState | None) -> None:
        if state is None:
            return
        remnant, former = SupersededCopy(term, state), self.remnants.get(shard)
        if former is not None:  # of two copies the better one; the deltas of both are in the log
            remnant, former = (remnant, former) if remnant.rank >= former.rank else (former, remnant)
            remnant.earlier = former.known()
        self.remnants[shard] = remnant

    def restarted(self, node_id: bytes, me: Contact) -> None:
        """A node was started anew: it owns nothing, backs nothing, and says so only when it is asked."""
        for shard, owned in list(self.owned.items()):
            if owned.learner is not None and owned.learner.node_id == node_id:
                owned.learner = None
            if owned.backup is not None and owned.backup.node_id == node_id and not owned.moving:
                self.drop_backup(shard, me)
        for shard, backed in list(self.backed.items()):
            if backed.owner.node_id == node_id:
                backed.bereft = True
                if backed.state is None:
                    del self.backed[shard]
        for shard, belief in list(self.beliefs.items()):
            if belief.owner.node_id == node_id:
                del self.beliefs[shard]

    def doubts(self, shards: Iterable[int]) -> list[Fence]:
        """The fences of those shards whose believed owner is below them, or for which none is believed in."""
        found = []
        for shard in shards:
            belief, fence = self.beliefs.get(shard), self.fence(shard)
            if fence > (ZERO_TERM if belief is None else belief.term):
                found.append(Fence(shard, *fence))
        return found

    def note(self, wheres: Iterable[OwnerInfo]) -> None:
        """`note_owner` for a list from the wire; addresses that are none are passed over."""
        for where in wheres:
            try:
                contact = where.contact()
            except ValueError:
                continue
            self.note_owner(where.shard, where.term, contact)

    def where(self, shard: int) -> OwnerInfo | None:
        """What this node would tell another about a shard's owner."""
        belief = self.beliefs.get(shard)
        return None if belief is None else OwnerInfo.of(shard, belief.term, belief.owner)

    def elsewhere(self, shard: int) -> OwnerInfo | None:
        """Where to send somebody who takes this node for the owner; None where it does not know, or believes in itself
        without owning."""
        belief = self.beliefs.get(shard)
        if belief is None or (belief.owner.node_id == self.node_id and shard not in self.owned):
            return None
        return self.where(shard)

    # -- owning -------------------------------------------------------------------------------------------------

    def own(self, shard: int, state: ShardState, term: Term, me: Contact, now: float, *, tenured: bool) -> Owned:
        """Become the owner under a term that must be above every one seen. Raises `ValueError` otherwise."""
        if term < self.fence(shard):
            raise ValueError(f"shard {shard}: term {term.number} is below the fence {self.fence(shard).number}")
        backed = self.backed.pop(shard, None)
        if backed is not None and backed.state is not state:
            self._keep_remnant(shard, backed.term, backed.state)
        owned = Owned(state=state, term=term, since=now, tenured=tenured)
        self.owned[shard] = owned
        self.beliefs[shard] = KnownOwner(term, me)
        self.raise_fence(shard, term)
        return owned

    def next_term(self, shard: int, *above: Term) -> Term:
        """A term of our own above every one seen here, held, promised or given."""
        owned = self.owned.get(shard)
        own = (owned.term, Term(owned.promised, self.node_id)) if owned is not None else ()
        highest = max((self.fence(shard), self._promised_here(shard), *own, *above))
        return Term(highest.number + 1, self.node_id)

    def _promised_here(self, shard: int) -> Term:
        """The term that our owner may already use because it was promised to us: a take-over must be above it."""
        backed = self.backed.get(shard)
        return ZERO_TERM if backed is None or backed.promised is None else backed.promised

    def promise(self, shard: int) -> Term:
        """The term under which a learner will be the backup; never the same twice."""
        term = self.next_term(shard)
        self.owned[shard].promised = term.number
        return term

    def appoint(self, shard: int, backup: Contact, term: Term, me: Contact, now: float) -> Contact | None:
        """Make the learner that has everything the backup, under the term promised to it; returns the former one."""
        owned = self.owned[shard]
        former, owned.backup, owned.learner = owned.backup, backup, None
        owned.term, owned.since = term, now
        self.beliefs[shard] = KnownOwner(term, me)
        self.raise_fence(shard, term)
        return former

    def drop_backup(self, shard: int, me: Contact, *above: Term) -> None:
        """Go on without the backup, under a new term, also above those given: a state it may still hold ranks below
        all to come."""
        owned = self.owned[shard]
        # The learner goes too, and the lesson under way: what was promised to it is below the new term.
        owned.backup, owned.learner, owned.moving, owned.term = None, None, False, self.next_term(shard, *above)
        owned.promised = owned.term.number
        self.beliefs[shard] = KnownOwner(owned.term, me)
        self.raise_fence(shard, owned.term)

    def demote(self, shard: int, owner: Contact, term: Term) -> None:
        """Hand over: the new owner's backup from now on, with the state we had as owner."""
        owned = self.owned.pop(shard)
        self.backed[shard] = Backed(owner=owner, term=term, state=owned.state, attempt=owned.promised)
        self.beliefs[shard] = KnownOwner(term, owner)
        self.raise_fence(shard, term)

    # -- backing up ---------------------------------------------------------------------------------------------

    def learn(self, shard: int, term: Term, owner: Contact, attempt: int | None = None) -> bool:
        """Begin to take live deltas of a shard whose state will follow; False when a higher term is known, when we own
        it ourselves, or when a later `attempt` of the same owner was heard already: deltas taken for that one would be
        forgotten."""
        if term < self.fence(shard) or not 0 <= shard < len(self.bounds):
            return False
        former = self.backed.get(shard)
        same = former is not None and former.owner.node_id == owner.node_id and not former.bereft
        if former is not None and same and attempt is not None and attempt <= former.attempt:
            return False
        self.note_owner(shard, term, owner)
        if shard in self.owned:
            return False
        # Learning again from the same owner begins anew: its coming snapshot is newer than what we have.
        self.backed[shard] = Backed(owner=owner, term=term, attempt=attempt or 0)
        return True

    def take_state(self, shard: int, promised: Term, owner: Contact, state: ShardState) -> bool:
        """Put the streamed state under the deltas that came meanwhile; False when this node does not learn it, or
        has a newer snapshot already."""
        backed = self.backed.get(shard)
        if backed is None or backed.owner.node_id != owner.node_id or promised < self.fence(shard):
            return False
        if backed.in_office or (backed.promised is not None and promised < backed.promised):
            return False
        for item in backed.waiting:
            self._add(shard, state, item)
        if not self._follow(state, backed.closings):
            return False
        backed.state, backed.promised = state, promised
        return True

    def release(self, shard: int, term: Term, owner: Contact) -> bool:
        """The owner has another backup under a newer term: forget the shard."""
        backed = self.backed.get(shard)
        if backed is None or backed.owner.node_id != owner.node_id or not term > backed.term:
            return False
        if backed.promised is not None and backed.promised >= term:
            return False  # released as a former backup, and taught anew since
        del self.backed[shard]
        return self.note_owner(shard, term, owner)

    def counts_on(self, shard: int, node_id: bytes) -> bool:
        """Whether a node is the backup or the learner of a shard owned here."""
        owned = self.owned.get(shard)
        return owned is not None and any(contact.node_id == node_id for contact in owned.targets())

    def not_counted_on(self, where: OwnerInfo, owner: Contact) -> None:
        """The owner that this node backs does not count on its copy, and says who owns the shard: itself, with another
        backup, or somebody else, to whom the copy is to be offered."""
        backed = self.backed.get(where.shard)
        if backed is None or backed.owner.node_id != owner.node_id:
            return
        if where.owner == owner.node_id:
            self.release(where.shard, where.term, owner)
        else:
            self.note([where])

    def accept_forward(
        self,
        shard: int,
        term: Term,
        item: BufferedDelta,
        folded_step: int,
        sender: bytes,
        closings: Sequence[Closing] = (),
    ) -> tuple[str, Term]:
        """A delta from the owner, and the windows it has closed: `ok`, `fenced` (with the higher term) or `unknown`.

        `unknown` also when there is no room for it, or when a window has a delta that is not here: then the owner goes
        on without this backup, and teaches it anew.
        """
        fence = self.fence(shard)
        backed = self.backed.get(shard)
        if term < fence:
            return "fenced", fence
        if backed is None or backed.owner.node_id != sender:
            return "unknown", fence
        if backed.promised is not None and term >= backed.promised:
            backed.take_office(term)
            self.beliefs[shard] = KnownOwner(term, backed.owner)
            self.raise_fence(shard, term)
        elif backed.in_office and term > backed.term:
            backed.term = term  # the same pair under a newer term: the owner rose above a fence
            self.beliefs[shard] = KnownOwner(term, backed.owner)
            self.raise_fence(shard, term)
        if not backed.in_office:
            if self._waiting_bytes() > MOST_WAITING_BYTES:
                return "unknown", fence
            backed.waiting.append(item)
            backed.closings += [window for window in closings if window not in backed.closings]
        state = backed.state
        if state is not None:
            if self.rule.robust == "trimmed-mean":
                state.folded_step = max(state.folded_step, folded_step)
            else:
                state.fold(folded_step, self.rule)
            self._add(shard, state, item)
            if not self._follow(state, closings):
                return "unknown", fence
        return "ok", term

    def follow(self, shard: int, closings: Sequence[Closing]) -> bool:
        """Close what the owner has closed in the copy it is about to hand over; False when that cannot be done."""
        backed = self.backed[shard]
        return backed.state is not None and self._follow(backed.state, closings)

    def _follow(self, state: ShardState, closings: Sequence[Closing]) -> bool:
        return all(state.close(window, self.rule) for window in closings)

    def _waiting_bytes(self) -> int:
        return sum(backed.waiting_bytes for backed in self.backed.values() if not backed.in_office)

    def add(self, shard: int, item: BufferedDelta) -> int:
        """Add a delta that the backup has to an owned shard; returns the version."""
        state = self.owned[shard].state
        self._add(shard, state, item)
        return state.version

    def add_only(self, shard: int, identity: DeltaId, weight: float, delta: Vector) -> int:
        """Add to an owned shard a delta that nobody else will ever ask for: neither held, nor logged, nor measured.
        Returns the version. `delta` is not kept."""
        state = self.owned[shard].state
        if not state.knows(identity):
            state.apply(identity, weight, delta, self.rule)
        return state.version

    def _add(self, shard: int, state: ShardState, item: BufferedDelta) -> None:
        if state.knows(item.identity):
            return
        state.norms.note(*item.identity, item.norm)
        # What comes out of a split was voted on there, or will not be: its fellows of that step are in already.
        in_window = self.rule.robust == "trimmed-mean" and item.momentum
        if item.synchronous or in_window:
            state.hold(item.identity, item.weight, item.delta, momentum=item.momentum)
        else:
            state.apply(item.identity, item.weight, item.delta, self.rule, momentum=item.momentum)
        if self.log.seconds and item.is_logged:
            payload = codecs.encode(item.delta, item.codec) if item.payload is None else item.payload
            self.log.add(shard, item.identity, item.weight, payload, item.codec, momentum=item.momentum)

    # -- windows ------------------------------------------------------------------------------------------------

    def fold(self, shard: int, step: int) -> None:
        """The barrier of a step has passed: make its deltas visible at the owner."""
        owned = self.owned[shard]
        if self.rule.robust != "trimmed-mean":
            owned.state.fold(step, self.rule)
            return
        owned.state.folded_step = max(owned.state.folded_step, step)
        for ready in sorted(number for number in owned.state.pending if number <= step):
            self.close(shard, sorted(held.identity for held in owned.state.pending[ready]))

    def close(self, shard: int, window: list[DeltaId]) -> None:
        """Make a window visible at the owner; its backup and learner hear of it with the next delta."""
        owned = self.owned[shard]
        owned.state.close(window, self.rule)
        owned.closings.append(window)
        if not owned.has_targets:
            owned.forgotten += len(owned.closings)
            owned.closings.clear()

    def close_complete(self, shard: int, workers: float) -> bool:
        """Close the window of an owned shard that is complete (`training.shards.robust.is_complete`). Not under
        bulk-synchronous rules: there each step is a window."""
        owned = self.owned[shard]
        if not owned.state.pending or owned.moving:
            return False
        window = [held.identity for held in owned.state.held()]
        members = len({identity.node: None for identity in window})
        if not is_complete(members, len(window), workers):
            return False
        self.close(shard, window)
        return True

    # -- what is here -------------------------------------------------------------------------------------------

    def standing(self, shard: int, replica: tuple[Term, int] | None, step: int) -> CopyStatus:
        """What this node has of a shard, for a survey."""
        fence = max(self.fence(shard), self._promised_here(shard))
        owned, backed = self.owned.get(shard), self.backed.get(shard)
        if owned is not None:
            return CopyStatus(shard, "owner", *owned.term, owned.state.version, *fence, step)
        if backed is not None and backed.state is not None:
            role: Role = "backup" if backed.in_office else "learner"
            return CopyStatus(shard, role, *backed.term, backed.state.version, *fence, step)
        remnant = self.remnants.get(shard)
        if remnant is not None:
            return CopyStatus(shard, "backup", *remnant.term, remnant.state.version, *fence, step)
        stored = self.stored_above(shard, replica)
        if stored is not None:
            replica = stored.term, stored.state.version
        if replica is not None:
            return CopyStatus(shard, "replica", *replica[0], replica[1], *fence, step, stored is not None)
        return CopyStatus(shard, "none", *ZERO_TERM, 0, *fence, step)

    def stored_above(self, shard: int, replica: tuple[Term, int] | None) -> StoredState | None:
        """The state from disk, where the replica is not newer: with momentum and identities it is worth more."""
        stored = self.stored.get(shard)
        if stored is None or (replica is not None and replica > (stored.term, stored.state.version)):
            return None
        return stored

    def settle_stored(self) -> None:
        """The owners are known now: what they lack of the states from disk is offered to them, and the rest goes."""
        for shard, stored in list(self.stored.items()):
            owned = self.owned.get(shard)
            if owned is not None or shard in self.beliefs:
                del self.stored[shard]
                if owned is None or owned.state.value is not stored.state.value:
                    self._keep_remnant(shard, stored.term, stored.state)

    def known(self) -> list[Applied]:
        """The identities in every state that is here, visible or held."""
        states = [owned.state for owned in self.owned.values()]
        states += [backed.state for backed in self.backed.values() if backed.state is not None]
        states += [stored.state for stored in self.stored.values()]
        return [everything(state) for state in states] + [remnant.known() for remnant in self.remnants.values()]

    def copy_of(self, shard: int) -> tuple[Term, ShardState] | None:
        """The state that this node does not own but could go on from, and its term."""
        backed, remnant = self.backed.get(shard), self.remnants.get(shard)
        if backed is not None and backed.state is not None:
            return backed.term, backed.state
        return None if remnant is None else (remnant.term, remnant.state)

    @property
    def size_bytes(self) -> int:
        """Memory of the states held, as owner and as backup."""
        states = [owned.state for owned in self.owned.values()]
        states += [backed.state for backed in self.backed.values() if backed.state is not None]
        states += [remnant.state for remnant in self.remnants.values()]
        states += [stored.state for stored in self.stored.values()]
        return sum(state.size_bytes for state in states)
