"""Long work on the event loop yields to other tasks."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.training import kernels
from p2pnode.training.cooperative import (
    LIGHT_PASSES,
    VALUES_PER_PASS,
    VALUES_PER_TURN,
    LoopTurns,
    LoopYielder,
    ThreadPauses,
    light,
    off_loop,
)
from tests.harness.environment.loop_turns import counted_turns
from tests.harness.environment.simulated import InlineExecutor
from tests.harness.runner.stories import run_by


class CountingExecutor(InlineExecutor):
    calls = 0
    paused = 0

    def pause(self) -> None:
        self.paused += 1

    async def run(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.calls += 1
        return await super().run(function, *args, **kwargs)


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


@run_by(asyncio.run)
async def test_a_long_pass_runs_in_a_thread_and_a_short_one_at_once() -> None:
    """A hand-over to a thread costs more than half a millisecond of work."""
    executor = CountingExecutor()
    assert await off_loop(executor, VALUES_PER_TURN, max, 2, 3) == 3
    assert executor.calls == 0
    assert await off_loop(executor, VALUES_PER_TURN + 1, sorted, [1, 2], reverse=True) == [2, 1]
    assert executor.calls == 1


@pytest.mark.parametrize(
    ("values", "per_turn", "order"),
    [
        (VALUES_PER_TURN // 2, 2, [0, 0, 0, 1, 2, 3, 1, 2, 3, 1, 2, 3]),  # two of the first task fit the first turn
        (VALUES_PER_TURN, 1, [0, 0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3]),
        (2 * VALUES_PER_TURN, 1, [0, 0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3]),
    ],
)
def test_the_passes_of_all_tasks_share_the_turns_in_their_order(values: int, per_turn: int, order: list[int]) -> None:
    """Tasks that are ready at once make no more than `VALUES_PER_TURN` values, or one pass, in a turn of the loop."""

    async def scenario() -> list[tuple[int, int]]:
        loop_turns, made = LoopTurns(), []

        async def task(number: int) -> None:
            for _ in range(3):
                await loop_turns.take(values)
                made.append((turns.count, number))

        with counted_turns() as turns:
            await asyncio.gather(*(task(number) for number in range(4)))
        return made

    made = asyncio.run(scenario())
    in_turn = [sum(turn == other for other, _ in made) for turn, _ in made]
    assert max(in_turn) == per_turn
    assert [number for _, number in made] == order


def test_several_light_passes_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes over memory that is there count as a quarter; NumPy's count as what they are."""
    monkeypatch.setattr(kernels, "COMPILED", object())
    assert [light(values) for values in (0, 1, 4, 5, VALUES_PER_TURN)] == [0, 1, 1, 2, VALUES_PER_TURN // LIGHT_PASSES]
    monkeypatch.setattr(kernels, "COMPILED", None)
    assert light(VALUES_PER_TURN) == VALUES_PER_TURN


def test_a_turn_with_room_is_not_waited_for() -> None:
    """A pass that is alone begins at once, also a long one; the turn after it is free again."""

    async def scenario() -> list[int]:
        loop_turns, seen = LoopTurns(), []
        with counted_turns() as turns:
            await loop_turns.take(2 * VALUES_PER_TURN)
            seen.append(turns.count)
            await asyncio.sleep(0)
            await loop_turns.take(VALUES_PER_TURN)
            seen.append(turns.count)
        return seen

    assert asyncio.run(scenario()) == [0, 1]


def test_short_passes_do_not_overtake_one_that_waits() -> None:
    """A turn that has room for a short pass, but not for the longer one before it, is left as it is."""

    async def scenario() -> list[str]:
        loop_turns, made = LoopTurns(), []

        async def task(name: str, values: int) -> None:
            await loop_turns.take(values)
            made.append(name)

        await asyncio.gather(task("first", VALUES_PER_TURN // 2), task("long", VALUES_PER_TURN), task("short", 1))
        return made

    assert asyncio.run(scenario()) == ["first", "long", "short"]


def test_a_pass_that_is_cancelled_while_it_waits_keeps_no_turn() -> None:
    """Those behind it go on in the next turn."""

    async def scenario() -> int:
        loop_turns = LoopTurns()
        await loop_turns.take(VALUES_PER_TURN)
        waiting = [asyncio.ensure_future(loop_turns.take(VALUES_PER_TURN)) for _ in range(9)]
        last = asyncio.ensure_future(loop_turns.take(VALUES_PER_TURN))
        await asyncio.sleep(0)
        with counted_turns() as turns:
            for one in waiting:
                one.cancel()
            async with asyncio.timeout(10):
                await last
            return turns.count

    assert asyncio.run(scenario()) <= 3


def test_a_pass_over_many_values_runs_in_a_thread_and_another_in_its_turn() -> None:
    """The way to a thread and back takes more processor time than a pass over half a million values."""

    async def scenario() -> list[int]:
        executor, loop_turns, calls = CountingExecutor(), LoopTurns(), []
        for values in (VALUES_PER_PASS, VALUES_PER_PASS + 1):
            assert await loop_turns.run(executor, values, sorted, [1, 2], reverse=True) == [2, 1]
            calls.append(executor.calls)
        return calls

    assert asyncio.run(scenario()) == [0, 1]


def test_long_work_in_a_thread_pauses_after_so_many_values() -> None:
    """Small pieces are counted together; a piece below the limit does not pause."""
    executor = CountingExecutor()
    pauses, seen = ThreadPauses(executor), []
    for _ in range(4):
        pauses.after(VALUES_PER_TURN // 2)
        seen.append(executor.paused)

    assert seen == [0, 1, 1, 2]
