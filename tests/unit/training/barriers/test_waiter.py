"""Waiting at a barrier, over scripted peers and on a virtual clock: whom it asks, when it goes on, what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from p2pnode.training.barriers.waiter import BarrierWaiter
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.stubs.barrier_peers import MINE, QUERY_S, FakeOverlay, later, node, play

# -- not waiting ------------------------------------------------------------------------------------------------------


@played_by(play, "asp")
async def test_asp_draws_nobody(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Without a barrier nothing is sampled, queried or waited for."""
    overlay.add(1, 0)
    assert await gate.wait(MINE, 1.0) == 0.0
    assert (overlay.draws, overlay.asked) == ([], [])


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_node_alone_goes_on(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Without peers no node waits."""
    assert await gate.wait(MINE, 1.0) == 0.0
    assert overlay.asked == []


@pytest.mark.parametrize(
    ("method", "far_enough"), [("bsp", MINE), ("pbsp", MINE), ("ssp", MINE - 4), ("pssp", MINE - 4)]
)
@played_by(play, Fixture("method"))
async def test_peers_known_to_be_far_enough_are_not_asked(
    overlay: FakeOverlay, gate: BarrierWaiter, *, far_enough: int
) -> None:
    """Steps never decrease within an incarnation: an old heartbeat that suffices costs no message and no time."""
    for number in range(1, 5):
        overlay.add(number, far_enough + number - 1)
    assert await gate.wait(MINE, 1.0) == 0.0
    assert overlay.asked == []
    assert gate.queries == 0


@played_by(play)
async def test_it_asks_all_others_whatever_is_known_of_them(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Without waiting for a barrier, also those that no sample has, because they are suspected. Who answers is heard
    after the moment that it returns."""
    for number in range(1, 5):
        overlay.add(number, MINE + number)
    overlay.silent[node(4)] = None
    overlay.samples = [[]]
    await asyncio.sleep(1.0)
    asked_at = await gate.ask()
    assert overlay.asked == [[1, 2, 3, 4]]
    heard = [overlay.peer(node(number)).last_heard >= asked_at for number in range(1, 5)]
    assert heard == [True, True, True, False]
    assert gate.waiting is None


@pytest.mark.parametrize(("sample", "asked"), [([3, 7], [3, 7]), ([], [*range(1, 11)])])
@played_by(play)
async def test_of_many_others_it_asks_a_sample(
    overlay: FakeOverlay, gate: BarrierWaiter, *, sample: list[int], asked: list[int]
) -> None:
    """At most ten, and those that are known where all are suspected."""
    for number in range(1, 21):
        overlay.add(number, MINE)
    overlay.samples = [sample]
    await gate.ask()
    assert overlay.asked == [asked]


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
@played_by(play, Fixture("method"))
async def test_only_those_believed_behind_are_asked(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Of four peers the two whose known step is too low are queried; their answers let the node pass in one round."""
    for number, known in [(1, MINE), (2, MINE - 3), (3, MINE + 5), (4, MINE - 1)]:
        overlay.add(number, MINE, known=known)
    assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)
    assert overlay.asked == [[2, 4]]
    assert gate.queries == 2


# -- sampling ---------------------------------------------------------------------------------------------------------


@played_by(play)
async def test_every_re_poll_draws_a_fresh_sample(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A laggard does not block a node that does not draw it again: PSP, not a held sample."""
    overlay.add(1, MINE - 1)
    overlay.add(2, MINE)
    overlay.samples = [[1], [1], [1], [2]]
    waited = await gate.wait(MINE, 2.0)
    assert overlay.draws == [1] * 4
    assert overlay.asked == [[1]] * 3
    assert waited == pytest.approx(3 * (QUERY_S + 0.1))


@played_by(play)
async def test_the_sample_follows_the_population(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """β is computed at each draw: the swarm may grow during a wait."""
    overlay.add(1, MINE - 1)
    overlay.estimate = 4.0
    later(0.15, lambda: setattr(overlay, "estimate", 50.0))
    later(0.25, lambda: overlay.steps.update({node(1): MINE}))
    await gate.wait(MINE, 2.0)
    assert overlay.draws == [2, 2, 8, 8]


@played_by(play, sample=3)
async def test_a_configured_sample_is_asked_for(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """`barrier.sample` overrules the population."""
    overlay.estimate = 1e6
    await gate.wait(MINE, 1.0)
    assert overlay.draws == [3]
    assert gate.present_sample_size() == 3


@pytest.mark.parametrize(("step_seconds", "pause_s"), [(4.0, 0.2), (0.001, 0.02)])
@played_by(play)
async def test_the_pause_between_two_polls(
    overlay: FakeOverlay, gate: BarrierWaiter, *, step_seconds: float, pause_s: float
) -> None:
    """A twentieth of the median step, not below 20 ms."""
    overlay.add(1, MINE - 1)
    overlay.add(2, MINE)
    overlay.samples = [[1], [2]]
    assert await gate.wait(MINE, step_seconds) == pytest.approx(QUERY_S + pause_s)


@played_by(play, "pssp")
async def test_a_peer_that_moves_lets_us_on(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """The barrier opens at the first poll after the laggard has completed its step."""
    overlay.add(1, MINE - 5)
    later(3.0, lambda: overlay.steps.update({node(1): MINE - 4}))
    waited = await gate.wait(MINE, 2.0)
    assert 3.0 <= waited <= 3.0 + 0.1 + 2 * QUERY_S


@played_by(play)
async def test_a_peer_that_restarted_is_taken_at_its_new_step(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A new incarnation may be behind where the former was ahead: its present step counts."""
    overlay.add(1, 3, known=MINE + 7)
    overlay.incarnations[node(1)] = 2
    overlay.hear(node(1), 3)
    later(1.0, lambda: overlay.steps.update({node(1): MINE}))
    waited = await gate.wait(MINE, 2.0)
    assert 1.0 <= waited <= 1.2


@played_by(play)
async def test_a_peer_that_vanished_between_draw_and_answer_is_not_counted(
    overlay: FakeOverlay, gate: BarrierWaiter
) -> None:
    """A peer that is removed during its query is not waited for."""
    overlay.add(1, MINE - 1)
    overlay.silent[node(1)] = None
    later(QUERY_S / 2, lambda: overlay.peers.remove(node(1)) and None)
    assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)


# -- quantile and custom ----------------------------------------------------------------------------------------------


@played_by(play, quantile=0.75)
async def test_a_quantile_lets_the_slowest_behind(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Three of four are far enough for 0.75; the fourth is queried, but not waited for."""
    overlay.add(1, 0)
    for number in (2, 3, 4):
        overlay.add(number, MINE)
    assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)


def most_are_near(mine: int, others: Sequence[int]) -> bool:
    return sum(other >= mine - 1 for other in others) >= 2


@played_by(play, f"{__name__}:most_are_near")
async def test_a_custom_barrier_sees_fresh_steps_of_the_whole_sample(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Only the predicate knows which step is sufficient, so every sampled peer is queried at each test."""
    for number in (1, 2, 3):
        overlay.add(number, MINE - 5, known=0)
    later(1.0, lambda: overlay.steps.update({node(1): MINE}))
    later(2.0, lambda: overlay.steps.update({node(3): MINE - 1}))
    waited = await gate.wait(MINE, 1.0)
    assert 2.0 <= waited <= 2.1
    assert all(asked == [1, 2, 3] for asked in overlay.asked)


@played_by(play, f"{__name__}:most_are_near")
async def test_a_custom_barrier_may_refuse_an_empty_sample(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A predicate that requires two others waits without peers; the step loop does not crash."""

    def arrive() -> None:
        overlay.add(1, MINE)
        overlay.add(2, MINE)

    later(1.0, arrive)
    assert await gate.wait(MINE, 1.0) >= 1.0


# -- what is shown ----------------------------------------------------------------------------------------------------


@played_by(play)
async def test_whom_it_waits_for_is_shown_while_it_waits(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """Slowest peer, its step, how many are behind, how many were counted, since when; and nothing afterwards."""
    for number, step in [(1, MINE - 2), (2, MINE - 7), (3, MINE), (4, 0)]:
        overlay.add(number, step)
    overlay.silent[node(4)] = None
    began = overlay.clock.monotonic()
    wait = asyncio.create_task(gate.wait(MINE, 1.0))
    await asyncio.sleep(0.5)
    shown = gate.waiting
    assert shown is not None
    assert (shown.slowest, shown.its_step, shown.behind, shown.sampled) == (node(2), MINE - 7, 2, 3)
    assert shown.since == began
    overlay.steps.update({node(1): MINE, node(2): MINE})
    await wait
    assert gate.waiting is None


@played_by(play)
async def test_the_shown_peer_follows_the_last_sample(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A slowest peer that caught up is replaced by the one that is now last."""
    overlay.add(1, MINE - 9)
    overlay.add(2, MINE - 3)
    wait = asyncio.create_task(gate.wait(MINE, 1.0))
    await asyncio.sleep(0.5)
    overlay.steps[node(1)] = MINE
    await asyncio.sleep(0.5)
    assert gate.waiting is not None
    assert (gate.waiting.slowest, gate.waiting.behind) == (node(2), 1)
    overlay.steps[node(2)] = MINE
    await wait


@played_by(play)
async def test_a_cancelled_wait_shows_nothing_more(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """A wait that is cancelled leaves no entry behind in the status."""
    overlay.add(1, 0)
    wait = asyncio.create_task(gate.wait(MINE, 1.0))
    await asyncio.sleep(0.5)
    assert gate.waiting is not None
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert gate.waiting is None


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
@played_by(play, Fixture("method"))
async def test_a_member_that_is_left_out_is_not_waited_for(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
    """It is behind for good, answers, and makes a step now and then; the node goes on, and waits for another one."""
    overlay.add(1, 0)
    overlay.add(2, MINE)
    gate.exclude(lambda node_id: node_id == node(1))
    assert await gate.wait(MINE, 1.0) == 0.0
    assert not [asked for asked in overlay.asked if 1 in asked]
    gate.exclude(lambda node_id: node_id == node(2))
    waiting = asyncio.create_task(gate.wait(MINE, 1.0))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    waiting.cancel()
