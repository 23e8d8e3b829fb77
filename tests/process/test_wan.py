"""Real daemons behind slow lines: slow is neither dead nor suspected, and everything arrives; dead is found at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.lan_world import LanNode, NotPermitted
from tests.process.harness.line_model import Cable
from tests.process.harness.swarm_world import DETECTION_BOUND_S, START_S, kill_all, until
from tests.process.harness.wan_world import Wan, wan

#: A step's bfloat16 delta, its copies for backups and the values for others take more than a second on this line.
LINE = Cable(4.0, 4.0, delay_s=0.02)
PARAMETERS = 120_000
STEP_S = 0.7
STEPS = 8
#: Of each node, so that how far apart two of them are can be told.
EXCHANGES = 3
NODES = 3
SHARDS = 16
SETTINGS = {
    "training.min_nodes": NODES,
    "training.local_steps": 1,
    "training.checkpoint_s": 0.0,
    "exchange.shards": SHARDS,
    "log.format": "json",
    "log.level": "debug",
}


def noted(file: Path) -> list[dict[str, Any]]:
    """The turns of a trainer so far."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


@contextlib.contextmanager
def swarm(world: Wan, folder: Path) -> Iterator[list[LanNode]]:
    """Nodes that train together, killed at the end."""
    nodes: list[LanNode] = []
    try:
        for number, machine in enumerate(world.machines):
            script = [sys.executable, "-m", "benchmarks.wan_trainer", "--parameters", str(PARAMETERS)]
            script += ["--step-s", str(STEP_S), "--shards", str(SHARDS), "--seed", str(number)]
            script += ["--notes", str(folder / f"notes-{number}")]
            bootstrap = nodes[0].address if nodes else ""
            name = f"n{number}"
            nodes.append(LanNode(folder, name, SETTINGS, machine=machine, bootstrap=bootstrap, script=script))
            if not number:
                until(lambda: nodes[0].address != "", START_S, "the founder listens", nodes)
        yield nodes
    finally:
        kill_all(nodes)
        for node in nodes:
            said = [line for line in node.output().splitlines() if '"level": "debug"' not in line]
            print(f"--- {node.name}, its end:", *said[-15:], sep="\n")


def exchanges(node: LanNode) -> list[dict[str, Any]]:
    """The rows of its steps that had a delta."""
    return [row for row in node.steps(1000) if "acknowledged" in row]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.promise(10)
def test_slow_lines_delay_and_nothing_else(tmp_path: Path) -> None:
    """On lines that need longer for a step than it takes no node is suspected, every delta is acknowledged, and every
    shard is pulled and at most two exchanges old. A killed node is known to be dead within the detection bound."""
    try:
        with wan([LINE] * NODES, seed=5) as world, swarm(world, tmp_path) as nodes:
            until(lambda: all(len(noted(tmp_path / f"notes-{n}")) >= STEPS for n in range(NODES)), 60, "steps", nodes)
            until(lambda: all(len(exchanges(node)) >= EXCHANGES for node in nodes), 60, "exchanges", nodes)
            for node in nodes:
                node.post("/pause")
            until(
                lambda: all(node.status()["exchange"]["outstanding_steps"] == [] for node in nodes), 20, "heard", nodes
            )
            for number, node in enumerate(nodes):
                exchange = node.status()["exchange"]
                lost = exchange["lost_in_splits"] + exchange["lost_in_restarts"]
                assert (lost, exchange["refused"]) == (0, 0)
                made = exchanges(node)
                turns = max(later["step"] - row["step"] for row, later in itertools.pairwise(made))
                print([(row["acknowledged"], row["outstanding"], row["pull_missing"]) for row in made])
                assert [row["pull_missing"] for row in made] == [0] * len(made)
                assert max(note["oldest"] for note in noted(tmp_path / f"notes-{number}")[3:]) <= 2 * turns
                assert [event for name in ("peer_suspect", "peer_dead") for event in node.events(name)] == []
            for node in nodes:
                node.post("/resume")
            nodes[2].kill()
            left = nodes[:2]
            took_s = until(
                lambda: [node.status()["population"]["estimate"] for node in left] == [2, 2], 20, "it is known", left
            )
            print(f"known to be dead after {took_s:.1f} s")
            assert took_s <= DETECTION_BOUND_S
    except NotPermitted as error:
        pytest.skip(f"slow lines between network namespaces: {error}")
