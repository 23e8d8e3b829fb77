"""The ledger of promises."""

from __future__ import annotations

from tests.harness.project.ledger import faults, promises, table


def test_every_promise_has_a_sentence() -> None:
    """They are numbered without a gap."""
    found = promises()

    assert sorted(found) == list(range(1, len(found) + 1))
    assert len(found) >= 20


def test_a_promise_without_a_test_and_a_test_without_a_promise_are_named() -> None:
    """Either ends `make ledger` with an error."""
    assert faults([1, 2], [2, 3]) == [
        "promise 1 has no test",
        "a test names promise 3, which is not in docs/faults.md",
    ]
    assert faults([1, 2], [1, 2]) == []


def test_a_function_stands_in_the_table_once_with_all_its_cases() -> None:
    """Below its promise, with the seconds of all cases."""
    seconds = {"a.py::one[x]": 1.0, "a.py::one[y]": 0.5}

    assert table({1: "Nothing is lost."}, {1: list(seconds)}, seconds) == [
        "  1  Nothing is lost.",
        "      1.5 s  a.py::one",
    ]
