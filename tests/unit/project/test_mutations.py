"""The table of deliberate faults: its texts are still in the source, and the docs list it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tests.mutations.runner import run, stale
from tests.mutations.table import MUTATIONS, Change, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.part}: {mutation.fault}")
def test_every_fault_can_be_applied(mutation: Mutation) -> None:
    """Its text occurs once, the change is one, and its test exists. `make mutations` tries them."""
    for change in mutation.changes:
        assert stale(ROOT, change) == ""
        assert change.new != change.old
    path, _, name = mutation.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8") or not name


def test_the_docs_list_every_fault() -> None:
    """docs/faults.md has the rows of `python -m tests.mutations --rows`, and no other."""
    rows = [mutation.row() for mutation in MUTATIONS]
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    table = text.partition("<!-- mutations: begin -->")[2].partition("<!-- mutations: end -->")[0].strip().splitlines()

    assert table[2:] == rows
    assert len(rows) >= 15
    assert {mutation.part for mutation in MUTATIONS} == {
        "aggregation",
        "owner",
        "backup",
        "client",
        "recovery",
        "first hour",
    }


def test_a_fault_is_killed_by_a_test_that_fails_and_by_nothing_else(tmp_path: Path) -> None:
    """A failing test kills it; one that passes, one that fails without the fault, and a text that has moved do not."""
    (tmp_path / "module.py").write_text("def double(value):\n    return 2 * value\n")
    tests = "from module import double\ndef test_double():\n    assert double(2) == 4\n"
    (tmp_path / "test_module.py").write_text(tests + "def test_zero():\n    assert double(0) == 0\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")

    def tried(old: str, new: str, test: str) -> str:
        (verdict,) = run(tmp_path, [Mutation("owner", "", test, (Change("module.py", old, new),))])
        return verdict.outcome

    assert tried("2 * value", "3 * value", "test_module.py::test_double") == "killed"
    assert tried("2 * value", "3 * value", "test_module.py::test_zero") == "survived"
    assert tried("2 * value", "3 *", "test_module.py::test_zero") == "broken"
    assert tried("2 * value", "3 * value", "test_wrong.py") == "broken"
    assert tried("4 * value", "3 * value", "test_module.py") == "stale"
