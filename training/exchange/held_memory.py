"""Counts the memory that the exchange of one node holds now, part by part. Pure.

`training.budget` estimates the same parts before they are allocated. What is not counted here is short-lived: what a
request is being received into, and the copies of a checkpoint that is being written.
"""

from __future__ import annotations

import msgspec

from training.exchange.exchange import Exchange
from training.exchange.store.shard_store import ShardStore
from training.shards.state import ShardState


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by part, without those in files (`disk_bytes`).

    `replica` is shared with the trainer. `backed` has what this node holds as backup or learner, `copies` the states
    from disk and those that lost to a higher term. `outbox`: the encoded deltas of this node that no owner has
    acknowledged, and those that are kept in case their owners have not added them; those that this node has added are
    the same memory as in `repair_log`. `handed_down`: changes that others may ask this node for in the place of their
    owners. `encoded`: values encoded for several nodes that pull.
    """

    replica: int
    owned: int
    backed: int
    copies: int
    residual: int
    outbox: int
    repair_log: int
    published: int
    handed_down: int
    encoded: int

    def parts(self) -> dict[str, int]:
        """Bytes by part, for `/status`."""
        return {f"{name}_bytes": getattr(self, name) for name in self.__struct_fields__}


def held_memory(exchange: Exchange) -> HeldMemory:
    """What it holds at this moment; it takes a few microseconds per shard."""
    store = exchange.store
    return HeldMemory(
        replica=exchange.context.replica.vector.nbytes,
        owned=sum(_in_memory(store, owned.state) for owned in store.owned.values()),
        backed=_backed_bytes(store),
        copies=sum(_in_memory(store, state) for state in _copies(store)),
        residual=exchange.push_client.residual_bytes,
        outbox=exchange.push_client.outbox_bytes + exchange.context.acknowledged.size_bytes,
        repair_log=store.log.memory_bytes,
        published=exchange.publisher.size_bytes,
        handed_down=exchange.pull_client.relays.handed.size_bytes,
        encoded=exchange.reads.encoded_bytes,
    )


def disk_bytes(exchange: Exchange) -> dict[str, int]:
    """Bytes in use of the files of `exchange.on_disk`, by part."""
    on_disk, store = exchange.context.settings.on_disk, exchange.store
    found = {
        "residual": exchange.context.replica.vector.nbytes,
        "log": 0 if store.log.file is None else store.log.file.used_bytes,
        "shards": 0 if store.space is None else store.space.used_bytes,
    }
    return {f"{part}_bytes": size for part, size in found.items() if part in on_disk}


def state_bytes(store: ShardStore) -> int:
    """All states of a node, wherever they are kept."""
    held = [owned.state for owned in store.owned.values()]
    held += [backed.state for backed in store.backed.values() if backed.state is not None]
    return sum(state.size_bytes for state in (*held, *_copies(store)))


def _in_memory(store: ShardStore, state: ShardState) -> int:
    """Memory of a state, without what is in a file."""
    if store.space is None:
        return state.size_bytes
    arrays = (array for array in (state.value, state.momentum) if array is not None)
    return state.size_bytes - sum(array.nbytes for array in arrays if store.space.has(array))


def _backed_bytes(store: ShardStore) -> int:
    size = 0
    for backed in store.backed.values():
        size += 0 if backed.state is None else _in_memory(store, backed.state)
        size += 0 if backed.base is None else backed.base[1].nbytes
        size += backed.buffered_bytes
    return size


def _copies(store: ShardStore) -> list[ShardState]:
    """States from disk, and superseded ones. One that this node goes on from is that of its shard, and not among
    them."""
    in_use = {id(owned.state.value) for owned in store.owned.values()}
    in_use |= {id(backed.state.value) for backed in store.backed.values() if backed.state is not None}
    copies = [stored.state for stored in store.stored.values()] + [copy.state for copy in store.superseded.values()]
    return [state for state in copies if id(state.value) not in in_use]
