"""Figures of a run, against their definitions computed directly."""

from __future__ import annotations

import numpy as np

from p2pnode.training.simulation.reference import ReferenceEngine
from tools.psp import sequence_figures as metrics
from tools.psp.points import plan_of


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

    engine._pass = watched  # type: ignore[method-assign]
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
