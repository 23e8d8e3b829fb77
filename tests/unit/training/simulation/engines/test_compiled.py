"""Arrays of the compiled engine, and a run that is fed in small budgets."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.builders.small_plans import small_plan

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")

from p2pnode.training.simulation.engines.compiled import PAGE, CompiledEngine, filled, lengthened


def test_a_new_array_begins_with_a_page() -> None:
    """Rows of eight words are cache lines only then."""
    array = filled((5, 8), np.uint64, 7)

    assert array.ctypes.data % PAGE == 0
    assert array.shape == (5, 8)
    assert (array == 7).all()


def test_an_array_grows_by_at_least_half_of_its_new_length() -> None:
    """What it holds is kept, the rest is zero; one that is long enough is returned itself."""
    array = filled((4,), np.int64, 3)
    longer = lengthened(array, 5)

    assert longer.tolist() == [3] * 4 + [0] * 4
    assert lengthened(longer, 8) is longer


@pytest.mark.parametrize("discipline", ["event", "repoll"])
def test_the_end_of_a_budget_changes_nothing(discipline: str) -> None:
    """A run that returns after each few completions is the run that does not."""
    plan = small_plan("pbsp", 30, 4, discipline=discipline)
    whole = CompiledEngine(plan, (5.0, 12.5), keep_trace=True).run()
    pieces = CompiledEngine(plan, (5.0, 12.5), keep_trace=True)
    pieces._budget = 7
    broken = pieces.run()

    assert broken.moments == whole.moments
    assert (broken.tests, broken.gap_sum) == (whole.tests, whole.gap_sum)
    np.testing.assert_array_equal(broken.steps, whole.steps)
    np.testing.assert_array_equal(broken.waited_s, whole.waited_s)
    assert broken.trace is not None
    assert whole.trace is not None
    np.testing.assert_array_equal(broken.trace.completed_s, whole.trace.completed_s)
