"""A signal for one waiter: kept until it is cleared, and free again after a wait that was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.wake_up import WakeUp
from tests.harness.environment.virtual_loop import run


def test_it_wakes_the_waiter_and_stays_set_until_it_is_cleared() -> None:
    """A second waiter at the same time is a mistake; a cancelled wait makes room for the next."""

    async def story() -> None:
        signal = WakeUp()
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await signal.wait()
        signal.set()
        signal.set()
        await waiting
        assert signal.is_set()
        await asyncio.wait_for(signal.wait(), 1.0)
        signal.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(signal.wait(), 1.0)
        again = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        signal.set()
        await again

    run(story())
