"""A turn of a node whose records may end while it waits for one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.training.record_turns import RecordsOver, unless_over
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


class Ending:
    """Records that may end."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def count(self, step: int) -> None: ...

    def drop(self, step: int) -> None: ...

    def abandon(self, step: int) -> None: ...


async def turn(seconds: float, ended: list[str]) -> str:
    try:
        await asyncio.sleep(seconds)
        return "trained"
    finally:
        ended.append("ended")


@run_by(run, strict=True)
async def test_a_turn_that_ends_first_has_its_result() -> None:
    """Also where there are no records at all, and what it raises is raised."""

    async def raises() -> None:
        raise ValueError("wrong")

    for records in (None, Ending()):
        assert await unless_over(records, turn(1.0, [])) == "trained"
        with pytest.raises(ValueError, match="wrong"):
            await unless_over(records, raises())


def test_a_turn_is_given_up_when_no_record_is_left() -> None:
    """It is cancelled, and has ended when that is said; a turn that ended with the last record counts."""

    async def scenario() -> None:
        records, ended = Ending(), list[str]()
        asyncio.get_running_loop().call_later(1.0, records.over.set)
        with pytest.raises(RecordsOver):
            await unless_over(records, turn(10.0, ended))
        assert ended == ["ended"]
        assert await unless_over(records, immediate()) == "trained"

    async def immediate() -> Any:
        return "trained"

    run(scenario(), strict=True)


@run_by(run, strict=True)
async def test_a_cancelled_caller_takes_its_turn_along() -> None:
    """Nothing trains on for a step that nobody waits for."""
    ended = list[str]()
    waiting = asyncio.create_task(unless_over(Ending(), turn(10.0, ended)))
    await asyncio.sleep(1.0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended == ["ended"]
