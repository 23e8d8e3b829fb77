"""Puts parts of one node's exchange into files that are mapped to memory (`exchange.on_disk`).

The files have no name, so nothing is left behind however the process ends, and all of their space is taken before the
run: a disk that is too small is an error then, and no fault in the middle of it. What is in them is no checkpoint. The
kernel holds in memory what fits, and writes back what was changed.
"""

from __future__ import annotations

import numpy as np

from training.exchange.exchange import Exchange
from training.exchange.store.mapped_extents import UNIT_BYTES, ArraySpace, PayloadFile

#: Payloads of the log share extents of so many bytes, or of the largest shard.
LOG_CHUNK_BYTES = 16 << 20
#: Extents beside those that the log fills: its oldest and its newest are filled in part.
FURTHER_LOG_CHUNKS = 2


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
        chunk_bytes = max(LOG_CHUNK_BYTES, -(-shard_bytes // UNIT_BYTES) * UNIT_BYTES)
        count = -(-settings.log_bytes // chunk_bytes) + FURTHER_LOG_CHUNKS
        store.log.keep_in(PayloadFile(await mapped("log", count * chunk_bytes), chunk_bytes))
    if "shards" in settings.on_disk and total:
        array_bytes = -(-shard_bytes // UNIT_BYTES) * UNIT_BYTES
        count = len(store) * (2 if store.rule.outer_momentum else 1)
        store.space = ArraySpace(await mapped("shards", count * array_bytes))
