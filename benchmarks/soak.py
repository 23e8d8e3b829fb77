"""soak: four daemons train for half an hour; do memory, file descriptors or tasks of any of them grow?

The slope is that of the least squares line through the daemon's resident memory, after a first fifth in which caches,
logs and rings fill up. Descriptors and tasks move with what is under way: the median of the last fifth is compared
with that of the second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.start import resident_bytes
from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all

NODES = 4
MINUTES = 30.0
SAMPLE_S = 5.0
SETTINGS: dict[str, Any] = {
    "training.task": "benchmarks.tasks:PacedDigits",
    "training.eval_steps": 20,
    "training.checkpoint_s": 30.0,
    "training.min_nodes": NODES,
    "log.format": "json",
}


class Samples:
    """What one node showed: seconds, megabytes, descriptors, tasks."""

    def __init__(self, node: ProcessNode) -> None:
        self.node = node
        self.seconds: list[float] = []
        self.memory_mb: list[float] = []
        self.descriptors: list[float] = []
        self.tasks: list[float] = []
        self.steps = 0

    def take(self, seconds: float) -> None:
        status = self.node.status()
        if not status:
            raise NotMeasured(f"{self.node.name} does not answer:\n{self.node.output()[-2000:]}")
        pid = self.node.pid()
        self.seconds.append(seconds)
        self.memory_mb.append(resident_bytes(pid) / 1e6)
        self.descriptors.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        self.tasks.append(status["loop"]["tasks"])
        self.steps = status["step"]


def slope_per_minute(seconds: Sequence[float], values: Sequence[float]) -> float:
    """Of the least squares line after the first fifth. Pure."""
    first = len(values) // 5
    return 60.0 * statistics.linear_regression(seconds[first:], values[first:]).slope


def growth(values: Sequence[float]) -> float:
    """The median of the last fifth minus that of the second. Pure."""
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) - statistics.median(values[fifth : 2 * fifth])


def measure(arguments: argparse.Namespace) -> Outcome:
    minutes = arguments.minutes or MINUTES
    with tempfile.TemporaryDirectory(prefix="p2pnode-soak-", ignore_cleanup_errors=True) as folder:
        nodes: list[ProcessNode] = []
        try:
            samples = _run(Path(folder), nodes, 60.0 * minutes)
        finally:
            kill_all(nodes)
    conditions = (
        f"{NODES} daemons on loopback train digits for {minutes:g} minutes, steps of 0.2 s, checkpoints every 30 s; "
        f"sampled every {SAMPLE_S:g} s after the start, the slope without the first fifth"
    )
    details = {
        "steps": [one.steps for one in samples],
        "memory_mb": [[round(one.memory_mb[0], 1), round(one.memory_mb[-1], 1)] for one in samples],
        "descriptors": [[min(one.descriptors), max(one.descriptors)] for one in samples],
        "tasks": [[min(one.tasks), max(one.tasks)] for one in samples],
    }
    slopes = [slope_per_minute(one.seconds, one.memory_mb) for one in samples]
    return Outcome(
        "soak",
        conditions,
        [
            Series("soak: growth of a daemon's resident memory", "MB/min", slopes, "≤ 1", details),
            Series("soak: growth of open descriptors", "", [growth(one.descriptors) for one in samples], "≤ 2"),
            Series("soak: growth of tasks", "", [growth(one.tasks) for one in samples], "≤ 2"),
        ],
    )


def _run(folder: Path, nodes: list[ProcessNode], seconds: float) -> list[Samples]:
    for part in range(NODES):
        options = {"part": part, "parts": NODES, "lacking": 3}
        bootstrap = nodes[0].address if nodes else ""
        settings = SETTINGS | {"training.options": options}
        nodes.append(ProcessNode(folder, f"node-{part}", settings, bootstrap=bootstrap))
        _wait(lambda: nodes[-1].address != "", "it listens", nodes)
    _wait(lambda: all(node.step >= 5 for node in nodes), "all train", nodes)
    samples = [Samples(node) for node in nodes]
    began_s = time.monotonic()
    while (now_s := time.monotonic() - began_s) < seconds:
        for one in samples:
            one.take(time.monotonic() - began_s)
        if len(samples[0].seconds) % 12 == 0:
            print(f"{now_s:.0f} s, {[round(one.memory_mb[-1], 1) for one in samples]} MB", file=sys.stderr, flush=True)
        time.sleep(SAMPLE_S)
    return samples


def _wait(condition: Any, what: str, nodes: list[ProcessNode]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline or any(node.ended for node in nodes):
            said = "\n".join(f"{node.name}:\n{node.output()[-1500:]}" for node in nodes)
            raise NotMeasured(f"not within {START_S:.0f} s: {what}\n{said}")
        time.sleep(0.2)
