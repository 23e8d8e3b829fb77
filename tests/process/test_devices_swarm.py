"""Real daemons with several trainers each: together, with trainers and daemons that are killed, and started again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all, until
from tests.process.harness.trainer_world import is_running

SETTINGS: dict[str, Any] = {
    "training.device": "cpu*2",
    "training.local_steps": 4,
    "training.eval_steps": 0,
    "training.checkpoint_s": 1.0,
    "training.linger_s": 1.0,
    "devices.period": 2,
    "devices.coordination": "global",
    "exchange.shards": 4,
    "log.format": "json",
}
TRAINER = (sys.executable, "-m", "tests.process.harness.plain_trainer", "0.02")
WITHIN_S = 120.0

Start = Callable[..., ProcessNode]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[ProcessNode] = []

    def start(name: str, bootstrap: str = "", **settings: Any) -> ProcessNode:
        values = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
        node = ProcessNode(tmp_path, name, values, bootstrap=bootstrap, script=TRAINER, forks=True)
        nodes.append(node)
        until(lambda: node.step >= 2 or node.ended, START_S, "it trains", [node])
        return node

    yield start
    kill_all(nodes)


def devices(node: ProcessNode) -> list[dict[str, Any]]:
    return list(node.status().get("devices", []))


def pids(node: ProcessNode) -> list[int]:
    """Of those that run: one that is started again has none for a moment."""
    return [int(one["pid"]) for one in devices(node) if one["pid"]]


def go_on(*nodes: ProcessNode, steps: int = 3) -> None:
    """Every node completes so many more steps."""
    goals = [node.step + steps for node in nodes]
    until(
        lambda: all(node.step >= goal for node, goal in zip(nodes, goals, strict=True)),
        WITHIN_S,
        f"{steps} more steps",
        nodes,
    )


def test_two_nodes_with_two_trainers_each_live_through_the_end_of_trainers_and_daemons(start: Start) -> None:
    """They share their local steps. A killed trainer is back in a moment, while its node and the other go on. All
    trainers of a node may be killed. With a killed daemon its trainers end, and after SIGTERM nothing is left."""
    one = start("one")
    other = start("other", one.address)
    until(
        lambda: (
            {str((node.status().get("coordination") or {}).get("server")) for node in (one, other)}
            in ({one.status()["node"]["id"]}, {other.status()["node"]["id"]})
        ),
        WITHIN_S,
        "one global server",
        [one, other],
    )
    assert sum(node.status()["coordination"]["serves"] for node in (one, other)) == 1

    before = pids(one)
    assert len(set(before)) == 2
    os.kill(before[1], signal.SIGKILL)
    go_on(one, other)
    until(lambda: [d["state"] for d in devices(one)] == ["running", "running"], WITHIN_S, "it is back", [one])
    assert [d["failures"] for d in devices(one)] == [0, 1]
    assert pids(one)[0] == before[0]

    for pid in pids(one):
        os.kill(pid, signal.SIGKILL)
    go_on(one, other)
    until(lambda: all(map(is_running, found := pids(one))) and len(found) == 2, WITHIN_S, "all are back", [one])

    orphans = pids(other)
    os.kill(other.pid(), signal.SIGKILL)
    until(lambda: not any(map(is_running, orphans)), WITHIN_S, "its trainers have ended")
    go_on(one)

    left = pids(one)
    one.terminate()
    until(lambda: one.ended, WITHIN_S, "it has left")
    assert one.process.returncode == 0
    assert not any(map(is_running, left))


def test_a_node_goes_on_with_another_number_of_devices(start: Start) -> None:
    """From a checkpoint of two trainers three go on, and then a single one, each from the step before."""
    node, step = start("node"), 0
    for number in (2, 3, 1):
        if number != 2:
            node = start("node", training__device=f"cpu*{number}", devices__coordination="none")
        assert node.step >= step, "it went back"
        assert len(devices(node)) == (number if number > 1 else 0)
        go_on(node)
        node.terminate()
        step = node.step
        until(lambda: node.ended, WITHIN_S, "it has left")  # noqa: B023
        assert node.process.returncode == 0, node.output()[-2000:]
    assert node.events("trainer_state_gone") == []
