"""The copies of a shard that nodes have beside that of its owner, and their rank when that owner is gone. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import NamedTuple

from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ROLE_RANK, ZERO_TERM, Role, Term
from p2pnode.training.shards.state import ShardState


class CopyRank(NamedTuple):
    """The rank of a copy: by term, by role, learners by the term promised to them, then by version.

    Among equals a state from disk ranks above a bare value, because it has the identities of its deltas.

    Two terms with the same number belong to the two sides of a split: neither came after the other, since every
    take-over raises the number. Among these a state with its history ranks above a replica, whatever the node ids.
    """

    number: int
    has_history: bool
    node: bytes
    role: int
    promise: Term
    version: int
    is_stored: bool


def rank_copy(standing: CopyStatus, seen: Container[Term] = ()) -> CopyRank:
    """`seen` are the terms known to be in use. If the term promised to a learner is in use, the learner is the backup,
    even before a message under that term reached it."""
    role, term, promise = ROLE_RANK[standing.role], standing.term, ZERO_TERM
    if standing.role == "learner":
        if standing.fence in seen:
            role, term = ROLE_RANK["backup"], standing.fence
        else:
            promise = standing.fence
    has_history = role >= ROLE_RANK["learner"]
    return CopyRank(term.number, has_history, term.node, role, promise, standing.version, standing.is_stored)


def stored_above(store: ShardStore, shard: int, replica: tuple[Term, int] | None) -> StoredState | None:
    """The state from disk, unless the replica is newer; at the same version it is preferred: it has identities."""
    stored = store.stored.get(shard)
    if stored is None or (replica is not None and replica > (stored.term, stored.state.version)):
        return None
    return stored


def replica_copy(store: ShardStore, replica: Replica, step: int, shard: int) -> tuple[Term, ShardState] | None:
    """The state from disk, or the replica, and its term: a start for this node if the shard has no owner and no backup.
    Either begins a new era, so that a later copy with the whole history replaces it."""
    pulled = replica.pulled_version(shard)
    stored = stored_above(store, shard, pulled)
    if stored is not None:
        # A state from disk has its identities, so that no delta is refused for its age: any new era number will do.
        era = stored.state.era_step + 1
        return stored.term, dataclasses.replace(stored.state, era_step=era, era_term=stored.term)
    return None if pulled is None else (pulled[0], replica_state(store, replica, step, shard))


def replica_state(store: ShardStore, replica: Replica, step: int, shard: int) -> ShardState:
    """A state of value and version. Deltas with a base before it are refused: it is unknown which of them it has."""
    term, version = replica.version_of(shard)
    # At least 1: an era of 0 would have the whole history.
    state = store.fresh_state(shard, replica.slice_of(shard), version=version, era_step=max(1, step), era_term=term)
    state.unlisted = version
    return state


def copy_status(store: ShardStore, shard: int, replica: tuple[Term, int] | None, step: int) -> CopyStatus:
    """The best copy that this node has of a shard; `replica` is the (term, version) of the last pull."""
    fence = max(store.ownership.fence(shard), store.promised_here(shard))
    owned, backed = store.owned.get(shard), store.backed.get(shard)
    if owned is not None:
        return CopyStatus(shard, "owner", owned.term, owned.state.version, fence, step)
    if backed is not None and backed.state is not None:
        role: Role = "backup" if backed.is_active else "learner"
        return CopyStatus(shard, role, backed.term, backed.state.version, fence, step)
    superseded = store.superseded.get(shard)
    if superseded is not None and superseded.is_usable:
        return CopyStatus(shard, "backup", superseded.term, superseded.state.version, fence, step)
    stored = stored_above(store, shard, replica)
    if stored is not None:
        replica = stored.term, stored.state.version
    if replica is not None:
        return CopyStatus(shard, "replica", *replica, fence, step, stored is not None)
    return CopyStatus(shard, "none", ZERO_TERM, 0, fence, step)


def has_state(store: ShardStore, shard: int) -> bool:
    """Whether this node has a state of a shard that it does not own: as its backup or former owner, or on disk."""
    return shard in store.stored or store.unowned_copy(shard) is not None


def has_known_owner(store: ShardStore, shard: int) -> bool:
    """Whether a node owns the shard as far as this one knows. What others say that this node owned before it was
    started again does not count."""
    known = store.ownership.known_owners.get(shard)
    return shard in store.owned or (known is not None and known.owner.node_id != store.node_id)
