"""slow_joiner: three daemons train 25 million parameters; a fourth joins behind 20 Mbit/s. Do the three slow down?

Each machine is a network namespace. The rate of a node is that of the steps it completed between the first and the last
in a window: the one before the joiner starts, and the one from the first bytes of the vector on the joiner's cable
until it has all of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import NotMeasured, Outcome, Series
from tests.process.harness.lan_world import LanNode, NotPermitted, lan
from tests.process.harness.swarm_world import START_S, kill_all

NODES = 3
RATE_MBIT = 20.0
VALUES = 25_000_000
STEP_S = 2.0
BEFORE_S = 40.0
#: Longest wait for the vector: its bfloat16 takes 20 s on such a line.
LOADED_S = 180.0
#: On the joiner's cable before the vector: lookups, greetings and the manifest are far less.
BEGUN_BYTES = 500_000
LOOK_S = 0.05
SETTINGS: dict[str, Any] = {
    "training.task": "benchmarks.tasks:Wide",
    "training.options": {"values": VALUES, "seconds": STEP_S},
    "training.local_steps": 1,
    "training.eval_steps": 0,
    "training.checkpoint_s": 0.0,
    "training.min_nodes": NODES,
    "log.format": "json",
}


class Pace:
    """When each node completed its steps."""

    def __init__(self, nodes: list[LanNode]) -> None:
        self._nodes = nodes
        self._steps = [-1] * len(nodes)
        self._times: list[list[float]] = [[] for _ in nodes]

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for place, node in enumerate(self._nodes):
                step = node.step
                if step > self._steps[place]:
                    self._steps[place] = step
                    self._times[place].append(time.monotonic())
            if until():
                return True
            time.sleep(LOOK_S)
        return False

    def rate(self) -> float:
        """Steps per second of all nodes together."""
        if min(len(times) for times in self._times) < 3:
            raise NotMeasured(f"too few steps to tell a rate: {[len(times) for times in self._times]}")
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in self._times)


def measure(_arguments: argparse.Namespace) -> Outcome:
    nodes: list[LanNode] = []
    with tempfile.TemporaryDirectory(prefix="p2pnode-joiner-", ignore_cleanup_errors=True) as name:
        try:
            with lan([0] * NODES + [1], [0.0] * NODES + [RATE_MBIT]) as net:
                try:
                    before, while_loading, loading_s = _measure(Path(name), net.machines, net.ports[NODES], nodes)
                finally:
                    kill_all(nodes)
        except NotPermitted as error:
            raise NotMeasured(f"network namespaces cannot be made here: {error}") from error
    conditions = (
        f"{NODES} daemons train {VALUES / 1e6:g} M parameters in steps that rest {STEP_S:g} s, default exchange; a "
        f"fourth loads the vector behind {RATE_MBIT:g} Mbit/s; steps per second of the three while it loads over those "
        f"before"
    )
    details = {"steps_per_s": [round(before, 4), round(while_loading, 4)], "loading_s": round(loading_s, 1)}
    return Outcome(
        "slow_joiner",
        conditions,
        [Series("slow joiner: step rate of the others while it loads", "", [while_loading / before], "≥ 0.9", details)],
    )


def _measure(folder: Path, machines: list[Any], port: str, nodes: list[LanNode]) -> tuple[float, float, float]:
    for place in range(NODES):
        bootstrap = nodes[0].address if nodes else ""
        nodes.append(LanNode(folder, f"n{place}", SETTINGS, machine=machines[place], bootstrap=bootstrap))
        _wait(lambda: nodes[-1].address != "", "it listens", nodes)
    _wait(lambda: all(node.step >= 4 for node in nodes), "all train", nodes)
    _wait(lambda: all(node.status()["exchange"]["shards_backed"] for node in nodes), "all have backups", nodes)
    others = list(nodes)
    before = Pace(others)
    before.watch(BEFORE_S)
    print(f"before: {before.rate():.3f} steps/s", file=sys.stderr, flush=True)
    joiner = LanNode(folder, "joiner", SETTINGS, machine=machines[NODES], bootstrap=nodes[0].address)
    nodes.append(joiner)
    sent = Path("/sys/class/net", port, "statistics", "tx_bytes")
    _wait(lambda: int(sent.read_text()) > BEGUN_BYTES, "it loads", nodes)
    began_s = time.monotonic()
    loading = Pace(others)
    if not loading.watch(LOADED_S, lambda: bool(joiner.events("vector_fetched"))):
        raise NotMeasured(f"the joiner did not load within {LOADED_S:g} s:\n{joiner.output()[-3000:]}")
    return before.rate(), loading.rate(), time.monotonic() - began_s


def _wait(condition: Callable[[], bool], what: str, nodes: list[LanNode]) -> None:
    deadline = time.monotonic() + 2 * START_S
    while not condition():
        if time.monotonic() > deadline or any(node.ended for node in nodes):
            said = "\n".join(f"{node.name}:\n{node.output()[-1500:]}" for node in nodes)
            raise NotMeasured(f"not within {2 * START_S:.0f} s: {what}\n{said}")
        time.sleep(0.2)
