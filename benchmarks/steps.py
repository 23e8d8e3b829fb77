"""steps: the steps per second of one node, as a share of the bare torch loop with the same task.

Node and loop alternate in turns of a few seconds, one paused while the other runs, so that other load on the machine
affects both alike. Each turn of the node is compared with the loop's turns before and after it, which cancels a steady
drift of the machine. Both compute with one thread: two threads that wait for each other at each operation would mostly
measure other load. The load is sized on this machine, so that a step of the swarm (`local_steps` optimiser steps) takes
about the wanted time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.bare_loop import TASK
from benchmarks.daemons import Daemon, daemons, status, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import KEEP_MEMORY


class Case(NamedTuple):
    """A load: how long a step of the swarm is to take, and four square layers of `width`."""

    name: str
    step_ms: int
    width: int


#: The exchange costs by the parameter and not by the second: short steps of a large model show it most. In the last one
#: an optimiser step takes as long as a whole step in the first.
CASES = (
    Case("50 ms, 0.26 M parameters", 50, 256),
    Case("50 ms, 1.05 M parameters", 50, 512),
    Case("200 ms, 1.05 M parameters", 200, 512),
    Case("500 ms, 1.05 M parameters", 500, 512),
)
REPETITIONS = 30
WINDOW_S = 1.0
WARM_STEPS = 5
THREADS = 1
#: Single turns vary. A median whose confidence interval is wider than this is discarded.
MAX_UNCERTAINTY = 0.1
CONFIDENCE = 0.95
#: Poll interval while waiting for the end of a step.
EDGE_LOOK_S = 0.002


class BareLoop:
    """`benchmarks.bare_loop` as a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise NotMeasured(f"the bare loop ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def rate(self, seconds: float) -> float:
        """Optimiser steps per second over about `seconds`."""
        answer = self.ask({"train": seconds})
        return float(answer["optimizer_steps"] / answer["seconds"])


@contextlib.contextmanager
def bare_loop() -> Iterator[BareLoop]:
    command = [sys.executable, "-m", "benchmarks.bare_loop"]
    # With the same settings of the C library's memory as a trainer gets: what the exchange costs is to be seen, and not
    # what these settings save.
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield BareLoop(process)
        finally:
            process.kill()


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series = [_ratio(case, repetitions) for case in CASES]
    conditions = (
        "one node against the plain loop (zero_grad, loss, backward, step), the same task, taking turns of "
        f"{WINDOW_S:.0f} s, each of the node's beside the loop's before and after it; AdamW, "
        f"{TrainingSettings().local_steps} local steps, default exchange, {THREADS} thread of PyTorch's each, both "
        "with the trainer's memory settings"
    )
    return Outcome("steps", conditions, series)


def _ratio(case: Case, repetitions: int) -> Series:
    local_steps = TrainingSettings().local_steps
    with bare_loop() as bare, daemons() as group:
        options = bare.ask({"calibrate": case.step_ms / 1000 / local_steps, "width": case.width})["options"]
        training = TrainingSettings(task=TASK, options=options, eval_steps=0, checkpoint_s=0.0, threads=THREADS)
        node = group.start(training)
        wait_until(node, lambda found: found["step"] >= WARM_STEPS, what="training")
        pause(node)
        bare.rate(1.0)
        theirs, ours = [bare.rate(WINDOW_S)], []
        for _ in range(repetitions):
            ours.append(node_rate(node))
            theirs.append(bare.rate(WINDOW_S))
    ratios = between(ours, theirs)
    low, high = median_interval(ratios)
    if high - low > MAX_UNCERTAINTY:
        raise NotMeasured(
            f"something else keeps this machine busy: the ratio's median is somewhere from {low:.3g} to {high:.3g}; "
            "try again when it rests"
        )
    details = {
        "options": options,
        "bare_ms_per_swarm_step": round(1000 * local_steps / statistics.median(theirs), 1),
        "median_interval": [round(low, 3), round(high, 3)],
        "node_optimizer_steps_per_s": [round(rate, 2) for rate in ours],
        "bare_optimizer_steps_per_s": [round(rate, 2) for rate in theirs],
    }
    return Series(f"steps/s of a node over the bare loop's, steps of {case.name}", "", ratios, "≥ 0.95", details)


def between(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each rate of p2pnode over the mean of the other's rates before and after it; the other has one more. Pure."""
    return [one / ((before + after) / 2) for one, (before, after) in zip(ours, pairwise(theirs), strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the true median with at least `CONFIDENCE`, whatever the distribution: between two of the values
    in their order (binomial). With too few values for that, the lowest and the highest. Pure."""
    ordered = sorted(values)
    outside, cut = 0.0, 0
    while cut < len(ordered) // 2:
        outside += 2 * math.comb(len(ordered), cut) / 2 ** len(ordered)
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    cut = max(cut, 1)
    return ordered[cut - 1], ordered[-cut]


def node_rate(node: Daemon) -> float:
    """Optimiser steps per second of the node over about one window, from the end of one step to that of another."""
    assert node.client is not None
    node.client.post("/resume")
    _edge(node)  # the first step after a pause begins with a pull of its own
    began_at, began_s = _edge(node)
    time.sleep(WINDOW_S)
    ended_at, ended_s = _edge(node)
    pause(node)
    return (ended_at - began_at) / (ended_s - began_s)


def _edge(node: Daemon) -> tuple[int, float]:
    """Optimiser steps done, and the moment, when the next step ends."""
    found = status(node)
    before = -1 if found is None else found["training"]["optimizer_steps"]
    after = wait_until(
        node, lambda now: now["training"]["optimizer_steps"] > before, what="making steps", look_s=EDGE_LOOK_S
    )
    return after["training"]["optimizer_steps"], time.monotonic()


def pause(node: Daemon) -> None:
    """Pause the node and wait until the step in hand is over."""
    assert node.client is not None
    node.client.post("/pause")
    quiet_s = 0.5
    seen, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < quiet_s:
        found = status(node)
        if found is not None and found["training"]["optimizer_steps"] != seen:
            seen, since_s = found["training"]["optimizer_steps"], time.monotonic()
        time.sleep(10 * EDGE_LOOK_S)
