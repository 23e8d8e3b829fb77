"""The wait of a step: bytes of transfers are looked at while it lasts, and their movement extends it."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.environment.virtual_loop import run
from training.exchange.client.step_wait import StepWait, together


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
