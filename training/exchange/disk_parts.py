"""Puts parts of one node's exchange into files that are mapped to memory (`exchange.on_disk`).

The files have no name, so nothing is left behind however the process ends, and all of their space is taken before the
run: a disk that is too small is an error then, and no fault in the middle of it. What is in them is no checkpoint. The
kernel holds in memory what fits, and writes back what was changed.
"""

from __future__ import annotations

import numpy as np

from training.exchange.exchange import Exchange
from training.exchange.store.array_space import UNIT_BYTES, ArraySpace
from training.exchange.store.mapped_slots import MappedSlots, PayloadFile

#: Payloads of the log share slots of so many bytes, or of the largest shard.
LOG_SLOT_BYTES = 16 << 20
#: Slots beside those that the log fills: its oldest and its newest are filled in part.
FURTHER_LOG_SLOTS = 2


async def keep_on_disk(exchange: Exchange) -> None:
    """Claim the files for the parts that the settings name. After it is built, before it starts. Raises `OSError` for
    too little space, with what was asked for."""
    settings, store, executor = exchange.context.settings, exchange.store, exchange.context.environment.executor
    disk, total = exchange.context.environment.disk, exchange.context.replica.vector.size
    shard_bytes = 4 * max(store.size(shard) for shard in range(len(store)))

    async def mapped(part: str, size_bytes: int) -> memoryview:
        try:
            return await executor.run(disk.mapped, size_bytes)
        except OSError as error:
            what = f"{part} of exchange.on_disk takes {size_bytes / 1e6:,.1f} MB of it: {error.strerror or error}"
            raise OSError(error.errno, what) from error

    if "residual" in settings.on_disk and total:
        exchange.push_client.keep_residual_in(np.frombuffer(await mapped("residual", 4 * total), np.float32))
    if "log" in settings.on_disk and settings.log_bytes and store.log.seconds:
        slot_bytes = max(LOG_SLOT_BYTES, shard_bytes)
        count = -(-settings.log_bytes // slot_bytes) + FURTHER_LOG_SLOTS
        store.log.keep_in(PayloadFile(MappedSlots(await mapped("log", count * slot_bytes), slot_bytes)))
    if "shards" in settings.on_disk and total:
        array_bytes = -(-shard_bytes // UNIT_BYTES) * UNIT_BYTES
        count = len(store) * (2 if store.rule.outer_momentum else 1)
        store.space = ArraySpace(await mapped("shards", count * array_bytes))
