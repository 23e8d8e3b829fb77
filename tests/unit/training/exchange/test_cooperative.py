"""Long work on the event loop yields to other tasks."""

from __future__ import annotations

import asyncio

from tests.harness.environment import InlineExecutor
from tests.harness.loop_turns import counted_turns
from training.exchange.cooperative import VALUES_PER_TURN, LoopYielder, off_loop


def test_other_tasks_run_after_so_many_values() -> None:
    """Small pieces are counted together; a piece below the limit does not yield."""

    async def scenario() -> list[int]:
        yielder, seen = LoopYielder(), []
        with counted_turns() as turns:
            for _ in range(4):
                await yielder.after(VALUES_PER_TURN // 2)
                seen.append(turns.count)
        return seen

    assert asyncio.run(scenario()) == [0, 1, 1, 2]


def test_a_long_pass_runs_in_a_thread_and_a_short_one_at_once() -> None:
    """A hand-over to a thread costs more than half a millisecond of work."""

    class Counting(InlineExecutor):
        calls = 0

        async def run(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.calls += 1
            return await super().run(function, *args, **kwargs)

    async def scenario() -> None:
        executor = Counting()
        assert await off_loop(executor, VALUES_PER_TURN, max, 2, 3) == 3
        assert executor.calls == 0
        assert await off_loop(executor, VALUES_PER_TURN + 1, sorted, [1, 2], reverse=True) == [2, 1]
        assert executor.calls == 1

    asyncio.run(scenario())
