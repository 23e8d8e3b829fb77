"""Counts the memory that the exchange of one node holds now, part by part. Pure.

`training.budget` estimates the same parts before they are allocated. What is not counted here is short-lived: what a
request is being received into, and the copies of a checkpoint that is being written.
"""

from __future__ import annotations

import msgspec

from training.exchange.exchange import Exchange
from training.exchange.store.shard_store import ShardStore


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by part.

    `replica` is shared with the trainer. `backed` has what this node holds as backup or learner, `copies` the states
    from disk and those that lost to a higher term. `outbox`: the encoded deltas of this node that no owner has
    acknowledged; those that this node has added are the same memory as in `repair_log`. `encoded`: values encoded for
    several nodes that pull.
    """

    replica: int
    owned: int
    backed: int
    copies: int
    residual: int
    outbox: int
    repair_log: int
    published: int
    encoded: int

    def parts(self) -> dict[str, int]:
        """Bytes by part, for `/status`."""
        return {f"{name}_bytes": getattr(self, name) for name in self.__struct_fields__}


def held_memory(exchange: Exchange) -> HeldMemory:
    """What it holds at this moment; it takes a few microseconds per shard."""
    store = exchange.store
    return HeldMemory(
        replica=exchange.context.replica.vector.nbytes,
        owned=sum(owned.state.size_bytes for owned in store.owned.values()),
        backed=_backed_bytes(store),
        copies=_copies_bytes(store),
        residual=exchange.push_client.residual_bytes,
        outbox=exchange.push_client.outbox_bytes,
        repair_log=store.log.size_bytes,
        published=exchange.publisher.size_bytes,
        encoded=exchange.reads.encoded_bytes,
    )


def _backed_bytes(store: ShardStore) -> int:
    size = 0
    for backed in store.backed.values():
        size += 0 if backed.state is None else backed.state.size_bytes
        size += 0 if backed.base is None else backed.base[1].nbytes
        size += backed.buffered_bytes
    return size


def _copies_bytes(store: ShardStore) -> int:
    """A state from disk that this node goes on from is one with that of its shard, and counted there."""
    in_use = {id(owned.state.value) for owned in store.owned.values()}
    in_use |= {id(backed.state.value) for backed in store.backed.values() if backed.state is not None}
    copies = [stored.state for stored in store.stored.values()] + [copy.state for copy in store.superseded.values()]
    return sum(state.size_bytes for state in copies if id(state.value) not in in_use)
