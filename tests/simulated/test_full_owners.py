"""Two owners with more pushes than they handle at once, which each wait for the other as a backup."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.overlay.sockets import concurrency
from p2pnode.training.settings import ExchangeSettings
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.exchange_swarm import World

PLACES = 8
PUSHERS = 40
VALUES = 8


@run_by(run, limit_s=600)
async def test_owners_full_of_pushes_to_each_other_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes own all shards, each is the other's backup, and forty push at once to owners that handle eight requests
    at a time: forwards have places left, so everything is acknowledged in a few round trips. Without these places all
    pushes wait for forwards that wait for the pushes to end, until requests are given up and the backups dropped."""
    monkeypatch.setattr(concurrency, "MAX_CONCURRENT_HANDLERS", PLACES)
    settings = ExchangeSettings(codec="float32", shards=4, weight="sum", outer_lr=1.0, outer_momentum=0.0)
    world = World(3, settings=settings, shards=4, values=VALUES, synchronous=False, tenure_s=0.5)
    try:
        await world.start("n0", founder=True)
        await world.join("n1")
        await asyncio.sleep(6.0)
        pushers = []
        for number in range(2, 2 + PUSHERS):
            member = await world.start(f"n{number}")
            member.overlay.eligible = False
            world.spread(member)
            await member.exchange.join(world.members["n0"].contact)
            pushers.append(member)
        owned = [world.members[name].exchange.store.owned for name in ("n0", "n1")]
        assert all(owned)
        assert all(one.backup is not None for shards in owned for one in shards.values())
        terms = [one.term for shards in owned for one in shards.values()]
        world.training = False

        began = world.clock.monotonic()
        delta = np.ones(VALUES, np.float32)
        reports = await asyncio.gather(*(one.exchange.push(1, 0, 1.0, delta.copy()) for one in pushers))
        took_s = world.clock.monotonic() - began

        assert [(report.outstanding, report.refused) for report in reports] == [(0, {})] * PUSHERS
        assert took_s < 1.0
        assert [one.term for shards in owned for one in shards.values()] == terms
        values = {float(one.state.value[0]) for shards in owned for one in shards.values()}
        assert values == {float(PUSHERS)}
    finally:
        await world.stop()
