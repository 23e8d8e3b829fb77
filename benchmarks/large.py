"""large: models of GPT-2's shape on this machine, with real trainers: 124 M parameters on two nodes, 355 M on one.

Random weights and tokens, AdamW, one optimiser step of 16 tokens per step, one thread per trainer. The first node
trains alone, the second one joins; all figures but the hand-over are of the time after it. /status is asked up to 20
times a second by another process, all the time, also while checkpoints are written and while a node leaves. The same
process asks a server that only answers by turns (`benchmarks.idle_server`): what that takes is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.daemons import Daemon, daemons, status, wait_until
from benchmarks.gate import peak_bytes
from benchmarks.idle_server import answering
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.client import NodeClient
from p2pnode.errors import UserError
from p2pnode.training.settings import TrainingSettings

#: By size in millions: layers, width, nodes.
SHAPES = {25.0: (3, 384, 2), 124.0: (12, 768, 2), 355.0: (24, 1024, 1)}
DEFAULT = (124.0, 355.0)
CHECKPOINT_S = 20.0
CHECKPOINTS = 2
#: Longest wait for a start, a hand-over, or some checkpoints of the largest model on a slow disk.
DEADLINE_S = 900.0
ASK_INTERVAL_S = 0.05
STATUS_AIM_MS = 50
LEAVE_S = 300.0


class StatusProbe:
    """Asks a node for its status again and again, and an idle server by turns, in a thread; keeps all times."""

    def __init__(self, node: Daemon, idle: NodeClient) -> None:
        self._node, self._idle = node, idle
        self._ended = threading.Event()
        self.milliseconds: list[float] = []
        self.idle_milliseconds: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(ASK_INTERVAL_S):
            self._ask(self._node.client, self.milliseconds)
            self._ask(self._idle, self.idle_milliseconds)

    def _ask(self, client: NodeClient | None, milliseconds: list[float]) -> None:
        if client is None:
            return
        began_s = time.perf_counter()
        with contextlib.suppress(UserError):
            client.status()
            milliseconds.append(1000 * (time.perf_counter() - began_s))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def measure(arguments: argparse.Namespace) -> Outcome:
    series: list[Series] = []
    for millions in arguments.parameters or DEFAULT:
        if millions not in SHAPES:
            raise NotMeasured(f"there is no shape of {millions:g} M; there are {', '.join(f'{m:g}' for m in SHAPES)}")
        series += _measured(millions)
    return Outcome(
        "large",
        "GPT-2's shape with random weights and tokens, AdamW, one optimiser step of 16 tokens a step, one thread per "
        f"trainer, default exchange, a checkpoint {CHECKPOINT_S:g} s after the last one, all nodes on this machine; "
        "memory: VmHWM without the two shared vectors; hand-over: from the joiner's first step until every shard has a "
        "backup and each node has its share; pause: what the next step waits when a checkpoint begins; status: asked "
        "up to 20 times a second of the first node, from its first step until it has been told to leave, by turns with "
        "a process that only answers, with the same bytes, HTTP server and event loop",
        series,
    )


def _measured(millions: float) -> list[Series]:
    layers, width, count = SHAPES[millions]
    training = TrainingSettings(
        task="benchmarks.gpt:Gpt",
        options={"layers": layers, "width": width},
        local_steps=1,
        threads=1,
        eval_steps=0,
        checkpoint_s=CHECKPOINT_S,
        keep_checkpoints=1,
        hang_s=120.0,
    )
    label = f"{millions:g} M, {'alone' if count == 1 else f'{count} nodes'}"
    series: list[Series] = []
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(daemons())
        nodes = [group.start(training)]
        answer = _until(nodes[0], lambda found: found["step"] >= 1, "training")
        probe = StatusProbe(nodes[0], stack.enter_context(answering(answer)))
        if count > 1:
            nodes.append(group.start(training, bootstrap=nodes[0].listens_at))
            series.append(_hand_over(nodes, label))
        steps_before = [_until(node, lambda _: True, "there")["step"] for node in nodes]
        since = [_event_count(node) for node in nodes]
        _until(nodes[0], lambda found: found["step"] >= steps_before[0] + 5, "at its fifth step")
        written = [_checkpoints(node, after) for node, after in zip(nodes, since, strict=True)]
        rows = [row for node in nodes if node.client is not None for row in node.client.steps(100)]
        parameters = _until(nodes[0], lambda _: True, "there")["memory"]["parts"]["replica_bytes"] // 4
        memory = [_memory(node.pid, 8 * parameters) for node in nodes]
        left_s = _leave(nodes)
        probe.stop()
    latency, idle = probe.milliseconds, probe.idle_milliseconds
    every = [event for events in written for event in events]
    whole = [sum(row.get(f"{phase}_seconds", 0.0) for phase in ("train", "push", "wait", "pull")) for row in rows]
    series += [
        Series(f"step, {label}", "s", whole),
        Series(f"training of a step, {label}", "s", [row["train_seconds"] for row in rows]),
        Series(f"own memory of a daemon, {label}", "MB", [daemon / 1e6 for daemon, _ in memory]),
        Series(
            f"own memory of a daemon per parameter, {label}", "bytes", [one / parameters for one, _ in memory], "≤ 20"
        ),
        Series(f"own memory of a trainer, {label}", "MB", [trainer / 1e6 for _, trainer in memory]),
        Series(f"checkpoint, {label}", "s", [event["seconds"] for event in every]),
        Series(f"pause of a step at a checkpoint, {label}", "s", [event["held_seconds"] for event in every]),
        Series(f"leaving, last checkpoint included, {label}", "s", left_s),
        Series(f"answer of /status p50, {label}", "ms", [float(np.percentile(latency, 50))]),
        Series(
            f"answer of /status p99, {label}",
            "ms",
            [float(np.percentile(latency, 99))],
            f"≤ {STATUS_AIM_MS}",
            {
                "max_ms": max(latency),
                "idle_max_ms": max(idle),
                "answers": len(latency),
                "steps": len(whole),
                "median_s": statistics.median(whole),
            },
        ),
        Series(f"answer of a server that only answers, p50, {label}", "ms", [float(np.percentile(idle, 50))]),
        Series(f"answer of a server that only answers, p99, {label}", "ms", [float(np.percentile(idle, 99))]),
    ]
    return series


def _hand_over(nodes: list[Daemon], label: str) -> Series:
    """From the joiner's first step until every shard has a backup and both nodes own some."""
    _until(nodes[1], lambda found: found["state"] in ("training", "waiting"), "training")
    began_s = time.monotonic()
    deadline = began_s + DEADLINE_S
    while time.monotonic() < deadline:
        held = [found["exchange"] for node in nodes if (found := status(node)) is not None]
        shards = held[0]["shards"] if held else 0
        owned, backed = [one["shards_owned"] for one in held], sum(one["shards_backed"] for one in held)
        if len(held) == 2 and min(owned) >= shards // 4 and sum(owned) == backed == shards:
            return Series(f"hand-over to a joiner, {label}", "s", [time.monotonic() - began_s])
        time.sleep(0.2)
    raise NotMeasured(f"the shards were not handed over within {DEADLINE_S:g} s: {held}")


