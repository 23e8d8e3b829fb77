"""start: from the start of a process to a node that is in and trains, its idle memory, and its way out.

A founder trains `digits`; one joiner after another starts beside it, is timed, and leaves by SIGTERM. Memory is of the
daemon's process alone, without its trainer, where a node waits for others.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.daemons import LOOK_S, Daemon, Daemons, daemons, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from training.settings import TrainingSettings

REPETITIONS = 7
#: After the last thing that happens at a start, so that what it only needed then has been given back.
SETTLE_S = 2.0

_DIGITS = TrainingSettings(task="digits", checkpoint_s=0.0)


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    with daemons() as group:
        founder = group.start(_DIGITS)
        wait_until(founder, lambda status: status["step"] >= 3, what="training")
        joins = [_join(group, founder) for _ in range(repetitions)]
    with daemons() as group:
        idle = [_idle_mb(group) for _ in range(repetitions)]
    joined, first_step, left = zip(*joins, strict=True)
    conditions = (
        f"loopback, a founder that trains digits beside the joiner; joined: /status is past joining, so the trainer "
        f"stands too and the vector is there (looked at every {1000 * LOOK_S:.0f} ms); memory: VmRSS of the daemon "
        f"without its trainer, waiting for a second node"
    )
    return Outcome(
        "start",
        conditions,
        [
            Series("start of the process to joined", "s", joined),
            Series("start of the process to first step done", "s", first_step, aim="≤ 5"),
            Series("SIGTERM to exit", "s", left, aim="≤ 5"),
            Series("resident memory of an idle daemon", "MB", idle, aim="≤ 80"),
        ],
    )


def _join(group: Daemons, founder: Daemon) -> tuple[float, float, float]:
    """Seconds from start to joined, from start to the first completed step, and from SIGTERM to the end."""
    began_s = time.monotonic()
    node = group.start(_DIGITS, bootstrap=founder.listens_at)
    entered = wait_until(node, lambda status: status["state"] != "joining", what="joined")
    joined_s = time.monotonic() - began_s
    own_steps = entered["training"]["optimizer_steps"]
    wait_until(node, lambda status: status["training"]["optimizer_steps"] > own_steps, what="training")
    stepped_s = time.monotonic() - began_s
    asked_s = time.monotonic()
    node.terminate()
    return joined_s, stepped_s, time.monotonic() - asked_s


def _idle_mb(group: Daemons) -> float:
    """Of a fresh node that waits for a second one."""
    node = group.start(TrainingSettings(task="digits", min_nodes=2, checkpoint_s=0.0))
    wait_until(node, lambda status: status["state"] == "waiting_for_nodes", what="waiting for nodes")
    time.sleep(SETTLE_S)
    resident_mb = resident_bytes(node.pid) / 1e6
    group.end(node)
    return resident_mb


def resident_bytes(pid: int) -> int:
    """VmRSS of a process. Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise NotMeasured(f"process {pid} has no memory: it has ended")
