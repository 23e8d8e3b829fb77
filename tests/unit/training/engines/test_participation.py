"""A node's part in a run of an engine: what it announces, and whom it waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.training.engines.participation import AGAIN_S, PACE_STEPS, POLL_INTERVAL_S, SHORTEST_STEP_S, Participation
from p2pnode.training.progress import Progress
from p2pnode.training.settings import TrainingSettings
from tests.harness.environment.simulated import ListLog, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


class Swarm:
    """Peers that the test sets, and what was announced."""

    def __init__(self, *peers: Any) -> None:
        self.peers = list(peers)
        self.told: list[dict[str, Any]] = []
        self.worker_count = 0.0

    def members(self) -> list[Any]:
        return self.peers

    all_members = members

    def sample(self, count: int) -> list[Any]:
        return self.peers[:count]

    def workers(self) -> float:
        return self.worker_count

    def announce(self, **fields: Any) -> None:
        self.told.append(fields)


def peer(activity: Activity, step: int = 0, name: bytes = b"p") -> Any:
    return SimpleNamespace(
        node_id=name, activity=activity, step=step, is_worker=lambda _now: activity is Activity.TRAINING
    )


def part_of(swarm: Swarm, log: ListLog | None = None, **settings: Any) -> tuple[Participation, Progress, list[Any]]:
    waits: list[Any] = []

    async def wait(count: int, seconds: float) -> None:
        waits.append((count, seconds))

    waiter: Any = SimpleNamespace(begin=lambda: waits.append("begin"), wait=wait)
    progress = Progress()
    training = TrainingSettings(**settings)
    return Participation(swarm, waiter, training, progress, VirtualClock(), log), progress, waits  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "begins"), [([7], 7), ([3, 9], 9), ([1, 5, 9], 5), ([], 0)])
@run_by(run)
async def test_one_that_comes_late_begins_at_the_median_of_those_at_work(steps: list[int], begins: int) -> None:
    """Those that have finished or wait do not count; its own count never falls."""
    peers = [peer(Activity.TRAINING, step) for step in steps]
    part, progress, _ = part_of(Swarm(*peers, peer(Activity.FINISHED, 100)), min_nodes=1)
    assert await part.begin() == begins
    progress.step = 50
    assert await part.begin() == 50


@run_by(run)
async def test_the_step_time_is_the_median_of_the_last_steps() -> None:
    """A count that does not rise counts no time; a step of no time has the shortest, because 0 means none yet."""
    swarm = Swarm()
    part, progress, waits = part_of(swarm, min_nodes=1)
    part.count(1, 0.0)
    assert (progress.step, progress.step_seconds) == (1, SHORTEST_STEP_S)
    part.count(1, 99.0)
    assert progress.step_seconds == SHORTEST_STEP_S
    for step in range(2, 2 + PACE_STEPS):
        part.count(step, 2.0)
    part.count(100, 50.0)
    assert swarm.told[-1] == {"step": 100, "step_seconds": 2.0}
    await part.wait(100)
    assert waits == [(100, 2.0)]
    assert part.step == 100


@run_by(run)
async def test_one_that_has_finished_stays_until_nobody_is_at_work() -> None:
    """Or its time has passed; a paused node holds nobody."""
    loop, swarm = asyncio.get_running_loop(), Swarm(peer(Activity.TRAINING), peer(Activity.PAUSED))
    part, _, _ = part_of(swarm, min_nodes=1, linger_s=30.0)
    loop.call_later(5.0, lambda: swarm.peers.pop(0))
    began_s = loop.time()
    await part.finish()
    assert loop.time() - began_s == pytest.approx(5.0, abs=2 * POLL_INTERVAL_S)
    assert swarm.told[-1] == {"activity": Activity.FINISHED}
    swarm.peers = [peer(Activity.READY)]
    began_s = loop.time()
    await part.finish()
    assert loop.time() - began_s == pytest.approx(30.0)


@run_by(run)
async def test_one_that_begins_again_is_seen_as_finished_before() -> None:
    """So nobody takes it for one that is at work in the run before; and it begins with those that have finished that
    too, for a while."""
    loop, swarm = asyncio.get_running_loop(), Swarm()
    part, _, _ = part_of(swarm, min_nodes=2)
    await part.finish()
    began_s = loop.time()
    swarm.peers = [peer(Activity.FINISHED)]
    again = asyncio.create_task(part.begin())
    await asyncio.sleep(AGAIN_S - POLL_INTERVAL_S)
    assert swarm.told[-1] == {"activity": Activity.FINISHED}
    await asyncio.sleep(2 * POLL_INTERVAL_S)
    assert swarm.told[-1]["activity"] is Activity.READY
    await again
    assert loop.time() - began_s == pytest.approx(3 * AGAIN_S, abs=2 * POLL_INTERVAL_S)


@run_by(run)
async def test_one_that_has_finished_does_not_wait_for_the_next_run_of_another() -> None:
    """Once a node was seen as finished, its later start is not the run that this one waits for."""
    loop = asyncio.get_running_loop()
    swarm = Swarm(peer(Activity.TRAINING, 0, b"a"), peer(Activity.FINISHED, 0, b"b"))
    part, _, _ = part_of(swarm, min_nodes=1, linger_s=30.0)

    def begins_again() -> None:
        swarm.peers = [peer(Activity.TRAINING, 0, b"a"), peer(Activity.READY, 0, b"b")]

    loop.call_later(1.0, begins_again)
    loop.call_later(2.0, lambda: swarm.peers.pop(0))
    began_s = loop.time()
    await part.finish()
    assert loop.time() - began_s == pytest.approx(2.0, abs=2 * POLL_INTERVAL_S)


@run_by(run)
async def test_the_others_are_a_sample_or_all() -> None:
    """And a node alone is one worker."""
    swarm = Swarm(peer(Activity.TRAINING, 3, b"a"), peer(Activity.TRAINING, 4, b"b"))
    part, _, _ = part_of(swarm, min_nodes=1)
    assert part.peers(0) == {b"a": 3, b"b": 4}
    assert part.peers(1) == {b"a": 3}
    assert part.workers() == 1
    swarm.worker_count = 2.6
    assert part.workers() == 3


@run_by(run)
async def test_a_wait_that_is_cancelled_is_shown_no_more() -> None:
    """The script has gone meanwhile."""
    part, _, _ = part_of(Swarm(), min_nodes=2)
    beginning = asyncio.create_task(part.begin())
    await asyncio.sleep(1.0)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert not part.waits_for_nodes