def _until(node: Daemon, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    return wait_until(node, holds, what=what, look_s=0.2, within_s=DEADLINE_S)


def _events(node: Daemon) -> Iterator[dict[str, Any]]:
    if node.client is not None:
        with contextlib.suppress(UserError):
            yield from node.client.events()["events"]


def _event_count(node: Daemon) -> int:
    return sum(event["event"] == "checkpoint_written" for event in _events(node))


def _checkpoints(node: Daemon, before: int) -> list[dict[str, float]]:
    """The fields of the checkpoints written since, once there are enough."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = [event["fields"] for event in _events(node) if event["event"] == "checkpoint_written"][before:]
        if len(found) >= CHECKPOINTS:
            return found
        if status(node) is None:
            raise NotMeasured(f"{node.name} does not answer")
        time.sleep(0.5)
    raise NotMeasured(f"{node.name} wrote no {CHECKPOINTS} checkpoints; its last lines:\n{node.last_lines()}")


def _memory(pid: int, shared_bytes: int) -> tuple[float, float]:
    """Own memory of a daemon and of its trainer."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    trainers = [peak_bytes(int(child)) for child in children]
    if not trainers:
        raise NotMeasured(f"the daemon {pid} has no trainer")
    return peak_bytes(pid) - shared_bytes, max(trainers) - shared_bytes


def _leave(nodes: list[Daemon]) -> list[float]:
    """Seconds from SIGTERM to the end, one node after the other, the joiner first."""
    taken = []
    for node in reversed(nodes):
        began_s = time.monotonic()
        os.kill(node.pid, signal.SIGTERM)
        while node.exit_code is None:
            if time.monotonic() - began_s > LEAVE_S:
                raise NotMeasured(f"{node.name} did not leave within {LEAVE_S:g} s")
            time.sleep(0.05)
        taken.append(time.monotonic() - began_s)
    return taken
