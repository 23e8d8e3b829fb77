"""Long work on the event loop yields to other tasks."""

from __future__ import annotations

import asyncio

from training.exchange.cooperative import VALUES_PER_TURN, LoopYielder


def test_other_tasks_run_after_so_many_values() -> None:
    """Small pieces are counted together; a piece below the limit does not yield."""

    async def scenario() -> list[int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        yielder, seen = LoopYielder(), []
        for _ in range(4):
            await yielder.after(VALUES_PER_TURN // 2)
            seen.append(turns)
        counting.cancel()
        return seen

    assert asyncio.run(scenario()) == [0, 1, 1, 2]
