"""What tests cost: `make test ARGS="-p tests.harness.runner.processor_time"` lists files and tests by processor time.

Counted is the time, user and system, of the test's own process, of the processes that it started and waited for, and
of the servers that fork for it (`tests.process.harness.forked_python`). It includes a test's fixtures; one that tests
share is counted at the first. Unlike `--durations` it does not count what a test waits for, which costs the others
nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

KEY = "processor_s"
BEGAN = pytest.StashKey[float]()
#: Rows of each list.
FILES, TESTS = 25, 40

_spent: dict[str, float] = {}


def processor_seconds() -> float:
    """Of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_of_process, _fork_servers()))


def _fork_servers() -> list[int]:
    module = sys.modules.get("tests.process.harness.forked_python")
    return [] if module is None else list(module.RUNNING)


def _of_process(pid: int) -> float:
    """Of a process and its children."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def table(spent: Mapping[str, float]) -> list[str]:
    """The lines to print: all, then by file, then by test, the most expensive first."""
    files: Counter[str] = Counter()
    for test, seconds in spent.items():
        files[test.partition("::")[0]] += seconds
    tests = sorted(spent.items(), key=lambda item: -item[1])[:TESTS]
    rows = [(sum(spent.values()), "all tests"), *((seconds, file) for file, seconds in files.most_common(FILES))]
    rows += [(seconds, test) for test, seconds in tests]
    return [f"{seconds:8.1f} s  {what}" for seconds, what in rows]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((KEY, processor_seconds() - item.stash[BEGAN]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, seconds in report.user_properties:
        if name == KEY:
            _spent[report.nodeid] = float(str(seconds))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("processor time")
    for line in table(_spent):
        terminalreporter.write_line(line)
