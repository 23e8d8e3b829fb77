"""A codec that is one class and one entry of the table trains a swarm, as docs/architecture.md describes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.training.encoding.arithmetic import Arithmetic, Vector
from p2pnode.training.encoding.table import CODECS, NAMES, Codec
from p2pnode.training.settings import ExchangeSettings
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import World

SHARDS, SIZE, STEPS = 4, 300, 8


class Float16(Arithmetic):
    """IEEE half precision."""

    decodings = 0

    def pack(self, values: Vector) -> bytes:
        return values.astype("<f2").tobytes()

    def unpack(self, view: memoryview, into: Vector) -> None:
        Float16.decodings += 1
        into[:] = np.frombuffer(view, dtype="<f2")


def test_two_nodes_train_with_a_new_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas are pushed in it, changes are pulled in it, and both nodes' model is the sum of the deltas."""
    codec = Codec("float16", 200, f"{__name__}:Float16", bits=16)
    monkeypatch.setitem(CODECS, codec.name, codec)
    monkeypatch.setitem(NAMES, codec.number, codec.name)
    settings = ExchangeSettings(codec=codec.name, shards=SHARDS, weight="sum", outer_lr=1.0, outer_momentum=0.0)
    random = np.random.default_rng(3)
    deltas = random.standard_normal((STEPS, 2, SHARDS * SIZE), dtype=np.float32)
    expected = deltas.sum(axis=(0, 1))
    followed, found = list[int](), list[Vector]()

    async def main() -> None:
        world = World(3, settings=settings, shards=SHARDS, values=SHARDS * SIZE, synchronous=False)
        first, second = await world.start("n0", founder=True), await world.start("n1")
        members = [member.exchange for member in (first, second) if member.exchange is not None]
        await members[1].join(first.contact)
        await asyncio.sleep(6.0)
        for step in range(1, STEPS + 1):
            for exchange, delta in zip(members, deltas[step - 1], strict=True):
                assert (await exchange.push(step, step - 1, 1.0, delta)).refused == {}
                await exchange.pull(step)
        await asyncio.sleep(6.0)
        for exchange in members:
            assert (await exchange.pull(STEPS)).missing == []
            followed.append(exchange.counters.shards_followed)
            found.append(exchange.replica.vector.copy())
        await world.stop()

    VirtualLoop().run(main(), limit_s=900)

    for values in found:
        np.testing.assert_allclose(values, expected, rtol=0, atol=0.05)
    assert max(followed) >= SHARDS
    assert Float16.decodings
