"""Pending calls: retries, time-outs, the excuse for a busy loop, late answers, and who is not called for a while."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia import calls
from p2pnode.overlay.kademlia.calls import MAX_PAUSE_S, MAX_SILENT, CallTable, NegativeCache, PendingCall
from p2pnode.overlay.kademlia.messages import Ping, Result
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import contact
from tests.harness.environment.simulated import SeededEntropy, VirtualClock
from tests.harness.runner.stories import in_world, played_by

PEER = Contact(b"p" * 20, Address("10.0.0.1", 8468))


class BusyClock(VirtualClock):
    """`lag_s` is how late the loop runs its timers."""

    lag_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.lag_s


class World:
    """A table whose sends and time-outs are recorded with their times."""

    def __init__(self) -> None:
        self.clock = BusyClock()
        self.began_s = self.clock.monotonic()
        self.counters: Counter[str] = Counter()
        self.sent: list[tuple[bytes, float]] = []
        self.given_up: list[tuple[PendingCall, float]] = []
        self.table = CallTable(
            self.clock,
            SeededEntropy(1),
            self.counters,
            send=lambda message_id, _: self.sent.append((message_id, self.clock.monotonic())),
            give_up=lambda pending: self.given_up.append((pending, self.clock.monotonic())),
        )

    def start(self, first_s: float, second_s: float, *, timed: bool = True) -> PendingCall:
        pending = PendingCall(PEER, Ping(), lambda _: None, None, second_s, True, False, timed)
        self.table.start(pending, first_s, self.clock.monotonic())
        return pending


@played_by(in_world, World)
async def test_a_silent_peer_gets_one_retry_under_a_new_message_id(world: World) -> None:
    """The retry goes out after the first wait, the call is given up after the second, and nothing stays behind."""
    pending = world.start(0.2, 0.3)
    await asyncio.sleep(1.0)
    assert [at - world.began_s for _, at in world.sent] == pytest.approx([0.0, 0.2])
    assert len({message_id for message_id, _ in world.sent}) == 2
    assert [each for each, _ in world.given_up] == [pending]
    assert world.given_up[0][1] - world.began_s == pytest.approx(0.5)
    assert (len(world.table), world.table.waiting) == (0, 0)
    assert world.counters == {"retries": 1, "timeouts": 1}


@played_by(in_world, World)
async def test_an_answer_to_either_try_settles_the_call(world: World) -> None:
    """Both message ids lead to the call; once it is settled neither does, and no time-out follows."""
    pending = world.start(0.2, 0.3)
    await asyncio.sleep(0.25)
    assert [world.table.get(message_id) for message_id, _ in world.sent] == [pending, pending]
    assert (len(world.table), world.table.waiting) == (2, 1)
    world.table.settle(pending)
    assert [world.table.get(message_id) for message_id, _ in world.sent] == [None, None]
    await asyncio.sleep(1.0)
    assert not world.given_up


@played_by(in_world, World)
async def test_a_late_answer_finds_its_call_once_and_the_time_of_its_try(world: World) -> None:
    """The call given up is found by the id of the try that was answered; calls that measure nothing are not kept."""
    pending = world.start(0.2, 0.3)
    await asyncio.sleep(1.0)
    (first, first_s), (second, second_s) = world.sent
    assert world.table.take_late(second) == (pending, second_s)
    assert world.table.take_late(second) == (None, 0.0)
    assert world.table.take_late(first) == (pending, first_s)
    world.start(0.2, 0.0, timed=False)
    await asyncio.sleep(1.0)
    assert world.table.take_late(world.sent[-1][0]) == (None, 0.0)


@played_by(in_world, World)
async def test_a_late_call_keeps_nothing_alive_and_is_forgotten_with_time(world: World) -> None:
    """What waited for the answer, often a whole lookup, goes when the call is given up; the call itself goes after
    `LATE_S`, whether others are given up meanwhile or not."""

    class Waiting:
        def on_result(self, _: Result | None) -> None: ...

    waiting = Waiting()
    gone = weakref.ref(waiting)
    call = PendingCall(PEER, Ping(), waiting.on_result, lambda: None, 0.3, True, False, True)
    world.table.start(call, 0.2, world.clock.monotonic())
    del waiting, call
    await asyncio.sleep(0.4)
    assert gone() is not None
    await asyncio.sleep(0.6)
    assert world.table.late == 2
    world.given_up.clear()
    assert gone() is None
    await asyncio.sleep(calls.LATE_S)
    answered = world.start(0.2, 0.3)
    world.table.settle(answered)
    await asyncio.sleep(1.0)
    assert world.table.late == 0


@played_by(in_world, World)
async def test_late_calls_are_bounded(world: World, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest late calls are dropped beyond the limit."""
    monkeypatch.setattr(calls, "MAX_LATE_CALLS", 2)
    for _ in range(3):
        world.start(0.2, 0.0)
        await asyncio.sleep(0.3)
    late = [world.table.take_late(message_id)[0] for message_id, _ in world.sent]
    assert late[0] is None
    assert None not in late[1:]


