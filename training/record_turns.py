"""What the step loop tells the dispatched records, and the end of a run whose passes over them are done.

A record counts as trained when the step that trained it is counted. The loop says which steps are counted, which were
trained and dropped, and which a crashed trainer never ended (`training.dispatch.worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class RecordsInTurns(Protocol):
    """The records of one node, as its step loop sees them."""

    @property
    def over(self) -> asyncio.Event:
        """Set when no record is left for this node, and all that it trained is reported."""
        ...

    def count(self, step: int) -> None:
        """The step is pushed and counted."""
        ...

    def drop(self, step: int) -> None:
        """The step was trained, and its delta is pushed by nobody."""
        ...

    def abandon(self, step: int) -> None:
        """The trainer failed in this step, before it reported a delta."""
        ...


class RecordsOver(Exception):
    """No record is left: the turn that waits for one is given up."""


async def unless_over(records: RecordsInTurns | None, turn: Coroutine[Any, Any, R]) -> R:
    """The result of a turn. Raises `RecordsOver`, and cancels the turn, if no record is left for it. `records`: None
    for a node that draws none."""
    if records is None:
        return await turn
    training = asyncio.create_task(turn, name="turn")
    over = asyncio.create_task(records.over.wait(), name="records-over")
    try:
        await asyncio.wait((training, over), return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            raise RecordsOver
        return training.result()
    finally:
        for task in (training, over):
            task.cancel()
        await asyncio.gather(training, over, return_exceptions=True)
