"""The loop of the peer-to-peer engine: a store in memory, and many nodes on a simulated network and virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.training.engines.program import Context, Program
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.peer_engine_swarm import PeerWorld


class Counting(Program):
    """Every step adds 1 to one of four keys, and to a key of all."""

    reducer = "add"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.read: list[tuple[int, Any]] = []

    def schedule(self, ctx: Context) -> list[str]:
        return ["all"]

    def push(self, ctx: Context, params: Any) -> list[tuple[str, int]]:
        self.read.append((ctx.step, params[0][1] or 0))
        return [("all", 1), (f"part {ctx.rng.randrange(4)}", 1)]

    def stop(self, ctx: Context) -> bool:
        return ctx.step >= self.steps


async def all_of(world: PeerWorld) -> list[int]:
    return await asyncio.gather(*world.runs.values())


async def value_of(world: PeerWorld, key: str) -> Any:
    found = await world.store.get(key)
    assert found is not None
    return found.value


@run_by(run)
async def test_bulk_synchronous_reads_have_whole_steps() -> None:
    """Under bsp a node reads all updates of the steps before its own, and none of later ones, whatever its pace."""
    world = PeerWorld(6, "bsp", min_nodes=4)
    programs = [Counting(6) for _ in range(4)]
    for number, program in enumerate(programs):
        await world.start(number, program, step_s=0.02 * 4**number)
    await all_of(world)
    for program in programs:
        assert program.read == [(step, 4 * step) for step in range(6)]


def test_asynchronous_nodes_do_not_wait() -> None:
    """Under asp a fast node is far ahead of a slow one; under ssp by the staleness at most, and one step."""

    async def lead(method: str) -> int:
        world = PeerWorld(7, method, min_nodes=2, staleness=3)
        fast, slow = await world.start(0, Counting(60), 0.01), await world.start(1, Counting(60), 0.5)
        largest = 0
        while fast.ctx.step < 60:
            await asyncio.sleep(0.05)
            largest = max(largest, fast.ctx.step - slow.ctx.step)
        await all_of(world)
        return largest

    assert run(lead("asp")) > 20
    assert run(lead("ssp")) <= 4


def test_a_barrier_of_the_program_replaces_that_of_the_settings() -> None:
    """A program's own barrier is asked until it passes, with the steps of its peers; the predicates of training do."""
    from p2pnode.training.barriers.predicates import ssp

    class Own(Counting):
        asked = 0

        def barrier(self, ctx: Context) -> bool:
            self.asked += 1
            return ssp(ctx.step, list(ctx.peers().values()), 1)

    async def play() -> int:
        world = PeerWorld(8, "asp", min_nodes=2)
        fast, slow = await world.start(0, Own(20), 0.01), await world.start(1, Own(20), 0.2)
        largest = 0
        while fast.ctx.step < 20:
            await asyncio.sleep(0.02)
            largest = max(largest, fast.ctx.step - slow.ctx.step)
        await all_of(world)
        return largest

    assert 1 <= run(play()) <= 2


def test_nobody_waits_for_a_node_between_two_runs() -> None:
    """A node whose program has ended or failed is no worker, and a bulk-synchronous barrier does not wait for it."""

    async def play() -> float:
        world = PeerWorld(12, "bsp", min_nodes=2)
        await world.start(0, Counting(12))
        short = await world.start(1, Counting(3))
        began = world.clock.monotonic()
        assert await all_of(world) == [12, 3]
        assert short.worker_num() == 1
        return world.clock.monotonic() - began

    assert run(play()) < 10.0


@pytest.mark.parametrize("method", ["bsp", "asp"])
@run_by(run)
async def test_a_second_run_begins_at_once_and_with_all(method: str) -> None:
    """Nodes that end a run one after the other neither wait for one that has begun the next, nor run it alone."""
    world = PeerWorld(14, method, min_nodes=3)
    programs = [Counting(4) for _ in range(3)]
    for number, program in enumerate(programs):
        await world.start(number, program, 0.1 * (number + 1))
    await all_of(world)
    began = world.clock.monotonic()

    async def again(number: int) -> int:
        await world.peers[number].run()  # a run without a step
        programs[number].steps += 4
        return await world.peers[number].run()

    assert await asyncio.gather(*map(again, range(3))) == [8] * 3
    assert world.clock.monotonic() - began < 15.0
    assert await value_of(world, "all") == 24
    if method == "bsp":
        assert [[read for step, read in one.read if step >= 4] for one in programs] == [[12, 15, 18, 21]] * 3


def test_a_late_node_never_begins_between_reading_and_updating() -> None:
    """Under bsp a count that is odd is that of a step which the others have read for: it begins with the next one."""

    async def play() -> list[int]:
        world = PeerWorld(15, "bsp")
        node = await world.start(0, Counting(4))
        await all_of(world)
        found = []
        for count in (8, 9):
            node.progress.step = count
            await node.run()
            found.append(node.ctx.step)
        return found

    assert run(play()) == [4, 5]
