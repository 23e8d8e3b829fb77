"""The status of a node's copy of a shard: its answer to a survey. Pure."""

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
