"""Figures of the update sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.simulation.figures.sequence_figures import (
    SEQUENCES,
    _pass_moments,
    bound_rows,
    inconsistency_rows,
)
from p2pnode.training.simulation.figures.tables import ReproductionRequest

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")
pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install p2pnode[simulate]")


def request_to(folder: Path) -> ReproductionRequest:
    return ReproductionRequest((), folder, None, 1, lambda _stage, _share: None)


def test_moments_are_those_of_the_normal_distribution() -> None:
    """Mean, standard deviation, skew 0 and kurtosis 3 of 100,000 normal numbers."""
    found = _pass_moments(np.random.default_rng(1).normal(2.0, 3.0, 100_000))

    assert found["mean"] == pytest.approx(2.0, abs=0.05)
    assert found["sd"] == pytest.approx(3.0, abs=0.05)
    assert found["skew"] == pytest.approx(0.0, abs=0.05)
    assert found["kurtosis"] == pytest.approx(3.0, abs=0.1)


def test_barriers_order_the_inconsistency_of_the_sequence(tmp_path: Path) -> None:
    """A row per run and the claim of their order, which holds; PNG and CSV are written."""
    rows = inconsistency_rows(request_to(tmp_path))

    assert len(rows) == len(SEQUENCES) + 1
    assert rows[-1].within is True
    assert {path.name for path in tmp_path.iterdir()} == {"inconsistency.csv", "inconsistency.png"}


def test_every_bound_has_its_golden_value(tmp_path: Path) -> None:
    """Nine values for each of six β, all within the tolerance."""
    rows = bound_rows(request_to(tmp_path))

    assert len(rows) == 54
    assert all(row.within for row in rows)
