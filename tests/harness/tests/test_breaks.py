"""The deliberate breaks of promises."""

from __future__ import annotations

import ast

import pytest

from tests.harness.project import breaks
from tests.harness.project.ledger import promises
from tests.harness.project.repository import syntax_nodes


def marked(path: str) -> set[tuple[str, int]]:
    """The test functions of a module, each with the numbers of the promises that it holds."""
    return {
        (node.name, number)
        for node in syntax_nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise"
        for number in map(ast.literal_eval, decorator.args)
    }


def test_every_promise_has_a_break() -> None:
    """And there is no break of anything else."""
    assert sorted(breaks.BREAKS) == sorted(promises())


@pytest.mark.parametrize("number", breaks.BREAKS)
def test_a_break_has_its_place_and_a_test_of_its_promise(number: int) -> None:
    """A function that is renamed, or a test that is, is found here and not by the next run of all breaks."""
    broken = breaks.BREAKS[number]
    path, _, test = broken.test.partition("::")

    assert callable(breaks.found(broken.place)[2])
    assert (test.partition("[")[0], number) in marked(path)


def test_a_break_that_nothing_calls_or_that_no_assertion_finds_is_not_shown() -> None:
    """Nor one whose test ends with another error."""
    run = breaks.Breaking(1)
    assert run.wrong == ["nothing has called it", "no assertion has failed"]

    run.calls, run.failed = 1, ["AssertionError"]
    assert run.wrong == []

    run.faults.append("TypeError")
    assert run.wrong == ["TypeError"]


@pytest.mark.long
def test_a_break_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The quickest of them, as `make ledger-breaks ARGS=9` has it."""
    assert breaks.main(["9"]) == 0
    assert "failed as it must: AssertionError" in capsys.readouterr().out
