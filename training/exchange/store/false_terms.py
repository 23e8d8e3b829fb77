"""Forgets terms that were never given, and everything that this node has under them. Pure."""

from __future__ import annotations

from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM


def forget_terms_above(store: ShardStore, replica: Replica, number: int) -> list[int]:
    """The shards of which a term above this number was known: it has no known owner now, and no fence.

    What this node owned or kept under such a term came from the member that made it up, and is dropped. Nothing of it
    can be told from a lie. The value in the replica counts as never pulled, so that the next pull replaces it.
    """
    shards = store.ownership.forget_above(number)
    for shard, owned in list(store.owned.items()):
        if owned.term.number > number:
            del store.owned[shard]
    for shard, backed in list(store.backed.items()):
        if max(backed.term, backed.promised or ZERO_TERM).number > number:
            del store.backed[shard]
    for shard, stored in list(store.stored.items()):
        if stored.term.number > number:
            del store.stored[shard]
    for shard, copy in list(store.superseded.items()):
        if copy.term.number > number:
            del store.superseded[shard]
    for shard in range(len(store)):
        if replica.version_of(shard)[0].number > number:
            replica.set_version(shard, ZERO_TERM, 0)
    return shards
