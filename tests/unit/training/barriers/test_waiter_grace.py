"""`barrier.grace`: a node whose barrier passes waits a little for those that train the same step."""

from __future__ import annotations

import asyncio

import pytest

from overlay.peers import Activity
from tests.harness.stubs.barrier_peers import MINE, QUERY_S, FakeOverlay, later, node, play
from training.barriers.waiter import BarrierWaiter
from training.settings import BarrierMethod


def test_with_grace_a_node_waits_for_those_that_train_the_same_step() -> None:
    """It goes on when the last of them is through, is abreast then, and asks nobody who has completed the step."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE)
        overlay.add(2, MINE - 1)
        overlay.add(3, MINE - 1)
        later(0.1, lambda: overlay.steps.update({node(2): MINE}))
        later(0.2, lambda: overlay.steps.update({node(3): MINE}))

        assert await gate.wait(MINE, 1.0) == pytest.approx(0.2, abs=0.06)
        assert gate.is_abreast
        assert gate.waiting is None
        assert {number for asked in overlay.asked for number in asked} == {2, 3}

    play(scenario, "pssp", grace=0.3)


def test_grace_ends() -> None:
    """After its share of the node's own step time, whoever is not through; the status says meanwhile for whom it
    waits. Half of the sample is abreast, and then less."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE)
        overlay.add(2, MINE - 1)
        seen: list[object] = []
        later(0.1, lambda: seen.append(gate.waiting and (gate.waiting.slowest, gate.waiting.its_step)))

        assert await gate.wait(MINE, 1.0) == pytest.approx(0.3, abs=2 * QUERY_S)
        assert seen == [(node(2), MINE - 1)]
        assert gate.is_abreast

        overlay.add(3, MINE - 1)
        assert await gate.wait(MINE, 0.5) == pytest.approx(0.15, abs=2 * QUERY_S)
        assert not gate.is_abreast

    play(scenario, "pssp", grace=0.3)


@pytest.mark.parametrize(
    ("step", "activity", "known"),
    [
        (MINE - 2, Activity.TRAINING, MINE - 2),  # slower
        (MINE + 1, Activity.TRAINING, MINE - 1),  # ahead
        (MINE - 1, Activity.PAUSED, MINE - 1),
        (MINE - 1, Activity.STALLED, MINE - 1),
    ],
)
def test_grace_is_for_nobody_else(step: int, activity: Activity, known: int) -> None:
    """Neither a slower node, nor one ahead, nor one that does not train: at most one query is waited for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, step, known=known, activity=activity)

        assert await gate.wait(MINE, 1.0) <= QUERY_S
        assert not gate.is_abreast

    play(scenario, "pssp", grace=0.3)


def test_a_silent_or_dead_peer_has_no_grace() -> None:
    """Who does not answer leaves the sample, and who dies is not waited for to the end."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.silent[node(1)] = None
        await asyncio.sleep(1.0)
        assert await gate.wait(MINE, 1.0) <= QUERY_S
        overlay.silent.clear()
        later(0.1, lambda: overlay.dead.update({node(1): None}))
        assert await gate.wait(MINE, 1.0) == pytest.approx(0.1, abs=0.06)

    play(scenario, "pssp", grace=0.3)


def test_grace_keeps_its_sample() -> None:
    """With a fresh one at each poll a large swarm would always have somebody to wait for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.add(2, MINE - 1)
        overlay.samples = [[1], [1], [2]]
        later(0.1, lambda: overlay.steps.update({node(1): MINE}))

        assert await gate.wait(MINE, 1.0) == pytest.approx(0.1, abs=0.06)
        assert len(overlay.draws) == 2

    play(scenario, "pssp", grace=0.3)


@pytest.mark.parametrize(
    ("method", "overlaps", "grace"), [("asp", False, 0.3), ("pssp", True, 0.3), ("pssp", False, 0.0)]
)
def test_without_grace_nobody_is_waited_for(method: BarrierMethod, overlaps: bool, grace: float) -> None:
    """Under asp, beside the next step's training, and by default; nor is the node abreast, which it was before."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        gate.is_abreast = True

        assert await gate.wait(MINE, 1.0, overlaps=overlaps) == 0.0
        assert gate.is_abreast is False

    play(scenario, method, grace=grace)
