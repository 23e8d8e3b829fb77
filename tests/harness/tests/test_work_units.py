"""The scheduler of `make test`: what is one unit, in which order units begin, and what a crash leaves to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.harness.work_units import WorkUnits

TESTS = [
    "tests/process/test_a.py::test_long@swarms",
    "tests/simulated/test_b.py::test_one",
    "tests/simulated/test_b.py::test_two[x@y]",
    *(f"tests/unit/test_c.py::test_{number}" for number in range(5)),
    *(f"tests/unit/test_d.py::test_{number}" for number in range(4)),
]


class Worker:
    """What a scheduler asks a worker for."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def begun(workers: int) -> tuple[Any, list[Any]]:
    """A scheduler whose workers have collected and got their first units."""
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _: [f"{workers}*popen"], hook=None)
    units, nodes = (
        WorkUnits(config, Producer("test", enabled=False)),
        [Worker(f"gw{number}") for number in range(workers)],
    )
    for node in nodes:
        units.add_node(node)  # type: ignore[arg-type]
        units.add_node_collection(node, TESTS)  # type: ignore[arg-type]
    units.schedule()
    return units, nodes


def test_a_run_prints_nothing_but_its_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler says what it does only where xdist is asked to."""
    begun(2)
    assert capsys.readouterr() == ("", "")


def test_a_quick_module_is_one_unit_and_units_begin_in_the_order_of_the_tests() -> None:
    """A group and slow tests come as they are listed, not after the modules that have more tests."""
    units, (first, second) = begun(2)

    # Two units at least, so that none waits for the next message.
    assert first.given == [TESTS[0], TESTS[2]]
    assert second.given == [TESTS[1], *TESTS[3:8]]
    assert list(units.workqueue) == ["tests/unit/test_d.py"]


def test_who_has_two_tests_left_is_given_the_next_unit() -> None:
    """What is finished is forgotten, and the others are shut down when nothing is left."""
    units, (first, second) = begun(2)
    units.mark_test_complete(first, 0)
    assert first.given == [TESTS[0], TESTS[2], *TESTS[8:]]
    assert list(units.assigned_work[first]) == [TESTS[2], "tests/unit/test_d.py"]

    for node in (first, second):
        for nodeid in node.given[node is first :]:
            units.mark_test_complete(node, TESTS.index(nodeid))
    assert units.tests_finished
    assert first.shutting_down
    assert second.shutting_down


def test_what_a_crashed_worker_had_goes_to_one_that_has_collected() -> None:
    """Its replacement is given nothing before it has collected, even if another worker crashes meanwhile."""
    units, (first, second, third) = begun(3)
    for nodeid in [nodeid for nodeid in first.given + second.given if nodeid.startswith("tests/unit")]:
        units.mark_test_complete(first if nodeid in first.given else second, TESTS.index(nodeid))
    replacement: Any = Worker("gw3")
    units.add_node(replacement)

    assert units.remove_node(first) == TESTS[0]
    units.schedule()
    assert replacement.given == []
    units.add_node_collection(replacement, TESTS)
    units.schedule()
    left = [nodeid for node in (second, third, replacement) for nodeid in node.given]
    assert TESTS[0] in left
