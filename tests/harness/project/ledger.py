"""The ledger: the promises of docs/faults.md, and the tests that fail when one is broken (`@pytest.mark.promise(n)`).

`make ledger` runs these tests, prints each promise with its tests and their seconds, and fails where a promise has
none, or a test names a promise that is not there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from tests.harness.project.repository import ROOT

PROMISES = ROOT / "docs" / "faults.md"
_ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def promises() -> dict[int, str]:
    """The sentence of each promise."""
    return {int(number): sentence for number, sentence in _ROW.findall(PROMISES.read_text(encoding="utf-8"))}


def numbers_of(item: pytest.Item) -> list[int]:
    """The promises that a test holds."""
    return [number for mark in item.iter_markers("promise") for number in mark.args]


def faults(known: Iterable[int], bound: Iterable[int]) -> list[str]:
    """What is wrong with the ledger itself."""
    known, bound = set(known), set(bound)
    found = [f"promise {number} has no test" for number in sorted(known - bound)]
    return found + [
        f"a test names promise {number}, which is not in docs/faults.md" for number in sorted(bound - known)
    ]


def table(sentences: Mapping[int, str], tests: Mapping[int, Iterable[str]], seconds: Mapping[str, float]) -> list[str]:
    """The lines to print: a promise, and below it its tests, each function once with the seconds of all its cases."""
    lines = []
    for number, sentence in sorted(sentences.items()):
        lines.append(f"{number:3}  {sentence}")
        spent: dict[str, float] = defaultdict(float)
        for test in tests.get(number, ()):
            spent[test.partition("[")[0]] += seconds.get(test, 0.0)
        lines += [f"{taken:9.1f} s  {test}" for test, taken in spent.items()]
    return lines


class Ledger:
    """The plugin of one run."""

    def __init__(self) -> None:
        self._tests: dict[int, list[str]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for number in numbers_of(item):
                self._tests[number].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if faults(promises(), self._tests):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in [*table(promises(), self._tests, self._seconds), *faults(promises(), self._tests)]:
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.option.markexpr
    config.option.markexpr = f"promise and ({chosen})" if chosen else "promise"
    config.pluginmanager.register(Ledger(), "ledger-of-promises")
