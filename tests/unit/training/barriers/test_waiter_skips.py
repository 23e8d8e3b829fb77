"""Whom a node at a barrier does not wait for, or not for long: the silent, the dead, the idle and the stalled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from p2pnode.overlay.peers import STALL_FLOOR_S, STALL_STEPS, Activity
from p2pnode.training.barriers.waiter import LONGEST_UNPROVEN_S, BarrierWaiter, longest_idle_s
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.stubs.barrier_peers import MINE, QUERY_S, SLOW_S, FakeOverlay, later, node, play

# -- peers that do not answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_silent_peer_leaves_a_sampled_barrier(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A peer that counts as alive but does not answer leaves the sample."""
    overlay.add(1, 0)
    overlay.add(2, MINE)
    overlay.silent[node(1)] = None
    await asyncio.sleep(0.1)
    assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)


@played_by(play)
async def test_a_silent_peer_does_not_excuse_one_that_answers(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A peer that answers with too low a step blocks a sampled barrier, even if the others do not answer."""
    overlay.add(1, 0)
    overlay.add(2, MINE - 1)
    overlay.silent[node(1)] = None
    await asyncio.sleep(0.1)
    later(2.0, lambda: overlay.steps.update({node(2): MINE}))
    assert await gate.wait(MINE, 1.0) >= 2.0


@pytest.mark.parametrize("method", ["bsp", "ssp"])
@played_by(play, Fixture("method"))
async def test_two_that_do_not_hear_each_other_wait_no_longer_than_any_peer_may_be_idle(
    overlay: FakeOverlay, gate: BarrierWaiter
) -> None:
    """Others reach both, so that neither is declared dead: they would wait for each other for ever."""
    overlay.add(1, MINE - 9, step_seconds=1.0)
    overlay.add(2, MINE)
    overlay.silent[node(1)] = None
    assert STALL_FLOOR_S - 1.0 <= await gate.wait(MINE, 1.0) <= STALL_FLOOR_S + 1.0
    assert await gate.wait(MINE, 1.0) < 1.0
    del overlay.silent[node(1)]
    overlay.hear(node(1), MINE - 8)
    assert await gate.wait(MINE, 1.0) > 5.0


@pytest.mark.parametrize("method", ["bsp", "ssp"])
@played_by(play, Fixture("method"))
async def test_a_silent_peer_holds_a_complete_barrier_until_it_is_dead(
    overlay: FakeOverlay, gate: BarrierWaiter
) -> None:
    """bsp and ssp wait for every peer until the failure detector reports it dead, and not one poll longer."""
    overlay.add(1, 0)
    overlay.add(2, MINE)
    overlay.silent[node(1)] = None
    later(5.0, lambda: overlay.dead.update({node(1): None}))
    waited = await gate.wait(MINE, 1.0)
    assert 5.0 <= waited <= 5.0 + 0.05 + 2 * QUERY_S


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_peer_that_dies_while_asked_holds_nobody(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Death counts at the moment of decision, not at that of the draw."""
    overlay.add(1, 0)
    later(QUERY_S / 2, lambda: overlay.dead.update({node(1): None}))
    assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)


