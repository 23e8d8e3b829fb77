"""Divides what one node has of its shards while it takes part in the swarm: each part is as its whole was. Pure.

A delta is cut like the vector, and every rule of ownership treats each shard by itself. So a node whose shards are
divided is as one whose parts have had the same history all along, and a node that has not divided yet is as one whose
parts move together. Nothing is decided anew: terms, fences, promises, partners and identities are those of the whole.
Only what was under way is given up, as a lost message is: a catch-up whose state has not arrived begins again.

`tests/harness/ownership/model.py` searches the orders of events with nodes that divide at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from training.encoding.cutting import can_cut
from training.exchange.store.records import Backed, Owned, StoredState
from training.exchange.store.repair_log import SupersededCopy
from training.exchange.store.replica import NO_POSITION, Replica
from training.exchange.store.shard_store import ShardStore
from training.shards.splitting import split
from training.shards.state import ShardState

Slices = Sequence[tuple[int, int]]
T = TypeVar("T")


def sizes_of_parts(wholes: Slices, parts: Slices) -> list[list[int]]:
    """The sizes of the parts of each shard. Raises `ValueError` if the one is no division of the other."""
    factor, rest = divmod(len(parts), len(wholes))
    found = [parts[factor * shard : factor * (shard + 1)] for shard in range(len(wholes))]
    for whole, its in zip(wholes, found, strict=True):
        touch = all(one[1] == other[0] for one, other in pairwise(its))
        if rest or not its or not touch or (its[0][0], its[-1][1]) != tuple(whole):
            raise ValueError(f"{len(parts)} shards are no division of {len(wholes)}")
    return [[stop - start for start, stop in its] for its in found]


def can_divide(wholes: Slices, parts: Slices) -> bool:
    """Whether these shards can be divided into those while deltas are on their way: their encodings must be cut."""
    try:
        return all(min(sizes) > 0 and can_cut(sizes) for sizes in sizes_of_parts(wholes, parts))
    except ValueError:
        return False


def divide_store(whole: ShardStore, parts: ShardStore) -> None:
    """Give a fresh store, of shards that are parts of those of another one, what that one has; it is used no more."""
    sizes = sizes_of_parts(whole.bounds, parts.bounds)
    factor = len(sizes[0])

    def places(shard: int) -> range:
        return range(factor * shard, factor * (shard + 1))

    #: A state may be that of an owner and the one from its disk; then so are its parts.
    divided: dict[int, list[ShardState]] = {}

    def states(shard: int, state: ShardState) -> Iterator[tuple[int, ShardState]]:
        if id(state) not in divided:
            divided[id(state)] = split(state, sizes[shard])
            # Its memory is free now, whoever still refers to it: not all of the node's states are there twice.
            state.value, state.momentum, state.pending = np.empty(0, np.float32), None, {}
        return zip(places(shard), divided[id(state)], strict=True)

    for shard, owned in whole.owned.items():
        for place, state in states(shard, owned.state):
            parts.owned[place] = _part_of_owned(owned, state)
    for shard, backed in whole.backed.items():
        # Without a state it is a learner, whose owner or itself has given up the catch-up with the division.
        for place, state in states(shard, backed.state) if backed.state is not None else ():
            parts.backed[place] = _part_of_backed(backed, state)
    for shard, copy in whole.superseded.items():
        for place, state in states(shard, copy.state):
            parts.superseded[place] = _part_of_superseded(copy, state)
    for shard, stored in whole.stored.items():
        for place, state in states(shard, stored.state):
            parts.stored[place] = StoredState(stored.term, state, stored.clean)
    parts.ownership.take_from(whole.ownership, factor)
    parts.log.take_from(whole.log, sizes)


def _part_of_owned(owned: Owned, state: ShardState) -> Owned:
    """A move under way stays one: who owns the shard is not known before its backup has said so."""
    return replace(owned, state=state, learner=None)


def _part_of_backed(backed: Backed, state: ShardState) -> Backed:
    """Also of a learner that has its state: its owner may rely on it already. No other snapshot of this catch-up will
    come, so what was kept for one is not needed."""
    return replace(backed, state=state, buffered=[], base=None)


def _part_of_superseded(copy: SupersededCopy, state: ShardState) -> SupersededCopy:
    return replace(copy, state=state, earlier=copy.earlier.copy())


def divide_replica(whole: Replica, parts: Replica) -> None:
    """Give a fresh replica over the same vector the versions of another one, and its places in chains: who holds a
    published value holds those of its parts."""
    factor = len(sizes_of_parts(whole.bounds, parts.bounds)[0])
    parts.restore_versions([version for version in whole.versions() for _ in range(factor)])
    for shard in range(len(parts.bounds)):
        if (position := whole.position_of(shard // factor)) != NO_POSITION:
            parts.set_version(shard, *parts.version_of(shard), position)
