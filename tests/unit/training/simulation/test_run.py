"""The choice of an engine, and that every engine repeats from its seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2pnode.training.simulation.plan import Churn
from p2pnode.training.simulation.run import REFERENCE_STEPS, NotCompiled, simulate
from tests.harness.builders.small_plans import SEED, small_plan

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


def test_a_run_repeats_from_its_seed() -> None:
    """The same plan gives the same steps twice, another seed others."""
    one = small_plan("pssp", 50, 3)

    first, second = simulate(one), simulate(one)

    np.testing.assert_array_equal(first.steps, second.steps)
    assert not np.array_equal(first.steps, simulate(replace(one, seed=SEED + 1)).steps)


def test_what_the_compiled_engine_cannot_do_is_refused_by_name() -> None:
    """Churn, delay, biased samples and custom barriers go to the reference engine, or are refused by name."""
    for changes in ({"churn": Churn(0.1)}, {"delay_s": 0.1}, {"sampler": "biased"}):
        one = small_plan("pssp", 10, 2, **changes)
        with pytest.raises(NotCompiled):
            simulate(one, engine="compiled")
        assert simulate(one).engine == "reference"


def test_without_numba_the_history_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed the reference engine runs, and gives the same steps."""
    one = small_plan("pssp", 30, 3, discipline="pool", duration_s=120.0)
    compiled = simulate(one)
    monkeypatch.setattr("p2pnode.training.simulation.run.has_numba", lambda: False)

    reference = simulate(one)

    assert (compiled.engine, reference.engine) == ("compiled", "reference")
    np.testing.assert_array_equal(compiled.steps, reference.steps)


def test_a_small_plan_needs_no_compilation() -> None:
    """Up to the bound `auto` runs the reference engine, beyond it the compiled one, and both give the same steps."""
    below = small_plan("pssp", 30, 3, discipline="pool", duration_s=REFERENCE_STEPS / 30)
    above = replace(below, duration_s=below.duration_s + 0.1)

    assert (simulate(below).engine, simulate(above).engine) == ("reference", "compiled")
    np.testing.assert_array_equal(simulate(below).steps, simulate(below, engine="compiled").steps)
