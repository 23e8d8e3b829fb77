"""Nodes that start again and again: the sets of applied deltas stay bounded, and nothing is added twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.harness.histories.conservation import play
from tests.harness.swarms.exchange_swarm import World
from tests.simulated.test_exchange_faults import (
    BOUND_S,
    ONES,
    VALUES,
    backup,
    exchange_of,
    join,
    owner,
    push,
    simulate,
    until,
    value,
)
from training.exchange.messages import Push
from training.exchange.owner import identities
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.store.records import BufferedDelta
from training.shards.applied import DeltaId
from training.shards.state import ShardState

STARTS = 24


def forget_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """In these histories minutes are seconds."""
    monkeypatch.setattr(identities, "LOOK_INTERVAL_S", 1.0)
    monkeypatch.setattr(identities, "LEAST_SILENT_S", seconds)
    monkeypatch.setattr(identities, "SILENT_LOGS", 0.0)


async def pushed_again(world: World, identity: DeltaId, *, repair: bool) -> str:
    """What the owner of shard 0 answers to a delta of this identity that comes now."""
    deltas = exchange_of(owner(world)).deltas
    push = Push(*identity, identity.step, 1.0, [0])
    item = IncomingDelta(0, ONES[: VALUES // 2], ONES[: VALUES // 2].tobytes(), "float32", repair=repair)
    (result,) = await deltas.accept(push, [item])
    return f"{result.status} {result.reason}".strip()


def copy_of(world: World) -> ShardState:
    state = exchange_of(backup(world)).store.backed[0].state
    assert state is not None
    return state


def test_a_node_that_starts_again_and_again_leaves_a_bounded_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 starts the owner lists the last few, and so does its backup, which takes over with what it knows. A delta
    of the first start that comes again is refused, as a push and as a repair, and its owner teaches a backup anew that
    cannot tell it from an unknown one."""
    forget_after(monkeypatch, 5.0)

    async def scenario(world: World) -> None:
        node = world.members["n4"].contact.node_id
        for step in range(1, STARTS + 1):
            world.kill("n4")
            await asyncio.sleep(0.5)
            await push(await join(world, "n4"), step)
            await asyncio.sleep(1.5)
        expected = STARTS * (STARTS + 1) / 2
        first = DeltaId(node, 2, 1)
        for state in (exchange_of(owner(world)).store.owned[0].state, copy_of(world)):
            assert state.applied.count() == STARTS
            assert state.applied.row_count <= 10
            assert not state.knows(first)
            assert state.may_have_forgotten(first)
        assert [await pushed_again(world, first, repair=repair) for repair in (False, True)] == ["refused late"] * 2

        item = BufferedDelta(first, 1.0, np.ones(VALUES // 2, np.float32), synchronous=False)
        term, sender = exchange_of(owner(world)).store.owned[0].term, owner(world).contact.node_id
        status, _ = exchange_of(backup(world)).store.accept_forward(0, term, item, 0, sender)
        assert status == "unknown"
        assert value(world) == [expected, expected]

        former = owner(world)
        world.kill(former.name)
        await until(
            world,
            lambda: any(0 in exchange_of(one).store.owned for one in world.running()),
            within_s=2 * BOUND_S,
            what="the backup takes over",
        )
        assert await pushed_again(world, first, repair=True) in ("refused late", "retry no_backup_yet")
        assert value(world)[0] == expected

    simulate(scenario, nodes=5)


def test_histories_whose_sets_forget_lose_nothing_and_add_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories with restarts, splits, kills and a switch off, in which a start of a node that was silent for 8 s is
    forgotten: every state is the sum of its deltas."""
    forget_after(monkeypatch, 8.0)
    seeds = (1005, 1020)
    print(f"seeds {seeds}")
    tallies = [play(seed, 8) for seed in seeds]

    assert sum(tally.forgotten for tally in tallies) >= 20
    assert {"restart", "part", "switched off"} <= {what for tally in tallies for what in tally.faults}
