"""The plan of a demo: configurations of its nodes, when the goal is reached, and the summary."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest

from p2pnode.config.load import load
from p2pnode.config.rules import check
from p2pnode.config.toml import node_toml
from p2pnode.demo.plan import DemoPlan, DemoResult, goal_held, node_config, options, summary
from p2pnode.demo.run import _Swarm
from p2pnode.demo.view import View
from p2pnode.local_run import Interrupts

PLAN = DemoPlan(nodes=2)


@pytest.mark.parametrize(
    ("accuracies", "held"),
    [
        ([[0.95, 0.95, 0.95], [0.96, 0.97, 0.98]], True),
        ([[0.1, 0.95, 0.99, 0.95], [0.96, 0.97, 0.98]], True),
        ([[0.95, 0.95, 0.95], [0.96, 0.97]], False),
        ([[0.95, 0.95, 0.95], []], False),
        ([[0.99, 0.99, 0.94, 0.99, 0.99], [0.96, 0.97, 0.98]], False),
        ([[0.99, 0.99, 0.99, 0.94], [0.96, 0.97, 0.98]], False),
    ],
)
def test_the_goal_must_hold_three_times_in_a_row_at_every_node(accuracies: list[list[float]], held: bool) -> None:
    """A relapse starts the count again, and the last node decides."""
    assert goal_held(accuracies, 0.95) is held


def test_the_configuration_of_the_nodes_loads_and_each_has_a_part(tmp_path: Path) -> None:
    """The parts are disjoint and lack classes, ports are free ones, and no node begins before all are there."""
    plan = dataclasses.replace(PLAN, nodes=4, barrier="bsp", seed=7)
    config = node_config(plan, tmp_path)
    path = tmp_path / "node.toml"
    path.write_text(node_toml(config))

    assert check(config) == []
    assert load(path).config == config
    assert [options(plan, part)["part"] for part in range(4)] == [0, 1, 2, 3]
    assert options(plan, 3) == {"part": 3, "parts": 4, "lacking": 3}
    assert (config.training.min_nodes, config.training.seed, config.training.threads) == (4, 7, 1)
    assert (config.node.port, config.status.port) == (0, 0)
    assert config.barrier.method == "bsp"


def test_the_summary_has_the_figures() -> None:
    """Accuracy is the worst node's; bytes are per node and step; what is unknown is null."""
    statuses = tuple(
        {
            "step": step,
            "population": {"estimate": 2.0},
            "exchange": {"bytes_sent": sent},
        }
        for step, sent in [(10, 1000), (30, 3000)]
    )

    answer = summary(PLAN, DemoResult(True, "", 12.345, statuses, (0.97, 0.96)), [0.7, 0.72])

    assert answer["nodes"] == 2
    assert answer["seconds"] == pytest.approx(12.345, abs=0.01)
    assert answer["steps_per_node"] == [10, 30]
    assert answer["accuracy"] == 0.96
    assert answer["alone"] == 0.71
    assert answer["population_estimate"] == 2.0
    assert answer["bytes_sent_per_node_and_step"] == 100
    nothing = summary(PLAN, DemoResult(False, "why", 1.0, ({}, {}), (0.9, None)), [])
    assert (nothing["accuracy"], nothing["alone"], nothing["bytes_sent_per_node_and_step"]) == (None, None, None)


def test_a_single_node_lacks_nothing() -> None:
    """With one node no other could hold the missing classes; presets of the task stay."""
    assert options(DemoPlan(nodes=1), 0) == {"part": 0, "parts": 1, "lacking": 0}
    assert options(DemoPlan(nodes=1, task="mnist"), 0)["optimizer"] == "sgd"


def test_a_gap_in_the_events_starts_the_evaluations_again() -> None:
    """Evaluations before dropped events do not count as "in a row" with those after them."""
    swarm = _Swarm(DemoPlan(nodes=1), Interrupts(), View("", io.StringIO()))
    first = {"event": "evaluated", "fields": {"accuracy": 0.5}}

    swarm.read_events(1, {"dropped": 0, "events": [first, {"event": "step", "fields": {}}], "last": 2})
    assert swarm.accuracies[1] == [0.5]
    swarm.read_events(1, {"dropped": 3, "events": [{"event": "evaluated", "fields": {"accuracy": 0.9}}], "last": 6})

    assert swarm.accuracies[1] == [0.9]
