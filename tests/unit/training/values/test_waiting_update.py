"""Requests that wait for updates: all must be settled, or the time is over; who gives up is told no more."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.environment.virtual_loop import run
from training.exchange.messages import PushResult
from training.shards.value_batch import KeyUpdate
from training.values.script_pulls import Waiting, all_settled

OK, REFUSED = PushResult(0, "ok"), PushResult(0, "refused", reason="late")


def waiting(number: int) -> Waiting:
    update = KeyUpdate(b"n" * 20, 1, number, b"sk", "add", b"1", 0)
    return Waiting(update, update.identity, 0.0, b"n" * 20)


def test_it_returns_when_the_last_is_settled() -> None:
    """One that was settled before, and one that is named twice, count once."""

    async def story() -> None:
        some = [waiting(number) for number in range(3)]
        some[0].settle(OK)
        waits = asyncio.create_task(all_settled([*some, some[2]], 100.0))
        for one in some[1:]:
            await asyncio.sleep(1.0)
            assert not waits.done()
            one.settle(OK)
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert waits.done()

    run(story())


def test_two_requests_wait_for_one_update() -> None:
    """A repeated request and the first both return; the first result stays."""

    async def story() -> None:
        one = waiting(1)
        both = [asyncio.create_task(all_settled([one], 100.0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        one.settle(OK)
        one.settle(REFUSED)
        await asyncio.gather(*both)
        assert one.result == OK

    run(story())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_one_that_gives_up_leaves_the_update_to_the_others(is_cancelled: bool) -> None:
    """After its time, or cancelled: the update is settled later, without it."""

    async def story() -> None:
        loop, one, other = asyncio.get_running_loop(), waiting(1), waiting(2)
        began_s = loop.time()
        waits = asyncio.create_task(all_settled([one, other], 2.0))
        await asyncio.sleep(1.0)
        one.settle(OK)
        if is_cancelled:
            waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert loop.time() - began_s == pytest.approx(1.0 if is_cancelled else 2.0)
        assert other.result is None
        other.settle(REFUSED)
        assert other.result == REFUSED

    run(story())
