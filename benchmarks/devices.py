"""devices: two nodes with four trainers each against eight nodes, leader SGD against elastic averaging, the step path.

1. Real daemons on this machine, bsp, the same samples in all: eight nodes with one trainer, then two with `cpu*4`, with
   `devices.step` "average" and "leader". Shown: the accuracy at the end, beside that of the eight nodes, and the bytes
   that all exchanges sent, as a share of theirs.
2. In one process and without a network, over several seeds: two nodes with four trainers each, by the arithmetic of the
   nodes (`training.devices.positions`), and elastic averaging (Zhang et al. 2015) in the same place, with the constants
   of the paper on leader SGD: β = 0.43, α = β/W.
3. The step path: optimiser steps per second of a node with two trainers on one device, over those of two plain loops
   beside each other there, of the same niceness. On the processor, and on a GPU where torch has one; otherwise a
   message says so.

The data are those of the task `mnist` with `--data-dir`, otherwise `digits`. `--ways` names some of "daemons",
"elastic" and "path".
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.bare_loop import TASK
from benchmarks.daemons import Daemon, daemons, status, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.steps import BareLoop, bare_loop, between, node_rate, pause
from benchmarks.virtual_worker import initial, metrics_of
from p2pnode.training.devices.node_step import LOSS_WINDOW
from p2pnode.training.devices.positions import AveragePositions, LeaderPositions, weighted_mean, weights_of
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.settings import BarrierSettings, DevicesSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder, StepReport

NODES, TRAINERS = 2, 4
STEPS, LOCAL_STEPS, PERIOD = 40, 16, 4
BATCH_SIZE = 32
SEEDS = 5
#: The constants of elastic averaging in the comparison of Teng et al. 2019.
BETA = 0.43
RUN_S = 900.0
#: Turns of node and loops for the step path, and its steps.
TURNS, STEP_S, WARM_STEPS = 10, 0.1, 5
WAYS = ("daemons", "elastic", "path")


def measure(arguments: argparse.Namespace) -> Outcome:
    ways = arguments.ways or WAYS
    torch.set_num_threads(1)
    task, data_dir = ("mnist", str(arguments.data_dir.resolve())) if arguments.data_dir else ("digits", "")
    series: list[Series] = []
    if "daemons" in ways:
        series += _of_daemons(task, data_dir)
    if "elastic" in ways:
        series += _of_rules(task, data_dir, range(arguments.repetitions or SEEDS))
    if "path" in ways:
        series += _of_the_path(arguments.repetitions or TURNS)
    conditions = (
        f"task {task}, batch {BATCH_SIZE}, {STEPS} steps of {LOCAL_STEPS} local steps, a distributed step in the node "
        f"after every {PERIOD}, bsp; {NODES} nodes of {TRAINERS} trainers against {NODES * TRAINERS} of one"
    )
    return Outcome("devices", conditions, series)


# -- real daemons --------------------------------------------------------------------------------------------------


def _of_daemons(task: str, data_dir: str) -> list[Series]:
    alone, their_bytes = _swarm(task, data_dir, NODES * TRAINERS, "", DevicesSettings())
    series = [Series(f"accuracy of {NODES * TRAINERS} nodes", "%", [100 * alone])]
    for step in ("average", "leader"):
        settings = DevicesSettings(step=step, period=PERIOD)
        accuracy, sent_bytes = _swarm(task, data_dir, NODES, f"cpu*{TRAINERS}", settings)
        difference = 100 * (accuracy - alone)
        series += [
            Series(
                f"accuracy of {NODES} × {TRAINERS}, {step}, minus that of the nodes", "points", [difference], "≥ -1"
            ),
            Series(f"bytes of {NODES} × {TRAINERS}, {step}, over those of the nodes", "", [sent_bytes / their_bytes]),
        ]
    return series


def _swarm(task: str, data_dir: str, nodes: int, devices: str, settings: DevicesSettings) -> tuple[float, int]:
    """Accuracy of the model at the end, and the bytes that the exchanges of all nodes sent."""
    training = TrainingSettings(
        task=task,
        data_dir=data_dir,
        options={"batch_size": BATCH_SIZE},
        device=devices,
        threads=TRAINERS if devices else 1,
        local_steps=LOCAL_STEPS,
        min_nodes=nodes,
        max_steps=STEPS,
        eval_steps=STEPS,
        checkpoint_s=0.0,
        linger_s=RUN_S,
    )
    with daemons() as group:
        running: list[Daemon] = []
        for _ in range(nodes):
            bootstrap = running[0].status["node"]["address"] if running else ""
            running.append(
                group.start(
                    training,
                    bootstrap=bootstrap,
                    barrier=BarrierSettings(method="bsp"),
                    exchange=ExchangeSettings(codec="float32", pull_codec="float32"),
                    devices=settings,
                )
            )
            wait_until(running[-1], lambda found: bool(found["node"]["address"]), what="listening")
        for node in running:
            wait_until(node, lambda found: found["step"] >= STEPS, what="at the last step", look_s=0.2, within_s=RUN_S)
        best = wait_until(
            running[0], lambda found: "accuracy" in found["training"]["metrics"], what="evaluated", within_s=RUN_S
        )
        found = [status(node) or {} for node in running]
    sent_bytes = sum(int(one["exchange"]["bytes_sent"]) for one in found)
    who = f"{nodes} nodes, {devices or 'one trainer'}, {settings.step}"
    print(f"{who}: {best['training']['metrics']}, {sent_bytes} bytes", file=sys.stderr)
    return float(best["training"]["metrics"]["accuracy"]), sent_bytes


# -- the rules, without a network ----------------------------------------------------------------------------------


class ElasticPositions:
    """Elastic averaging: all trainers and a centre draw one another. As `LeaderPositions`, whose place it takes."""

    is_elsewhere = True

    def __init__(self, total: int, workers: int) -> None:
        self._centre = np.zeros(total, np.float32)
        self._carried = np.zeros(total, np.float32)
        self._mean = np.zeros(total, np.float32)
        self._starts = [np.zeros(total, np.float32) for _ in range(workers)]
        self._alpha = np.float32(BETA / workers)

    def begin(self, carried: Vector | None, vector: Vector) -> None:
        """A step of the swarm begins: the centre moves to its vector, and the trainers with it."""
        del vector, carried
        for index in range(len(self._starts)):
            self._starts[index] -= self._centre
        self._centre[:] = 0.0

    def start(self, index: int) -> Vector:
        return self._starts[index]

    def combine(self, reports: dict[int, StepReport], deltas: dict[int, Vector], *, is_last: bool) -> None:
        """x ← (1 − α) x + α c, and with the x before that c ← (1 − β) c + β mean(x)."""
        del is_last
        for index, delta in deltas.items():
            self._starts[index] += delta
        weights = weights_of(reports)
        weighted_mean(((weights[index], self._starts[index]) for index in reports), self._mean)
        for index, start in enumerate(self._starts):
            self._starts[index] = start + self._alpha * (self._centre - start)
        self._centre += np.float32(BETA) * (self._mean - self._centre)

    def delta(self, into: Vector) -> None:
        into[:] = self._centre


class _VirtualHost:
    """A node with several trainers, in this process."""

    def __init__(self, rule: str, runners: list[TaskRunner]) -> None:
        total = runners[0].model_vector.layout.total
        self._runners = runners
        self._settings = DevicesSettings(period=PERIOD)
        self._leaders = [np.zeros(total, np.float32)]
        self._positions: Any
        if rule == "leader":
            self._positions = LeaderPositions(total, self._leaders, self._settings.pull)
            for runner in runners:
                runner.follow(tuple(self._leaders))
        else:
            self._positions = AveragePositions(total) if rule == "average" else ElasticPositions(total, len(runners))
        self._deltas = [np.zeros(total, np.float32) for _ in runners]
        self.delta = np.zeros(total, np.float32)

    def train(self, step: int, vector: Vector) -> None:
        """A step of the swarm from this vector; `delta` has what it came to."""
        positions = self._positions
        positions.begin(None, vector)
        for cycle in range(LOCAL_STEPS // PERIOD):
            pull = self._settings.pull / PERIOD if getattr(positions, "has_local", False) else 0.0
            reports = {}
            for index, (runner, delta) in enumerate(zip(self._runners, self._deltas, strict=True)):
                delta[:] = positions.start(index)
                order = StepOrder(
                    step,
                    PERIOD,
                    1.0,
                    is_first=False,
                    local_pull=pull,
                    loss_window=LOSS_WINDOW,
                    at_delta=True,
                )
                runner.use(vector, delta)
                runner.begin_anew()
                report = runner.train(order)
                assert report is not None
                reports[index] = report
            is_last = (cycle + 1) * PERIOD == LOCAL_STEPS
            positions.combine(reports, dict(enumerate(self._deltas)), is_last=is_last)
        positions.delta(self.delta)


def _accuracy(rule: str, task: str, data_dir: str, seed: int) -> float:
    """At the end of a run of all nodes in step."""
    runners = []
    for index in range(NODES * TRAINERS):
        built, spec = build_task(
            task,
            {"batch_size": BATCH_SIZE},
            data_dir=data_dir,
            seed=seed,
            node_seed=100 * seed + index + 1,
            device="cpu",
        )
        runners.append(TaskRunner(task, built, spec))
    state = ShardState(initial(runners[0]), runners[0].model_vector.layout.parameter_total)
    hosts = [_VirtualHost(rule, runners[first : first + TRAINERS]) for first in range(0, len(runners), TRAINERS)]
    settings = ExchangeSettings()
    rule_of_the_swarm = Rule(settings.outer_lr, settings.outer_momentum)
    for step in range(1, STEPS + 1):
        vector = state.value.copy()
        for host in hosts:
            host.train(step, vector)
        for number, host in enumerate(hosts):
            state.apply(DeltaId(bytes([number]) * 20, 1, step), 1 / NODES, host.delta, rule_of_the_swarm)
    return 100 * metrics_of(runners[0], state.value.copy())["accuracy"]


def _of_rules(task: str, data_dir: str, seeds: range) -> list[Series]:
    found = {
        rule: [_accuracy(rule, task, data_dir, seed) for seed in seeds] for rule in ("average", "leader", "elastic")
    }
    for rule, values in found.items():
        print(f"{rule}: {' '.join(f'{value:.2f}' for value in values)}", file=sys.stderr)
    ahead = [leader - elastic for leader, elastic in zip(found["leader"], found["elastic"], strict=True)]
    series = [Series(f"accuracy by {rule}, without a network", "%", values) for rule, values in found.items()]
    return [*series, Series("accuracy by leader minus that by elastic", "points", ahead, "≥ 0")]


# -- the step path -------------------------------------------------------------------------------------------------


def _of_the_path(turns: int) -> list[Series]:
    places = ["cpu"]
    if torch.cuda.is_available():
        places.append("cuda:0")
    else:
        print("devices: torch finds no GPU here, so the step path is measured on the processor alone", file=sys.stderr)
    return [_path(place, turns) for place in places]


def _path(device: str, turns: int) -> Series:
    """Two trainers on a device, against two loops beside each other on it."""
    local_steps = TrainingSettings().local_steps
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(bare_loop()) for _ in range(2)]
        wish = {"calibrate": STEP_S / local_steps, "width": 256, "device": device}
        options = loops[0].ask(wish)["options"]
        loops[1].ask({**wish, "options": options})
        group = stack.enter_context(daemons())
        training = TrainingSettings(
            task=TASK, options=options, device=[device] * 2, eval_steps=0, checkpoint_s=0.0, threads=2, nice=0
        )
        node = group.start(training)
        wait_until(node, lambda found: found["step"] >= WARM_STEPS, what="training", within_s=RUN_S)
        pause(node)
        both = stack.enter_context(ThreadPoolExecutor(2))

        def their_rate() -> float:
            return sum(both.map(BareLoop.rate, loops, [1.0, 1.0]))

        their_rate()
        theirs, ours = [their_rate()], []
        for _ in range(turns):
            ours.append(node_rate(node))
            theirs.append(their_rate())
    if not ours:
        raise NotMeasured("no turn was measured")
    ratios = between(ours, theirs)
    details = {"options": options, "bare_steps_per_s": [round(rate, 2) for rate in theirs]}
    print(f"{device}: median {statistics.median(ratios):.3f}", file=sys.stderr)
    name = f"steps/s of two trainers on one {device.partition(':')[0]} over two bare loops', steps of 100 ms"
    return Series(name, "", ratios, "≥ 0.95", details)
