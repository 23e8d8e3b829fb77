"""loop_delay: how late a daemon's event loop is while its trainer has the processor to itself.

A loop that is late answers late: probes look lost, peers look slow. Measured inside the daemon's own loop
(`benchmarks.probed`), for a small model with many steps a second and for one of some millions of parameters whose
vectors pass through the exchange, alone and with a second node of the same kind beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from benchmarks.daemons import daemons, wait_until
from benchmarks.probed import PERIOD_S, window
from benchmarks.record import Outcome, Series
from p2pnode.training.settings import TrainingSettings

REPETITIONS = 3
WINDOW_S = 6.0
#: Steps of the swarm before the window: the first ones allocate.
WARM_STEPS = 3


class Case(NamedTuple):
    """One situation. `aim` holds for p99 in milliseconds; with two nodes on one machine there is none to hold it to."""

    name: str
    training: TrainingSettings
    nodes: int
    aim: str


_DIGITS = TrainingSettings(task="digits", checkpoint_s=0.0)
_LARGE = TrainingSettings(
    task="benchmarks.tasks:Load",
    options={"width": 1024, "layers": 6, "batch_size": 64, "rounds": 1},
    eval_steps=0,
    checkpoint_s=0.0,
)

CASES = (
    Case("digits", _DIGITS, 1, "≤ 10"),
    Case("6.3 M parameters", _LARGE, 1, "≤ 10"),
    Case("6.3 M parameters, two nodes on the machine", _LARGE, 2, ""),
)


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series = []
    for case in CASES:
        runs = [_run(case) for _ in range(repetitions)]
        p50, p99 = ([float(np.percentile(run.late_ms, share)) for run in runs] for share in (50, 99))
        details = {
            "max_ms": [round(max(run.late_ms), 3) for run in runs],
            "steps_per_s": [round(run.steps_per_s, 2) for run in runs],
            "as_the_daemon_says": [run.own for run in runs],
        }
        series.append(Series(f"loop delay p50, {case.name}", "ms", p50))
        series.append(Series(f"loop delay p99, {case.name}", "ms", p99, case.aim, details))
    conditions = (
        f"a task in the daemon's own loop sleeps {1000 * PERIOD_S:.0f} ms and notes how late it wakes, for "
        f"{WINDOW_S:.0f} s; the trainer has PyTorch's default threads and never rests; uvloop where it is installed"
    )
    return Outcome("loop_delay", conditions, series)


class Run(NamedTuple):
    """One window: milliseconds late of every wake-up, the daemon's pace, and its own figures from `/status`."""

    late_ms: list[float]
    steps_per_s: float
    own: dict[str, float]


def _run(case: Case) -> Run:
    with TemporaryDirectory(prefix="p2pnode-bench-") as folder, daemons() as group:
        out = Path(folder) / "wakes.json"
        node = group.start(case.training, command=("benchmarks.probed", str(out), "start"))
        wait_until(node, lambda status: status["step"] >= WARM_STEPS, what="training")
        for _ in range(case.nodes - 1):
            other = group.start(case.training, bootstrap=node.listens_at)
            wait_until(other, lambda status: status["training"]["optimizer_steps"] > 0, what="training")
        before, start_s = wait_until(node, lambda _: True, what="there"), time.monotonic()
        time.sleep(WINDOW_S)
        stop_s, after = time.monotonic(), wait_until(node, lambda _: True, what="there")
        node.terminate()
        late_ms = window(json.loads(out.read_text(encoding="utf-8")), start_s, stop_s)
    return Run(late_ms, (after["step"] - before["step"]) / (stop_s - start_s), after["loop"])
