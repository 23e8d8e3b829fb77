"""The status of a node's copy of a shard, as in its answer to a survey, and whether anybody owns it. Pure."""

from __future__ import annotations

from training.exchange.ownership_messages import CopyStatus
from training.exchange.store.replica_copies import stored_above
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM, Role, Term


def copy_status(store: ShardStore, shard: int, replica: tuple[Term, int] | None, step: int) -> CopyStatus:
    """The best copy that this node has of a shard; `replica` is the (term, version) of the last pull."""
    fence = max(store.ownership.fence(shard), store.promised_here(shard))
    owned, backed = store.owned.get(shard), store.backed.get(shard)
    if owned is not None:
        return CopyStatus(shard, "owner", *owned.term, owned.state.version, *fence, step)
    if backed is not None and backed.state is not None:
        role: Role = "backup" if backed.is_active else "learner"
        return CopyStatus(shard, role, *backed.term, backed.state.version, *fence, step)
    superseded = store.superseded.get(shard)
    if superseded is not None and superseded.is_usable:
        return CopyStatus(shard, "backup", *superseded.term, superseded.state.version, *fence, step)
    stored = stored_above(store, shard, replica)
    if stored is not None:
        replica = stored.term, stored.state.version
    if replica is not None:
        return CopyStatus(shard, "replica", *replica[0], replica[1], *fence, step, stored is not None)
    return CopyStatus(shard, "none", *ZERO_TERM, 0, *fence, step)


def has_state(store: ShardStore, shard: int) -> bool:
    """Whether this node has a state of a shard that it does not own: as its backup or former owner, or on disk."""
    return shard in store.stored or store.unowned_copy(shard) is not None


def has_known_owner(store: ShardStore, shard: int) -> bool:
    """Whether a node owns the shard as far as this one knows. What others say that this node owned before it was
    started again does not count."""
    known = store.ownership.known_owners.get(shard)
    return shard in store.owned or (known is not None and known.owner.node_id != store.node_id)
