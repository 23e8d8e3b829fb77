"""A node's part in a run of an engine, over the real overlay: what it announces, and whom it waits for."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.peers import Activity, Peer
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.engines.participation import AGAIN_S, PACE_STEPS, POLL_INTERVAL_S, SHORTEST_STEP_S, Participation
from p2pnode.training.progress import Progress
from p2pnode.training.settings import BarrierSettings, TrainingSettings
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import OverlayWorld

#: All have heard after so long what one announces.
HEARD_S = 3.0


class World(OverlayWorld):
    """Node 0 takes part in a run; the others announce what a test says."""

    part: Participation

    @classmethod
    async def of(cls, *peers: tuple[Activity, int], min_nodes: int = 1) -> World:
        world = cls(1)
        (overlay, *_) = await world.raise_swarm(1 + len(peers))
        settings = BarrierSettings(method="asp")
        waiter = BarrierWaiter(overlay, make_barrier(settings), settings, world.clock)
        training = TrainingSettings(min_nodes=min_nodes, linger_s=30.0)
        world.part = Participation(overlay, waiter, training, Progress(), world.clock)
        for number, (activity, step) in enumerate(peers, 1):
            world.nodes[number].announce(activity=activity, step=step)
        await asyncio.sleep(HEARD_S)
        return world

    def later(self, seconds: float, number: int, activity: Activity) -> None:
        """After so long the node announces this."""
        asyncio.get_running_loop().call_later(seconds, lambda: self.nodes[number].announce(activity=activity))

    def seen(self) -> Peer:
        """Node 0 as node 1 sees it."""
        return next(one for one in self.nodes[1].members() if one.node_id == self.nodes[0].node_id)

    async def finish_s(self) -> float:
        began_s = self.clock.monotonic()
        await self.part.finish()
        return self.clock.monotonic() - began_s


@pytest.mark.parametrize(("steps", "begins"), [([7], 7), ([3, 9], 9), ([1, 5, 9], 5), ([], 0)])
@run_by(run)
async def test_one_that_comes_late_begins_at_the_median_of_those_at_work(steps: list[int], begins: int) -> None:
    """Those that have finished or wait do not count; its own count never falls."""
    world = await World.of(*((Activity.TRAINING, step) for step in steps), (Activity.FINISHED, 100))
    assert await world.part.begin() == begins
    world.part.count(50, 1.0)
    assert await world.part.begin() == 50


@run_by(run)
async def test_the_step_time_is_the_median_of_the_last_steps() -> None:
    """A count that does not rise counts no time; a step of no time has the shortest, because 0 means none yet."""
    world = await World.of((Activity.TRAINING, 0))
    for seconds in (0.0, 99.0):
        world.part.count(1, seconds)
        await asyncio.sleep(HEARD_S)
        assert (world.seen().step, world.seen().step_seconds) == (1, pytest.approx(SHORTEST_STEP_S, rel=0.5))
    for step in range(2, 2 + PACE_STEPS):
        world.part.count(step, 2.0)
    world.part.count(100, 50.0)
    await asyncio.sleep(HEARD_S)
    assert (world.seen().step, world.seen().step_seconds) == (100, pytest.approx(2.0, rel=0.5))
    assert world.part.step == 100


@run_by(run)
async def test_one_that_has_finished_stays_until_nobody_is_at_work() -> None:
    """Or its time has passed; a paused node holds nobody."""
    world = await World.of((Activity.TRAINING, 0), (Activity.PAUSED, 0))
    world.later(5.0, 1, Activity.FINISHED)
    assert 5.0 <= await world.finish_s() <= 5.0 + HEARD_S
    assert world.seen().activity is Activity.FINISHED
    world.nodes[1].announce(activity=Activity.READY)
    await asyncio.sleep(HEARD_S)
    assert await world.finish_s() == pytest.approx(30.0)


@run_by(run)
async def test_one_that_begins_again_is_seen_as_finished_before() -> None:
    """So nobody takes it for one that is at work in the run before; and it begins with those that have finished that
    too, for a while."""
    world = await World.of((Activity.PAUSED, 0), min_nodes=2)
    await world.part.finish()
    began_s = world.clock.monotonic()
    world.nodes[1].announce(activity=Activity.FINISHED)
    again = asyncio.create_task(world.part.begin())
    await asyncio.sleep(AGAIN_S - POLL_INTERVAL_S)
    assert world.nodes[0].local.heartbeat.activity == Activity.FINISHED
    await asyncio.sleep(2 * POLL_INTERVAL_S)
    assert world.nodes[0].local.heartbeat.activity == Activity.READY
    await again
    assert world.clock.monotonic() - began_s == pytest.approx(3 * AGAIN_S, abs=2 * POLL_INTERVAL_S)


@run_by(run)
async def test_one_that_has_finished_does_not_wait_for_the_next_run_of_another() -> None:
    """Once a node was seen as finished, its later start is not the run that this one waits for."""
    world = await World.of((Activity.TRAINING, 0), (Activity.FINISHED, 0))
    world.later(1.0, 2, Activity.READY)
    world.later(6.0, 1, Activity.PAUSED)
    assert 6.0 <= await world.finish_s() <= 6.0 + HEARD_S


@run_by(run)
async def test_the_others_are_a_sample_or_all() -> None:
    """And a node alone is one worker."""
    world = await World.of((Activity.TRAINING, 3), (Activity.TRAINING, 4))
    steps = {world.nodes[1].node_id: 3, world.nodes[2].node_id: 4}
    assert world.part.peers(0) == steps
    assert len(world.part.peers(1)) == 1
    assert world.part.peers(1).items() <= steps.items()
    await world.part.begin()
    assert world.part.workers() == 3
    assert (await World.of()).part.workers() == 1


@run_by(run)
async def test_a_wait_that_is_cancelled_is_shown_no_more() -> None:
    """The script has gone meanwhile."""
    world = await World.of(min_nodes=2)
    beginning = asyncio.create_task(world.part.begin())
    await asyncio.sleep(1.0)
    assert world.part.waits_for_nodes
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert not world.part.waits_for_nodes
