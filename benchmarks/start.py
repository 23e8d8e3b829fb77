"""start: from the start of a process to a node that is in and trains, what it takes while idle, and its way out.

A founder trains `digits`; one joiner after another starts beside it, is timed, and leaves by SIGTERM. Then the same
with a vector of 25 M values (`benchmarks.tasks:Wide`), from the moment the joiner is in the overlay. Memory is of the
daemon's process alone, processor time of it and its trainer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.daemons import LOOK_S, Daemon, Daemons, daemons, wait_until
from benchmarks.gate import peak_bytes, tree_cpu_seconds
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.settings import TrainingSettings

REPETITIONS = 7
#: After the last thing that happens at a start, so that what it only needed then has been given back.
SETTLE_S = 5.0
#: The processor time of an idle daemon is counted for so long.
IDLE_S = 20.0
LARGE = 25_000_000
#: What a step of the large model takes, but for its exchange: not so short that it keeps this machine busy by itself.
REST_S = 0.1

_DIGITS = TrainingSettings(task="digits", checkpoint_s=0.0)
_LARGE = TrainingSettings(
    task="benchmarks.tasks:Wide",
    options={"values": LARGE, "seconds": REST_S},
    local_steps=1,
    eval_steps=0,
    checkpoint_s=0.0,
)


class Join(NamedTuple):
    """Seconds from the start of the process to the overlay, to the end of joining and to the first step; from the
    overlay to the first step; and from SIGTERM to the end. `peak_mb`: of the joiner's daemon."""

    in_overlay_s: float
    joined_s: float
    stepped_s: float
    after_joining_s: float
    left_s: float
    peak_mb: float


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    small, large = _joins(_DIGITS, repetitions), _joins(_LARGE, repetitions)
    with daemons() as group:
        idle = [_idle(group) for _ in range(repetitions)]
    conditions = (
        f"loopback, a founder that trains beside the joiner; joined: /status is past joining, so the trainer stands "
        f"too and the vector is there (looked at every {1000 * LOOK_S:.0f} ms); idle: waiting for a second node; "
        f"memory is the daemon's alone, VmRSS, in exchange the most there was (VmHWM), of a vector of 100 MB in shared "
        f"memory, which counts, and of half its shards; processor time is its trainer's too"
    )
    idle_mb, idle_percent = zip(*idle, strict=True)
    return Outcome(
        "start",
        conditions,
        [
            Series("start of the process to the overlay joined", "s", [join.in_overlay_s for join in small], "≤ 0.5"),
            Series("start of the process to joined", "s", [join.joined_s for join in small]),
            Series("start of the process to first step done", "s", [join.stepped_s for join in small], "≤ 5"),
            Series(
                "overlay joined to first step done, 25 M parameters", "s", [one.after_joining_s for one in large], "≤ 2"
            ),
            Series("start to first step done, 25 M parameters", "s", [join.stepped_s for join in large]),
            Series("SIGTERM to exit", "s", [join.left_s for join in small], "≤ 5"),
            Series("resident memory of an idle daemon", "MB", idle_mb, "≤ 80"),
            Series("processor time of an idle daemon", "%", idle_percent, "≤ 1"),
            Series("most resident memory while joining and exchanging 25 M", "MB", [join.peak_mb for join in large]),
        ],
    )


def _joins(training: TrainingSettings, repetitions: int) -> list[Join]:
    with daemons() as group:
        founder = group.start(training)
        wait_until(founder, lambda status: status["step"] >= 3, what="training")
        return [_join(group, founder, training) for _ in range(repetitions)]


def _join(group: Daemons, founder: Daemon, training: TrainingSettings) -> Join:
    began_s, began_wall_s = time.monotonic(), time.time()
    node = group.start(training, bootstrap=founder.listens_at)
    entered = wait_until(node, lambda status: status["state"] != "joining", what="joined")
    joined_s = time.monotonic() - began_s
    own_steps = entered["training"]["optimizer_steps"]
    wait_until(node, lambda status: status["training"]["optimizer_steps"] > own_steps, what="training")
    stepped_s = time.monotonic() - began_s
    in_overlay_s = _moment_of(node, "swarm_joined") - began_wall_s
    peak_mb = peak_bytes(node.pid) / 1e6
    asked_s = time.monotonic()
    node.terminate()
    left_s = time.monotonic() - asked_s
    return Join(in_overlay_s, joined_s, stepped_s, stepped_s - in_overlay_s, left_s, peak_mb)


def _moment_of(node: Daemon, event: str) -> float:
    """Wall time of the first event of this name."""
    assert node.client is not None
    events: list[dict[str, Any]] = node.client.events()["events"]
    for one in events:
        if one["event"] == event:
            return float(one["time"])
    raise NotMeasured(f"{node.name} told of no {event}")


def _idle(group: Daemons) -> tuple[float, float]:
    """Memory in MB and processor time in percent of a fresh node that waits for a second one."""
    node = group.start(TrainingSettings(task="digits", min_nodes=2, checkpoint_s=0.0))
    wait_until(node, lambda status: status["state"] == "waiting_for_nodes", what="waiting for nodes")
    time.sleep(SETTLE_S)
    resident_mb = resident_bytes(node.pid) / 1e6
    before_s, began_s = tree_cpu_seconds([node.pid]), time.monotonic()
    time.sleep(IDLE_S)
    busy = (tree_cpu_seconds([node.pid]) - before_s) / (time.monotonic() - began_s)
    group.end(node)
    return resident_mb, 100 * busy


def resident_bytes(pid: int) -> int:
    """VmRSS of a process. Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise NotMeasured(f"process {pid} has no memory: it has ended")
