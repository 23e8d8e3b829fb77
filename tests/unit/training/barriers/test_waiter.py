"""Waiting at a barrier, over a scripted overlay and on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from overlay.discovery.population import Population
from overlay.peers import STALL_FLOOR_S, Activity, Heartbeat, Peer, PeerTable
from tests.harness.environment import VirtualClock
from tests.harness.virtual_loop import run
from training.barriers.predicates import make_barrier
from training.barriers.waiter import BarrierWaiter
from training.settings import BarrierMethod, BarrierSettings

MINE = 20
#: Virtual seconds that a round of queries takes.
QUERY_S = 0.005
#: Step time where minutes are waited: the waiter looks again after a twentieth of it.
SLOW_S = 6.0


def node(number: int) -> bytes:
    return bytes([number]) * 20


class FakeOverlay:
    """Peers with a true step each, which a query reveals, unless they are silent."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.node_id = node(0)
        self.peers = PeerTable()
        self.steps: dict[bytes, int] = {}
        self.incarnations: dict[bytes, int] = {}
        self.activities: dict[bytes, Activity] = {}
        self.step_seconds: dict[bytes, float] = {}
        self.silent: dict[bytes, None] = {}
        self.dead: dict[bytes, None] = {}
        self.estimate = 1.0
        self.asked: list[list[int]] = []
        self.draws: list[int] = []
        #: The sample of each draw, the last one from then on; None: all peers.
        self.samples: list[list[int]] | None = None

    def add(
        self,
        number: int,
        step: int,
        *,
        known: int | None = None,
        activity: Activity = Activity.TRAINING,
        step_seconds: float = 0.1,
    ) -> None:
        """A peer at `step` whose last known heartbeat had `known` completed steps."""
        self.steps[node(number)] = step
        self.incarnations[node(number)] = 1
        self.activities[node(number)] = activity
        self.step_seconds[node(number)] = step_seconds
        self.hear(node(number), step if known is None else known)

    def hear(self, node_id: bytes, step: int) -> None:
        """A heartbeat of the peer arrives."""
        incarnation = self.incarnations[node_id]
        activity, step_seconds = int(self.activities[node_id]), self.step_seconds[node_id]
        heartbeat = Heartbeat(node_id, incarnation, incarnation, 8468, "", activity, step, step_seconds)
        self.peers.observe(heartbeat, "10.0.0.1", self.clock.monotonic())

    def population(self) -> Population:
        return Population(self.estimate, self.estimate, self.estimate, True, 1, None)

    def sample(self, count: int, since: float = 0.0) -> list[Peer]:
        self.draws.append(count)
        if self.samples is None:
            chosen = [peer.node_id for peer in self.peers]
        else:
            chosen = [node(number) for number in self.samples[min(len(self.draws), len(self.samples)) - 1]]
        return [self.peer(node_id) for node_id in chosen]

    def peer(self, node_id: bytes) -> Peer:
        peer = self.peers.get(node_id)
        assert peer is not None
        return peer

    def all_members(self, since: float = 0.0) -> list[Peer]:
        now = self.clock.monotonic()
        return [peer for peer in self.peers if peer.counts_for_barrier(now, since) and self.is_alive(peer.node_id)]

    def members(self) -> list[Peer]:
        return [peer for peer in self.peers if self.is_alive(peer.node_id)]

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self.peers and node_id not in self.dead

    async def query_steps(self, node_ids: Sequence[bytes]) -> None:
        self.asked.append([node_id[0] for node_id in node_ids])
        await asyncio.sleep(QUERY_S)
        for node_id in node_ids:
            if node_id not in self.silent and node_id not in self.dead:
                self.hear(node_id, self.steps[node_id])


Scenario = Callable[[FakeOverlay, BarrierWaiter], Coroutine[Any, Any, None]]


def play(scenario: Scenario, method: BarrierMethod = "pbsp", **settings: Any) -> None:
    """Run a scenario on the virtual loop with a gate of the method (s = 4 where it has one)."""

    async def main() -> None:
        clock = VirtualClock()
        overlay = FakeOverlay(clock)
        chosen = BarrierSettings(method=method, **settings)
        await scenario(overlay, BarrierWaiter(overlay, make_barrier(chosen), chosen, clock))  # type: ignore[arg-type]

    run(main(), limit_s=600.0, strict=True)


def later(delay_s: float, change: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, change)


# -- not waiting ------------------------------------------------------------------------------------------------------


