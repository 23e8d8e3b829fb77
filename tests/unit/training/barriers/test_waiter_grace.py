"""`barrier.grace`: a node whose barrier passes waits a little for those that train the same step."""

from __future__ import annotations

import asyncio

import pytest

from overlay.peers import Activity
from tests.harness.stubs.barrier_peers import MINE, QUERY_S, FakeOverlay, later, node, play
from training.barriers.grace import FIRST, GraceCredit
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

        assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.2, abs=0.06)
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

        assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.3, abs=2 * QUERY_S)
        assert seen == [(node(2), MINE - 1)]
        assert gate.is_abreast

        overlay.add(3, MINE - 1)
        assert await gate.wait(MINE, 0.5, has_grace=True) == pytest.approx(0.15, abs=2 * QUERY_S)
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

        assert await gate.wait(MINE, 1.0, has_grace=True) <= QUERY_S
        assert not gate.is_abreast

    play(scenario, "pssp", grace=0.3)


def test_a_dead_peer_has_no_grace() -> None:
    """Who dies is not waited for to the end."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        later(0.1, lambda: overlay.dead.update({node(1): None}))
        assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.1, abs=0.06)

    play(scenario, "pssp", grace=0.3)


def test_a_peer_that_stops_costs_one_grace() -> None:
    """Whether it answers or not, and however long its answer is waited for: of the steps that follow none waits for it.
    One that is heard again is waited for again."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        for is_silent in (False, True):
            gate.credit = GraceCredit()
            overlay.add(1, MINE - 1)
            if is_silent:
                overlay.silent[node(1)] = None
                overlay.silence_s = 2.0
                await asyncio.sleep(1.0)
            assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.3, abs=0.05)
            for step in range(1, 4):
                await asyncio.sleep(1.0)
                assert await gate.wait(MINE + step, 1.0, has_grace=True) <= QUERY_S, (is_silent, step)
                assert not gate.is_abreast

        asked = len(overlay.asked)
        overlay.silent.clear()
        overlay.incarnations[node(1)] += 1
        overlay.steps[node(1)] = MINE + 3
        overlay.hear(node(1), MINE + 3)
        later(0.1, lambda: overlay.steps.update({node(1): MINE + 4}))
        assert await gate.wait(MINE + 4, 1.0, has_grace=True) == pytest.approx(0.1, abs=0.06)
        assert gate.is_abreast
        assert len(overlay.asked) > asked

    play(scenario, "pssp", grace=0.3)


def test_a_slower_node_has_no_grace() -> None:
    """Nor is it asked, whatever step it trains; the nodes of equal speed are waited for beside it."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1, step_seconds=1.3)
        overlay.add(2, MINE - 1, step_seconds=1.1)
        later(0.1, lambda: overlay.steps.update({node(2): MINE}))

        assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.1, abs=0.06)
        assert {number for asked in overlay.asked for number in asked} == {2}
        assert gate.is_abreast

    play(scenario, "pssp", grace=0.3)


def test_where_it_never_pays_nobody_waits() -> None:
    """Peers that are always late by more than the grace cost a node some waits in a row, and then no more; nor are they
    asked. Where they come in time it goes on waiting."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        overlay.add(2, 0)
        for is_late, least, most in ((True, FIRST, FIRST + 0.4), (False, 5.0, 7.0)):
            gate.credit = GraceCredit()
            waited = 0.0
            for step in range(MINE, MINE + 40):
                overlay.steps |= {node(1): step - 1, node(2): step - 1}
                overlay.hear(node(1), step - 1)
                overlay.hear(node(2), step - 1)
                if not is_late:
                    later(0.12, lambda step=step: overlay.steps.update({node(1): step, node(2): step}))  # type: ignore[misc]
                waited += await gate.wait(step, 1.0, has_grace=True)
                await asyncio.sleep(1.0)
            assert least <= waited <= most, is_late
            asked = len(overlay.asked)
            await gate.wait(MINE + 40, 1.0, has_grace=True)
            assert (len(overlay.asked) == asked) is is_late
            for number in (1, 2):
                overlay.incarnations[node(number)] += 1

    play(scenario, "pssp", grace=0.3)


def test_grace_keeps_its_sample() -> None:
    """With a fresh one at each poll a large swarm would always have somebody to wait for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.add(2, MINE - 1)
        overlay.samples = [[1], [1], [2]]
        later(0.1, lambda: overlay.steps.update({node(1): MINE}))

        assert await gate.wait(MINE, 1.0, has_grace=True) == pytest.approx(0.1, abs=0.06)
        assert len(overlay.draws) == 2

    play(scenario, "pssp", grace=0.3)


@pytest.mark.parametrize(
    ("method", "has_grace", "grace"),
    [("asp", True, 0.3), ("bsp", True, 0.3), ("pssp", False, 0.3), ("pssp", True, 0.0)],
)
def test_without_grace_nobody_is_waited_for(method: BarrierMethod, has_grace: bool, grace: float) -> None:
    """Under asp and bsp, beside the next step's training, and where it is off; nor is the node abreast, as before."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE if method == "bsp" else MINE - 1)
        gate.is_abreast = True

        assert await gate.wait(MINE, 1.0, has_grace=has_grace) == 0.0
        assert gate.is_abreast is False

    play(scenario, method, grace=grace)
