"""What the workers of `make test` take at once: tests of one group, the quick tests of a module, or one other test.

A group runs in one worker, so its tests share what is made once per process, and do not measure each other. Units are
in the order of their first tests, which `tests/conftest.py` decides; workers take them from both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

QUICK = "tests/unit/"


def units_of(tests: Iterable[tuple[str, str | None]]) -> list[list[int]]:
    """The units of tests given by node id and group. A unit is the places of its tests in the list."""
    units: dict[tuple[str, str], list[int]] = {}
    for place, (nodeid, group) in enumerate(tests):
        module = nodeid.partition("::")[0]
        if group is not None:
            key = ("group", group)
        elif nodeid.startswith(QUICK):
            key = ("module", module)
        else:
            key = ("test", nodeid)
        units.setdefault(key, []).append(place)
    return list(units.values())


class WorkQueue:
    """Units that wait, and what each worker still has of its own."""

    def __init__(self, units: Iterable[list[int]]) -> None:
        self._waiting = deque(units)
        self._given: dict[int, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def give(self, worker: int) -> list[int]:
        """The next unit, which is this worker's now; empty where none is left. Every third worker is given the last
        one: the first ones mostly wait, and the last ones compute meanwhile."""
        if not self._waiting:
            return []
        unit = self._waiting.pop() if worker % 3 == 2 else self._waiting.popleft()
        self._given.setdefault(worker, deque()).extend(unit)
        return list(unit)

    def running(self, worker: int) -> int | None:
        """The test that the worker runs, or begins next; None where it has none."""
        given = self._given.get(worker)
        return given[0] if given else None

    def finish(self, worker: int, test: int) -> None:
        """The worker has done the first test of those that it has."""
        given = self._given[worker]
        assert given[0] == test, f"test {test} ended before {given[0]}"
        given.popleft()

    def lose(self, worker: int) -> int | None:
        """The worker has crashed: the test that it ran is the result, the others of its units wait again."""
        given = self._given.pop(worker, None)
        if not given:
            return None
        crashed = given.popleft()
        if given:
            self._waiting.appendleft(list(given))
        return crashed
