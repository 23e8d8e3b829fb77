"""How long an exchange waits: for an answer, by what was measured, and for a step, as long as bytes move."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.timeouts import (
    BACKOFF,
    FORWARD,
    MAX_BACKOFF,
    MAX_KEYS,
    REQUEST,
    AdaptiveTimeouts,
    Obstacles,
    StepWait,
    together,
)
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

PEER, OTHER = b"p" * 20, b"o" * 20


def measured(*seconds: float) -> AdaptiveTimeouts:
    timeouts = AdaptiveTimeouts()
    for one in seconds:
        timeouts.on_response("push", PEER, one)
    return timeouts


def test_each_peer_has_a_timeout_for_each_kind() -> None:
    """Before anything is measured the first values hold; one slow peer does not delay requests to another."""
    timeouts = measured(*[4.0] * 8)
    assert timeouts.timeout_s("push", PEER) == REQUEST.ceiling_s
    assert timeouts.timeout_s("push", OTHER) == timeouts.timeout_s("pull", PEER) == REQUEST.first_s
    assert timeouts.timeout_s("forward", PEER) == FORWARD.first_s


def test_quick_answers_meet_the_floor_and_slow_ones_the_ceiling() -> None:
    """A machine that stalls for a second is waited for, and no first silence lasts past the detection bound. A link
    that has become fast again gets its short timeout again."""
    assert measured(*[0.001] * 8).timeout_s("push", PEER) == REQUEST.floor_s
    assert measured(*[9.0, 0.0] * 4).timeout_s("push", PEER) == REQUEST.ceiling_s
    assert measured(*[4.0] * 16, *[0.01] * 32).timeout_s("push", PEER) == REQUEST.floor_s


def test_an_owner_gives_its_backup_up_before_its_callers_give_up_the_owner() -> None:
    """For all measurements the longest forward timeout is below the shortest push timeout."""
    assert FORWARD.ceiling_s < REQUEST.floor_s <= REQUEST.first_s <= REQUEST.ceiling_s
    assert FORWARD.floor_s <= FORWARD.first_s <= FORWARD.ceiling_s


def test_silence_gives_more_time() -> None:
    """Step by step, beyond the ceiling, for that peer alone: it may have become slower than any measurement. One that
    is suspected is given no more than the ceiling."""
    timeouts = measured(*[0.01] * 8)
    steps = []
    for _ in range(4):
        timeouts.on_timeout("push", PEER)
        steps.append((timeouts.timeout_s("push", PEER), timeouts.timeout_s("push", PEER, is_suspect=True)))
    for _ in range(20):
        timeouts.on_timeout("push", PEER)

    assert steps == [(3.0, 3.0), (4.5, 4.5), (6.75, 4.5), (10.125, 4.5)]
    assert timeouts.timeout_s("push", PEER) == MAX_BACKOFF * REQUEST.floor_s
    assert timeouts.timeout_s("push", OTHER) == REQUEST.first_s


def test_a_peer_that_answers_late_is_given_as_long_again() -> None:
    """Or every other request to it would fail. A prompt answer takes one step back."""
    timeouts = AdaptiveTimeouts()
    for _ in range(4):
        timeouts.on_timeout("forward", PEER)
    for _ in range(8):
        timeouts.on_response("forward", PEER, 6.0)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.ceiling_s * BACKOFF**4
    for _ in range(64):
        timeouts.on_response("forward", PEER, 0.1)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.floor_s


def test_what_is_remembered_is_bounded() -> None:
    """Beyond the limit the peer that was asked longest ago is dropped."""
    timeouts = AdaptiveTimeouts()
    for number in range(MAX_KEYS + 50):
        timeouts.on_timeout("push", number.to_bytes(20, "big"))

    assert len(timeouts._times) == MAX_KEYS
    assert timeouts.timeout_s("push", (0).to_bytes(20, "big")) == REQUEST.first_s


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("moves_s", [0.0, 3.0, 20.0])
@run_by(run)
async def test_a_wait_lasts_as_long_as_bytes_move(moves_s: float) -> None:
    """It ends two seconds after the last byte, or at most one look before."""
    wait, began = StepWait(2.0), now()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with wait.watching("owner", lambda: int(1000 * min(now() - began, moves_s))):
        assert not await wait.until(done)
    assert moves_s + 2.0 - 0.26 <= now() - began <= moves_s + 2.0 + 0.01


@run_by(run)
async def test_a_wait_ends_with_what_it_waits_for() -> None:
    """At once; without a limit it lasts until then."""
    for limit_s in (None, 2.0):
        wait, began = StepWait(limit_s), now()
        assert await wait.until(asyncio.ensure_future(asyncio.sleep(1.5)))
        assert now() - began == pytest.approx(1.5)
    wait = StepWait(None)
    assert await wait.until(asyncio.ensure_future(asyncio.sleep(100.0)))


@run_by(run)
async def test_the_bytes_of_a_transfer_that_has_just_ended_count() -> None:
    """Also where it ended between two looks."""
    wait, began = StepWait(2.0), now()
    waiting = asyncio.ensure_future(wait.until(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0.85)
    with wait.watching("owner", lambda: 700):
        pass
    assert not await waiting
    assert 2.6 <= now() - began <= 2.86


@run_by(run)
async def test_work_together_ends_together() -> None:
    """If one part fails, its error is raised when the others are cancelled."""
    ended = []

    async def lasting() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(True)

    async def failing() -> None:
        await asyncio.sleep(1.0)
        raise LookupError("mine")

    with pytest.raises(LookupError):
        await together([lasting(), failing()])
    assert ended == [True]


@run_by(run)
async def test_a_silent_node_holds_no_step_longer_than_the_limit_after_the_others() -> None:
    """The others move for ten seconds, and answer."""
    wait, began = StepWait(2.0), now()
    for second in range(1, 11):
        asyncio.get_running_loop().call_later(float(second), wait.note)
    assert not await wait.until(asyncio.get_running_loop().create_future())
    assert 10.0 < now() - began <= 12.01


def test_bytes_that_are_sent_again_are_no_progress() -> None:
    """A stopped process takes the same few bytes of every attempt; more than ever before is progress."""

    async def scenario(attempts: list[int], lasts_s: float) -> None:
        wait, began = StepWait(2.0), now()

        async def send() -> None:
            for most in attempts:
                with wait.watching("owner", lambda most=most: most):
                    await asyncio.sleep(1.0)

        sending = asyncio.ensure_future(send())
        assert not await wait.until(asyncio.get_running_loop().create_future())
        sending.cancel()
        assert lasts_s - 0.25 <= now() - began <= lasts_s + 0.01

    run(scenario([1000] * 10, 2.0))
    run(scenario([1000, 1600, 2200, 2200, 2200, 2200], 4.0))


B, C = Contact(b"b" * 20, Address("10.0.0.2", 1)), Contact(b"c" * 20, Address("10.0.0.3", 1))


def test_what_has_waited_long_enough_is_grouped() -> None:
    """The number of shards, and since when the first of them waits."""
    found = Obstacles()
    found.note([1, 2], B, "refused", 5.0)
    found.note([3], B, "refused", 7.0)
    found.note([4], C, "was silent", 3.0)
    found.note([5], C, "was silent", 9.5)

    assert [(one.owner, one.since_s, count) for one, count in found.since(9.0).items()] == [(C, 3.0, 1), (B, 5.0, 3)]
    assert found.since(2.0) == {}


def test_a_shard_waits_since_the_first_request_in_vain_and_shows_the_last_reason() -> None:
    """Until it comes; after that it waits anew."""
    found = Obstacles()
    found.note([1], B, "refused", 5.0)
    found.note([1], None, "no owner is known", 8.0)
    ((one, _),) = found.since(99.0).items()
    assert one == (5.0, None, "no owner is known")
    assert 1 in found
    found.clear(1)
    assert (1 in found, found.since(99.0)) == (False, {})
    found.note([1], C, "refused", 20.0)
    ((one, _),) = found.since(99.0).items()
    assert one.since_s == 20.0
