"""The list of what tests cost."""

from __future__ import annotations

import subprocess
import sys

from tests.harness.runner.processor_time import processor_seconds, table


def test_the_time_of_a_child_is_counted_and_waiting_is_not() -> None:
    """A process that computes for a fifth of a second, and the cheapest of three that sleep for longer: other children
    of this process may end meanwhile, and count as well."""

    def cost_of(code: str) -> float:
        before = processor_seconds()
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
        return processor_seconds() - before

    computed = cost_of("import time\nwhile time.process_time() < 0.2: pass")
    slept = min(cost_of("import time; time.sleep(0.3)") for _ in range(3))

    assert computed >= 0.2
    assert slept < computed


def test_files_and_tests_are_listed_by_what_they_cost() -> None:
    """The sum, then the files, then the tests."""
    rows = table({"a.py::one": 1.0, "b.py::two": 1.5, "a.py::three": 2.0})

    assert [row.split() for row in rows] == [
        ["4.5", "s", "all", "tests"],
        ["3.0", "s", "a.py"],
        ["1.5", "s", "b.py"],
        ["2.0", "s", "a.py::three"],
        ["1.5", "s", "b.py::two"],
        ["1.0", "s", "a.py::one"],
    ]
