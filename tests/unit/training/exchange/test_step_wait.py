"""The wait of a step: bytes of transfers are looked at while it lasts, and their movement extends it.

How long a step waits: pure decisions over shards, bytes and times.

Why shards do not come: by owner and reason, the longest first.
"""

from __future__ import annotations

import asyncio

import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from tests.harness.environment.virtual_loop import run
from training.exchange.step_wait import LEAST_BYTES_PER_S, Obstacles, Patience, StepWait, together


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("moves_s", [0.0, 3.0, 20.0])
def test_a_wait_lasts_as_long_as_bytes_move(moves_s: float) -> None:
    """It ends two seconds after the last byte."""

    async def scenario() -> None:
        wait, began = StepWait(2.0), now()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with wait.watching("owner", [1], lambda: int(1000 * min(now() - began, moves_s))):
            assert not await wait.until(done, lambda: [1])
        assert moves_s + 2.0 - 0.01 <= now() - began <= moves_s + 2.0 + 0.25

    run(scenario())


def test_a_wait_ends_with_what_it_waits_for() -> None:
    """At once; without a limit it lasts until then."""

    async def scenario() -> None:
        for limit_s in (None, 2.0):
            wait, began = StepWait(limit_s), now()
            assert await wait.until(asyncio.ensure_future(asyncio.sleep(1.5)), lambda: [1])
            assert now() - began == pytest.approx(1.5)
        wait = StepWait(None)
        assert await wait.until(asyncio.ensure_future(asyncio.sleep(100.0)), lambda: [1])

    run(scenario())


def test_the_bytes_of_a_transfer_that_has_just_ended_count() -> None:
    """Also where it ended between two looks."""

    async def scenario() -> None:
        wait, began = StepWait(2.0), now()
        waiting = asyncio.ensure_future(wait.until(asyncio.get_running_loop().create_future(), lambda: [1]))
        await asyncio.sleep(0.85)
        with wait.watching("owner", [1], lambda: 700):
            pass
        assert not await waiting
        assert now() - began == pytest.approx(2.85, abs=0.01)

    run(scenario())


def test_work_together_ends_together() -> None:
    """If one part fails, its error is raised when the others are cancelled."""

    async def scenario() -> None:
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

    run(scenario())


def test_what_is_silent_from_the_beginning_ends_at_the_limit() -> None:
    """One dead node does not hold the step longer, however long the others moved."""
    patience = Patience(5.0, 100.0)
    assert patience.left_s([1, 2], 103.0) == 2.0
    patience.note([1], 108.0)
    assert patience.left_s([1, 2], 108.0) == 5.0
    assert patience.left_s([2], 108.0) == 0.0


def test_bytes_move_all_shards_of_their_transfer() -> None:
    """Those behind the shard that is being sent wait for their turn; shards of other transfers do not profit."""
    patience = Patience(5.0, 0.0)
    patience.note_bytes("a", [1, 2], 1000, 4.0)
    assert patience.left_s([2], 6.0) == 3.0
    assert patience.left_s([3], 6.0) == 0.0


def test_bytes_that_are_sent_again_are_no_progress() -> None:
    """A stopped process takes the same few bytes of every attempt; more than ever before is progress."""
    patience = Patience(5.0, 0.0)
    patience.note_bytes("a", [1], 1000, 1.0)
    for attempt in range(2, 12):
        patience.note_bytes("a", [1], 1000, float(attempt))
    assert patience.left_s([1], 6.0) == 0.0
    patience.note_bytes("a", [1], 1600, 6.0)
    assert patience.left_s([1], 6.0) == 5.0
    # Another owner of the same shard begins at its own first byte.
    patience.note_bytes("b", [1], 200, 8.0)
    assert patience.left_s([1], 8.0) == 5.0


def test_a_few_bytes_a_second_are_no_progress() -> None:
    """Who sends no more does so to hold others up. They count together, where enough have come at last."""
    patience = Patience(5.0, 0.0)
    for second in range(1, 6):
        patience.note_bytes("a", [1], int(0.9 * LEAST_BYTES_PER_S * second), float(second))
    assert patience.left_s([1], 5.0) == 0.0
    patience.note_bytes("a", [1], int(1.1 * LEAST_BYTES_PER_S * 5), 5.0)
    assert patience.left_s([1], 5.0) == 5.0


def test_nothing_awaited_is_over_after_the_limit() -> None:
    """The caller that still waits then waits for something else."""
    assert Patience(5.0, 0.0).left_s([], 5.0) == 0.0


def test_what_is_left_by_rounding_is_nothing() -> None:
    """A timer for it would not move the clock, and the wait would look again without end."""
    assert Patience(5.0, 0.1).left_s([1], 5.1 - 1e-15) == 0.0


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
