"""A push on its way in: parts are added while the next ones arrive, in bounds, and results come as they are final."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from p2pnode.training.encoding.frames import BadFrame
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import SIGN_OF_LIFE, Push, PushResult, piece_of
from p2pnode.training.exchange.owner import deltas
from p2pnode.training.exchange.owner.deltas import KEEP_ALIVE_INTERVAL_S, PART_S, PARTS_AT_ONCE, PushIntake
from tests.harness.builders.stores import IDS
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


class Owner:
    """Receives a shard of four values every `read_s`, and takes `accept_s` to add a part."""

    def __init__(self, read_s: float, accept_s: float, *, shards: int = 6, bad: int = -1, has_targets: bool = True):
        self.read_s, self.accept_s, self.bad = read_s, accept_s, bad
        self.push = Push(IDS["x"], 1, 1, 0, 1.0, list(range(shards)))
        self.read_at: list[float] = []
        self.parts: list[list[int]] = []
        self.adding = self.most_adding = 0
        self.added: list[int] = []
        self.intake = PushIntake(self.push, self.items(), self.accept, self.refuse, lambda _shard: has_targets)

    async def items(self) -> AsyncIterator[IncomingDelta]:
        for shard in self.push.shards:
            await asyncio.sleep(self.read_s)
            if shard == self.bad:
                raise BadFrame("torn")
            self.read_at.append(asyncio.get_running_loop().time())
            yield IncomingDelta(shard, np.ones(4, np.float32), b"", "float32")

    async def accept(self, _push: Push, items: list[IncomingDelta]) -> list[PushResult]:
        self.parts.append([item.shard for item in items])
        self.adding += 1
        self.most_adding = max(self.adding, self.most_adding)
        try:
            await asyncio.sleep(self.accept_s)
        finally:
            self.adding -= 1
        self.added += [item.shard for item in items]
        return [PushResult(item.shard, "ok") for item in items]

    def refuse(self, _push: Push, shards: list[int], _error: BadFrame) -> list[PushResult]:
        return [PushResult.refused(shard, "malformed") for shard in shards]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has two shards of four values."""
    monkeypatch.setattr(deltas, "VALUES_PER_PART", 8 * (PARTS_AT_ONCE + 1))


@run_by(run)
async def test_parts_are_added_while_the_next_ones_arrive() -> None:
    """Six shards of 1 s each, added in 1 s: 7 s for both, where one after the other takes 12 s."""
    owner, began = Owner(1.0, 1.0), asyncio.get_running_loop().time()
    results = await owner.intake.results(None)
    assert results == [PushResult(shard, "ok") for shard in range(6)]
    assert asyncio.get_running_loop().time() - began == pytest.approx(7.0, abs=0.1)
    await owner.intake.aclose()


@run_by(run)
async def test_a_part_that_fills_slowly_is_closed() -> None:
    """Shards that come one by one leave one by one; those that come at once leave in parts."""
    slow, quick = Owner(2 * PART_S, 0.0), Owner(0.0, 0.0)
    await asyncio.gather(slow.intake.results(None), quick.intake.results(None))
    assert slow.parts == [[0, 1], [2, 3], [4, 5]]
    assert quick.parts == [[0, 1], [2, 3], [4, 5]]


@run_by(run)
async def test_shards_without_a_backup_are_added_as_they_come() -> None:
    """Each by itself, and none waits for another."""
    owner = Owner(0.0, 0.0, shards=3, has_targets=False)
    assert len(await owner.intake.results(None) or ()) == 3
    assert owner.parts == [[0], [1], [2]]


@run_by(run)
async def test_no_more_is_read_than_can_be_added() -> None:
    """With two parts being added and one more received, the origin has to wait: memory is bounded."""
    owner = Owner(0.0, 100.0, shards=20)
    assert await owner.intake.results(50.0) is None
    assert owner.most_adding == PARTS_AT_ONCE
    assert len(owner.read_at) == 2 * (PARTS_AT_ONCE + 1)
    await owner.intake.aclose()
    assert owner.adding == 0


@run_by(run)
async def test_results_are_streamed_as_they_become_final() -> None:
    """The first while the last shards still arrive; between them signs of life, at most a quarter of a second apart."""
    owner, loop = Owner(1.0, 0.5, shards=4), asyncio.get_running_loop()
    assert await owner.intake.results(KEEP_ALIVE_INTERVAL_S) is None
    pieces: list[bytes] = []
    moments = [loop.time()]
    async for piece in owner.intake:
        pieces.append(piece)
        moments.append(loop.time())
    assert [piece for piece in pieces if piece != SIGN_OF_LIFE] == [
        piece_of([PushResult(shard, "ok") for shard in shards]) for shards in ([0, 1], [2, 3])
    ]
    assert max(later - now for now, later in pairwise(moments)) <= KEEP_ALIVE_INTERVAL_S + 0.01
    assert pieces[-1] != SIGN_OF_LIFE


@run_by(run)
async def test_a_torn_body_refuses_what_was_not_received() -> None:
    """What came before it is added, also where its part was not full."""
    owner = Owner(0.0, 0.1, bad=3)
    results: Any = await owner.intake.results(None)
    assert [result.status for result in results] == ["ok"] * 3 + ["refused"] * 3
    assert owner.added == [0, 1, 2]


@run_by(run)
async def test_closing_ends_the_work() -> None:
    """The origin is gone: nothing more is received or added, and an error of the stream reaches the handler."""
    owner = Owner(1.0, 10.0)
    assert await owner.intake.results(2.5) is None
    await owner.intake.aclose()
    await asyncio.sleep(30.0)
    assert (len(owner.read_at), owner.added, owner.adding) == (2, [], 0)

    async def failing() -> AsyncIterator[IncomingDelta]:
        raise ConnectionResetError("gone")
        yield

    broken = PushIntake(owner.push, failing(), owner.accept, owner.refuse, lambda _shard: True)
    with pytest.raises(ConnectionResetError):
        await broken.results(None)
