"""The memory of the exchange by part: what its nodes hold, and nothing twice."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.exchange_swarm import World
from training.exchange.exchange import Exchange
from training.exchange.held_memory import held_memory
from training.exchange.store.records import StoredState
from training.exchange.store.repair_log import SupersededCopy
from training.settings import ExchangeSettings

VALUES, SHARDS = 4096, 8
#: Values of one shard.
SIZE = VALUES // SHARDS
SETTINGS = ExchangeSettings(codec="bfloat16", pull_codec="int8", shards=SHARDS, tenure_s=0.0)


async def two_nodes(world: World) -> tuple[Exchange, Exchange]:
    """Until the second backs up the shards of the first, or owns them."""
    first, second = await world.start("n0", founder=True), await world.start("n1")
    assert first.exchange is not None
    assert second.exchange is not None
    for exchange in (first.exchange, second.exchange):
        exchange.advance(1)
    async with asyncio.timeout(120):
        while not all(one.exchange and one.exchange.store.backed for one in (first, second)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return first.exchange, second.exchange


def test_each_part_is_what_its_arrays_take_and_no_array_counts_twice() -> None:
    """Of two nodes with bfloat16 deltas: four bytes a value for residual and replica, eight for each shard that is
    owned or backed up, and two in the log for each delta. A state from disk that a node goes on from counts once, one
    that lost beside it; a delta that no owner has acknowledged is in the outbox, as is for a while one that has."""

    async def scenario() -> None:
        world = World(3, settings=SETTINGS, shards=SHARDS, values=VALUES, synchronous=False)
        try:
            first, second = await two_nodes(world)
            for exchange in (first, second):
                await exchange.push_client.push(1, 0, 1.0, np.full(VALUES, 0.5, np.float32))
            await second.pull_client.pull(1, deadline_s=5.0)  # it follows, so the owners publish
            found = held_memory(first)
            store = first.store

            kept = first.context.acknowledged.size_bytes  # should the owner not have added it
            assert (found.replica, found.residual, found.copies) == (4 * VALUES, 4 * VALUES, 0)
            assert 0 < found.outbox == kept < 2 * VALUES
            assert found.owned == 8 * SIZE * len(store.owned) > 0
            assert found.backed == 8 * SIZE * len(store.backed) > 0
            assert found.repair_log == 2 * 2 * SIZE * (len(store.owned) + len(store.backed))
            assert found.published == 4 * SIZE * len(store.owned)
            assert found.parts()["owned_bytes"] == found.owned

            shard, owned = next(iter(store.owned.items()))
            store.stored[shard] = StoredState(owned.term, owned.state, clean=False)
            assert held_memory(first).copies == 0
            store.superseded[shard] = SupersededCopy(owned.term, owned.state.copy())
            assert held_memory(first).copies == 8 * SIZE

            world.pause("n1")
            pushing = asyncio.ensure_future(
                first.push_client.push(2, 1, 1.0, np.full(VALUES, 0.5, np.float32), on_taken=lambda: None)
            )
            await asyncio.sleep(0.5)
            assert held_memory(first).outbox == 2 * VALUES + kept
            pushing.cancel()
        finally:
            world.stop()

    run(scenario(), limit_s=600)
