"""Histories of four stores that own one shard (`tests.harness.swarms.store_swarm`): failures, and what must hold.

A value shows which deltas were added, and how often. A lasting split is not covered: a take-over here reaches every
running node except the suspected one.
"""

from __future__ import annotations

from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.replica import copy_status
from p2pnode.training.exchange.terms import ROLE_RANK, ZERO_TERM, Term
from p2pnode.training.shards.state import ShardState
from tests.harness.swarms.store_swarm import BY_ID, CONTACTS, DELTAS, IDENTITIES, IDS, NAMES, PLAIN, Node, StoreSwarm


class World(StoreSwarm):
    """Four nodes of which one may crash, and the invariants of every moment and of the end."""

    # -- failover -----------------------------------------------------------------------------------------------

    def acting_owner(self) -> Node | None:
        """The running owner with the highest term."""
        owners = [node for node in self.nodes.values() if node.owned is not None]
        return max(owners, key=lambda node: node.store.owned[0].term, default=None)

    def may_crash(self) -> bool:
        """Whether the guarantee covers the loss of a node now: owner and backup are running, and both have the
        state."""
        acting_owner = self.acting_owner()
        if acting_owner is None:
            return False
        owned = acting_owner.store.owned[0]
        if owned.backup is None or owned.moving:
            return False
        backup = self.nodes[BY_ID[owned.backup.node_id]]
        backed = backup.store.backed.get(0)
        if backed is None or backed.state is None:
            return False
        return backup.alive and backed.owner == CONTACTS[acting_owner.name]

    def crash(self, name: str) -> None:
        """One node crashes and does not return."""
        if not self.crashed and self.may_crash():
            self.crashed = True
            self.nodes[name].alive = False

    def notice_crash(self, name: str) -> None:
        """An owner drops dead partners; one that was handing over to a dead node surveys like any backup."""
        owned = self.nodes[name].owned
        if owned is None:
            return
        if owned.learner is not None and not self.nodes[BY_ID[owned.learner.node_id]].alive:
            owned.learner = None
        if owned.backup is not None and not self.nodes[BY_ID[owned.backup.node_id]].alive:
            if owned.moving:
                self.nodes[name].store.become_backup(0, owned.backup, owned.term)
            else:
                self.nodes[name].store.drop_backup(0, CONTACTS[name])

    def suspect(self, name: str) -> None:
        """A backup suspects its owner, rightly or not, and takes over if no node has a better copy."""
        node = self.nodes[name]
        backed = node.store.backed.get(0)
        if not node.alive or node.owned is not None or backed is None or backed.state is None:
            return
        suspected = BY_ID[backed.owner.node_id]
        if self.nodes[suspected].alive and (self.acting_owner() is not self.nodes[suspected] or not self.may_crash()):
            return
        others = [other for other in self.nodes.values() if other.alive and other.name not in (name, suspected)]
        mine = copy_status(node.store, 0, None, 0)
        found = [copy_status(other.store, 0, None, 0) for other in others]
        for other, status in zip(others, found, strict=True):
            if status.role == "owner" and status.term >= max(mine.term, mine.fence):
                node.store.note_owner(0, status.term, CONTACTS[other.name])
                return
        if any(rank(one) > rank(mine) for one in found if one.role != "none"):
            return
        term = node.store.next_term(0, *(one for status in found for one in (status.term, status.fence)))
        node.store.own(0, backed.state, term, CONTACTS[name], 0.0, by_handover=False)
        for other in others:
            other.store.note_owner(0, term, CONTACTS[name])
        self.counts["taken"] += 1

    # -- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check every invariant; called after each event."""
        for node in self.nodes.values():
            for state in node.states:
                check_state(state)
            assert not (0 in node.store.owned and 0 in node.store.backed), "owner and backup at once"
            fence = node.store.ownership.fence(0)
            assert fence >= self.seen[node.name], "a fence fell"
            self.seen[node.name] = fence
            if (owned := node.store.owned.get(0)) is not None:
                assert owned.term <= fence
            if (known := node.store.ownership.known_owners.get(0)) is not None:
                assert known.term <= fence
        if (acting_owner := self.acting_owner()) is not None:
            owned = acting_owner.store.owned[0]
            fences = [node.store.ownership.fence(0) for node in self.nodes.values()]
            if not any(fence > owned.term and fence.node != IDS[acting_owner.name] for fence in fences):
                self._check_pair(acting_owner, owned)

    def _check_pair(self, owner: Node, owned: Owned) -> None:
        missing = [number for number in self.acknowledged if not owned.state.knows(IDENTITIES[number])]
        assert not missing, f"acknowledged and lost: {missing}"
        if owned.backup is None:
            return
        backed = self.nodes[BY_ID[owned.backup.node_id]].store.backed.get(0)
        if backed is None or backed.state is None or backed.owner != CONTACTS[owner.name] or owned.moving:
            return
        behind = [
            n for n in range(DELTAS) if owned.state.knows(IDENTITIES[n]) and not backed.state.knows(IDENTITIES[n])
        ]
        assert not behind, f"the backup lacks {behind}"

    def settle(self) -> None:
        """After the last fault: one owner, no acknowledged delta lost, every delta added, and a pair that agrees."""
        while self.waiting:
            self.time_out(0)
        self.drain()
        for name in NAMES:
            self.notice_crash(name)
        for _ in range(2):
            for source in NAMES:
                for to in NAMES:
                    self.gossip(source, to)
            self.drain()
            for name in (*NAMES, *NAMES):
                if self.acting_owner() is None:
                    self.suspect(name)
        (owner,) = [node for node in self.nodes.values() if node.owned is not None]
        owned = owner.store.owned[0]
        self._check_pair(owner, owned)
        owned.moving, owned.backup, owned.learner = False, None, None
        learner = next(node.name for node in self.nodes.values() if node.alive and node is not owner)
        for _ in range(2):
            self.add_learner(owner.name, learner)
            self.drain()
        for number in self.pushed:
            self.push(number, owner.name)
            self.drain()
        assert sorted(self.acknowledged) == sorted(self.pushed)
        self.fold(owner.name, 10**6)
        backed = self.nodes[learner].store.backed[0]
        assert backed.state is not None
        backed.state.fold(owned.state.folded_step, PLAIN)
        assert owned.state.value.tolist() == [float(number in self.pushed) for number in range(DELTAS)]
        assert backed.state.value.tolist() == owned.state.value.tolist()
        assert sorted(backed.state.applied.rows()) == sorted(owned.state.applied.rows())
        self.check()


def rank(one: CopyStatus) -> tuple[Term, int, Term, int]:
    """The rank of a copy. Of two learners, the one with the later snapshot ranks higher, by its fence."""
    return one.term, ROLE_RANK[one.role], one.fence if one.role == "learner" else ZERO_TERM, one.version


def check_state(state: ShardState) -> None:
    """The value is the sum of the deltas whose identities are in, each once; pending ones are not in it yet."""
    applied = [identity in state.applied for identity in IDENTITIES]
    assert state.value.tolist() == [float(there) for there in applied]
    assert state.version == sum(applied)
    held = [item.identity for items in state.pending.values() for item in items]
    assert len(held) == len(dict.fromkeys(held)), "pending twice"
    assert not any(identity in state.applied for identity in held), "pending and applied"