@played_by(play)
async def test_an_answer_in_the_same_instant_is_an_answer(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """On a fast network an answer may carry the very time of the question."""
    overlay.add(1, MINE - 1)

    async def at_once(node_ids: Sequence[bytes]) -> None:
        overlay.hear(node_ids[0], overlay.steps[node_ids[0]])

    overlay.query_steps = at_once  # type: ignore[method-assign]
    later(0.98, lambda: overlay.steps.update({node(1): MINE}))
    assert await gate.wait(MINE, 1.0) == pytest.approx(1.0)


# -- peers that count -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activity", [Activity.JOINING, Activity.PAUSED, Activity.STALLED, Activity.FINISHED, Activity.LEAVING]
)
@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_who_does_not_train_is_not_waited_for(
    overlay: FakeOverlay, gate: BarrierWaiter, *, activity: Activity
) -> None:
    """Paused, stalled, finished, leaving and joining nodes block no node, sampled or not."""
    overlay.add(1, 0, activity=activity)
    assert await gate.wait(MINE, 1.0) <= QUERY_S


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_ready_node_is_waited_for(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Its first step is waited for like any other: nodes that start together stay together."""
    overlay.add(1, 0, activity=Activity.READY)

    def begin() -> None:
        overlay.activities[node(1)] = Activity.TRAINING

    later(1.0, begin)
    later(4.0, lambda: overlay.steps.update({node(1): 5}))
    waited = await gate.wait(5, 1.0)
    assert 4.0 <= waited <= 4.2


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_ready_node_that_never_begins_holds_nobody_for_long(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Ready without a step for as long as a stall is allowed: after that it is skipped."""
    overlay.add(1, 0, activity=Activity.READY)
    waited = await gate.wait(5, 1.0)
    assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1
    assert await gate.wait(6, 1.0) <= QUERY_S


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_node_long_ready_is_about_to_begin_when_we_begin(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """It waited an hour for the last one, as this node did; from this node's own beginning it has as long as a stall is
    allowed."""
    overlay.add(1, 0, activity=Activity.READY)
    await asyncio.sleep(60.0)
    assert await gate.wait(1, 1.0) <= 2 * QUERY_S  # as if this node had begun long ago
    gate.begin()
    later(4.0, lambda: overlay.steps.update({node(1): 1}))
    waited = await gate.wait(1, 1.0)
    assert 4.0 <= waited <= 4.2


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_first_step_that_takes_minutes_is_waited_for(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A node that began with us compiles for three minutes: no barrier lets us run ahead, until it is announced as
    stalled."""
    gate.begin()
    for number in (1, 2):
        overlay.add(number, 0, step_seconds=0.0)
    later(180.0, lambda: overlay.steps.update({node(1): MINE}))
    later(200.0, lambda: overlay.activities.update({node(2): Activity.STALLED}))
    assert 200.0 <= await gate.wait(MINE, SLOW_S) <= 200.0 + SLOW_S / 10


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_joiner_that_compiles_holds_nobody_up_for_long(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """It began when we had trained for a minute: in its first step it counts for as long as a stall is allowed."""
    gate.begin()
    await asyncio.sleep(60.0)
    overlay.add(1, MINE - 9, step_seconds=0.0)
    waited = await gate.wait(MINE, 1.0)
    assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_peer_without_progress_is_skipped_until_it_moves(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A peer that answers but makes no progress is not waited for after max(10 s, 4 steps)."""
    overlay.add(1, MINE - 9)
    waited = await gate.wait(MINE, 1.0)
    assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1
    overlay.steps[node(1)] = MINE - 8
    overlay.hear(node(1), MINE - 8)
    later(2.0, lambda: overlay.steps.update({node(1): MINE}))
    assert await gate.wait(MINE, 1.0) >= 2.0


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_what_a_peer_announces_of_its_steps_does_not_hold_the_others_up(
    overlay: FakeOverlay, gate: BarrierWaiter
) -> None:
    """One member of five announces an hour for a step, and never moves: after ten seconds it is waited for no more."""
    gate.begin()
    overlay.add(1, MINE - 9, step_seconds=3600.0)
    for number in (2, 3, 4):
        overlay.add(number, MINE, step_seconds=1.0)
    await asyncio.sleep(9.5)
    for number in (2, 3, 4):
        overlay.hear(node(number), MINE)  # they wait for it too
    waited = await gate.wait(MINE, 1.0)
    assert 0.4 <= waited <= 0.7
    await asyncio.sleep(20.0)
    assert await gate.wait(MINE, 1.0) <= 2 * QUERY_S


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_first_step_that_never_ends_holds_the_others_up_once(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """One member of five stays in step 0. The others have ended their first steps after twenty seconds: it is waited
    for as long as four of those, and no longer at the next step."""
    gate.begin()
    for number in (1, 2, 3, 4):
        overlay.add(number, 0, step_seconds=0.0)
    await asyncio.sleep(20.0)
    for number in (2, 3, 4):
        overlay.step_seconds[node(number)] = 1.0
        overlay.steps[node(number)] = MINE
        overlay.hear(node(number), MINE)
    waited = await gate.wait(MINE, SLOW_S)
    assert 55.0 <= waited <= 65.0
    assert await gate.wait(MINE, SLOW_S) <= 2 * QUERY_S


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_a_slow_node_among_slow_ones_is_waited_for(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Where the others take half a minute for a step, a step of a minute and a half is one."""
    gate.begin()
    overlay.add(1, MINE - 1, step_seconds=90.0)
    for number in (2, 3):
        overlay.add(number, MINE, step_seconds=30.0)
    later(90.0, lambda: overlay.steps.update({node(1): MINE}))
    assert 90.0 <= await gate.wait(MINE, 30.0) <= 92.0


# -- how long: by the others' steps, not by what the peer announces ---------------------------------------------------


def test_the_steps_of_the_others_are_the_measure() -> None:
    """Four of their median, and ten seconds at least; neither the peer itself nor one other prolongs it."""
    assert longest_idle_s([1.0, 1.0, 2.0, 1.5], 1e9) == STALL_FLOOR_S
    assert longest_idle_s([30.0, 40.0, 50.0], 1e9) == STALL_STEPS * 40.0
    assert longest_idle_s([5.0, 6.0, 5.0, 1e9], 5.0) == STALL_STEPS * 6.0


def test_of_two_nodes_the_slower_one_counts_within_a_bound() -> None:
    """No third node shows what a step may take, nor whether the others compile in their first one."""
    assert longest_idle_s([1.0], 60.0) == STALL_STEPS * 60.0
    assert longest_idle_s([60.0], 1.0) == STALL_STEPS * 60.0
    assert longest_idle_s([1.0], 1e9) == longest_idle_s([0.5], math.inf) == LONGEST_UNPROVEN_S
