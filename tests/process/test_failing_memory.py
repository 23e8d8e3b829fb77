"""Memory that fails in a real daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all, until

NODES, SHARDS = 3, 4
#: For 5 s and more.
LOOKS = 100
SETTINGS: dict[str, Any] = {
    "training.checkpoint_s": 5.0,
    "training.eval_steps": 0,
    "barrier.method": "pbsp",
    "exchange.shards": SHARDS,
    "log.format": "json",
}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_shards_of_a_daemon_whose_memory_fails_go_to_their_backups(tmp_path: Path) -> None:
    """The values of all shards of one daemon are overwritten while it trains: each goes to another owner, nobody is
    left out, and all train on."""
    nodes: list[ProcessNode] = []
    try:
        for number in range(NODES):
            settings = SETTINGS | {"training.options": {"number": number, "seed": 7, "mean_s": 0.25}}
            bootstrap = nodes[0].address if nodes else ""
            program = "tests.process.harness.odd_daemon"
            nodes.append(ProcessNode(tmp_path, f"n{number}", settings, bootstrap=bootstrap, program=program))
            until(lambda: nodes[-1].step >= 1, START_S, "it trains", nodes)

        def owned() -> list[int]:
            """Of each node; all with a backup, as far as the nodes tell."""
            exchanges = [node.status()["exchange"] for node in nodes]
            return [exchange["shards_owned"] for exchange in exchanges if exchange["shards_without_backup"] == 0]

        history: list[list[int]] = []

        def settled() -> bool:
            """Many looks in a row have found the same: a young swarm still moves its shards."""
            history.append(owned())
            return sum(history[-1]) == SHARDS and history[-LOOKS:] == LOOKS * [history[-1]]

        until(settled, START_S, "the shards are backed up and stay where they are", nodes)
        broken = next(node for node in nodes if node.status()["exchange"]["shards_owned"])
        os.kill(broken.pid(), signal.SIGUSR2)

        until(lambda: bool(broken.events("shard_resigned")), START_S, "it has seen that", nodes)
        until(lambda: len(owned()) == NODES and sum(owned()) == SHARDS, START_S, "all have an owner", nodes)
        resigned = broken.status()["exchange"]["shards_resigned"]
        assert 1 <= resigned <= SHARDS
        until(lambda: len(broken.events("shard_resigned")) == resigned, START_S, "its log has each", nodes)
        steps = [node.step for node in nodes]
        until(
            lambda: all(node.step >= step + 5 for node, step in zip(nodes, steps, strict=True)),
            START_S,
            "all train on",
            nodes,
        )
        assert [node.status()["members_quarantined"] for node in nodes] == [[]] * NODES
    finally:
        kill_all(nodes)