def test_asp_draws_nobody() -> None:
    """Without a barrier nothing is sampled, queried or waited for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        assert await gate.wait(MINE, 1.0) == 0.0
        assert (overlay.draws, overlay.asked) == ([], [])

    play(scenario, "asp")


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_a_node_alone_goes_on(method: BarrierMethod) -> None:
    """Without peers no node waits."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        assert await gate.wait(MINE, 1.0) == 0.0
        assert overlay.asked == []

    play(scenario, method)


@pytest.mark.parametrize(
    ("method", "far_enough"), [("bsp", MINE), ("pbsp", MINE), ("ssp", MINE - 4), ("pssp", MINE - 4)]
)
def test_peers_known_to_be_far_enough_are_not_asked(method: BarrierMethod, far_enough: int) -> None:
    """Steps never decrease within an incarnation: an old heartbeat that suffices costs no message and no time."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        for number in range(1, 5):
            overlay.add(number, far_enough + number - 1)
        assert await gate.wait(MINE, 1.0) == 0.0
        assert overlay.asked == []
        assert gate.queries == 0

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_only_those_believed_behind_are_asked(method: BarrierMethod) -> None:
    """Of four peers the two whose known step is too low are queried; their answers let the node pass in one round."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        for number, known in [(1, MINE), (2, MINE - 3), (3, MINE + 5), (4, MINE - 1)]:
            overlay.add(number, MINE, known=known)
        assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)
        assert overlay.asked == [[2, 4]]
        assert gate.queries == 2

    play(scenario, method)


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_every_re_poll_draws_a_fresh_sample() -> None:
    """A laggard does not block a node that does not draw it again: PSP, not a held sample."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.add(2, MINE)
        overlay.samples = [[1], [1], [1], [2]]
        waited = await gate.wait(MINE, 2.0)
        assert overlay.draws == [1] * 4
        assert overlay.asked == [[1]] * 3
        assert waited == pytest.approx(3 * (QUERY_S + 0.1))

    play(scenario)


def test_the_sample_follows_the_population() -> None:
    """β is computed at each draw: the swarm may grow during a wait."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.estimate = 4.0
        later(0.15, lambda: setattr(overlay, "estimate", 50.0))
        later(0.25, lambda: overlay.steps.update({node(1): MINE}))
        await gate.wait(MINE, 2.0)
        assert overlay.draws == [2, 2, 8, 8]

    play(scenario)


def test_a_configured_sample_is_asked_for() -> None:
    """`barrier.sample` overrules the population."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.estimate = 1e6
        await gate.wait(MINE, 1.0)
        assert overlay.draws == [3]
        assert gate.sample_now() == 3

    play(scenario, sample=3)


@pytest.mark.parametrize(
    ("resample_s", "step_seconds", "pause_s"), [(0.0, 4.0, 0.2), (0.0, 0.001, 0.02), (1.5, 4.0, 1.5)]
)
def test_the_pause_between_two_polls(resample_s: float, step_seconds: float, pause_s: float) -> None:
    """A twentieth of the median step, not below 20 ms, or what is configured."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.add(2, MINE)
        overlay.samples = [[1], [2]]
        assert await gate.wait(MINE, step_seconds) == pytest.approx(QUERY_S + pause_s)

    play(scenario, resample_s=resample_s)


def test_a_peer_that_moves_lets_us_on() -> None:
    """The barrier opens at the first poll after the laggard has completed its step."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 5)
        later(3.0, lambda: overlay.steps.update({node(1): MINE - 4}))
        waited = await gate.wait(MINE, 2.0)
        assert 3.0 <= waited <= 3.0 + 0.1 + 2 * QUERY_S

    play(scenario, "pssp")


def test_a_peer_that_restarted_is_taken_at_its_new_step() -> None:
    """A new incarnation may be behind where the former was ahead: its present step counts."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 3, known=MINE + 7)
        overlay.incarnations[node(1)] = 2
        overlay.hear(node(1), 3)
        later(1.0, lambda: overlay.steps.update({node(1): MINE}))
        waited = await gate.wait(MINE, 2.0)
        assert 1.0 <= waited <= 1.2

    play(scenario)


def test_a_peer_that_vanished_between_draw_and_answer_is_not_counted() -> None:
    """A peer that is removed during its query is not waited for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)
        overlay.silent[node(1)] = None
        later(QUERY_S / 2, lambda: overlay.peers.remove(node(1)) and None)
        assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)

    play(scenario)


# -- peers that do not answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pbsp", "pssp"])
def test_a_silent_peer_leaves_a_sampled_barrier(method: BarrierMethod) -> None:
    """A peer that counts as alive but does not answer leaves the sample."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        overlay.add(2, MINE)
        overlay.silent[node(1)] = None
        await asyncio.sleep(0.1)
        assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)

    play(scenario, method)


