"""Models of step times and stragglers: notation, moments, traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.plan import Churn, Plan
from p2pnode.training.simulation.random_streams import DURATIONS, GAMMA, MASK, SAMPLES, RandomStream, mixed
from p2pnode.training.simulation.step_times import BadModel, Stragglers, parse_step_times, parse_stragglers


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
    model, stream = parse_step_times(text), RandomStream(11, 0, 0)
    draws = np.array([model.draw(stream) for _ in range(20_000)])

    assert model.mean_s == pytest.approx(mean_s)
    assert abs(draws.mean() - mean_s) <= 4 * math.sqrt(variance / 20_000) + 1e-12
    assert draws.var() == pytest.approx(variance, rel=0.1)


def test_a_trace_is_drawn_from(tmp_path: Path) -> None:
    """Rows of `/steps`: only their values are drawn, and all of them."""
    file = tmp_path / "steps.json"
    file.write_text(json.dumps([{"step": 1, "train_seconds": 0.5}, {"step": 2, "train_seconds": 1.5}, {"step": 3}]))
    model, stream = parse_step_times(f"trace:{file}"), RandomStream(1, 0, 0)

    assert model.mean_s == 1.0
    assert {model.draw(stream) for _ in range(100)} == {0.5, 1.5}


@pytest.mark.parametrize("text", ["", "exp", "exp:0", "exp:-1", "exp:1:2", "gamma:1", "nothing:1", "x+exp:1",
                                  "trace:/no/such/file", "exp:nan"])  # fmt: skip
def test_a_text_that_names_no_model_is_refused(text: str) -> None:
    """An unknown name, wrong numbers, or a file that is not there."""
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


# -- plans that are refused, and the daemon's barrier of a plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"duration_s": 0.0},
        {"repoll_s": 0.0},
        {"pool_size": 0},
        {"pool_renewal_s": -1.0},
        {"population_error": -0.1},
        {"delay_s": -0.1},
        {"churn": Churn(-0.1)},
        {"seed": -1},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_by_name(wrong: dict[str, Any]) -> None:
    """The message names the field."""
    usual: dict[str, Any] = {"nodes": 5, "barrier": BarrierSettings(), "duration_s": 10.0}

    with pytest.raises(ValueError, match=next(iter(wrong))):
        Plan(**(usual | wrong))


def test_the_barrier_is_the_daemons() -> None:
    """pssp with a lag of 2 passes exactly when no sampled node is more than two steps behind."""
    plan = Plan(nodes=5, barrier=BarrierSettings(method="pssp", staleness=2), duration_s=10.0)
    barrier = plan.made_barrier()

    assert barrier.passes(5, [3, 9])
    assert not barrier.passes(5, [2, 9])


# -- random streams


def test_the_generator_is_splitmix64() -> None:
    """The first outputs from the state 1234567, as published with the reference implementation."""
    state, found = 1234567, []
    for _ in range(3):
        state = (state + GAMMA) & MASK
        found.append(mixed(state))

    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_streams_differ_by_seed_purpose_and_node_and_repeat() -> None:
    """Each of the three gives another stream; the same three give the same."""
    found = {
        (seed, purpose, node): tuple(RandomStream(seed, purpose, node).uniform() for _ in range(1))
        for seed in (1, 2)
        for purpose in (DURATIONS, SAMPLES)
        for node in (0, 1)
    }

    assert len(set(found.values())) == len(found)
    assert RandomStream(2, SAMPLES, 1).uniform() == found[2, SAMPLES, 1][0]


@pytest.mark.parametrize(
    ("name", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("exponential", 1, 1), ("normal", 0, 1)]
)
def test_a_distribution_has_its_mean_and_variance(name: str, mean: float, variance: float) -> None:
    """20,000 draws: the mean within four standard errors, the variance within a tenth."""
    stream = RandomStream(3, DURATIONS, 0)
    draws = np.array([getattr(stream, name)() for _ in range(20_000)])

    assert abs(draws.mean() - mean) <= 4 * (variance / draws.size) ** 0.5
    assert draws.var() == pytest.approx(variance, rel=0.1)


def test_below_gives_each_number_equally_often() -> None:
    """7,000 draws below 7: each number about a thousand times."""
    stream = RandomStream(4, SAMPLES, 0)
    counts = np.bincount([stream.below(7) for _ in range(7000)], minlength=7)

    assert counts.size == 7
    assert abs(counts - 1000).max() < 150