@played_by(in_world, World)
async def test_a_busy_loop_extends_the_wait_once(world: World) -> None:
    """A timer that fires 0.1 s late is no time-out yet; the call is given up after one short extension."""
    world.start(0.2, 0.0)
    world.clock.lag_s = 0.1
    await asyncio.sleep(0.21)
    assert not world.given_up
    await asyncio.sleep(calls.EXCUSABLE_LAG_S)
    assert len(world.given_up) == 1


@played_by(in_world, World)
async def test_close_returns_each_waiting_call_once(world: World) -> None:
    """A call with a retry under way stands twice in the table and is returned once; its timer is cancelled."""
    one = world.start(0.2, 0.3)
    await asyncio.sleep(0.25)
    other = world.start(0.2, 0.3)
    closed = world.table.close()
    assert closed == [one, other]
    await asyncio.sleep(1.0)
    assert not world.given_up


@played_by(in_world, World)
async def test_a_proof_is_awaited_until_the_call_is_answered_or_given_up(world: World) -> None:
    """By id and address, and through the retry; a call that demands none awaits none."""
    pending = PendingCall(PEER, Ping(), lambda _: None, None, 0.5, True, True, True)
    world.table.start(pending, 0.5, world.clock.monotonic())
    other = Contact(PEER.node_id, Address("10.0.0.2", 8468))
    assert (world.table.awaits_proof(PEER), world.table.awaits_proof(other)) == (True, False)
    await asyncio.sleep(0.7)
    assert len(world.sent) == 2
    assert world.table.awaits_proof(PEER)
    await asyncio.sleep(0.5)
    assert world.given_up
    assert not world.table.awaits_proof(PEER)
    world.start(1.0, 0.0)
    assert not world.table.awaits_proof(PEER)


def test_a_contact_that_timed_out_has_a_growing_pause_until_it_answers() -> None:
    """By id and address; twice as long each time; an answer ends it."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    assert cache.is_silent(one, 4.9)
    assert not cache.is_silent(one, 5.1)
    assert not cache.is_silent(contact(b"a" * 20, port=1), 1.0)
    cache.add(one, 6.0)
    assert cache.is_silent(one, 15.9)
    cache.discard(one)
    assert not cache.is_silent(one, 7.0)


def test_the_pause_and_the_cache_are_bounded() -> None:
    """No pause is longer than the maximum, and the oldest contact is dropped from a full cache."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    for _ in range(20):
        cache.add(one, 0.0)
    assert not cache.is_silent(one, MAX_PAUSE_S + 0.1)
    for port in range(1, MAX_SILENT + 1):
        cache.add(contact(b"b" * 20, port), 0.0)

    assert len(cache) == MAX_SILENT
    assert not cache.is_silent(one, 1.0)


def test_an_address_that_nobody_tries_again_is_forgotten() -> None:
    """Once its pause has been over for as long as the longest; until then the next pause is twice as long."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    cache.expire(5.0 + MAX_PAUSE_S)
    cache.add(one, 5.0 + MAX_PAUSE_S)
    assert cache.is_silent(one, 14.9 + MAX_PAUSE_S)
    cache.expire(15.1 + 2 * MAX_PAUSE_S)
    assert len(cache) == 0
