"""The simulation of barriers and rules: it adds what was trained, at the times at which its barriers allow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.async_rule import Swarm, way_of
from benchmarks.record import NotMeasured
from training.encoding.codecs import Vector
from training.settings import BarrierSettings, ExchangeSettings
from training.shards.outer_rule import Rule

SIZE, NODES, STEPS = 16, 3, 5
GRACE = BarrierSettings().grace
#: Nodes of nearly equal speed.
SCENE = (1.0, 0.0)


class StubRunner:
    """Trains nothing: its delta is a step towards its own number. Notes the bases."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bases: list[Vector] = []
        self.trained = np.zeros(SIZE, np.float64)
        layout = SimpleNamespace(total=SIZE, parameter_total=SIZE)
        self.model_vector = SimpleNamespace(layout=layout, read=lambda vector: vector.fill(0.0))

    def train(self, _order: object, base: Vector, delta: Vector) -> None:
        self.bases.append(base.copy())
        delta[:] = 0.5 * (self.number - base)
        self.trained += delta


def run(way: str, seed: int = 3) -> tuple[Swarm, list[StubRunner]]:
    runners: list[Any] = [StubRunner(number) for number in (1, 2, 6)]
    swarm = Swarm(runners, way_of(way), seed, "float32")
    assert list(swarm.run(STEPS)) == list(range(1, NODES * STEPS + 1))
    return swarm, runners


@pytest.mark.parametrize("way", ["bsp 1/0", "asp 1/0", "pssp 1/0 carry=0.5", "asp 1/0 overlap=1", "pssp 1/0 grace=0.3"])
def test_every_delta_is_added_once_with_its_weight(way: str) -> None:
    """With rate 1 and no momentum the value is the sum of all that was trained, by one over the number of nodes."""
    swarm, runners = run(way)

    expected = sum(runner.trained for runner in runners) / NODES
    np.testing.assert_allclose(swarm.state.value, expected, rtol=1e-5)
    assert swarm.state.version == NODES * STEPS


def test_under_bsp_all_begin_a_step_with_the_same_values() -> None:
    """And without a barrier they do not."""
    for way, equal in (("bsp 1/0", True), ("asp 1/0", False)):
        _, runners = run(way)
        steps = zip(*(runner.bases for runner in runners), strict=True)
        same = [np.array_equal(bases[0], other) for bases in steps for other in bases]
        assert all(same) is equal, way


def test_with_enough_grace_nodes_step_together() -> None:
    """They begin each step with equal values, carry nothing, and wait; with none they do not."""
    for grace, equal in ((1.0, True), (0.0, False)):
        swarm, runners = run(f"pssp 1/0 carry=0.5 grace={grace}", seed=2)
        steps = zip(*(runner.bases for runner in runners), strict=True)
        same = [np.array_equal(bases[0], other) for bases in steps for other in bases]
        assert all(same) is equal, grace
        assert (swarm.waited_s > 0.0) is equal


def test_what_is_carried_is_in_the_base() -> None:
    """Of three nodes each carries two thirds of the share of its own delta: what the pulled value lacks."""
    plain, carrying = (run(way)[1] for way in ("asp 1/0 carry=0", "asp 1/0 carry=0.5"))

    for one, other in zip(plain, carrying, strict=True):
        first = 0.5 * (one.number - one.bases[0])
        np.testing.assert_allclose(other.bases[1] - one.bases[1], 0.5 * (2 / 3) * first, rtol=1e-5)


def test_a_way_is_a_barrier_a_rule_and_options() -> None:
    """What is not given is the default."""
    usual = ExchangeSettings()

    assert way_of("pssp")[1:] == (Rule(usual.outer_lr, usual.outer_momentum), usual.carry, 0.0, None, GRACE, *SCENE)
    assert way_of("pssp grace=0.1 slow=1.5 shape=4")[5:] == (0.1, 1.5, 4.0)
    assert way_of("asp 1/0 carry=0.25 correct=0.5")[1:] == (Rule(1.0, 0.0), 0.25, 0.5, None, 0.0, *SCENE)
    assert way_of("pssp overlap=1").grace == way_of("bsp shape=1").grace == 0.0


@pytest.mark.parametrize(
    "text", ["", "psp", "asp 1", "asp 1/x", "asp 1/0 carried=1", "asp carry=", "bsp carry=0.5", "bsp grace=0.3"]
)
def test_a_way_that_makes_no_sense_is_refused(text: str) -> None:
    """The message has the text."""
    with pytest.raises(NotMeasured, match=f'--ways "{text}'):
        way_of(text)
