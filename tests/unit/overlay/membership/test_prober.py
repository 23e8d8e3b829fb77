"""The timers of the failure detector."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.membership.service import REDIAL_DEAD_S
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.settings import LivenessSettings
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.stories import played_by
from tests.harness.stubs.recording_protocol import MembershipWorld

PEER = Contact(ids(1)[0], Address("10.0.0.1", 8468))


class World(MembershipWorld):
    """One peer is known, and answers nothing."""

    def __init__(self, settings: LivenessSettings) -> None:
        super().__init__(settings)
        self.changes: list[tuple[str, float]] = []
        self.membership.on_change(lambda change: self.changes.append((change.kind, self.clock.monotonic())))
        self.answered(heartbeat(PEER.node_id), PEER)

    def suspect(self) -> None:
        self.membership.perform(self.members.on_unreachable(PEER.node_id, self.clock.monotonic()))

    async def leave_unanswered(self, seconds: float) -> None:
        """Each call of this time is given up a fifth of a second later."""
        loop, given_up = asyncio.get_running_loop(), len(self.recorder.calls)
        for _ in range(round(10 * seconds)):
            await asyncio.sleep(0.1)
            for call in self.recorder.calls[given_up:]:
                loop.call_later(0.1, self.membership.on_timeout, call.contact)
            given_up = len(self.recorder.calls)


def play(story: Callable[[World], Awaitable[None]], **settings: float) -> None:
    async def run() -> None:
        world = World(LivenessSettings(**settings))  # type: ignore[arg-type]
        world.membership.start()
        await story(world)
        world.membership.close()
        sent = len(world.recorder.calls)
        await asyncio.sleep(30)
        assert len(world.recorder.calls) == sent, "a stopped prober sends nothing"

    VirtualLoop().run(run())


@played_by(play, probe_interval_s=10.0, suspicion_s=1.0)
async def test_a_suspicion_shorter_than_a_round_ends_on_time(world: World) -> None:
    """With ten seconds between rounds and one of suspicion the death comes after twice the suspicion and three probes
    of half a second, not after three rounds."""
    next_round = world.members.detector.next_deadline()
    await asyncio.sleep(next_round - world.clock.monotonic() + 0.1)
    world.suspect()
    await world.leave_unanswered(5)
    assert [kind for kind, _ in world.changes] == ["up", "suspect", "dead"]
    assert world.changes[2][1] - world.changes[1][1] == pytest.approx(2.0 + 3 * 0.5, abs=0.3)


@played_by(play, probe_interval_s=10.0, suspicion_s=1.0)
async def test_the_timer_is_armed_for_the_deadline_that_the_detector_measures_lag_from(world: World) -> None:
    """A suspicion that ended, and a later one, move both: a tick that comes late is noticed as lag of this loop."""
    next_round = world.members.detector.next_deadline()
    await asyncio.sleep(next_round - world.clock.monotonic() + 0.1)
    for _ in range(2):
        world.suspect()
        assert world.membership._timer is not None
        planned = world.members.detector._planned
        assert world.membership._timer.when() == pytest.approx(planned)
        refuted = heartbeat(PEER.node_id)
        world.membership.on_response(refuted, PEER.address, 0.01, PEER, proven=True)
        await asyncio.sleep(0.3)


@played_by(play)
async def test_a_dead_member_is_called_now_and_then(world: World) -> None:
    """So the sides of a healed partition find each other; a time-out there is no failure."""
    world.membership.perform(world.members.detector.declare_dead(PEER.node_id, world.clock.monotonic(), "certain"))
    await asyncio.sleep(4 * REDIAL_DEAD_S)
    assert 3 <= len(world.recorder.calls) <= 4
    assert {(call.contact, call.options["counts_as_failure"]) for call in world.recorder.calls} == {(PEER, False)}


@played_by(play)
async def test_a_subscriber_that_raises_does_not_end_the_probing(world: World) -> None:
    """The tick fails, and the next one comes."""

    def broken(change: PeerChange) -> None:
        if change.kind == "dead":
            raise LookupError("a bug")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    world.membership.on_change(broken)
    world.suspect()
    await world.leave_unanswered(8)
    assert len(failures) == 1
    before = len(world.recorder.calls)
    await asyncio.sleep(2 * REDIAL_DEAD_S)
    assert len(world.recorder.calls) > before
