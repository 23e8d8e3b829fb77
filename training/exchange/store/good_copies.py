"""What a shard goes on with whose values have become useless, in the memory of its living owner. Pure.

The identities of its deltas are still known. A copy of the backup has them all. Of a value that was pulled, the owner
knows which deltas it had; those added since are in the repair log, and are added again. What is in neither is lost, and
is reported as such: no delta is added twice, and none is given up in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from training.encoding import codecs
from training.encoding.codecs import Vector
from training.exchange.store.records import Owned
from training.exchange.store.repair_log import LogEntry, identities_of
from training.exchange.terms import Term
from training.shards.applied import Applied
from training.shards.delta_range import MAX_STATE_LENGTH, has_length, is_delta_in_range
from training.shards.outer_rule import Rule, is_plain
from training.shards.state import ShardState


@dataclass(frozen=True, slots=True)
class PulledValue:
    """The value of a shard that a node pulled, `float32[n]`: its term and version, and a digest of its bits."""

    term: Term
    version: int
    value: Vector
    digest: bytes


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A shard as a checkpoint of this node has it: its value, `float32[n]`, under this term and version. `state`: that
    of a shard which the node owned or backed up then; otherwise it had pulled the value."""

    folder: str
    value: Vector
    term: Term
    version: int
    state: ShardState | None = None


class StoredCopies(Protocol):
    """The checkpoints on this node's disk."""

    async def newest_good(self, shard: int) -> StoredCopy | None:
        """The newest copy of a shard whose values are in range; None if no checkpoint has one that can be read."""
        ...


def agreed(found: Sequence[PulledValue]) -> PulledValue | None:
    """The value that most nodes have in the same bits; of several the newest. One liar among three is outvoted."""
    votes = Counter((one.term, one.version, one.digest) for one in found)
    return max(found, key=lambda one: (votes[one.term, one.version, one.digest], one.version), default=None)


def has_all_of(state: ShardState, broken: ShardState) -> bool:
    """Whether a state has every delta that a broken one had."""
    return not identities_of(broken).without(identities_of(state)).count()


def state_at(owned: Owned, pulled: PulledValue) -> ShardState | None:
    """A state of a value that was pulled from this ownership; None if it is not known which deltas that had."""
    broken = owned.state
    if not pulled.version or (known := owned.listed_at(pulled.term, pulled.version)) is None:
        return None  # a replica that is being written has version 0
    momentum = broken.momentum
    keeps = momentum is not None and has_length(momentum, MAX_STATE_LENGTH)
    state = ShardState(
        pulled.value,
        broken.parameters,
        momentum=momentum.copy() if momentum is not None and keeps else None,
        sum_weight=broken.sum_weight if keeps else 0.0,
        version=pulled.version,
        era_step=broken.era_step,
        era_term=broken.era_term,
        applied=known,
        folded_step=broken.folded_step,
        norms=broken.norms.copy(),
        unlisted=broken.unlisted,
    )
    for one in broken.pending_deltas():
        if is_delta_in_range(one.delta):
            state.add_pending(one.identity, one.weight, one.delta, momentum=one.momentum, plain=one.plain)
    return state


def add_missing(
    state: ShardState, broken: ShardState, log: Sequence[LogEntry], rule: Rule, *, is_listed: bool
) -> tuple[int, Applied]:
    """Add to a good state what it lacks of the broken one, from the log; the number of deltas added, and those lost.

    Not `is_listed`: it is unknown which deltas the good state has, so none is added.
    Where the momentum is the broken state's own it has taken these deltas already.
    """
    if not is_listed:
        return 0, identities_of(broken)
    missing = identities_of(broken).without(identities_of(state))
    added = 0
    for entry in log:
        if entry.identity not in missing or state.knows(entry.identity):
            continue
        delta = np.empty(state.value.size, dtype=np.float32)
        codecs.decode(entry.payload, entry.codec, delta)
        has_momentum = entry.momentum and state.momentum is None
        state.apply(entry.identity, entry.weight, delta, rule, momentum=has_momentum, plain=is_plain(entry.codec))
        added += 1
    return added, missing.without(identities_of(state))
