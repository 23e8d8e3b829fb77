"""Models of step times and stragglers: notation, moments, traces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.simulation.random_streams import RandomStream
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
