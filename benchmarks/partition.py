"""partition: six daemons on two switches, the line between them cut for 30 s and restored.

Each machine is a network namespace with a limited rate. The task counts: in the model at the end stands how many steps
of each node are in it, exactly. Watched are the longest time that any node was idle during and after the cut, and how
long it took until all had one model. Every step that a node counted, on either side, must be in it.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.daemons import acknowledged_steps
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.files import checkpoint
from p2pnode.training.layout import shard_bounds
from tests.process.harness.lan_world import Lan, LanNode, NotPermitted, lan
from tests.process.harness.swarm_world import POLL_INTERVAL_S, START_S, kill_all

SIDES = (0, 0, 0, 1, 1, 1)
RATE_MBIT = 50.0
CUT_S = 30.0
BOUND_S = 10.0
SHARDS = 24
SETTINGS: dict[str, Any] = {
    "training.task": "tests.harness.trainers.tasks:Ledger",
    "training.local_steps": 1,
    "training.eval_steps": 0,
    "training.checkpoint_s": 5.0,
    "training.min_nodes": len(SIDES),
    # The two sides may drift apart by more steps than a late delta is taken: here every one must count.
    "barrier.method": "asp",
    "exchange.weight": "sum",
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.codec": "float32",
    "exchange.pull_codec": "float32",
    "exchange.shards": SHARDS,
    "log.format": "json",
}
STEP_S = 0.25


@dataclass
class Result:
    """What came of it. `missing` and `doubled` count steps, once per shard, as `refused` does by node. A node that
    began a new era of a shard refuses deltas with an older base, and logs that. `sides_steps` were made while the line
    was cut."""

    longest_s: float = 0.0
    longest_of: str = ""
    #: How late this process itself came to look: what the machine, and not the swarm, held up.
    own_lag_s: float = 0.0
    parted_s: float = 0.0
    one_model_s: float = 0.0
    sides_steps: list[int] = field(default_factory=list)
    repaired: int = 0
    lost: int = 0
    refused: list[int] = field(default_factory=list)
    missing: int = 0
    doubled: int = 0
    counted: list[int] = field(default_factory=list)
    #: (shard, node, steps too many) where the model is not what was counted.
    wrong: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def unaccounted(self) -> int:
        """Steps of a shard that were acknowledged and are not in the model, or are in it twice."""
        missing = [0.0] * len(self.refused)
        for _, node, steps in self.wrong:
            missing[node] += max(0.0, -steps)
        beyond = sum(max(0.0, missed - refused) for missed, refused in zip(missing, self.refused, strict=True))
        return round(beyond) + self.doubled + self.lost


class Watch:
    """The longest time that any node stood: without one more step whose delta all owners have acknowledged."""

    def __init__(self, nodes: list[LanNode], result: Result) -> None:
        self.nodes = nodes
        self.result = result
        self.statuses: list[dict[str, Any]] = [{} for _ in nodes]
        self._steps = [-1] * len(nodes)
        self._looked_s = time.monotonic()
        self._moved_s = [self._looked_s] * len(nodes)

    def look(self) -> None:
        self.result.own_lag_s = max(self.result.own_lag_s, time.monotonic() - self._looked_s)
        for place, node in enumerate(self.nodes):
            status = node.status()
            now = time.monotonic()
            if status:
                self.statuses[place] = status
            step = acknowledged_steps(status) if status else -1
            stood_s = now - self._moved_s[place]
            if stood_s > self.result.longest_s:
                self.result.longest_s, self.result.longest_of = stood_s, node.name
            if step > self._steps[place]:
                self._steps[place], self._moved_s[place] = step, now
        self._looked_s = time.monotonic()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            if until():
                return True
            time.sleep(POLL_INTERVAL_S)
        return False

    def steps(self) -> list[int]:
        return list(self._steps)

    def estimates(self) -> list[float]:
        return [status.get("population", {}).get("estimate", 0.0) for status in self.statuses]

    def mended(self) -> bool:
        """Every node counts all nodes, each shard has one owner, and no copy is left to be reconciled."""
        exchanges = [status.get("exchange", {}) for status in self.statuses]
        owned = sum(exchange.get("shards_owned", 0) for exchange in exchanges)
        left = sum(exchange.get("shards_to_mend", 1) for exchange in exchanges)
        return self.estimates() == [len(self.nodes)] * len(self.nodes) and owned == SHARDS and left == 0


def play(net: Lan, folder: Path, cut_s: float) -> Result:
    """Gather, cut, restore, wait for one model, stop all, and count what is in it. Raises `NotMeasured`."""
    result = Result()
    nodes: list[LanNode] = []
    try:
        for place, machine in enumerate(net.machines):
            options = {"part": place, "parts": len(SIDES), "seconds": STEP_S}
            settings = SETTINGS | {"training.options": options}
            bootstrap = nodes[0].address if nodes else ""
            nodes.append(LanNode(folder, f"n{place}", settings, machine=machine, bootstrap=bootstrap))
            _until(lambda: nodes[-1].address != "", START_S, "it listens", nodes)
        _until(lambda: min(node.step for node in nodes) >= 10, START_S, "ten steps everywhere", nodes)
        _until(lambda: _owned_by_side(nodes), 60.0, "both sides own some", nodes)
        watch = Watch(nodes, result)
        watch.run(3.0)
        before = watch.steps()
        net.cut()
        began_s = time.monotonic()
        watch.run(cut_s)
        if not watch.run(60.0, lambda: watch.estimates() == [3.0] * 6):
            raise NotMeasured(f"the sides did not notice: {watch.estimates()}")
        result.parted_s = time.monotonic() - began_s
        result.sides_steps = [step - was for step, was in zip(watch.steps(), before, strict=True)]
        net.mend()
        began_s = time.monotonic()
        if not watch.run(120.0, watch.mended):
            said = [(status.get("population"), status.get("exchange")) for status in watch.statuses]
            raise NotMeasured(f"it did not mend within 120 s: {said}")
        result.one_model_s = time.monotonic() - began_s
        watch.run(5.0)
        result.repaired = sum(status["exchange"]["repaired"] for status in watch.statuses)
        result.lost = sum(status["exchange"]["lost_in_splits"] for status in watch.statuses)
        for node in nodes:
            node.post("/pause")
        _until(lambda: all(_rests(node.status()) for node in nodes), 30.0, "all rest", nodes)
        time.sleep(4 * STEP_S)  # the step in hand when the pause was asked for ends
        result.refused = [_most_refused(node) for node in nodes]
        for node in nodes:
            node.terminate()
        for node in nodes:
            if node.process.wait(timeout=30) != 0:
                raise NotMeasured(f"{node.name} did not leave:\n{node.output()[-3000:]}")
        count(nodes, result)
    finally:
        kill_all(nodes)
    return result


def _owned_by_side(nodes: list[LanNode]) -> bool:
    """Whether each side owns a shard. One node may own none: its rank follows from its random id."""
    owned = [node.status().get("exchange", {}).get("shards_owned", 0) for node in nodes]
    return all(any(shards for shards, at in zip(owned, SIDES, strict=True) if at == side) for side in set(SIDES))


def count(nodes: list[LanNode], result: Result) -> None:
    """Compare the model on the disks with the steps that the nodes have counted."""
    total = len(nodes) * 64
    bounds = shard_bounds(total, SHARDS)
    highest: dict[int, StoredState] = {}
    for node in nodes:
        disk = FolderDisk(node.state_dir)
        found = checkpoint.newest(disk, _Quiet())
        if found is None:
            raise NotMeasured(f"{node.name} has no checkpoint")
        result.counted.append(found.state.step)
        for shard, stored in checkpoint.read_states(disk, found, bounds, total, _Quiet()).items():
            best = highest.setdefault(shard, stored)
            if (stored.term, stored.state.known_count) > (best.term, best.state.known_count):
                highest[shard] = stored
    expected = np.repeat(np.array(result.counted, np.float64), 64)
    for shard, (start, stop) in enumerate(bounds):
        steps = -1024.0 * highest[shard].state.value.astype(np.float64)
        difference = steps - expected[start:stop]
        rows = (np.flatnonzero(difference) + start) // 64
        result.wrong += [(shard, int(row), float(difference[max(0, row * 64 - start)])) for row in np.unique(rows)]
    result.missing = round(-sum(steps for _, _, steps in result.wrong if steps < 0))
    result.doubled = round(sum(steps for _, _, steps in result.wrong if steps > 0))


def _most_refused(node: LanNode) -> int:
    """Steps of a shard that owners have refused, at most: a delta has the steps since the one before."""
    deltas = [row["step"] for row in node.steps(1000) if "acknowledged" in row]
    most: int = max(later - step for step, later in itertools.pairwise(deltas))
    refused: int = node.status()["exchange"]["refused"]
    return refused * most


def _rests(status: dict[str, Any]) -> bool:
    """Paused, and every step that it has counted is acknowledged."""
    exchange = status.get("exchange", {})
    return status.get("state") == "paused" and exchange.get("outstanding_steps") == []


class _Quiet:
    """A log that is not kept."""

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


def _until(condition: Callable[[], bool], within_s: float, what: str, nodes: list[LanNode]) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline or any(node.ended for node in nodes):
            said = "\n".join(f"{node.name}:\n{node.output()[-1500:]}" for node in nodes)
            raise NotMeasured(f"not within {within_s:.0f} s: {what}\n{said}")
        time.sleep(POLL_INTERVAL_S)


def measure(_arguments: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="p2pnode-partition-", ignore_cleanup_errors=True) as folder:
        try:
            with lan(SIDES, [RATE_MBIT] * len(SIDES)) as net:
                result = play(net, Path(folder), CUT_S)
        except NotPermitted as error:
            raise NotMeasured(f"network namespaces cannot be made here: {error}") from error
    conditions = (
        f"6 daemons in network namespaces of {RATE_MBIT:g} Mbit/s on two switches, the line between them cut for "
        f"{CUT_S:g} s; asp, steps of {STEP_S:g} s, plain sums; all stop at the end and the model is counted"
    )
    details = {name: getattr(result, name) for name in ("longest_of", "sides_steps", "repaired", "refused", "counted")}
    return Outcome(
        "partition",
        conditions,
        [
            Series("partition 3 | 3: longest time of a node without a step", "s", [result.longest_s], "≤ 10", details),
            Series("partition 3 | 3: from the mended line to one model", "s", [result.one_model_s]),
            Series(
                "partition 3 | 3: steps acknowledged on a side that are missing or doubled",
                "",
                [result.unaccounted],
                "≤ 0",
            ),
        ],
    )
