"""Measures of a run, against their definitions done the slow way; and the texts that name models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from training.simulation.engines.reference import ReferenceEngine
from training.simulation.figures.points import plan_of
from training.simulation.model import metrics
from training.simulation.model.random_streams import Stream
from training.simulation.model.step_times import BadModel, Stragglers, parse_step_times, parse_stragglers


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


def test_lag_share_counts_pairs() -> None:
    """F(s): of all ordered pairs those where the other lies at most s behind."""
    steps = np.array([3, 5, 5, 9])
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    for staleness in (0, 2, 4, 6):
        expected = sum(steps[i] - steps[j] <= staleness for i, j in pairs) / len(pairs)
        assert metrics.lag_share(steps, staleness) == pytest.approx(expected)


def test_waiting_and_working_fill_the_time() -> None:
    """Per node: seconds at work plus seconds waited are the whole run, but for the step in hand at the end."""
    run = ReferenceEngine(plan_of("bsp", 10, 50, steps="constant:1", slow="10%x3")).run()

    assert run.waited_s[1] + run.steps[1] * 1.0 == pytest.approx(50, abs=1.0)
    assert run.waited_s[0] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("text", "mean_s", "variance"),
    [
        ("exp:2", 2.0, 4.0),
        ("1+exp:1", 2.0, 1.0),
        ("gamma:4:0.25", 1.0, 0.25),
        ("gamma:0.5:2", 1.0, 2.0),
        ("0.1+gamma:4:0.25", 1.1, 0.25),
        ("lognormal:0:0.3", math.exp(0.045), (math.exp(0.09) - 1) * math.exp(0.09)),
        ("constant:3", 3.0, 0.0),
    ],
)
def test_a_model_has_its_mean_and_variance(text: str, mean_s: float, variance: float) -> None:
    """20,000 draws: mean within four standard errors, variance within a tenth."""
    model, stream = parse_step_times(text), Stream(11, 0, 0)
    draws = np.array([model.draw(stream) for _ in range(20_000)])

    assert model.mean_s == pytest.approx(mean_s)
    assert abs(draws.mean() - mean_s) <= 4 * math.sqrt(variance / 20_000) + 1e-12
    assert draws.var() == pytest.approx(variance, rel=0.1)


def test_a_trace_is_drawn_from(tmp_path: Path) -> None:
    """What `/steps` answers, or bare seconds: only those values come, and all of them."""
    file = tmp_path / "steps.json"
    file.write_text(json.dumps([{"step": 1, "train_seconds": 0.5}, {"step": 2, "train_seconds": 1.5}, {"step": 3}]))
    model, stream = parse_step_times(f"trace:{file}"), Stream(1, 0, 0)

    assert model.mean_s == 1.0
    assert {model.draw(stream) for _ in range(100)} == {0.5, 1.5}


@pytest.mark.parametrize("text", ["", "exp", "exp:0", "exp:-1", "exp:1:2", "gamma:1", "nothing:1", "x+exp:1",
                                  "trace:/no/such/file", "exp:nan"])  # fmt: skip
def test_a_text_that_names_no_model_is_refused(text: str) -> None:
    """The message says what was expected."""
    with pytest.raises(BadModel):
        parse_step_times(text)


def test_stragglers_are_parsed() -> None:
    """A share, a factor, and whether each step or each node is slow."""
    assert parse_stragglers("") == Stragglers()
    assert parse_stragglers("5%x4") == Stragglers(0.05, 4.0)
    assert parse_stragglers("12.5% x 2,transient") == Stragglers(0.125, 2.0, transient=True)
    assert parse_stragglers("5%x4").count(1000) == 50
    for text in ("5x4", "101%x2", "5%x0", "a%x2"):
        with pytest.raises(BadModel):
            parse_stragglers(text)
