"""A copy of a shard that is made while deltas are added to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2pnode.lifecycle.checkpoints import ATTEMPTS, copied
from tests.harness.builders.stores import delta, owner_of


class Executor:
    """Runs a function, and adds a delta to the state after it as often as it is told."""

    def __init__(self, add: Callable[[], None], times: int) -> None:
        self.add, self.times, self.calls = add, times, 0

    async def run(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        result = function(*arguments, **named)
        if self.calls <= self.times:
            self.add()
        return result

    def pause(self) -> None: ...


@pytest.mark.parametrize("times", [0, 1, ATTEMPTS - 1, ATTEMPTS, 10])
def test_the_copy_is_of_one_moment_however_many_deltas_come(times: int) -> None:
    """It is begun again after each, and at last made at once; the state goes on by itself."""
    store = owner_of("a")
    state, steps = store.owned[0].state, iter(range(1, 100))
    executor = Executor(lambda: store.add(0, delta(next(steps))), times)

    copy = asyncio.run(copied(state, executor))  # type: ignore[arg-type]

    assert executor.calls == min(times + 1, ATTEMPTS)
    assert (copy.version, copy.value.tolist()) == (state.version, state.value.tolist())
    store.add(0, delta(next(steps)))
    assert copy.version == state.version - 1
    assert copy.value.tolist() != state.value.tolist()