def test_a_silent_peer_does_not_excuse_one_that_answers() -> None:
    """A peer that answers with too low a step blocks a sampled barrier, even if the others do not answer."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        overlay.add(2, MINE - 1)
        overlay.silent[node(1)] = None
        await asyncio.sleep(0.1)
        later(2.0, lambda: overlay.steps.update({node(2): MINE}))
        assert await gate.wait(MINE, 1.0) >= 2.0

    play(scenario)


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_a_silent_peer_holds_a_complete_barrier_until_it_is_dead(method: BarrierMethod) -> None:
    """bsp and ssp wait for every peer until the failure detector reports it dead, and not one poll longer."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        overlay.add(2, MINE)
        overlay.silent[node(1)] = None
        later(5.0, lambda: overlay.dead.update({node(1): None}))
        waited = await gate.wait(MINE, 1.0)
        assert 5.0 <= waited <= 5.0 + 0.05 + 2 * QUERY_S

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_peer_that_dies_while_asked_holds_nobody(method: BarrierMethod) -> None:
    """Death counts at the moment of decision, not at that of the draw."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        later(QUERY_S / 2, lambda: overlay.dead.update({node(1): None}))
        assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)

    play(scenario, method)


def test_an_answer_in_the_same_instant_is_an_answer() -> None:
    """On a fast network an answer may carry the very time of the question."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 1)

        async def at_once(node_ids: Sequence[bytes]) -> None:
            overlay.hear(node_ids[0], overlay.steps[node_ids[0]])

        overlay.query_steps = at_once  # type: ignore[method-assign]
        later(0.98, lambda: overlay.steps.update({node(1): MINE}))
        assert await gate.wait(MINE, 1.0) == pytest.approx(1.0)

    play(scenario)


# -- peers that count -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activity", [Activity.JOINING, Activity.PAUSED, Activity.STALLED, Activity.FINISHED, Activity.LEAVING]
)
@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_who_does_not_train_is_not_waited_for(method: BarrierMethod, activity: Activity) -> None:
    """Paused, stalled, finished, leaving and joining nodes block no node, sampled or not."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0, activity=activity)
        assert await gate.wait(MINE, 1.0) <= QUERY_S

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_a_ready_node_is_waited_for(method: BarrierMethod) -> None:
    """Its first step is waited for like any other: nodes that start together stay together."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0, activity=Activity.READY)

        def begin() -> None:
            overlay.activities[node(1)] = Activity.TRAINING

        later(1.0, begin)
        later(4.0, lambda: overlay.steps.update({node(1): 5}))
        waited = await gate.wait(5, 1.0)
        assert 4.0 <= waited <= 4.2

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_ready_node_that_never_begins_holds_nobody_for_long(method: BarrierMethod) -> None:
    """Ready without a step for as long as a stall is allowed: after that it is skipped."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0, activity=Activity.READY)
        waited = await gate.wait(5, 1.0)
        assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1
        assert await gate.wait(6, 1.0) <= QUERY_S

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_node_long_ready_is_about_to_begin_when_we_begin(method: BarrierMethod) -> None:
    """It waited an hour for the last one, as this node did; from this node's own beginning it has as long as a stall is
    allowed."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0, activity=Activity.READY)
        await asyncio.sleep(60.0)
        assert await gate.wait(1, 1.0) <= 2 * QUERY_S  # as if this node had begun long ago
        gate.begin()
        later(4.0, lambda: overlay.steps.update({node(1): 1}))
        waited = await gate.wait(1, 1.0)
        assert 4.0 <= waited <= 4.2

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_a_first_step_that_takes_minutes_is_waited_for(method: BarrierMethod) -> None:
    """A node that began with us compiles for three minutes: no barrier lets us run ahead, until it is announced as
    stalled."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        gate.begin()
        for number in (1, 2):
            overlay.add(number, 0, step_seconds=0.0)
        later(180.0, lambda: overlay.steps.update({node(1): MINE}))
        later(200.0, lambda: overlay.activities.update({node(2): Activity.STALLED}))
        assert 200.0 <= await gate.wait(MINE, SLOW_S) <= 200.0 + SLOW_S / 10

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_joiner_that_compiles_holds_nobody_up_for_long(method: BarrierMethod) -> None:
    """It began when we had trained for a minute: in its first step it counts for as long as a stall is allowed."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        gate.begin()
        await asyncio.sleep(60.0)
        overlay.add(1, MINE - 9, step_seconds=0.0)
        waited = await gate.wait(MINE, 1.0)
        assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_peer_without_progress_is_skipped_until_it_moves(method: BarrierMethod) -> None:
    """A peer that answers but makes no progress is not waited for after max(10 s, 4 steps)."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, MINE - 9)
        waited = await gate.wait(MINE, 1.0)
        assert STALL_FLOOR_S <= waited <= STALL_FLOOR_S + 0.1
        overlay.steps[node(1)] = MINE - 8
        overlay.hear(node(1), MINE - 8)
        later(2.0, lambda: overlay.steps.update({node(1): MINE}))
        assert await gate.wait(MINE, 1.0) >= 2.0

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_what_a_peer_announces_of_its_steps_does_not_hold_the_others_up(method: BarrierMethod) -> None:
    """One member of five announces an hour for a step, and never moves: after ten seconds it is waited for no more."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
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

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_a_first_step_that_never_ends_holds_the_others_up_once(method: BarrierMethod) -> None:
    """One member of five stays in step 0. The others have ended their first steps after twenty seconds: it is waited
    for as long as four of those, and no longer at the next step."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
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

    play(scenario, method)


@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_a_slow_node_among_slow_ones_is_waited_for(method: BarrierMethod) -> None:
    """Where the others take half a minute for a step, a step of a minute and a half is one."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        gate.begin()
        overlay.add(1, MINE - 1, step_seconds=90.0)
        for number in (2, 3):
            overlay.add(number, MINE, step_seconds=30.0)
        later(90.0, lambda: overlay.steps.update({node(1): MINE}))
        assert 90.0 <= await gate.wait(MINE, 30.0) <= 92.0

    play(scenario, method)


