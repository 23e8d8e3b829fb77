"""Nodes that start again and again: the sets of applied deltas stay bounded, and nothing is added twice."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Push
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.state import ShardState
from tests.harness.histories.conservation import play
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exchange_story import BOUND_S, ONES, VALUES, simulate
from tests.harness.swarms.exchange_swarm import World

STARTS = 24
LISTED = 8


async def pushed_again(world: World, identity: DeltaId, *, repair: bool) -> str:
    """What the owner of shard 0 answers to a delta of this identity that comes now."""
    deltas = world.owner().exchange.deltas
    push = Push(*identity, identity.step, 1.0, [0])
    item = IncomingDelta(0, ONES[: VALUES // 2], ONES[: VALUES // 2].tobytes(), "float32", repair=repair)
    (result,) = await deltas.accept(push, [item])
    return f"{result.status} {result.reason}".strip()


def copy_of(world: World) -> ShardState:
    state = world.backup().exchange.store.backed[0].state
    assert state is not None
    return state


@played_by(simulate, nodes=5)
async def test_a_node_that_starts_again_and_again_leaves_a_bounded_set(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 starts the owner lists the last few, and so does its backup, which takes over with what it knows. A delta
    of the first start that comes again is refused, as a push and as a repair."""
    monkeypatch.setattr(Applied, "MAX_STARTS", LISTED)
    node = world.members["n4"].contact.node_id
    for step in range(1, STARTS + 1):
        await world.kill("n4")
        await asyncio.sleep(0.5)
        await (await world.join("n4")).push(step)
        await asyncio.sleep(1.5)
    expected = STARTS * (STARTS + 1) / 2
    first = DeltaId(node, 2, 1)
    for state in (world.owner().exchange.store.owned[0].state, copy_of(world)):
        assert state.version == STARTS
        assert len(state.applied.rows()) == LISTED
        assert not state.knows(first)
        assert state.applied.may_have_forgotten(first)
    assert [await pushed_again(world, first, repair=repair) for repair in (False, True)] == ["refused late"] * 2

    assert world.value() == [expected, expected]

    former = world.owner()
    await world.kill(former.name)
    await world.until(
        lambda: any(0 in one.exchange.store.owned for one in world.running()),
        within_s=2 * BOUND_S,
        what="the backup takes over",
    )
    assert await pushed_again(world, first, repair=True) in ("refused late", "retry no_backup_yet")
    assert world.value()[0] == expected


def test_histories_whose_sets_forget_lose_nothing_and_add_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories with restarts, splits, kills and a switch off, in which a shard lists four starts of nodes: every
    state is the sum of its deltas."""
    monkeypatch.setattr(Applied, "MAX_STARTS", 4)
    seeds = (1020, 1032)
    print(f"seeds {seeds}")
    tallies = [play(seed, 8) for seed in seeds]

    assert sum(tally.forgotten for tally in tallies) >= 20
    assert {"restart", "part", "switched off"} <= {what for tally in tallies for what in tally.faults}
