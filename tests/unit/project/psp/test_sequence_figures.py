"""Figures of the update sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pnode.training.simulation.reference import ReferenceEngine
from tools.psp import sequence_figures as metrics
from tools.psp.__main__ import main
from tools.psp.points import plan_of
from tools.psp.sequence_figures import (
    SEQUENCES,
    _pass_moments,
    inconsistency_rows,
    mean_bound,
    normaliser,
    square_bound,
)
from tools.psp.tables import ReproductionRequest

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")
pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install p2pnode[simulate]")

Values = NDArray[np.float64]


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


def lag_law(f: Values, a: float, r: int, length: int) -> Values:
    """The chapter's distribution of lags, float64[T + 1]: S·f(n) up to r, then S·a^(n−r). `f` is float64[≥ r + 1]."""
    scale = normaliser(a, float(f[: r + 1].sum()), r, length)
    tail = a ** np.arange(1, length - r + 1, dtype=np.float64)
    return np.concatenate([scale * f[: r + 1], scale * tail])


def test_the_bounds_hold_for_the_law_of_lags() -> None:
    """On random laws (r < 12, β < 64) the mean and the mean square of the implied lag stay below the bounds."""
    generator = np.random.default_rng(7)
    print("seed 7")
    for _ in range(300):
        r, beta, length = int(generator.integers(0, 12)), int(generator.integers(1, 64)), 400
        f = generator.random(r + 1) * generator.random()
        f /= max(1.0, f.sum() / 0.98)
        share = float(f.sum())
        a = share**beta
        law = lag_law(f, a, r, length)
        lags = np.arange(law.size)

        assert law.sum() == pytest.approx(1.0)
        assert (law * lags).sum() <= mean_bound(a, share, r, length) + 1e-9
        assert (law * lags**2).sum() <= square_bound(a, share, r, length) + 1e-9


def test_the_bounds_are_reproduced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every golden value of the bounds is within its tolerance; PNG, CSV and the table of verdicts are written."""
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install p2pnode[simulate]")
    assert main(["bounds", "--out", str(tmp_path)]) == 0
    assert "54 of 54 within tolerance" in capsys.readouterr().out
    assert (tmp_path / "bounds.csv").read_text().splitlines()[1] == "1,min B1,14.664,14.66434,True"
    assert {"bounds.png", "bounds.csv", "table.csv"} <= {path.name for path in tmp_path.iterdir()}


# -- figures of a run, against their definitions computed directly


def test_sequence_inconsistency_is_the_symmetric_difference_of_prefixes() -> None:
    """For every prefix: |true △ noisy| / P, with the true sequence giving each node a step in turn."""
    nodes = 7
    trace = ReferenceEngine(plan_of("ssp(2)", nodes, 12), keep_trace=True).run().trace
    assert trace is not None
    done = [0] * nodes
    noisy = []
    for node in trace.node.tolist():
        done[node] += 1
        noisy.append((node, done[node]))
    true = [(place % nodes, place // nodes + 1) for place in range(len(noisy))]
    expected = [len(set(true[:n]) ^ set(noisy[:n])) / nodes for n in range(1, len(noisy) + 1)]

    np.testing.assert_allclose(metrics.sequence_inconsistency(trace, nodes), expected)


def test_progress_inconsistency_is_the_distance_of_step_vectors() -> None:
    """At each pass: Σ |steps now − steps at the node's previous pass| / P."""
    nodes = 6
    engine = ReferenceEngine(plan_of("pssp(1,2)", nodes, 12), keep_trace=True)
    last = {node: [0] * nodes for node in range(nodes)}
    expected = []
    passing = engine._pass

    def watched(now: float, node: int) -> None:
        expected.append(sum(abs(a - b) for a, b in zip(engine.steps, last[node], strict=True)) / nodes)
        last[node] = list(engine.steps)
        passing(now, node)

    engine._pass = watched
    trace = engine.run().trace
    assert trace is not None

    np.testing.assert_allclose(metrics.progress_inconsistency(trace, nodes), expected)


def test_bsp_is_nearly_consistent_and_asp_is_not() -> None:
    """After many steps the prefix of bsp differs from the true one by at most a round, that of asp by several."""
    found = {}
    for name in ("bsp", "asp"):
        trace = ReferenceEngine(plan_of(name, 20, 100), keep_trace=True).run().trace
        assert trace is not None
        found[name] = metrics.sequence_inconsistency(trace, 20)[-200:].mean()

    assert found["bsp"] <= 1.0 < found["asp"]
