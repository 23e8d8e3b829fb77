"""Turns with an owner: one at a time, in the order in which they ask; other owners are not waited for."""

from __future__ import annotations

import asyncio

from tests.harness.environment.virtual_loop import run
from training.exchange.client.outbox import OwnerTurns


def test_one_at_a_time_in_the_order_of_asking() -> None:
    """Three ask for one owner and one for another. One that gives up is passed over, and nothing is left behind."""

    async def scenario() -> None:
        turns, order = OwnerTurns(), list[str]()

        async def send(owner: bytes, name: str) -> None:
            async with turns.of(owner):
                order.append(f"{name} begins")
                await asyncio.sleep(1.0)
                order.append(f"{name} ends")

        tasks = [asyncio.create_task(send(b"a", name)) for name in ("first", "second", "third")]
        tasks.append(asyncio.create_task(send(b"b", "other")))
        await asyncio.sleep(0.5)
        assert order == ["first begins", "other begins"]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order[2:] == ["first ends", "other ends", "third begins", "third ends"]
        assert turns._owners == {}

    run(scenario())
