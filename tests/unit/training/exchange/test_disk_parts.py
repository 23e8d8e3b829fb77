"""Parts of the exchange in mapped files: which there are, what they hold, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
from typing import Literal

import msgspec
import numpy as np
import pytest

from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.exchange_swarm import World
from training.exchange.disk_parts import FURTHER_LOG_CHUNKS, LOG_CHUNK_BYTES
from training.exchange.exchange import Exchange
from training.exchange.held_memory import disk_bytes, held_memory
from training.settings import ExchangeSettings

VALUES, SHARDS = 8192, 8
SETTINGS = ExchangeSettings(codec="int8", shards=SHARDS, outer_momentum=0.5, log_bytes=LOG_CHUNK_BYTES)
Part = Literal["residual", "log", "shards"]


def trained(*parts: Part) -> tuple[Exchange, np.ndarray]:
    """A node beside another one after three deltas of its own, and the values of all shards."""

    async def scenario() -> tuple[Exchange, np.ndarray]:
        settings = msgspec.structs.replace(SETTINGS, on_disk=list(parts))
        world = World(1, settings=settings, shards=SHARDS, values=VALUES, synchronous=False)
        try:
            first, second = await world.start("n0", founder=True), await world.start("n1")
            assert first.exchange is not None
            assert second.exchange is not None
            first.exchange.advance(1)
            second.exchange.advance(1)
            async with asyncio.timeout(120):
                while not second.exchange.store.backed:  # noqa: ASYNC110  a store has no event
                    await asyncio.sleep(0.1)
            for step in range(1, 4):
                delta = np.random.default_rng(step).normal(size=VALUES).astype(np.float32)
                await first.exchange.push_client.push(step, step - 1, 1.0, delta)
            owned = {**second.exchange.store.owned, **first.exchange.store.owned}
            return first.exchange, np.concatenate([owned[shard].state.value for shard in range(SHARDS)])
        finally:
            world.stop()

    return run(scenario(), limit_s=600)


def test_values_are_the_same_to_the_bit_wherever_they_are_kept() -> None:
    """Three deltas of a lossy codec with momentum, in memory and in files."""
    _, in_memory = trained()
    _, on_disk = trained("residual", "log", "shards")

    assert np.any(in_memory)
    np.testing.assert_array_equal(on_disk, in_memory)


def test_what_is_in_files_does_not_count_as_memory() -> None:
    """Residual, log and shards: their files are in use, and the memory of each is none."""
    exchange, _ = trained("residual", "log", "shards")
    held, on_disk = held_memory(exchange), disk_bytes(exchange)

    assert (held.residual, held.repair_log, held.owned, held.backed) == (0, 0, 0, 0)
    assert on_disk["residual_bytes"] == 4 * VALUES
    assert on_disk["log_bytes"] == LOG_CHUNK_BYTES
    count = len(exchange.store.owned) + len(exchange.store.backed)
    assert on_disk["shards_bytes"] == 2 * 4 * VALUES // SHARDS * count > 0


@pytest.mark.parametrize("part", ["residual", "log", "shards"])
def test_each_part_is_put_on_disk_alone(part: Part) -> None:
    """The others stay in memory."""
    exchange, _ = trained(part)
    held = held_memory(exchange)

    in_memory = {"residual": held.residual, "log": held.repair_log, "shards": held.owned + held.backed}
    assert [name for name, size in in_memory.items() if not size] == [part]
    assert list(disk_bytes(exchange)) == [f"{part}_bytes"]


@pytest.mark.parametrize(
    ("part", "megabytes"),
    [("residual", "0.0"), ("log", f"{(1 + FURTHER_LOG_CHUNKS) * LOG_CHUNK_BYTES / 1e6:.1f}"), ("shards", "0.1")],
)
def test_a_full_disk_is_an_error_that_names_the_part_and_its_size(part: Part, megabytes: str) -> None:
    """Before anything is served."""

    async def scenario() -> None:
        settings = msgspec.structs.replace(SETTINGS, on_disk=[part])
        world = World(1, settings=settings, shards=SHARDS, values=VALUES, synchronous=False)
        try:
            world.member("n0").disk.full = True
            with pytest.raises(OSError, match=f"{part} of exchange.on_disk takes {megabytes} MB") as raised:
                await world.start("n0", founder=True)
            assert raised.value.errno == errno.ENOSPC
        finally:
            world.stop()

    run(scenario(), limit_s=60)
