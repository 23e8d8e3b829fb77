"""The wait of a step: bytes of transfers are looked at while it lasts, and their movement extends it.

Why shards do not come: by owner and reason, the longest first.
"""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.timeouts import Obstacles, StepWait, together
from tests.harness.environment.virtual_loop import run


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("moves_s", [0.0, 3.0, 20.0])
def test_a_wait_lasts_as_long_as_bytes_move(moves_s: float) -> None:
    """It ends two seconds after the last byte, or at most one look before."""

    async def scenario() -> None:
        wait, began = StepWait(2.0), now()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with wait.watching("owner", lambda: int(1000 * min(now() - began, moves_s))):
            assert not await wait.until(done)
        assert moves_s + 2.0 - 0.26 <= now() - began <= moves_s + 2.0 + 0.01

    run(scenario())


def test_a_wait_ends_with_what_it_waits_for() -> None:
    """At once; without a limit it lasts until then."""

    async def scenario() -> None:
        for limit_s in (None, 2.0):
            wait, began = StepWait(limit_s), now()
            assert await wait.until(asyncio.ensure_future(asyncio.sleep(1.5)))
            assert now() - began == pytest.approx(1.5)
        wait = StepWait(None)
        assert await wait.until(asyncio.ensure_future(asyncio.sleep(100.0)))

    run(scenario())


def test_the_bytes_of_a_transfer_that_has_just_ended_count() -> None:
    """Also where it ended between two looks."""

    async def scenario() -> None:
        wait, began = StepWait(2.0), now()
        waiting = asyncio.ensure_future(wait.until(asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0.85)
        with wait.watching("owner", lambda: 700):
            pass
        assert not await waiting
        assert 2.6 <= now() - began <= 2.86

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


def test_a_silent_node_holds_no_step_longer_than_the_limit_after_the_others() -> None:
    """The others move for ten seconds, and answer."""

    async def scenario() -> None:
        wait, began = StepWait(2.0), now()
        for second in range(1, 11):
            asyncio.get_running_loop().call_later(float(second), wait.note)
        assert not await wait.until(asyncio.get_running_loop().create_future())
        assert 10.0 < now() - began <= 12.01

    run(scenario())


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
