"""Free heap goes back to the kernel when a node is at rest, and costs a bounded share of a core."""

from __future__ import annotations

import asyncio
import math
import platform
import subprocess
import sys

import pytest

from p2pnode.heap_return import LEAST_BYTES, LOOK_S, SECONDS_PER_BYTE, SHARE, HeapReturn, is_return_due
from p2pnode.own_memory import OwnMemory
from tests.harness.environment.simulated import InlineExecutor, ListLog, Record, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.project.repository import ROOT

MIB = 1 << 20
#: Resident memory that counts as free and cannot be returned.
OTHER = 40 * MIB


@pytest.mark.parametrize(
    ("free_mib", "former_mib", "since_s", "is_due"),
    [
        (500, 500, math.inf, True),
        (500, 510, math.inf, True),
        (63, 63, math.inf, False),  # too little
        (500, 200, math.inf, False),  # the end of an exchange: more becomes free
        (200, 500, math.inf, False),  # the beginning of one
        (500, 0, math.inf, False),  # the first look
        (500, 500, 31.0, False),
        (500, 500, 32.0, True),
        (100, 100, 32.0, True),
        (2000, 2000, 32.0, False),
    ],
)
def test_enough_free_heap_is_returned_at_rest_at_most_so_often(
    free_mib: int, former_mib: int, since_s: float, is_due: bool
) -> None:
    """It takes 64 MiB, two looks that agree, and for each GB a minute since the last time."""
    assert is_return_due(free_mib * MIB, former_mib * MIB, since_s) == is_due


class Heap:
    """A process whose steps use `used` bytes for some seconds and leave them free."""

    def __init__(self, clock: VirtualClock, used: int, step_s: float) -> None:
        self._clock, self._used, self._step_s = clock, used, step_s
        self._began_s = clock.monotonic()
        self._faulted_at = -1
        self.returned: list[float] = []
        self.is_known = True

    def _step(self) -> tuple[int, float]:
        number, at = divmod(self._clock.monotonic() - self._began_s, self._step_s)
        return int(number), at

    def own(self) -> OwnMemory | None:
        number, at = self._step()
        if not self.is_known:
            return None
        if at < 0.2 * self._step_s:  # its exchange: what was free is in use
            self._faulted_at = number
            return OwnMemory(1000 * MIB + self._used, OTHER)
        free = self._used if self._faulted_at == number else 0
        return OwnMemory(1000 * MIB + free, free + OTHER)

    def give_back(self) -> None:
        self._faulted_at = -1
        self.returned.append(self._clock.monotonic() - self._began_s)


def history(used: int, step_s: float, seconds: float, *, is_known: bool = True) -> tuple[Heap, list[Record], bool]:
    """The heap, what was logged, and whether the service still ran at the end."""
    records: list[Record] = []

    async def main() -> tuple[Heap, bool]:
        clock = VirtualClock()
        heap = Heap(clock, used, step_s)
        heap.is_known = is_known
        service = HeapReturn(clock, InlineExecutor(), ListLog(records, "n0", clock), heap.own, heap.give_back)
        task = asyncio.create_task(service.run())
        await asyncio.sleep(seconds)
        runs = not task.done()
        task.cancel()
        return heap, runs

    heap, runs = run(main())
    return heap, records, runs


def test_after_each_long_step_the_heap_is_returned_once() -> None:
    """Steps of a minute that leave 500 MiB: returned within two looks of the end of each exchange, and the log says how
    much."""
    heap, records, _ = history(500 * MIB, 60.0, 300.0)
    print(heap.returned)

    assert len(heap.returned) == 5
    assert all(at % 60.0 <= 12.0 + 2 * LOOK_S for at in heap.returned)
    assert [record.fields["returned_bytes"] for record in records if record.event == "heap_returned"] == [500 * MIB] * 5


def test_short_steps_do_not_pay_for_it_each_time() -> None:
    """Steps of three seconds: what all returns cost is below a hundredth of the time."""
    heap, _, _ = history(500 * MIB, 3.0, 600.0)
    cost_s = len(heap.returned) * 500 * MIB * SECONDS_PER_BYTE
    print(f"{len(heap.returned)} times, {cost_s:.2f} s of 600")

    assert len(heap.returned) >= 10
    assert cost_s <= SHARE * 600 + 500 * MIB * SECONDS_PER_BYTE  # the first is free


def test_what_cannot_be_returned_is_not_tried_again() -> None:
    """100 MiB that count as free and stay: one attempt in ten minutes."""

    async def main() -> int:
        clock, records, tries = VirtualClock(), list[Record](), list[float]()
        service = HeapReturn(
            clock,
            InlineExecutor(),
            ListLog(records, "n0", clock),
            lambda: OwnMemory(1000 * MIB, 100 * MIB),
            lambda: tries.append(clock.monotonic()),
        )
        task = asyncio.create_task(service.run())
        await asyncio.sleep(600.0)
        task.cancel()
        return len(tries)

    assert run(main()) == 1


def test_a_system_that_does_not_tell_ends_the_service() -> None:
    """Nothing is looked at again and again where nothing can be known."""
    heap, _, runs = history(500 * MIB, 60.0, 100.0, is_known=False)

    assert not runs
    assert not heap.returned


#: Prints private and free bytes with 150 MB in use beside as much that was freed, after the free pages were returned,
#: and with half of them in use again.
RETURNED = """
import numpy as np
from p2pnode.malloc import return_free_heap, tune_malloc
from p2pnode.own_memory import own_memory
assert tune_malloc()
first = [np.ones(1 << 20, np.uint8) for _ in range(300)]
kept, freed = first[::2], first[1::2]
del first, freed
print(*own_memory())
return_free_heap()
print(*own_memory())
again = [np.ones(1 << 20, np.uint8) for _ in range(75)]
print(*own_memory())
assert all((array == 1).all() for array in kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed pages")
def test_pages_between_memory_in_use_go_back_and_what_is_left_is_counted() -> None:
    """Of 300 MB every second megabyte is freed: 150 MB go back, and count as free no more; what is in use stays."""
    found = subprocess.run(
        [sys.executable, "-c", RETURNED],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (before, before_free), (after, after_free), (again, again_free) = (
        (int(private), int(free)) for private, free in (line.split() for line in found.stdout.splitlines())
    )
    print(found.stdout)

    assert before_free > 150 * MIB
    assert 145 * MIB < before - after < 152 * MIB
    assert after_free < LEAST_BYTES // 2
    assert 70 * MIB < again - after < 80 * MIB
    assert again_free < LEAST_BYTES // 2