# -- quantile and custom ----------------------------------------------------------------------------------------------


def test_a_quantile_lets_the_slowest_behind() -> None:
    """Three of four are far enough for 0.75; the fourth is queried, but not waited for."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        for number in (2, 3, 4):
            overlay.add(number, MINE)
        assert await gate.wait(MINE, 1.0) == pytest.approx(QUERY_S)

    play(scenario, quantile=0.75)


def most_are_near(mine: int, others: Sequence[int]) -> bool:
    return sum(other >= mine - 1 for other in others) >= 2


def test_a_custom_barrier_sees_fresh_steps_of_the_whole_sample() -> None:
    """Only the predicate knows which step is sufficient, so every sampled peer is queried at each test."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        for number in (1, 2, 3):
            overlay.add(number, MINE - 5, known=0)
        later(1.0, lambda: overlay.steps.update({node(1): MINE}))
        later(2.0, lambda: overlay.steps.update({node(3): MINE - 1}))
        waited = await gate.wait(MINE, 1.0)
        assert 2.0 <= waited <= 2.1
        assert all(asked == [1, 2, 3] for asked in overlay.asked)

    play(scenario, "custom", custom=f"{__name__}:most_are_near")


def test_a_custom_barrier_may_refuse_an_empty_sample() -> None:
    """A predicate that requires two others waits without peers; the step loop does not crash."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        def arrive() -> None:
            overlay.add(1, MINE)
            overlay.add(2, MINE)

        later(1.0, arrive)
        assert await gate.wait(MINE, 1.0) >= 1.0

    play(scenario, "custom", custom=f"{__name__}:most_are_near")


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_whom_it_waits_for_is_shown_while_it_waits() -> None:
    """Slowest peer, its step, how many are behind, how many were counted, since when; and nothing afterwards."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
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

    play(scenario)


def test_the_shown_peer_follows_the_last_sample() -> None:
    """A slowest peer that caught up is replaced by the one that is now last."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
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

    play(scenario)


def test_a_cancelled_wait_shows_nothing_more() -> None:
    """A wait that is cancelled leaves no entry behind in the status."""

    async def scenario(overlay: FakeOverlay, gate: BarrierWaiter) -> None:
        overlay.add(1, 0)
        wait = asyncio.create_task(gate.wait(MINE, 1.0))
        await asyncio.sleep(0.5)
        assert gate.waiting is not None
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert gate.waiting is None

    play(scenario)


# -- grace ------------------------------------------------------------------------------------------------------------


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
