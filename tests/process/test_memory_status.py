"""The memory that `/status` counts is the memory that the kernel counts: two real daemons with a stub trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants import Ours, Way
from benchmarks.daemons import wait_until

#: So many that their parts are three times the interpreter and its libraries.
PARAMETERS = 6_000_000
TURNS = 6
SHARED = ("replica_bytes", "delta_bytes")


def _has_both_halves(status: dict[str, Any]) -> bool:
    held = status["memory"]["held"]
    return bool(held["owned_bytes"] + held["backed_bytes"] == 8 * PARAMETERS)


@pytest.mark.timeout(600)
def test_the_parts_of_status_are_the_private_memory_of_the_process() -> None:
    """After some steps the parts held by each of two daemons, without those shared with the trainer, are within 15 % of
    the private memory that the kernel counts; half of the shards are owned and half backed up, with momentum."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-test-") as folder:
        group = Ours(Way("bfloat16", replicas=1), 2, PARAMETERS, Path(folder))
        try:
            for _ in range(TURNS):
                group.turn()
            group.ready()
            found = [wait_until(node, _has_both_halves, what="owner and backup")["memory"] for node in group.nodes]
        finally:
            group.stop()

    for memory in found:
        held = memory["held"]
        assert held["replica_bytes"] == held["delta_bytes"] == held["residual_bytes"] == 4 * PARAMETERS
        assert held["repair_log_bytes"] >= 2 * PARAMETERS  # of each delta its own half, and that of the other node
        assert memory["held_bytes_per_parameter"]["residual"] == 4.0
        own = sum(size for part, size in held.items() if part not in SHARED)
        assert 0.85 < own / memory["private_bytes"] < 1.15, memory
